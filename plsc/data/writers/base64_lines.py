"""Folders of base64 lines, ``<base64>\\t<label>``, with their file_list.txt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import BinaryIO

import pybase64

from plsc.errors import DataError
from plsc.storage.publish import publishing, publishing_folder
from plsc.storage.urls import is_url, join

_PART = "part-00000"


def write_base64(location: str, samples: Iterable[tuple[bytes, int]]) -> int:
    """Write samples to a new folder, local or remote; return their number.

    A remote folder holds a set as soon as its file_list.txt, written last, is there. Raises DataError
    if the folder exists or cannot be written.
    """
    if not is_url(location):
        with publishing_folder(location) as folder:
            with (folder / _PART).open("wb", buffering=2**20) as file:
                count = _write_lines(file, samples)
            (folder / "file_list.txt").write_text(f"{_PART}\n")
        return count
    with publishing(join(location, _PART)) as file:
        count = _write_lines(file, samples)
    with publishing(join(location, "file_list.txt")) as file:
        file.write(f"{_PART}\n".encode())
    return count


def _write_lines(file: BinaryIO, samples: Iterable[tuple[bytes, int]]) -> int:
    count = 0
    for image, label in samples:
        if label < 0:
            raise DataError(f"label {label} cannot be written; expected 0 or more")
        file.write(b"%b\t%d\n" % (pybase64.b64encode(image), label))
        count += 1
    return count
