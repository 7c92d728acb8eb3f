"""One folder for each class, the layout of torchvision's ImageFolder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from plsc.data.sources.base import FileSource
from plsc.data.sources.paths import PathTable, printable
from plsc.errors import DataError

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".png", ".bmp", ".gif"),
    *(".tif", ".tiff", ".webp", ".ppm", ".pgm"),
)


class ImageFolderSource(FileSource):
    """``<folder>/<class>/<image>``; class ids are the ranks of the sorted class names.

    class_depth: None: class folders hold their images directly, and folders in them are refused; n: the
    folders at depth n are the classes, with all images in and below them. A class is named by its path below
    the folder: ``alphabet/character``. ``label_map``, a JSON object or lines of ``name<TAB>id``, gives the
    ids instead. Hidden folders and files are passed over; ``ignored_files`` counts the files in class
    folders that do not end like an image. A link to a file inside the folder is followed; a link that leads
    out, or to a folder, raises DataError.
    """

    def __init__(
        self,
        dataset_dir: str | Path,
        label_map: str | Path | None = None,
        class_depth: int | None = None,
    ) -> None:
        root = Path(dataset_dir).resolve()
        self.ignored_files = 0
        paths = PathTable()
        counts: dict[str, int] = {}  # images in each folder, by its path below the root
        for folder, names in _walk(root, ""):
            before = len(paths)
            for name in names if folder else ():
                if _is_image(name):
                    paths.append(os.fsencode(f"{folder}/{name}"))
                else:
                    self.ignored_files += 1
            counts[folder] = len(paths) - before
        if len(paths) == 0:
            raise DataError(
                f"{root} holds no images; expected <class>/<image> files that end in "
                + ", ".join(sorted(IMAGE_SUFFIXES))
            )
        depth = _checked_depth(root, counts, class_depth)
        names = _folders_at(counts, depth)
        self.class_names = names if label_map is None else None
        ranks = {name: rank for rank, name in enumerate(names)}
        filled = {folder: count for folder, count in counts.items() if count}
        labels = [ranks["/".join(folder.split("/")[:depth])] for folder in filled]
        every = np.repeat(np.array(labels, np.int64), list(filled.values()))
        super().__init__(root, paths, with_label_map(every, names, label_map))


def holds_image(root: Path, folder: str) -> bool:
    """Whether there is an image in a folder below ``root``, at any depth."""
    return any(_is_image(name) for _, names in _walk(root, folder) for name in names)


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)


def _depth(folder: str) -> int:
    return folder.count("/") + 1


def _folders_at(folders: Iterable[str], depth: int) -> list[str]:
    return sorted(folder for folder in folders if folder and _depth(folder) == depth)


def _checked_depth(root: Path, counts: Mapping[str, int], class_depth: int | None) -> int:
    """Return the depth of the class folders; DataError for images above it, or unless it is clear."""
    filled = [folder for folder, count in counts.items() if count]
    shallowest = min(filled, key=_depth)
    if class_depth is not None:
        if _depth(shallowest) < class_depth:
            raise DataError(
                f"{root}/{printable(shallowest)} holds images above the class folders, which are at depth "
                f"{class_depth}; move them, or set_class_depth({_depth(shallowest)})"
            )
        return class_depth
    nested = {folder.partition("/")[0] for folder in filled if "/" in folder}
    if nested:
        choices = range(1, min(5, _depth(shallowest)) + 1)
        classes = {n: len(_folders_at(counts, n)) for n in choices}
        there = [
            f"with set_class_depth({n}) there are {count} classes" for n, count in classes.items()
        ]
        raise DataError(
            f"in {len(nested)} of {classes[1]} class folders of {root} images lie in further folders; "
            f"{', '.join(there)}"
        )
    return 1


def _walk(root: Path, folder: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder's path below the root, and the names of its files, both sorted; `folder` first."""
    folders, files = _entries(root, root / folder)
    yield folder, files
    for name in folders:
        yield from _walk(root, f"{folder}/{name}" if folder else name)


def _entries(root: Path, folder: Path) -> tuple[list[str], list[str]]:
    """Return the sorted names of the folders and of the files in a folder, hidden ones left out."""
    _check_link(root, folder)
    folders: list[str] = []
    files: list[str] = []
    try:
        with os.scandir(folder) as found:
            for entry in sorted(found, key=lambda entry: entry.name):
                if entry.name.startswith("."):
                    continue
                is_folder = entry.is_dir()
                if entry.is_symlink() and not is_folder and folder != root:
                    _check_link(root, Path(entry.path))
                (folders if is_folder else files).append(entry.name)
    except OSError as error:
        raise DataError(f"{printable(str(folder))} cannot be read: {error.strerror}") from error
    return folders, files


def _check_link(root: Path, path: Path) -> None:
    if not path.is_symlink():
        return
    shown = printable(str(path))
    if path.is_dir():  # following these could walk in circles
        raise DataError(f"{shown} is a link to a folder; put the folder itself there")
    if not path.resolve().is_relative_to(root):
        raise DataError(f"{shown} is a link that leaves the dataset folder; copy the image instead")


def with_label_map(
    labels: np.ndarray, names: list[str] | None, label_map: str | Path | None
) -> np.ndarray:
    """Return the labels, int64 [N], by a label map where one is given; DataError if it lacks a name."""
    if label_map is None:
        return labels
    ids = read_label_map(Path(label_map))
    missing = [name for name in names or [] if name not in ids]
    if missing:
        raise DataError(
            f"{label_map} has no id for the class '{printable(missing[0])}' "
            f"({len(missing)} of {len(names or [])} have none); add it"
        )
    return np.array([ids[name] for name in names or []], dtype=np.int64)[labels]


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
