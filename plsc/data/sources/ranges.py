"""Ranges of bytes of data files, many at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from plsc.data.native.files import read_ranges
from plsc.storage.blocks import Bytes, LocalBytes


def read_from(
    files: Sequence[Bytes], offsets: np.ndarray, lengths: np.ndarray
) -> Iterator[bytes | None]:
    """Yield lengths[i] bytes at offsets[i] of files[i]; None for what is remote, or cannot be read so.

    The files stay open for as long as values come.
    """
    numbers = [file.fileno() if isinstance(file, LocalBytes) else -1 for file in files]
    yield from read_ranges(np.array(numbers, np.int32), offsets, lengths)
