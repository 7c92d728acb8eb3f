"""Sources of labelled images: each implements ``len()``, ``source[i]``, ``name(i)`` and ``labels()``.

`open_source` recognises the format of a dataset from its files; `FORMATS` is the registry.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from plsc.data.files import is_hidden
from plsc.data.sources.base import Source
from plsc.data.sources.base import TorchDatasetSource as TorchDatasetSource
from plsc.data.sources.base import check_labels as check_labels
from plsc.data.sources.image_folders import ImageFolderSource, LabelFileSource
from plsc.data.sources.parquet import ParquetSource
from plsc.data.sources.recordio import RecordIOSource
from plsc.data.sources.rows import Base64Source, CsvSource, JsonLinesSource
from plsc.data.sources.tar import TarSource
from plsc.errors import DataError, OptionError
from plsc.storage.disk import check_inside
from plsc.storage.urls import base_name, is_url, list_folder, local_path, shown

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
