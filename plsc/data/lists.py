"""Lists of images: files that choose from a dataset, or label it anew, without copies of its images.

A list has the columns ``path`` and ``class_name``, separated by tabs. Its paths lie below the folder of the
dataset, which the format argument ``image_folder`` names when the list is read.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plsc.data.sources import Source, open_source
from plsc.data.sources.base import FileSource, printable
from plsc.data.sources.rows import RowSource
from plsc.errors import DataError, check_name
from plsc.storage.urls import is_url, shown, without_secrets
from plsc.version import __version__

_UNLISTABLE = re.compile(r"[\t\r\n\ud800-\udfff]|\A\s|\s\Z")  # a file name that is not UTF-8 has surrogates


@dataclass(frozen=True)
class Listing:
    """N images of C classes.

    folder: folder or URL of the images. paths: N paths relative to it, each once. labels: int64 [N], 0 to
    C - 1; every class has images. classes: the C class names, sorted as strings; if labels are numbers, their
    digits.
    """

    folder: str
    paths: Sequence[str]
    labels: np.ndarray
    classes: Sequence[str]


def read_listing(location: str | Path, **reading: Any) -> tuple[Source, Listing]:
    """Open a dataset of image files; row i of the listing is sample i of the source.

    reading: options of `open_source`.

    Raises:
        DataError: the images are not files, two samples are the same file, or a path or class name cannot be
            in a list.
    """
    source = open_source(location, **reading)
    if not isinstance(source, FileSource | RowSource) or getattr(source, "is_base64", False):
        raise DataError(
            f"the images of {shown(str(location))} are inside its files; a list needs image files: write "
            "them to class folders, or to a folder with label.txt"
        )
    paths = source.paths()
    first: dict[str, int] = {}
    for number, path in enumerate(paths):
        if first.setdefault(path, number) != number:
            raise DataError(
                f"{source.name(number)} is the same image as {source.name(first[path])}: "
                f"'{printable(path)}'; remove one of the two"
            )
    numbers, labels = np.unique(source.labels(), return_inverse=True)
    names = source.class_names
    found = [str(number) if names is None else names[number] for number in numbers.tolist()]
    classes = sorted(found)
    ranks = {name: rank for rank, name in enumerate(classes)}
    check_listable(itertools.chain(paths, map(check_name, classes)))
    labels = np.array([ranks[name] for name in found], np.int64)[labels]
    return source, Listing(str(source.root), paths, labels, classes)


def check_listable(texts: Iterable[str]) -> None:
    """Raise DataError for the first path or class name that a list cannot contain."""
    for text in texts:
        if _UNLISTABLE.search(text):
            raise DataError(
                f"'{printable(text)}' cannot be in a list, because it has a tab, a line break or a blank at "
                "an end, or is not UTF-8; rename it"
            )


def write_list(path: Path, listing: Listing, numbers: np.ndarray) -> dict[str, int]:
    """Write a list of the images `numbers`, int64 [n], in this order; return the numbers of both kinds."""
    labels = listing.labels[numbers]
    paths = (listing.paths[number] for number in numbers.tolist())
    classes = (listing.classes[label] for label in labels.tolist())
    write_rows(path, ("path", "class_name"), zip(paths, classes, strict=True))
    return {"images": len(numbers), "classes": len(np.unique(labels))}


def write_rows(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table whose columns are separated by tabs; header: its first line, () for none."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerows([header] if header else [])
        writer.writerows(rows)


def write_origin(
    folder: Path, location: str | Path, listing: Listing, reading: dict[str, Any], about: dict[str, Any]
) -> dict[str, Any]:
    """Write ``origin.json`` in the folder of a command: where its lists come from; return the content."""
    data, images = absolute(str(location)), absolute(listing.folder)
    how = {name: value for name, value in reading.items() if value is not None}
    origin = {"plsc": __version__, "data": data, "images": images, "reading": without_secrets(how), **about}
    text = json.dumps(origin, indent=1, ensure_ascii=False, default=str)
    (folder / "origin.json").write_text(f"{text}\n", encoding="utf-8")
    return origin


def absolute(place: str) -> str:
    """Return a path or URL for people who are elsewhere, without secrets."""
    return shown(place if is_url(place) else os.path.abspath(place))  # noqa: PTH100 - of a string


def train_command(out: str, name: str, folder: str) -> str:
    """Return the command that trains on the list `name` in `out`; folder: that of the images."""
    return f"plsc train --data.dataset_dir {shlex.quote(str(Path(out, name)))} {reading_flag(folder)}"


def reading_flag(folder: str) -> str:
    """Return the flag for the folder of the images of a list."""
    arguments = json.dumps({"image_folder": shown(folder)}, ensure_ascii=False)  # which is YAML, too
    return f"--data.format_arguments {shlex.quote(arguments)}"
