"""Changes of a dataset's labels: a file that people read and edit, and the list of images after them.

A line of the file moves an image to another class, removes an image or a class, or merges a class into
another one. Paths and class names are those of the dataset, in all lines. Moves and removals come first, then
merges, so that an image moved to a class that is merged ends in the merged class.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from plsc.data.lists import Listing, check_listable, read_listing, write_list, write_origin, write_rows
from plsc.data.sources.base import printable
from plsc.errors import DataError, suggest
from plsc.storage.publish import publishing_folder
from plsc.storage.regular import read_regular

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


def write_changes(path: Path, changes: Iterable[Change]) -> None:
    """Write a file of changes, in this order."""
    rows = ((one.change, f"{one.score:.4f}", one.image, one.of, one.to, one.reason) for one in changes)
    write_rows(path, COLUMNS, rows)


def read_changes(path: str | Path, listing: Listing) -> list[Change]:
    """Read a file of changes of a dataset, without scores and reasons.

    Columns may be in any order. Empty lines, CRLF and a byte order mark are accepted. Raises DataError, with
    file and line, for a change that is impossible or contradicts another one.
    """
    return _read(str(path), _content(path), listing)[0]


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
        found, final = _read(str(changes), content, listing)
        after, is_kept = _changed(listing, found, final)
        if not is_kept.any():
            raise DataError(f"{changes} removes all images; remove some of its lines")
        counts = {
            "before": {"images": len(listing.paths), "classes": len(listing.classes)},
            "after": write_list(folder / "list.tsv", after, np.flatnonzero(is_kept)),
            "changes": {kind: sum(one.change == kind for one in found) for kind in _KINDS},
        }
        left = {after.classes[label] for label in np.unique(after.labels[is_kept]).tolist()}
        names = ((name, final.get(name, name)) for name in listing.classes)
        write_rows(folder / "classes.tsv", (), ((old, new if new in left else "") for old, new in names))
        about = {"command": "plsc data apply", "changes": str(changes), "counts": counts}
        about["changes_sha256"] = hashlib.sha256(content).hexdigest()
        origin = write_origin(folder, location, listing, reading, about)
    return {**origin, "folder": listing.folder}


def _changed(
    listing: Listing, changes: Iterable[Change], final: Mapping[str, str]
) -> tuple[Listing, np.ndarray]:
    """Return the listing with its new labels and classes, and which images are left, bool [N]."""
    images = {path: number for number, path in enumerate(listing.paths)}
    classes = {name: number for number, name in enumerate(listing.classes)}
    labels, is_moved = listing.labels.copy(), np.zeros(len(images), bool)
    is_kept, is_removed = ~is_moved, np.zeros(len(classes), bool)
    for one in changes:
        if one.change == "move":
            labels[images[one.image]] = classes.setdefault(one.to, len(classes))
            is_moved[images[one.image]] = True
        elif one.change == "remove" and one.image:
            is_kept[images[one.image]] = False
        elif one.change == "remove":
            is_removed[classes[one.of]] = True
    is_kept &= is_moved | ~is_removed[listing.labels]
    merged = np.array([classes[final.get(name, name)] for name in classes])
    return replace(listing, labels=merged[labels], classes=list(classes)), is_kept


def _content(path: str | Path) -> bytes:
    try:
        return read_regular(path, _MOST_BYTES)
    except OSError as error:
        raise DataError(f"the changes {path} cannot be read: {error.strerror}") from error


def _read(place: str, content: bytes, listing: Listing) -> tuple[list[Change], dict[str, str]]:
    """Return the changes, and the class in which each merged class ends."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{place} is not UTF-8 text; save it as text with tabs, in UTF-8") from error
    labels = dict(zip(listing.paths, listing.labels.tolist(), strict=True))
    classes = dict.fromkeys(listing.classes)
    found: dict[int, Change] = {}  # by line
    reader = csv.reader(io.StringIO(text, newline=""), delimiter="\t", strict=True)
    try:
        columns = [name.strip().lower() for name in next(reader, [])]
        for name in _NEEDED:
            if name not in columns:
                raise ValueError(f"there is no column '{name}'; expected {', '.join(COLUMNS)}, between tabs")
        for row in reader:
            fields = dict(zip(columns, map(str.strip, row), strict=False))
            change, image, of, to = (fields.get(name, "") for name in _NEEDED)
            if any(fields.values()):
                one = Change(change, 0.0, image, of, to)
                _check(one, labels, listing.classes, classes)
                found[reader.line_num] = one
    except csv.Error as error:
        problem = printable(str(error))
        raise DataError(
            f"{place}:{reader.line_num}: the quotes are wrong ({problem}); fix the line"
        ) from error
    except (ValueError, DataError) as error:
        raise DataError(f"{place}:{max(reader.line_num, 1)}: {error}") from error
    return list(found.values()), _check_together(place, found)


def _check(one: Change, labels: Mapping[str, int], names: Sequence[str], classes: Container[str]) -> None:
    """Raise ValueError or DataError if a change is impossible by itself."""
    if one.change not in _KINDS:
        raise ValueError(f"unknown change '{printable(one.change)}'; {suggest(one.change, _KINDS)}")
    if one.of not in classes:
        raise ValueError(f"the dataset has no class '{printable(one.of)}'; fix the column class")
    if one.image and one.image not in labels:
        raise ValueError(f"the dataset has no image '{printable(one.image)}'; fix the column image")
    if one.image and names[labels[one.image]] != one.of:
        own = printable(names[labels[one.image]])
        raise ValueError(
            f"the image is in the class '{own}', not in '{printable(one.of)}'; fix the column class"
        )
    needs_image = {"move": True, "merge": False}.get(one.change, bool(one.image))
    if needs_image != bool(one.image):
        raise ValueError(
            f"{one.change} is of {'an image' if needs_image else 'a class'}; fix the column image"
        )
    if bool(one.to) == (one.change == "remove"):
        problem = "has a class" if one.to else "needs a class"
        raise ValueError(f"{one.change} {problem} in the column to; fix the column, or the change")
    if one.change == "merge" and (one.to not in classes or one.to == one.of):
        raise ValueError(
            f"the class cannot be merged into '{printable(one.to)}'; name another class of the dataset"
        )
    check_listable([one.to])


def _check_together(place: str, changes: Mapping[int, Change]) -> dict[str, str]:
    """Return the class in which each merged class ends; DataError if changes contradict each other.

    changes: by line.
    """
    lines: dict[tuple[str, str], int] = {}
    for line, one in changes.items():
        subject = ("image", one.image) if one.image else ("class", one.of)
        first = lines.setdefault(subject, line)
        if first != line:
            name = printable(subject[1])
            raise DataError(f"{place}:{line}: line {first} changes '{name}', too; remove one of the two")
    for line, one in changes.items():
        other = lines.get(("class", one.to))
        if other is not None and changes[other].change == "remove":
            raise DataError(
                f"{place}:{line}: line {other} removes the class '{printable(one.to)}'; remove "
                "one of the two, or choose another class"
            )
    merges = {one.of: one.to for one in changes.values() if one.change == "merge"}
    final: dict[str, str] = {}
    for at in merges:
        chain: dict[str, int] = {}  # the line of each merge on the way
        while at in merges and at not in final and at not in chain:
            chain[at] = lines["class", at]
            at = merges[at]
        if at in chain:
            circle = sorted(list(chain.values())[list(chain).index(at) :])
            raise DataError(
                f"{place}:{circle[0]}: the merges in the lines {', '.join(map(str, circle))} form a circle; "
                "remove one of them"
            )
        final |= dict.fromkeys(chain, final.get(at, at))
    return final
