"""The registry of formats, and how a set is recognised: by a file's suffix, by what a folder holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from plsc.data.sources.base import Source
from plsc.data.sources.base64_lines import Base64Source
from plsc.data.sources.image_folders import ImageFolderSource, LabelFileSource, holds_image
from plsc.data.sources.lmdb import LmdbSource
from plsc.data.sources.parquet import ParquetSource
from plsc.data.sources.recordio import RecordIOSource
from plsc.data.sources.rows import CsvSource, JsonLinesSource
from plsc.data.sources.tar import TarSource
from plsc.errors import DataError, OptionError
from plsc.storage.retry import with_retries
from plsc.storage.urls import base_name, is_url, open_filesystem, shown

_COLUMNS = ("image_column", "label_column", "label_map")


class Format(NamedTuple):
    """The source of a suffix, the options it takes, and whether other files in its folder belong to it."""

    make: Callable[..., Source]
    options: tuple[str, ...] = ()
    has_shards: bool = False


# To add a format: a line here, by its suffix.
FORMATS = {
    ".rec": Format(RecordIOSource),
    ".csv": Format(CsvSource, _COLUMNS),
    ".tsv": Format(CsvSource, _COLUMNS),
    ".jsonl": Format(JsonLinesSource, _COLUMNS),
    ".ndjson": Format(JsonLinesSource, _COLUMNS),
    ".parquet": Format(ParquetSource, _COLUMNS, has_shards=True),
    ".tar": Format(TarSource, _COLUMNS, has_shards=True),
    ".lmdb": Format(LmdbSource, ("label_map",)),
}
_LAYOUTS = (
    "expected a folder with label.txt (lines of '<path> <label>') and its images, one with file_list.txt and "
    "files of '<base64>TAB<label>' lines, or one with a folder of images for each class, or a file or folder "
    f"of {', '.join(FORMATS)}"
)


def open_source(
    location: str | Path,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    label_map: str | Path | None = None,
    class_depth: int | None = None,
) -> Source:
    """Return the source for a file, a pattern of shards, or a folder, local or remote.

    A file is known by its suffix. A folder with a label.txt is one of images and labels, with a file_list.txt
    one of base64 lines; one that holds Parquet, tar or LMDB files, or one single file of another format, is
    that set; else each folder in it is a class. Of two such readings the one with two classes or more counts;
    if both have, an option that only one of them takes decides. Options that are None are left to the format.
    Raises DataError, which says what is accepted, if there is nothing, nothing that is known, or two sets,
    and OptionError for an option that the format does not take.
    """
    given: dict[str, Any] = {
        "image_column": image_column,
        "label_column": label_column,
        "label_map": label_map,
        "class_depth": class_depth,
    }
    options = {name: value for name, value in given.items() if value is not None}
    suffix = _suffix(str(location))
    folder = Path(location)
    if suffix in FORMATS and (is_url(location) or suffix == ".lmdb" or not folder.is_dir()):
        return _make(suffix, str(location), options)
    if not is_url(location) and not folder.is_dir():
        raise DataError(f"{folder} {_why_none(folder)}; {_LAYOUTS}")
    names = _names_in(str(location))
    if "label.txt" in names and not is_url(location):
        _refuse(options, ())
        return LabelFileSource(folder)
    if "file_list.txt" in names:
        _refuse(options, ())
        return Base64Source(str(location))
    if "data.mdb" in names:
        return _make(".lmdb", str(location), options)
    folders = [] if is_url(location) else [name for name in names if _is_class_folder(folder, name)]
    found = None if folders and "class_depth" in options else _only_set(str(location), names)
    if found is not None and not _is_overruled(found, folder, folders, options):
        return _make(_suffix(found), found, options)
    # `images/` alone is the first layout with its label.txt forgotten, not a set of one class.
    if folders in ([], ["images"]):
        raise DataError(f"{shown(str(location))} has no label.txt and no class folders; {_LAYOUTS}")
    _refuse(options, ("label_map", "class_depth"))
    return ImageFolderSource(folder, **options)


def _is_class_folder(folder: Path, name: str) -> bool:
    return not name.startswith(".") and (folder / name).is_dir()


def _is_overruled(found: str, folder: Path, folders: list[str], options: dict[str, Any]) -> bool:
    """Whether the class folders next to a file are the set. Raises DataError if both could be."""
    if not options.keys() <= {"label_map"} or len(folders) < 2:
        return False
    try:
        filled = sum(holds_image(folder, name) for name in folders)
    except DataError:  # links, say, which class folders may not hold
        return False
    if filled < 2:
        return False
    try:
        classes = len(np.unique(_make(_suffix(found), found, options).labels()))
    except (DataError, OptionError):
        return True
    if classes < 2:
        return True
    raise DataError(
        f"{folder} holds {filled} folders of images and {base_name(found)}, a set of {classes} classes; give "
        "the path of the file, or set_class_depth(1) for the folders"
    )


def _why_none(path: Path) -> str:
    """Return why something that is no folder, and has no suffix of a format, is no set."""
    if not path.exists():
        return "does not exist"
    if path.name in ("label.txt", "file_list.txt"):
        return f"lists a set; give the folder that it is in, {path.parent}"
    suffix = f" with the suffix {path.suffix}" if path.suffix else " without a suffix"
    return f"is no set of images: no format has files{suffix}"


def _make(suffix: str, location: str, options: dict[str, Any]) -> Source:
    found = FORMATS[suffix]
    _refuse(options, found.options)
    return found.make(location, **options)


def _refuse(options: dict[str, Any], accepted: tuple[str, ...]) -> None:
    for name in options:
        if name not in accepted:
            known = f"it takes {', '.join(accepted)}" if accepted else "it takes none of these"
            raise OptionError(f"{name} is set, but this kind of data has no such option; {known}")


def _only_set(location: str, names: list[str]) -> str | None:
    """Return the one file of a known format in a folder, or the folder if it has shards of one."""
    by_suffix: dict[str, list[str]] = {}
    for name in names:
        if _suffix(name) in FORMATS and not name.startswith("."):
            by_suffix.setdefault(_suffix(name), []).append(name)
    if len(by_suffix) != 1:
        return None
    ((suffix, found),) = by_suffix.items()
    if FORMATS[suffix].has_shards:
        return f"{location.rstrip('/')}/*{suffix}"
    return f"{location.rstrip('/')}/{found[0]}" if len(found) == 1 else None


def _names_in(location: str) -> list[str]:
    if not is_url(location):
        return [path.name for path in Path(location).iterdir()]
    filesystem, inside = open_filesystem(location)
    found = with_retries(lambda: filesystem.ls(inside, detail=False), f"{shown(location)} cannot be listed")
    return [base_name(name) for name in found]


def _suffix(location: str) -> str:
    name = base_name(location).lower()
    return name[name.rindex(".") :] if "." in name else ""
