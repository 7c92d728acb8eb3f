"""Frames: lines with their numbers, as they lie in bucket files.

A frame is the number of its lines (uint64), their numbers (uint64 each), their lengths (uint32 each, newline
included), and their bytes; all little-endian.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from plsc.data.native import partition as native

COUNT_BYTES = 8
_COUNT = np.dtype("<u8")
Number = TypeVar("Number", int, np.ndarray)


def frame_bytes(count: Number) -> Number:
    """Return the bytes of the head of a frame of `count` lines."""
    return COUNT_BYTES + 12 * count


def frame_head(numbers: np.ndarray, lengths: np.ndarray) -> bytes:
    """Return the head of a frame. lengths: without the newline."""
    count = np.array([len(numbers)], dtype=_COUNT).tobytes()
    return count + numbers.astype("<u8").tobytes() + (lengths + 1).astype("<u4").tobytes()


def read_frames(data: np.ndarray, lines: int) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Return (numbers, starts, lengths without newline) of `lines` lines in frames, int64.

    None if the data (uint8) are not whole frames of so many lines.
    """
    library = native.functions()
    if library is not None:
        return native.read_frames(library, data, lines)
    return read_frames_plainly(data, lines)


def read_frames_plainly(
    data: np.ndarray, lines: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Do the same without the library."""
    numbers, starts, lengths = np.empty((3, lines), dtype=np.int64)
    at = done = 0
    try:
        while at < len(data):
            count, frame_numbers, sizes = read_head(data.data, at)
            at += frame_bytes(count)
            ends = at + np.cumsum(sizes, dtype=np.int64)
            if count > lines - done or (count and (sizes.min() < 1 or ends[-1] > len(data))):
                return None
            some = slice(done, done + count)
            numbers[some], starts[some], lengths[some] = frame_numbers, ends - sizes, sizes - 1
            at, done = int(ends[-1]) if count else at, done + count
    except ValueError:  # a head that is cut off
        return None
    return (numbers, starts, lengths) if done == lines else None


def read_head(view: memoryview, position: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Return (lines, their numbers, their lengths with newline) of a frame. Raises ValueError if cut off."""
    count = int(np.frombuffer(view, _COUNT, 1, position)[0])
    if count > len(view) // 12:
        raise ValueError(f"a frame of {count} lines in {len(view)} bytes")
    position += COUNT_BYTES
    numbers = np.frombuffer(view, "<u8", count, position) if count else np.empty(0, "<u8")
    lengths = np.frombuffer(view, "<u4", count, position + 8 * count) if count else numbers
    return count, numbers, lengths.astype(np.int64)
