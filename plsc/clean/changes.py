"""Changes of a dataset's labels: a file that people read and edit, and the list of images after them.

A line of the file moves an image to another class, removes an image or a class, or merges a class into
another one. Paths and class names are those of the dataset, in all lines. Moves and removals come first, then
merges, so that an image moved to a class that is merged ends in the merged class.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import numpy as np

from plsc.data.files import name_key
from plsc.data.lists import Listing, check_listable, read_listing, write_list, write_origin, write_rows
from plsc.data.sources.base import printable
from plsc.errors import DataError, check_name, suggest
from plsc.storage.publish import publishing_folder
from plsc.storage.regular import read_regular, without_mark

COLUMNS = ("change", "score", "image", "class", "to", "reason")
_NEEDED = ("change", "image", "class", "to")
_KINDS = ("move", "remove", "merge")
_MOST_BYTES = 2**28


@dataclass(frozen=True)
class Change:
    """One change of a dataset.

    change: ``move`` (the image to the class `to`), ``remove`` (the image; or the class `of` with its images,
    if `image` is empty) or ``merge`` (the class `of` into the class `to`). score: how sure it is, 0 to 1.
    image: a path, or ''. of: the class in the dataset. to: a class, which may be new for a move, or ''.
    reason: for people.
    """

    change: str
    score: float
    image: str
    of: str
    to: str = ""
    reason: str = ""

    @property
    def subject(self) -> tuple[str, str]:
        """What is changed, of which there must not be two changes: path and '', or '' and class."""
        return (self.image, "") if self.image else ("", self.of)


def write_changes(path: Path, changes: Iterable[Change]) -> None:
    """Write a file of changes, in this order; without a score if it is 0."""
    scored = ((one, f"{one.score:.4f}" if one.score else "") for one in changes)
    rows = ((one.change, score, one.image, one.of, one.to, one.reason) for one, score in scored)
    write_rows(path, COLUMNS, rows)


def read_changes(path: str | Path, listing: Listing) -> list[Change]:
    """Read a file of changes of a dataset, without scores and reasons.

    Columns may be in any order. Empty lines, CRLF and a byte order mark are accepted. Raises DataError, with
    file and line, for a change that is impossible or contradicts another one.
    """
    return _parse(path, _content(path), listing)[0]


def apply_changes(
    location: str | Path, changes: str | Path, out: str | Path, **reading: Any
) -> dict[str, Any]:
    """Write the list of a dataset's images after changes to a new folder; the dataset is unchanged.

    ``list.tsv``: the images, in their order. ``classes.tsv``: old and new name of each class; no new name if
    it has no images. ``origin.json``: data, changes and counts.

    Args:
        changes: file of changes.
        reading: options of `open_source`.

    Returns:
        The content of ``origin.json``, and `folder`, that of the images.

    Raises:
        DataError: invalid data or changes, no image is left, or the folder exists.
    """
    with publishing_folder(out) as folder:
        _, listing = read_listing(location, **reading)
        content = _content(changes)
        found, final = _parse(changes, content, listing)
        moved = {one.image: one.to for one in found if one.image}  # to '' if it is removed
        own = (listing.classes[label] for label in listing.labels.tolist())
        names = [moved.get(path, name) for path, name in zip(listing.paths, own, strict=True)]
        names = [final.get(name, name) for name in names]
        if not any(names):
            raise DataError(f"{changes} removes all images; remove some of its lines")
        labels = {name: label for label, name in enumerate(sorted(set(names)))}
        after = replace(listing, labels=np.array([labels[name] for name in names]), classes=list(labels))
        counts = {
            "before": {"images": len(listing.paths), "classes": len(listing.classes)},
            "after": write_list(folder / "list.tsv", after, np.flatnonzero([bool(name) for name in names])),
            "changes": {kind: sum(one.change == kind for one in found) for kind in _KINDS},
        }
        renamed = ((name, final.get(name, name)) for name in listing.classes)
        rows = ((old, new if new in labels else "") for old, new in renamed)
        write_rows(folder / "classes.tsv", (), rows)
        about: dict[str, Any] = {"command": "plsc data apply", "changes": str(changes), "counts": counts}
        about["new_classes"] = sorted(set(names) - {*listing.classes, ""})
        about["changes_sha256"] = hashlib.sha256(content).hexdigest()
        origin = write_origin(folder, location, listing, reading, about)
    return {**origin, "folder": listing.folder}


def _content(path: str | Path) -> bytes:
    try:
        return read_regular(path, _MOST_BYTES)
    except OSError as error:
        raise DataError(f"the changes {path} cannot be read: {error.strerror}") from error


def _parse(place: str | Path, content: bytes, listing: Listing) -> tuple[list[Change], dict[str, str]]:
    """Return the changes, and where the images of each removed or merged class end; see `_ends`."""
    try:
        text = without_mark(content, str(place)).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{place} is not UTF-8 text; save it as text with tabs, in UTF-8") from error
    own = (listing.classes[label] for label in listing.labels.tolist())
    owners = dict(zip(listing.paths, own, strict=True))
    classes = set(listing.classes)
    known = (*listing.paths, *listing.classes)
    written = {name_key(name): name for name in known} | {name: name for name in known}
    found: dict[int, Change] = {}  # by line
    reader = csv.reader(io.StringIO(text, newline=""), delimiter="\t", strict=True)
    try:
        columns = [name.strip().lower() for name in next(reader, [])]
        for name in _NEEDED:
            if name not in columns:
                raise DataError(f"there is no column '{name}'; expected {', '.join(COLUMNS)}, between tabs")
        for row in reader:
            fields = dict(zip(columns, map(str.strip, row), strict=False))
            change, *names = (fields.get(name, "") for name in _NEEDED)
            image, of, to = (written.get(name, written.get(name_key(name), name)) for name in names)
            if any(fields.values()):
                one = Change(change, 0.0, image, of, to)
                if problem := _problem(one, owners, classes):
                    raise DataError(problem)
                check_listable([to])
                check_name(to)
                found[reader.line_num] = one
    except (csv.Error, DataError) as error:
        problem = str(error)
        if isinstance(error, csv.Error):
            problem = f"the quotes are wrong ({error}); fix the line"
        raise DataError(f"{place}:{max(reader.line_num, 1)}: {printable(problem)}") from error
    return list(found.values()), _ends(place, found)


def _problem(one: Change, owners: Mapping[str, str], classes: Container[str]) -> str:
    """Return why a change is impossible by itself, or ''. owners: class by path."""
    if one.change not in _KINDS:
        return f"unknown change '{one.change}'; {suggest(one.change, _KINDS)}"
    if one.of not in classes:
        return f"the dataset has no class '{one.of}'; fix the column class"
    if one.image and one.image not in owners:
        return f"the dataset has no image '{one.image}'; fix the column image"
    if one.image and owners[one.image] != one.of:
        return f"the image is in the class '{owners[one.image]}', not in '{one.of}'; fix the column class"
    if one.change == "move" and not one.image:
        return "move is of an image; fix the column image"
    if one.change == "merge" and one.image:
        return "merge is of a class; fix the column image"
    if one.change == "remove" and one.to:
        return "remove has a class in the column to; fix the column, or the change"
    if one.change != "remove" and not one.to:
        return f"{one.change} needs a class in the column to; fix the column, or the change"
    if one.change == "merge" and (one.to not in classes or one.to == one.of):
        return f"the class cannot be merged into '{one.to}'; name another class of the dataset"
    return ""


def _ends(place: str | Path, changes: Mapping[int, Change]) -> dict[str, str]:
    """Return where the images of each removed or merged class end: a class, or '' if they are removed.

    changes: by line. Raises DataError if they contradict each other.
    """
    lines: dict[tuple[str, str], int] = {}
    for line, one in changes.items():
        first = lines.setdefault(one.subject, line)
        if first != line:
            name = printable(one.image or one.of)
            raise DataError(f"{place}:{line}: line {first} changes '{name}', too; remove one of the two")
    final = {one.of: "" for one in changes.values() if one.change == "remove" and not one.image}
    for line, one in changes.items():
        if one.to in final:
            raise DataError(
                f"{place}:{line}: line {lines['', one.to]} removes the class '{printable(one.to)}'; remove "
                "one of the two, or choose another class"
            )
    merges = {one.of: one.to for one in changes.values() if one.change == "merge"}
    try:
        order = list(TopologicalSorter({of: [to] for of, to in merges.items()}).static_order())
    except CycleError as error:
        circle = sorted({lines["", name] for name in error.args[1]})
        raise DataError(
            f"{place}:{circle[0]}: the merges in the lines {', '.join(map(str, circle))} form a circle; "
            "remove one of them"
        ) from error
    for name in order:  # a class comes after that which it is merged into
        final[name] = final[merges[name]] if name in merges else name
    return final
