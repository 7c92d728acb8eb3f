"""Write the page on which people review proposed changes to a dataset: one file, no script, no requests."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from plsc.clean.faults import LEAST_SURE
from plsc.data.overview import thumbnail
from plsc.data.sources import Source
from plsc.data.sources.base import printable
from plsc.storage.publish import replacing

_MOST_PROPOSALS, _MOST_PICTURES = 100, 12
_SIDE = 96  # pixels of a thumbnail; 6rem in the style
_NAME = 48  # characters of a file name

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light dark; --line: 1px solid light-dark(#c9c9d1, #4a4a53); }
body {
  margin: 0 auto; padding: 1rem; max-width: 76rem; font: 1rem/1.5 system-ui, sans-serif;
  overflow-wrap: anywhere; background: light-dark(#fff, #17171a); color: light-dark(#1c1c1e, #ededf0);
}
h1 { font-size: 1.5rem; margin: 0; }
h2 { font-size: 1.15rem; display: inline; }
h3 { font-size: 1rem; margin: 0; }
h4 { font-size: .9rem; font-weight: normal; margin: .5rem 0 .25rem; }
h4, .count { color: light-dark(#5b5b63, #a9a9b3); }
a, b { color: light-dark(#00609a, #6cb8ee); }
p { margin: .25rem 0; scroll-margin-top: 4rem; }
details { border: var(--line); border-radius: .5rem; padding: 1rem; margin: 1rem 0; }
summary { cursor: pointer; }
article { border-top: var(--line); margin-top: 1rem; padding-top: 1rem; }
.rows { display: flex; flex-wrap: wrap; gap: 0 1.5rem; }
.rows ul { list-style: none; display: flex; flex-wrap: wrap; gap: .5rem; margin: 0; padding: 0; }
.rows li { width: 6rem; overflow: hidden; font-size: .75rem; line-height: 1.3; }
.rows div { display: grid; place-items: center; height: 6rem; background: light-dark(#f4f4f6, #232328); }
.rows span { color: light-dark(#a63f00, #ff9a5c); text-align: center; }
</style>
"""


@dataclass(frozen=True)
class Row:
    """Pictures with a caption: the first 12 of these samples of a source."""

    caption: str
    source: Source
    numbers: Sequence[int]


@dataclass
class Part:
    """A kind of fault, explained in a sentence, with proposals, the surest first, and questions.

    proposals: how sure it is, 0 to 1, a sentence, and the pictures of each; below 0.5, it is a question.
    """

    title: str
    explanation: str
    proposals: list[tuple[float, str, Iterable[Row]]] = field(default_factory=list)

    @property
    def total(self) -> int:
        """The number of proposals without questions."""
        return sum(score >= LEAST_SURE for score, *_ in self.proposals)


def write_page(path: str | Path, title: str, summary: Sequence[str], parts: Sequence[Part]) -> None:
    """Write the page; all strings are shown as text.

    Raises DataError if the file cannot be written; an existing file is then unchanged.
    """
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(f"{_HEAD}<title>{_text(title)}</title>\n</head>\n<body>\n<h1>{_text(title)}</h1>\n")
        file.writelines(f"<p>{_text(line)}</p>\n" for line in summary)
        links = (f'<a href="#part-{number}">{_text(part.title)}</a>' for number, part in enumerate(parts))
        counts = (f'<span class="count">{part.total:,}</span>' for part in parts)
        items = "".join(f"<li>{link} {count}</li>\n" for link, count in zip(links, counts, strict=True))
        file.write(f'<nav aria-label="Contents">\n<ul>\n{items}</ul>\n</nav>\n<main>\n')
        for number, part in enumerate(parts):
            file.writelines(_part(number, part))
        file.write("</main>\n</body>\n</html>\n")


def _text(text: str) -> str:
    return html.escape(printable(text))


def _part(number: int, part: Part) -> Iterator[str]:
    yield f"<details open>\n<summary><h2>{_text(part.title)}</h2></summary>\n"
    yield f'<p id="part-{number}">{_text(part.explanation)}</p>\n'  # a link to it opens the details
    total, questions = part.total, part.proposals[part.total :]
    count = f"Proposals: {total}, surest first." if total else "No proposals."
    if total > _MOST_PROPOSALS:
        count = f"The {_MOST_PROPOSALS} surest of {total:,}; all are in changes.tsv."
    if questions:
        count += " Then, without a proposal, the most suspicious others: look at these."
    yield f'<p class="count">{count}</p>\n'
    for score, text, rows in part.proposals[: min(total, _MOST_PROPOSALS)] + questions[:_MOST_PROPOSALS]:
        sure = f"{score * 100:.0f} %" if score >= LEAST_SURE else "Look at this:"
        yield f"<article>\n<h3><b>{sure}</b> {_text(text)}</h3>\n"
        yield '<div class="rows">\n'
        for row in rows:
            more = len(row.numbers) - _MOST_PICTURES
            hidden = f" (and {more:,} more)" if more > 0 else ""
            yield f"<section>\n<h4>{_text(row.caption)}{hidden}</h4>\n<ul>\n"
            yield from (_picture(row.source, index) for index in row.numbers[:_MOST_PICTURES])
            yield "</ul>\n</section>\n"
        yield "</div>\n</article>\n"
    yield "</details>\n"


def _picture(source: Source, index: int) -> str:
    name = printable(source.name(index))
    last = "/".join(name.split("/")[-2:])
    short = last if len(last) <= _NAME else f"…{last[1 - _NAME :]}"
    picture = thumbnail(source, index, _SIDE)
    shown = "<span>cannot be decoded</span>"
    if picture is not None:
        file = io.BytesIO()
        picture.save(file, "jpeg", quality=85)
        data = base64.b64encode(file.getvalue()).decode()
        shown = f'<img src="data:image/jpeg;base64,{data}" alt="{html.escape(name)}">'
    return f'<li title="{html.escape(name)}"><div>{shown}</div>{html.escape(short)}</li>\n'
