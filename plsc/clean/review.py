"""Propose changes of a dataset from embeddings: a file of changes to edit, and a page to look at them.

The page is one file, without scripts and requests.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from plsc.checkpoint import read_manifest
from plsc.clean import faults
from plsc.clean.changes import Change, write_changes
from plsc.clean.faults import (
    LEAST_SURE,
    Found,
    Pixels,
    View,
    agreeing,
    find_duplicates,
    planted_copies,
    read_pixels,
)
from plsc.data.lists import Listing, halves_of, read_listing
from plsc.data.overview import thumbnail
from plsc.data.sources import Source
from plsc.data.sources.base import class_names_of
from plsc.errors import CheckpointError, DataError, printable
from plsc.evaluate.identification import check_finite
from plsc.gallery.gallery import nearest
from plsc.predict.embeddings import EMBEDDINGS, NAMES, Embeddings
from plsc.predict.predict import LABELS, Samples
from plsc.storage.disk import replacing
from plsc.storage.urls import shown
from plsc.train.data import check_unseen

_EXAMPLES = 5
PAGE, CHANGES, QUESTIONS = "report.html", "changes.tsv", "questions.tsv"


@dataclass
class _Images:
    """The embedded images of a dataset: numbers in the source, int64 [n], and labels, int64 [n]."""

    place: str
    source: Source
    listing: Listing
    numbers: np.ndarray
    labels: np.ndarray
    views: list[View]
    pixels: Pixels

    def summary(self) -> list[str]:
        """Return what was compared and what could not be."""
        classes = len(self.listing.classes)
        missing = [self.source.name(i) for i in np.setdiff1d(np.arange(len(self.source)), self.numbers)[:20]]
        found = [f"{self.place}: {len(self.numbers):,} of {len(self.source):,} images, {classes:,} classes."]
        if missing:
            found.append(f"Without embedding, such as images that cannot be decoded: {', '.join(missing)}")
        return found

    def path(self, row: int) -> str:
        return self.listing.paths[self.numbers[row]]

    def of(self, row: int) -> str:
        return self.listing.classes[self.labels[row]]

    def row(self, caption: str, rows: np.ndarray | list[int]) -> Row:
        return Row(caption, self.source, self.numbers[rows].tolist())

    def examples(self, label: int, kept: np.ndarray | bool = True) -> Row:
        rows = np.flatnonzero((self.labels == label) & kept)[:_EXAMPLES]
        return self.row(f"class {self.listing.classes[label]}", rows)


def open_images(location: str | Path, embeddings: Sequence[Embeddings], **reading: Any) -> _Images:
    """Match one or two embeddings with the images of a dataset; the second network judges the first half.

    Raises:
        DataError: invalid data, or the embeddings are of other images.
    """
    source, listing = read_listing(location, **reading)
    place = shown(str(location))
    samples = Samples(source, place, 0)
    names = samples.names(range(len(source)))
    places = [{name: row for row, name in enumerate(one[NAMES][:])} for one in embeddings]
    numbers = np.array([n for n, name in enumerate(names) if all(name in rows for rows in places)], np.int64)
    if not len(numbers):
        folders = " and ".join(str(one.folder) for one in embeddings)
        raise DataError(f"{folders} have no image of {place}; predict the same dataset, by the same path")
    is_second = halves_of(listing)[numbers]
    unseen = [is_second, ~is_second] if len(places) == 2 else [np.ones(len(numbers), bool)]
    views = []
    for one, rows, judged in zip(embeddings, places, unseen, strict=True):
        places_of = np.array([rows[names[number]] for number in numbers.tolist()])
        # An image that is named by its place in a file may be another one now. Classes may have new numbers.
        stored, labels = one[LABELS][places_of], listing.labels[numbers]
        most = max(len(np.unique(stored)), len(np.unique(labels)))
        if not samples.has_paths and len(np.unique([stored, labels], axis=1).T) > most:
            raise DataError(f"{one.folder} was predicted when {place} had other labels; predict it again")
        unit = one[EMBEDDINGS][places_of]
        check_finite(unit, f"{one.folder}, image ", numbers)
        unit /= np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), 1e-9)
        views.append(View(unit, judged))
    pixels = read_pixels(source, numbers)
    return _Images(place, source, listing, numbers, listing.labels[numbers], views, pixels)


def clean(
    location: str | Path, out: str | Path, embeddings: Sequence[Embeddings], **reading: Any
) -> list[str]:
    """Write proposed changes of a dataset to ``changes.tsv`` and ``report.html`` in a folder.

    ``questions.tsv`` has the changes that the data do not support enough, most suspicious first.

    Args:
        embeddings: of `Entry.predict` with the dataset: of one network; or of two, of which the first was
            trained on ``half1.tsv`` of ``plsc data split --halves``, the second on ``half2.tsv``.
        reading: options of `open_source`.

    Returns:
        The summary, a sentence per line.

    Raises:
        DataError: invalid data, embeddings of other images, or the changes exist.
    """
    images = open_images(location, embeddings, **reading)
    proposals = Proposals(images)
    judges = _judges(images, embeddings)
    views, labels, classes = images.views, images.labels, len(images.listing.classes)
    kept = np.ones(len(labels), bool)
    first = faults.compare_labels(views, labels, kept, classes)
    wrong = faults.wrong_labels(first)
    is_proposed = wrong.sure >= LEAST_SURE
    kept[wrong.subjects[is_proposed, 0]] = False
    copies = planted_copies(images.source, images.numbers, images.pixels)
    doubled = find_duplicates(first.near, images.pixels, copies)
    parts = [
        proposals.duplicates(doubled, first.scores()),
        proposals.same(faults.same_classes(views, labels, kept, classes), kept),
    ]
    again = faults.compare_labels(views, labels, kept, classes, first)
    right = faults.sure_of_class(again, kept, wrong.subjects[:, 0])
    parts.insert(0, proposals.wrong(wrong, again.likely, right, kept))
    judged = first.scores()[~np.isnan(first.own)]
    share = np.mean(judged <= 0) if len(judged) else 0
    weak = " Many labels are wrong, or the network is too weak to find most faults."
    checkpoints = " and ".join(printable(one.index["model"]["checkpoint"]) for one in embeddings)
    summary = [
        f"Embeddings: {checkpoints}. {judges}",
        *images.summary(),
        f"{share:.0%} of the images are nearest to their own class.{weak if share < 0.8 else ''}",
    ]
    return _write(Path(out), f"Proposed changes of {images.place}", summary, parts, proposals)


def _judges(images: _Images, embeddings: Sequence[Embeddings]) -> str:
    """Return what the networks judge. Raises DataError if they are exchanged, or one is missing."""
    warning, is_one = "", len(embeddings) == 1
    for number, one in enumerate(embeddings, 1):
        checkpoint = Path(one.index["model"]["checkpoint"])
        try:
            manifest = read_manifest(checkpoint)
        except CheckpointError:  # it was moved
            continue
        trained = Path(str(manifest.options.get("data", {}).get("dataset_dir"))).name
        if trained in ("half1.tsv", "half2.tsv") and (is_one or trained != f"half{number}.tsv"):
            raise DataError(f"{checkpoint} was trained on {trained}; pass that of half1.tsv, then --second")
        try:
            check_unseen(images.place, class_names_of(images.source), (checkpoint, manifest))
        except DataError:
            warning = (
                "This network was trained on these classes. If it was trained on these images, it has "
                "learned some of their wrong labels, which are not found: train a network on each half "
                "(plsc data split --halves), and use both (plsc data clean --second)."
            )
    if not is_one:
        return "Each network judges the half of the images that the other one was trained on."
    return warning or "The network must not have been trained on these images."


def overlap(
    one: str | Path, other: str | Path, out: str | Path, embeddings: Sequence[Embeddings], **reading: Any
) -> list[str]:
    """Write what a dataset shares with another one: classes and images; the changes remove it from `one`.

    embeddings: of both datasets, by one network. Other arguments, results and errors as of `clean`.
    """
    mine, theirs = (
        open_images(place, [found], **reading) for place, found in zip((one, other), embeddings, strict=True)
    )
    mine_unit, their_unit = mine.views[0].unit, theirs.views[0].unit
    numbers = nearest(mine_unit, their_unit, _EXAMPLES)
    copies = planted_copies(mine.source, mine.numbers, mine.pixels)
    found = agreeing(mine.pixels, theirs.pixels, faults.pairs_in(numbers), copies)
    first, second = len(mine.listing.classes), len(theirs.listing.classes)
    labels = np.concatenate([mine.labels, theirs.labels + first])
    classes = faults.shared_classes(np.concatenate([mine_unit, their_unit]), labels, first + second, first)
    proposals = Proposals(mine)
    parts = proposals.shared(classes, found, theirs)
    summary = [*mine.summary(), *theirs.summary()]
    return _write(Path(out), f"What {mine.place} shares with {theirs.place}", summary, parts, proposals)


class Proposals:
    """Collects changes and questions, one per image and per class, and the part of the page for each kind.

    A question is a change that is not sure.
    """

    def __init__(self, images: _Images) -> None:
        self._images, self._names = images, images.listing.classes
        self.changes: dict[tuple[str, str], Change] = {}
        self.questions: dict[tuple[str, str], Change] = {}

    def _add(self, change: Change) -> bool:
        """Add a change or a question; return whether there was no change of the same image or class."""
        if change.score < LEAST_SURE:
            self.questions.setdefault(change.subject, replace(change, score=0.0))
            return change.subject not in self.changes
        return self.changes.setdefault(change.subject, change) is change

    def duplicates(self, found: Found, wrongness: np.ndarray) -> Part:
        """Remove the image of each pair whose label is more likely wrong; of one class, the second one."""
        images = self._images
        part = Part("Duplicates", "The same image twice. The changes remove one of the two.")
        left: dict[int, int] = {}  # the image that is left by one that is removed
        for sure, pair in found:
            one, other = sorted(_end(left, row) for row in pair)
            if one == other:
                continue
            is_first = images.labels[one] != images.labels[other] and wrongness[one] > wrongness[other]
            gone, stays = (one, other) if is_first else (other, one)
            left[gone] = stays
            is_exact = images.pixels.digests[one] == images.pixels.digests[other]
            reason = f"{'exact' if is_exact else 'near'} duplicate of {images.path(stays)}"
            self._add(Change("remove", sure, images.path(gone), images.of(gone), "", reason))
            rows = images.row(images.of(stays), [stays]), images.row(f"{images.of(gone)} (removed)", [gone])
            part.proposals.append((sure, f"{images.path(gone)}: {reason}", rows))
        return part

    def same(self, found: Found, kept: np.ndarray) -> Part:
        """Ask whether the smaller class of each pair is to be merged into the larger one."""
        images = self._images
        text = "They agree as much as halves of a class do, or as classes that look the same to the network."
        part = Part("Two classes that may be one", text)
        sizes = np.bincount(images.labels, minlength=len(self._names))
        for sure, pair in found:
            small, large = sorted(pair, key=lambda label: (sizes[label], -label))
            of, to = self._names[small], self._names[large]
            self._add(Change("merge", sure, "", of, to, "same class"))
            part.proposals.append(
                (sure, f"merge {of} into {to}", (images.examples(label, kept) for label in pair))
            )
        return part

    def wrong(self, found: Found, likely: np.ndarray, right: np.ndarray, kept: np.ndarray) -> Part:
        """Move each image to the likely class, or remove it if that is probably not the right one."""
        text = "The changes move each image to the likely class, or remove it if several are as likely."
        images, part = self._images, Part("Wrong labels", text)
        for (sure, (row,)), share in zip(found, right.tolist(), strict=True):
            own, new = images.labels.item(row), likely.item(row)
            path, of, to = images.path(row), self._names[own], self._names[new]
            change = Change("move", sure, path, of, to, f"wrong label; {share:.0%} {to}")
            if share < 0.5:
                change = Change("remove", sure, path, of, "", f"wrong label; perhaps {to} ({share:.0%})")
            if self._add(change):
                image = [images.row("image", [row])]
                examples = (images.examples(one, kept) for one in (own, new))
                part.proposals.append((sure, f"{path}: not {of}, {change.reason}", chain(image, examples)))
        return part

    def shared(self, classes: Found, found: Found, theirs: _Images) -> list[Part]:
        """Remove the classes and images that another dataset has; its classes are numbered after these."""
        mine = self._images
        text = f"The changes remove them from {mine.place}."
        parts = [Part("Shared classes", text), Part("Shared images", text)]
        for sure, (one, other) in classes:
            match = other - len(self._names)
            reason = f"class {theirs.listing.classes[match]} of {theirs.place}"
            if self._add(Change("remove", sure, "", self._names[one], "", reason)):
                examples = (side.examples(label) for side, label in ((mine, one), (theirs, match)))
                parts[0].proposals.append((sure, f"{self._names[one]} is {reason}", examples))
        for sure, (one, other) in found:
            reason = f"{theirs.path(other)} of {theirs.place}"
            if self._add(Change("remove", sure, mine.path(one), mine.of(one), "", reason)):
                rows = mine.row(mine.of(one), [one]), theirs.row(theirs.of(other), [other])
                parts[1].proposals.append((sure, f"{mine.path(one)} is {reason}", rows))
        return parts


def refuse_finished(folder: Path) -> None:
    """Raise DataError if the folder has a file that a review writes."""
    for name in (CHANGES, QUESTIONS, PAGE):
        if (path := folder / name).exists():
            raise DataError(f"{path} exists, perhaps with your edits; choose another folder")


def _end(steps: Mapping[int, int], at: int) -> int:
    """Return where the steps from `at` lead."""
    while at in steps:
        at = steps[at]
    return at


def _write(
    out: Path, title: str, summary: list[str], parts: Sequence[Part], proposals: Proposals
) -> list[str]:
    refuse_finished(out)
    changes = sorted(proposals.changes.values(), key=lambda change: -change.score)
    questions = [one for subject, one in proposals.questions.items() if subject not in proposals.changes]
    counts = ", ".join(f"{part.title.lower()} {part.total:,}" for part in parts)
    summary = [*summary, f"Proposals: {counts}. Questions: {len(questions):,}."]
    write_page(out / PAGE, title, summary, parts)
    for name, rows in ((QUESTIONS, questions), (CHANGES, changes)):
        with replacing(out / name) as temporary:
            write_changes(temporary, rows)
    return [*summary, f"wrote {out / CHANGES}: {len(changes):,} changes; look at {out / PAGE}"]


# The page.

_MOST_PROPOSALS = 100
_SIDE = 96  # pixels of a thumbnail; 6rem in the style

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
b { color: light-dark(#00609a, #6cb8ee); }
p { margin: .25rem 0; }
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
    """Pictures with a caption: these samples of a source."""

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
        file.write("<main>\n")
        for part in parts:
            file.writelines(_part(part))
        file.write("</main>\n</body>\n</html>\n")


def _text(text: str) -> str:
    return html.escape(printable(shown(text)))


def _part(part: Part) -> Iterator[str]:
    yield f"<details open>\n<summary><h2>{_text(part.title)}</h2></summary>\n"
    yield f"<p>{_text(part.explanation)}</p>\n"
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
            yield f"<section>\n<h4>{_text(row.caption)}</h4>\n<ul>\n"
            yield from (_picture(row.source, index) for index in row.numbers)
            yield "</ul>\n</section>\n"
        yield "</div>\n</article>\n"
    yield "</details>\n"


def _picture(source: Source, index: int) -> str:
    name = _text(source.name(index))
    picture = thumbnail(source, index, _SIDE)
    image = "<span>cannot be decoded</span>"
    if picture is not None:
        file = io.BytesIO()
        picture.save(file, "jpeg", quality=85)
        data = base64.b64encode(file.getvalue()).decode()
        image = f'<img src="data:image/jpeg;base64,{data}" alt="{name}">'
    return f'<li title="{name}"><div>{image}</div>{name}</li>\n'
