"""Sources of labelled images: each implements ``len()``, ``source[i]``, ``name(i)`` and ``labels()``.

`open_source` recognises the format of a dataset from its files; `FORMATS` is the registry. Folders of images
are read here: with a label.txt, with one folder per class, or without labels.
"""

from __future__ import annotations

import inspect
import os
import posixpath
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from plsc.data.decode import IMAGE_SUFFIXES
from plsc.data.files import PathTable, hidden_part, is_hidden, listed_path, parse_label, ranked
from plsc.data.sources.base import (
    IMAGE_START,
    FileSource,
    Ignored,
    Source,
    TorchDatasetSource,
    is_image,
    printable,
)
from plsc.data.sources.base import check_labels as check_labels
from plsc.data.sources.columns import with_label_map
from plsc.data.sources.parquet import ParquetSource
from plsc.data.sources.recordio import RecordIOSource
from plsc.data.sources.rows import Base64Source, CsvSource, JsonLinesSource
from plsc.data.sources.tar import TarSource
from plsc.errors import DataError, OptionError, naming
from plsc.storage.blocks import Bytes, buffered, open_bytes, streamed, text_lines
from plsc.storage.regular import check_inside, without_mark
from plsc.storage.urls import (
    base_name,
    exists,
    find_below,
    is_url,
    join,
    list_folder,
    local_path,
    name_in_listing,
    open_filesystem,
    shown,
)

# To add a format, add a line here, by its suffix. Keyword-only parameters of the class are its options.
FORMATS: dict[str, Callable[..., Source]] = {
    ".rec": RecordIOSource,
    ".csv": CsvSource,
    ".tsv": CsvSource,
    ".jsonl": JsonLinesSource,
    ".ndjson": JsonLinesSource,
    ".parquet": ParquetSource,
    ".tar": TarSource,
}
_SHARDED = (".parquet", ".tar")  # several files in a folder form one dataset
_MAX_LINE_BYTES = 8192  # of a label.txt or a list of images
_NO_LIST = re.compile(rb"\s*<|%PDF|.*[\0-\x08\x0e-\x1f]", re.DOTALL)
_LAYOUTS = (
    "expected a folder with label.txt (lines of '<path> <label>') and images, a folder with file_list.txt "
    "and files of '<base64>TAB<label>' lines, a folder with one folder of images per class, or a file or "
    f"folder of {', '.join(FORMATS)}"
)


def open_source(
    location: str | Path,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    label_map: str | Path | None = None,
    image_folder: str | Path | None = None,
    landmarks: str | None = None,
    allowed: Sequence[str] | None = None,
) -> Source:
    """Return the source for a file, a pattern of shards, or a folder, local or remote.

    A file is recognised by its suffix. A folder is read, in this order, as: images with a label.txt; base64
    lines with a file_list.txt; its Parquet or tar files, or its only file of another format; otherwise
    one class per folder in it.

    Args:
        options: of the format; None means not given.

    Raises:
        DataError: nothing is there, the format is unknown, or two formats are possible.
        OptionError: the format does not accept an option.
    """
    given = {name: value for name, value in locals().items() if name != "location"}
    options = {name: value for name, value in given.items() if value not in (None, (), [])}
    location = local_path(str(location))
    suffix = _suffix(str(location))
    folder = Path(location)
    is_folder = os.path.isdir(location)  # noqa: PTH112 - no error for a name that is too long
    if suffix in FORMATS and (is_url(location) or not is_folder):
        return _make(FORMATS[suffix], str(location), options)
    if not is_url(location) and not is_folder:
        state = "is of no known format" if os.path.exists(location) else "does not exist"  # noqa: PTH110
        raise DataError(f"the dataset {folder} {state}; {_LAYOUTS}")
    names = {name: kind for name, kind in _names_in(str(location)).items() if not is_hidden(name)}
    if "label.txt" in names:
        return _make(LabelFileSource, location, options)
    if "file_list.txt" in names:
        return _make(Base64Source, str(location), options)
    folders = [name for name in names if names[name]]
    found = _only_dataset(str(location), names)
    if found is not None:
        if len(folders) > 1:
            raise DataError(
                f"{folder} has {len(folders)} folders and {base_name(found)}; give the path of the file, or "
                "move it for a class per folder"
            )
        for name in () if is_url(location) else names:
            if _suffix(name) == _suffix(found):
                check_inside(folder / name, folder)
        return _make(FORMATS[_suffix(found)], found, options)
    # A folder with only `images/` is likely the first format without its label.txt, not one class.
    if folders in ([], ["images"]):
        several = ", ".join(sorted(name for name in names if _suffix(name) in FORMATS)[:5])
        what = f"several datasets: {several}" if several else "no label.txt and no class folders"
        raise DataError(f"{shown(str(location))} has {what}; {_LAYOUTS}")
    return _make(ImageFolderSource, location, options)


def _make(source: Callable[..., Source], location: str | Path, options: dict[str, Any]) -> Source:
    accepted = inspect.getfullargspec(source).kwonlyargs
    for name in options:
        if name not in accepted:
            known = ", ".join(accepted) or "no others"
            raise OptionError(f"{name} is set, but this data format does not use it; it accepts {known}")
    return source(location, **options)


def _only_dataset(location: str, names: Iterable[str]) -> str | None:
    """Return the only file of a known format in a folder, or the folder if it contains shards of one."""
    by_suffix: dict[str, list[str]] = {}
    for name in names:
        if _suffix(name) in FORMATS:
            by_suffix.setdefault(_suffix(name), []).append(name)
    if len(by_suffix) != 1:
        return None
    ((suffix, found),) = by_suffix.items()
    if suffix in _SHARDED:
        return f"{location.rstrip('/')}/*{suffix}"
    return f"{location.rstrip('/')}/{found[0]}" if len(found) == 1 else None


def _names_in(location: str) -> dict[str, bool]:
    if not is_url(location):
        return {path.name: path.is_dir() for path in Path(location).iterdir()}
    return {base_name(path): kind == "directory" for path, kind in list_folder(location).items()}


def _suffix(location: str) -> str:
    name = base_name(location).lower()
    return name[name.rindex(".") :] if "." in name else ""


# Folders of images.


class LabelFileSource(FileSource):
    """Images listed in ``label.txt``: a path and a label per line, separated by spaces or a tab.

    A path may contain spaces: the line is split at its last run of blanks. Paths are relative to the folder,
    or to its ``images/`` if the first line's file exists only there. Blank lines, CRLF and a UTF-8 byte order
    mark are accepted. Raises DataError that names the line.

    landmarks: file of landmarks, to align the images (`Landmarks`); paths as in label.txt.
    allowed: as of `located`.
    """

    def __init__(
        self, dataset_dir: str | Path, *, landmarks: str | None = None, allowed: Sequence[str] = ()
    ) -> None:
        folder = str(dataset_dir)
        self._place = folder, allowed
        self._blank_lines = array("q")  # number of samples before each blank line
        with streamed(join(folder, "label.txt"), folder) as file:
            paths, labels = self._read(file)
        first = os.fsdecode(paths[0])
        is_inside = not (is_url(first) or exists(join(folder, first)))
        is_inside = is_inside and exists(join(folder, f"images/{first}"))
        self._prefix = "images/" if is_inside else ""
        root = join(folder, "images") if is_inside else folder
        if is_inside and not is_url(root):
            check_inside(root, folder)
        super().__init__(root if is_url(root) else Path(root), paths, labels)
        self.add_landmarks(landmarks, folder)

    def line(self, index: int) -> int:
        """Return the line number of a sample in label.txt, from 1."""
        return index + 1 + bisect_right(self._blank_lines, index)

    def name(self, index: int) -> str:
        """Return ``images/a.jpg (label.txt:12)``."""
        return f"{self._prefix}{super().name(index)} (label.txt:{self.line(index)})"

    def _read(self, file: BinaryIO) -> tuple[PathTable, np.ndarray]:
        paths, labels = PathTable(), array("q")
        for number, _, line in text_lines(file, "label.txt", _MAX_LINE_BYTES):
            if line := line.strip():
                path, label = [*line.rsplit(None, 1), b""][:2]
                with naming("label.txt:{}".format, number):
                    paths.append(listed_path(path, *self._place))
                    labels.append(parse_label(label))
            else:
                self._blank_lines.append(len(paths))
        if len(paths) == 0:
            raise DataError("label.txt contains no samples; expected lines of '<path> <label>'")
        return paths, np.frombuffer(labels, dtype=np.int64)


class ImageFolderSource(FileSource):
    """Images in ``<folder>/<class>/<image>``; class ids are the ranks of the class names (`ranked`).

    Hidden folders and files (`is_hidden`), files without the suffix of an image, and images above the class
    folders are left out; a warning has their number. A link to a file inside the folder is followed; other
    links raise DataError, and so does an image in a folder of a class folder.

    Args:
        label_map: class ids: a JSON object, or lines of ``name<TAB>id``.
        landmarks: file of landmarks, to align the images (`Landmarks`).
    """

    def __init__(
        self,
        dataset_dir: str | Path,
        *,
        label_map: str | Path | None = None,
        landmarks: str | None = None,
    ) -> None:
        is_remote = is_url(dataset_dir)
        root = str(dataset_dir).rstrip("/") if is_remote else Path(dataset_dir).resolve()
        ignored = Ignored()
        paths = PathTable()
        counts: dict[str, int] = {}  # number of images per class folder
        for folder, names in _images_below(root, ignored):
            if names and "/" in folder:
                place = f"{shown(str(root))}/{printable(folder)}"
                raise DataError(f"{place} contains images, but is no class folder; list them in a CSV file")
            for name in names:
                if folder:
                    paths.append(os.fsencode(f"{folder}/{name}"))
                else:
                    ignored.add(name, "in no class folder")
            if folder and "/" not in folder:
                counts[folder] = len(names)
        if len(paths) == 0:
            raise _no_images(str(root), ignored, "<class>/<image> files")
        ignored.report(str(root))
        class_of = partial(name_in_listing, str(dataset_dir))
        names, ranks = ranked([class_of(folder) for folder in counts])
        self.class_names = dict(enumerate(names)) if label_map is None else None
        labels = [ranks[class_of(folder)] for folder in counts]
        every = np.repeat(np.array(labels, np.int64), list(counts.values()))
        super().__init__(root, paths, with_label_map(every, names, label_map))
        self.add_landmarks(landmarks)


def open_images(images: str | os.PathLike[str] | Sequence[Any], allowed: Sequence[str] = ()) -> Source:
    """Return images without labels (each label is -1), in sorted or in the given order.

    Args:
        images: a folder, with all images at any depth; a file with a path per line (`located`), relative to
            its folder; an image file; or a sequence of paths, or of encoded or decoded images.
        allowed: as of `located`.

    Raises:
        DataError: there are no images, or the folder or file cannot be read.
    """
    paths, ignored = PathTable(), Ignored()
    root: str | Path = Path()
    may_leave = True
    if isinstance(images, (str, os.PathLike)):
        place = local_path(os.fspath(images))
        if place.lower().endswith(IMAGE_SUFFIXES):
            paths.append(os.fsencode(place))
        elif is_url(place) or os.path.isdir(place):  # noqa: PTH112 - no error for a name that is too long
            may_leave = False
            root = place.rstrip("/") if is_url(place) else Path(place).resolve()
            for folder, names in _images_below(root, ignored):
                for name in names:
                    paths.append(os.fsencode(posixpath.join(folder, name)))
            ignored.report(place)
        elif _starts_image(file := open_bytes(place), shown(place)):  # of another type, or without a suffix
            paths.append(os.fsencode(place))
        else:
            may_leave, root = False, Path(place).parent
            for number, _, line in text_lines(buffered(file), shown(place), _MAX_LINE_BYTES):
                if line := line.strip():
                    with naming("{}:{}".format, shown(place), number):
                        paths.append(listed_path(line, str(root), allowed))
        where = shown(place)
    else:
        if not all(isinstance(image, (str, os.PathLike)) for image in images):
            return TorchDatasetSource([(image, -1) for image in images], "images")
        for image in images:
            paths.append(os.fsencode(image))
        where = "the list"
    if not len(paths):
        raise _no_images(where, ignored, "files")
    return FileSource(root, paths, np.full(len(paths), -1), may_leave=may_leave)


def _starts_image(file: Bytes, place: str) -> bool:
    """Return whether a file is an image, not a list of paths; DataError if it is neither."""
    start = file.read_at(0, min(file.size, 64))
    is_image = b"\0" in start and IMAGE_START.match(start) is not None
    if not is_image and _NO_LIST.match(without_mark(start, place)):
        raise DataError(
            f"{place} is neither an image that can be read nor a list of paths; convert it to PNG"
        )
    return is_image


def _no_images(where: str, ignored: Ignored, expected: str) -> DataError:
    there = f" ({ignored})" if str(ignored) else ""
    return DataError(
        f"{shown(where)} contains no images{there}; expected {expected} that end in "
        + ", ".join(IMAGE_SUFFIXES)
    )


def _images_below(root: Path | str, ignored: Ignored) -> Iterator[tuple[str, list[str]]]:
    return _walk_store(root, ignored) if isinstance(root, str) else _walk(root, "", ignored)


def _walk(root: Path, folder: str, ignored: Ignored) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder's path below the root, and the names of its images, sorted; `folder` first."""
    left = [folder]
    while left:
        below = left.pop()
        folders, images, place = [], [], root / below
        _check_link(root, place)
        with os.scandir(place) as found:
            for entry in sorted(found, key=lambda entry: entry.name):
                path = posixpath.join(below, entry.name)
                is_folder = entry.is_dir()
                if is_hidden(entry.name):
                    ignored.add(path, "hidden")
                elif is_folder:
                    folders.append(path)
                else:
                    if entry.is_symlink() and place != root:
                        _check_link(root, Path(entry.path))
                    if is_image(entry.name):
                        images.append(entry.name)
                    else:
                        ignored.add(path)
        yield below, images
        left += reversed(folders)


def _walk_store(url: str, ignored: Ignored) -> Iterator[tuple[str, list[str]]]:
    """Do the same for a URL."""
    _, inside = open_filesystem(url)
    found = find_below(url)
    folders: dict[str, list[str]] = {"": []}
    depth = len(inside.strip("/").split("/")) if inside.strip("/") else 0
    for path in sorted(found, key=lambda path: path.split("/")):
        *above, name = path.strip("/").split("/")[depth:] or [""]
        below = "/".join((*above, name))
        if hidden := hidden_part(below):
            ignored.add(hidden, "hidden")
        if is_elsewhere := is_url(below) or below.startswith("/"):  # the key of a/http://host/b.jpg, say
            ignored.add(below, "named like another location")
        if hidden or is_elsewhere or not name:
            continue
        for count in range(1, len(above) + 1):
            folders.setdefault("/".join(above[:count]), [])
        if found[path] == "directory":
            folders.setdefault("/".join((*above, name)), [])
        elif is_image(name):
            folders["/".join(above)].append(name)
        else:
            ignored.add("/".join((*above, name)))
    yield from folders.items()


def _check_link(root: Path, path: Path) -> None:
    if not path.is_symlink():
        return
    shown = printable(str(path))
    if path.is_dir():  # following it could loop
        raise DataError(f"{shown} is a link to a folder; replace it by the folder itself")
    check_inside(path, root)
