"""The one reader of foreign JSON: types, ranges, unknown names, nesting and size."""

import json
import os
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import pytest

from plsc.errors import CheckpointError, DataError
from plsc.storage.regular import FileName, Size, Text, read_record


class Row(NamedTuple):
    near: float
    far: Annotated[float, (0, 1)] | None


class Record(TypedDict, total=False):
    kind: Literal["a", 1]
    rows: list[Row]
    sizes: dict[FileName, Size]
    shape: tuple[Any, bool]
    text: Text
    word: str


@dataclass
class Exact:
    count: int
    model: Record


GOOD = {
    "kind": 1, "rows": [[1, None], [-2.5, 0.5]], "sizes": {"a b": 1}, "shape": [[3], True], "text": "\x1b",
    "word": "x", "of a newer version": {"deep": [1]},
}  # fmt: skip
WRONG = [
    {"kind": "b"}, {"kind": True}, {"kind": 1.0}, {"rows": {"0": 1}}, {"rows": [[1]]}, {"rows": [[1, 2]]},
    {"rows": [[float("nan"), 0]]}, {"rows": [["1", 0]]}, {"sizes": {"../x": 1}}, {"sizes": {"a": 0}},
    {"sizes": {"a": 2**41}}, {"sizes": []}, {"shape": [1]}, {"shape": [1, 1]}, {"text": 3}, {"word": None},
    {"word": "\x1b"}, {"other": "\x07"},
]  # fmt: skip


def test_a_record_is_returned_with_its_kinds_and_unknown_names():
    found = read_record(Record, json.dumps(GOOD).encode(), "x")
    assert found == {**GOOD, "rows": [Row(1.0, None), Row(-2.5, 0.5)], "shape": ([3], True)}
    assert read_record(Exact, {"count": 2, "model": {}}, "x") == Exact(2, {})


@pytest.mark.parametrize("change", WRONG)
def test_a_value_of_another_kind_or_out_of_range_is_refused(change):
    with pytest.raises(DataError, match="x is damaged"):
        read_record(Record, {**GOOD, **change}, "x", DataError)


@pytest.mark.parametrize(
    "text",
    [
        *(b"[" * 10**5, b"{", b"\xff", b'{"a": NaN}', b"[]", b"3", b'{"word": "%s"}' % (b"x" * 999)),
        b'{"other": %s%s}' % (b"[" * 60, b"]" * 60),
    ],
)
def test_a_text_that_is_no_record_deep_or_too_large_is_refused(text):
    with pytest.raises(CheckpointError):
        read_record(Record, text, "x", most=500)


def test_a_dataclass_has_all_its_names_and_no_others(tmp_path):
    for wrong in ({"count": 1}, {"count": 1, "model": {}, "more": 1}, {"count": -1, "model": {}}):
        with pytest.raises(CheckpointError):
            read_record(Exact, wrong, "x")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 2**40)
    for name in ("large", "missing"):
        with pytest.raises(CheckpointError, match=name):
            read_record(Exact, tmp_path / name, tmp_path / name)
