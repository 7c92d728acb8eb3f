"""Rows of CSV files and JSON lines, found by C (csv.c, json.c) as long as they are usual."""

from __future__ import annotations

from ctypes import c_char_p, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

from plsc.data.native import function, kept_by_thread

MOST_ROWS = 8192  # of one call
_COLUMNS = 6  # of rows.h
_TEXT = (c_char_p, c_int64, c_int64)
_FOUND = (c_int64, c_void_p, c_void_p)


@dataclass(frozen=True)
class FoundRows:
    """Rows of a text, int64 [n] each: their places in it, first lines from 0, labels' places and numbers.

    A label that is no whole number of 0 or more has the number -1. `position` is where the search stopped,
    `lines` are those passed by: at the text's end, after `MOST_ROWS`, or at a row that is not usual.
    """

    starts: np.ndarray
    lengths: np.ndarray
    lines: np.ndarray
    label_starts: np.ndarray
    label_lengths: np.ndarray
    numbers: np.ndarray
    position: int
    lines_passed: int

    def __len__(self) -> int:
        return len(self.starts)


_columns = kept_by_thread(lambda: np.empty((_COLUMNS, MOST_ROWS), np.int64))


def find_csv_rows(
    text: bytes, end: int, position: int, separator: bytes, fields: int, label_field: int
) -> FoundRows | None:
    """Find rows of so many fields in text[:end], from a row's start on; None where there is no library."""
    call = function("plsc_csv_rows", (*_TEXT, c_int32, c_int64, c_int64, *_FOUND))
    return _find(call, text, end, position, separator[0], fields, label_field)


def find_json_rows(text: bytes, end: int, position: int, key: bytes) -> FoundRows | None:
    """Find objects with a label of this name in text[:end], from a line's start on; None as above."""
    call = function("plsc_json_rows", (*_TEXT, c_char_p, c_int64, *_FOUND))
    return _find(call, text, end, position, key, len(key))


def _find(call: Any, text: bytes, end: int, position: int, *what: Any) -> FoundRows | None:
    if call is None:
        return None
    columns, state = _columns(), np.empty(2, np.int64)
    room = (MOST_ROWS, columns.ctypes.data, state.ctypes.data)
    count = call(text, end, position, *what, *room)
    return FoundRows(*columns[:, :count].copy(), *state.tolist())
