"""Changes of a dataset's labels: a file that people read and edit, and the list of images after them.

A line of the file moves an image to another class, removes an image or a class, or merges a class into
another one. Paths and class names are those of the dataset, in all lines. Moves and removals come first, then
merges, so that an image moved to a class that is merged ends in the merged class.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import numpy as np

from plsc.data.files import name_key
from plsc.data.lists import Listing, check_listable, read_listing, write_list, write_rows
from plsc.errors import DataError, check_name, printable
from plsc.storage.disk import publishing_folder, read_regular, without_mark

COLUMNS = ("change", "score", "image", "class", "to", "reason")
_NEEDED = ("change", "image", "class", "to")
_KINDS = ("move", "remove", "merge")
# Change, and whether it has an image and a class to move or merge to.
_SHAPES = (("move", True, True), ("remove", True, False), ("remove", False, False), ("merge", False, True))
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


def apply_changes(
    location: str | Path, changes: str | Path, out: str | Path, **reading: Any
) -> dict[str, Any]:
    """Write the list of a dataset's images after changes to a new folder; the dataset is unchanged.

    ``list.tsv``: the images, in their order. ``classes.tsv``: old and new name of each class; no new name if
    it has no images.

    Args:
        changes: file of changes.
        reading: options of `open_source`.

    Returns:
        `counts`, `new_classes`, and `folder`, that of the images.

    Raises:
        DataError: invalid data or changes, no image is left, or the folder exists.
    """
    with publishing_folder(out) as folder:
        _, listing = read_listing(location, **reading)
        found, final = read_changes(changes, listing)
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
    new = sorted(set(names) - {*listing.classes, ""})
    return {"counts": counts, "new_classes": new, "folder": listing.folder}


def read_changes(path: str | Path, listing: Listing) -> tuple[list[Change], dict[str, str]]:
    """Read a file of changes of a dataset.

    Columns may be in any order. Empty lines, CRLF and a byte order mark are accepted.

    Returns:
        The changes, without scores and reasons; and where the images of each removed or merged class end, a
        class or '' if they are removed.

    Raises:
        DataError: a change is impossible or contradicts another one; with file and line.
    """
    try:
        content = read_regular(path, _MOST_BYTES)
        text = without_mark(content, str(path)).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the changes {path} are not text in UTF-8, or unreadable: {error}") from error
    owners = {
        path: listing.classes[label]
        for path, label in zip(listing.paths, listing.labels.tolist(), strict=True)
    }
    classes = set(listing.classes)
    paths, own = (
        {name_key(name): name for name in known} | {name: name for name in known}
        for known in (listing.paths, listing.classes)
    )
    lines: dict[tuple[str, str], int] = {}
    changes, rows = [], csv.reader(io.StringIO(text, newline=""), delimiter="\t", strict=True)
    try:
        columns = [name.strip().lower() for name in next(rows, [])]
        if not set(_NEEDED) <= set(columns):
            raise DataError(f"the columns are not {', '.join(COLUMNS)}, between tabs")
        for row in rows:
            fields = dict(zip(columns, map(str.strip, row), strict=False))
            kind, *names = (fields.get(name, "") for name in _NEEDED)
            forms = zip((paths, own, own), names, strict=True)
            image, of, to = (known.get(name, known.get(name_key(name), name)) for known, name in forms)
            if any(fields.values()):
                change = Change(kind, 0.0, image, of, to)
                _check(change, owners, classes)
                if first := lines.get(change.subject):
                    raise DataError(f"line {first} changes the same, too; remove one of the two")
                lines[change.subject] = rows.line_num
                changes.append(change)
    except (csv.Error, DataError) as error:
        raise DataError(f"{path}:{max(rows.line_num, 1)}: {printable(str(error))}") from error
    ends = {change.of: change.to for change in changes if not change.image}
    for change in changes:
        if ends.get(change.to) == "":
            both = f"{lines[change.subject]}: line {lines['', change.to]}"
            raise DataError(
                f"{path}:{both} removes the class '{printable(change.to)}'; remove one of the two"
            )
    try:
        order = list(TopologicalSorter({of: [to] for of, to in ends.items()}).static_order())
    except CycleError as error:
        circle = sorted({lines["", name] for name in error.args[1]})
        raise DataError(f"{path}:{circle[0]}: the merges in the lines {circle} form a circle") from error
    for name in order:  # a class comes after that which it is merged into
        to = ends.get(name, name)
        ends[name] = ends.get(to, to)
    return changes, ends


def _check(change: Change, owners: Mapping[str, str], classes: Container[str]) -> None:
    """Raise DataError if a change is impossible by itself. owners: class by path."""
    kind = (change.change, bool(change.image), bool(change.to))
    needed = (change.of, change.to if change.change == "merge" else change.of)
    if kind not in _SHAPES or (change.image and owners.get(change.image) != change.of):
        raise DataError(f"'{change.change}' of '{change.image}' in '{change.of}' is no move, remove or merge")
    if unknown := [name for name in needed if name not in classes]:
        raise DataError(f"the dataset has no class '{unknown[0]}'")
    check_listable([change.to])
    check_name(change.to)
