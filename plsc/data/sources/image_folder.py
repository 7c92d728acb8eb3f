"""One folder for each class, the layout of torchvision's ImageFolder."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from plsc.data.sources.base import FileSource
from plsc.data.sources.paths import PathTable, printable
from plsc.errors import DataError

IMAGE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
)


class ImageFolderSource(FileSource):
    """``<folder>/<class>/**/<image>``; class ids are the ranks of the sorted folder names.

    ``label_map``, a JSON object or lines of ``name<TAB>id``, gives the ids instead. Hidden folders
    and files are passed over; ``ignored_files`` counts the others that do not end like an image. A
    link to a file inside the folder is followed; a link that leads out, or to a folder, raises
    DataError.
    """

    def __init__(self, dataset_dir: str | Path, label_map: str | Path | None = None) -> None:
        root = Path(dataset_dir).resolve()
        self.class_names = class_folders(root)
        ids = read_label_map(Path(label_map)) if label_map is not None else None
        self.ignored_files = 0
        paths, labels = PathTable(), array("q")
        for position, class_name in enumerate(self.class_names):
            class_id = position if ids is None else ids.get(class_name)
            if class_id is None:
                raise DataError(
                    f"{label_map} has no id for the class folder '{printable(class_name)}'; add it"
                )
            for path in _walk(root, root / class_name):
                if Path(path).suffix.lower() in IMAGE_SUFFIXES:
                    paths.append(os.fsencode(os.path.relpath(path, root)))
                    labels.append(class_id)
                else:
                    self.ignored_files += 1
        if len(paths) == 0:
            raise DataError(
                f"{root} holds no images; expected <class>/<image> files that end in "
                + ", ".join(sorted(IMAGE_SUFFIXES))
            )
        super().__init__(root, paths, np.frombuffer(labels, dtype=np.int64))


def class_folders(root: Path) -> list[str]:
    """Return the sorted names of the folders in ``root``, hidden ones left out."""
    try:
        with os.scandir(root) as entries:
            return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    except OSError as error:
        raise DataError(f"{root} cannot be read: {error.strerror}") from error


def _walk(root: Path, folder: Path) -> Iterator[str]:
    _check_link(root, folder)
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{printable(str(folder))} cannot be read: {error.strerror}") from error
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _walk(root, Path(entry.path))
        else:
            if entry.is_symlink():
                _check_link(root, Path(entry.path))
            yield entry.path


def _check_link(root: Path, path: Path) -> None:
    if not path.is_symlink():
        return
    shown = printable(str(path))
    if path.is_dir():  # following these could walk in circles
        raise DataError(f"{shown} is a link to a folder; put the folder itself there")
    if not path.resolve().is_relative_to(root):
        raise DataError(f"{shown} is a link that leaves the dataset folder; copy the image instead")


def read_label_map(path: Path) -> dict[str, int]:
    """Return class name -> id from a ``.json`` object, or else from lines of ``name<TAB>id``.

    Raises DataError if the file cannot be read or an id is not a whole number of 0 or more. Several
    names may share an id.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        found = json.loads(text) if path.suffix.lower() == ".json" else _parse_lines(path, text)
    except OSError as error:
        raise DataError(f"the label map {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"the label map {path} is not valid: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"the label map {path} must be an object {{name: id}}")
    for name, class_id in found.items():
        if isinstance(class_id, bool) or not isinstance(class_id, int) or not 0 <= class_id < 2**62:
            raise DataError(
                f"the label map {path} gives '{printable(name)}' the id {class_id!r}; "
                "expected a whole number of 0 or more"
            )
    return found


def _parse_lines(path: Path, text: str) -> dict[str, int]:
    ids: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.rstrip("\r")
        if not line.strip():
            continue
        name, _, label = line.rpartition("\t")
        if not name or not (label.isascii() and label.isdigit() and len(label) <= 18):
            raise DataError(
                f"{path}:{number}: expected 'name<TAB>id', got '{printable(line[:200])}'"
            )
        if name in ids:
            raise DataError(f"{path}:{number}: the name '{printable(name)}' comes a second time")
        ids[name] = int(label)
    return ids
