"""Results of evaluation protocols: what they have in common, and how a report shows them."""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from plsc.errors import shown, without_secrets
from plsc.storage.disk import replacing

_MARKS = re.compile(r"[<|]|\]\(")  # of Markdown


@dataclass(frozen=True)
class Table:
    """A table of a report; cells are text, numbers are formatted already."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""


@dataclass(frozen=True)
class Section:
    """The result of one protocol on one dataset, as ``result.section(name)`` returns it.

    choices: how it was measured, one sentence each. values: everything, as plain values for JSON. pictures:
    by name, functions that draw a PNG file.
    """

    title: str
    choices: Sequence[str]
    tables: Sequence[Table]
    values: Mapping[str, Any]
    pictures: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)


class Result(ABC):
    """The result of a protocol: a frozen dataclass, whose arrays have ``repr=False``.

    METRICS: names of fields that a checkpoint stores, and that callbacks can monitor.
    """

    METRICS: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def summary(self) -> str:
        """Return a line for the log."""

    def _choices(self) -> list[str]:
        """Return how it was measured, one sentence each."""
        return []

    def _tables(self) -> list[Table]:
        return []

    def _pictures(self, name: str, stem: str) -> dict[str, Callable[[Path], None]]:
        """Return functions that draw a PNG file, by its name; stem: `stem_of(name)`."""
        return {}

    def warning(self) -> str | None:
        """Return what makes the result doubtful, if anything."""
        return None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, without arrays; FARs and FPIRs are strings such as ``"0.001"``."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.repr}  # type: ignore[arg-type]
        return {name: _value(value) for name, value in values.items()}

    def section(self, name: str, choices: Sequence[str] = ()) -> Section:
        """Return the section of a report.

        name: of the data, which is part of the names of the files. choices: how the data were chosen.
        """
        warning = self.warning()
        choices = [*choices, *self._choices(), *([f"Warning: {warning}."] if warning else [])]
        return Section(name, choices, self._tables(), self.as_dict(), self._pictures(name, stem_of(name)))


def stem_of(name: str) -> str:
    """Return a name for files: letters, digits, points and ``-``, others as ``_``."""
    return re.sub(r"[^\w.-]", "_", name)


def _value(value: Any) -> Any:
    if isinstance(value, Result):
        return value.as_dict()
    if isinstance(value, dict):
        return {f"{key:g}" if isinstance(key, float) else key: _value(one) for key, one in value.items()}
    return list(value) if isinstance(value, tuple) else value


def write_report(folder: str | os.PathLike[str], title: str, sections: Sequence[Section]) -> Path:
    """Write report.md, report.json and the pictures to a folder; return the path of report.md."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"# {title}", ""]
    for section in sections:
        for name, draw in section.pictures.items():
            draw(folder / name)
        lines += lines_of(section)
    values = {one.title: {**one.values, "choices": list(one.choices)} for one in sections}
    data = json.dumps(without_secrets(values), indent=2) + "\n"
    for name, text in (("report.md", shown("\n".join(lines))), ("report.json", data)):
        with replacing(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return folder / "report.md"


def lines_of(section: Section) -> list[str]:
    """Return the lines of a section in Markdown."""
    lines = [f"## {section.title}", ""]
    for table in section.tables:
        lines += [f"**{table.title}**", ""] if table.title else []
        lines += _rows(table)
    for name in section.pictures:
        lines += [f"![{Path(name).stem.replace('_', ' ')}]({name})", ""]
    return [*lines, "How it was measured:", "", *(f"- {_plain(choice)}" for choice in section.choices), ""]


def _rows(table: Table) -> list[str]:
    cells = [table.header, ["---", *["---:"] * (len(table.header) - 1)], *table.rows]
    return [f"| {' | '.join(map(_plain, row))} |" for row in cells] + [""]


def _plain(text: str) -> str:
    """Return text without HTML, links and new cells, which a name in it may have."""
    return _MARKS.sub(r"\\\g<0>", text)
