"""Writers of data files, one format each: ``write(location, samples)`` returns how many it wrote.

A sample is (encoded image, label); they are written in the order in which they come, and read back in it.
What is written appears under its name when it is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from plsc.data.writers.base64_lines import write_base64
from plsc.data.writers.parquet import write_parquet
from plsc.data.writers.recordio import write_recordio
from plsc.data.writers.tar import write_tar
from plsc.errors import DataError
from plsc.storage.urls import base_name

Samples = Iterable[tuple[bytes, int]]
Write = Callable[[str, Samples], int]

WRITERS: dict[str, Write] = {
    ".rec": write_recordio,
    ".parquet": write_parquet,
    ".tar": write_tar,
    "": write_base64,
}
"""By suffix; a name without one is a folder of base64 lines."""


def writer_of(location: str) -> Write:
    """Return the writer for a path or URL, by its suffix; DataError if there is none."""
    name = base_name(location).lower()
    suffix = name[name.rindex(".") :] if "." in name.lstrip(".") else ""
    if suffix not in WRITERS:
        raise DataError(
            f"{base_name(location)!r}: no format is known for {suffix!r}; name a file .rec, .parquet or "
            ".tar, or a folder, without a suffix, for base64 lines"
        )
    return WRITERS[suffix]
