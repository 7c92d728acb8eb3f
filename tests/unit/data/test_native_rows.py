"""The rows that C finds are those of the plain way, whatever the bytes are."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plsc.data import native
from plsc.data.native.rows import MOST_ROWS, find_csv_rows, find_json_rows
from plsc.data.sources import csv_rows, json_lines, lines
from plsc.data.sources.columns import LabelReader
from plsc.data.sources.csv_rows import CsvSource
from plsc.data.sources.json_lines import JsonLinesSource
from plsc.errors import DataError
from tests.in_memory import InMemory

pytestmark = pytest.mark.skipif(native.library() is None, reason="the C library is not built")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    (folder / "a.csv").write_text("path,label,note\na.jpg,1,x\n")
    (folder / "a.tsv").write_text("label\tpath\n1\ta.jpg\n")
    (folder / "a.jsonl").write_text('{"path": "a.jpg", "label": 1}\n')
    return {
        "csv": CsvSource(folder / "a.csv"),
        "tsv": CsvSource(folder / "a.tsv"),
        "jsonl": JsonLinesSource(folder / "a.jsonl"),
    }


@contextmanager
def plain_way() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_rows, "find_csv_rows", lambda *_: None)
        patch.setattr(json_lines, "find_json_rows", lambda *_: None)
        yield


def index_of(source, content: bytes, names_wanted: bool) -> dict[str, list[int]] | str:
    source._data = InMemory(content)
    try:
        return {name: a.tolist() for name, a in source._build(LabelReader(names_wanted)).items()}
    except DataError as error:
        return str(error)


def check_same(source, content: bytes) -> None:
    for names_wanted in (False, True):
        found = index_of(source, content, names_wanted)
        with plain_way():
            expected = index_of(source, content, names_wanted)
        # Where several rows are bad, which of them is named may differ.
        assert found == expected or (isinstance(found, str) and isinstance(expected, str))


BYTES = [b" ", b"\t", b'"', b"\n", b"\r", b"\r\n", b"\0", b"\xff", "é".encode(), b"\x0b", b"\x7f"]
OF_CSV = [b"a", b"7", b"12", b",", b'""', b'"a"', b'"x\n,"', b"\n\n", b"0" * 17, b"9" * 19]
CSV_ROWS = [b"a.jpg,3,x\n", b'"a.jpg","3",\n', b"3\ta.jpg\n", b'"3"\t"b""c"\r\n']
OF_JSON = [b"{", b"}", b"[", b"]", b":", b",", b'"label"', b'"a"', b"1", b"-", b"0", b".5", b"e3"]
OF_JSON += [b"\\", b"\\u0041", b"true", b"null", b"NaN", b"\x1f", b"9" * 19]
JSON_ROWS = [
    b'{"path": "a.jpg", "label": 5}\n',
    b'{"label": "bo", "path": "x"}\n',
    b'{"label":"7"}',
]
pieces = st.sampled_from(BYTES + OF_CSV + CSV_ROWS)
fragments = st.sampled_from(BYTES + OF_JSON + JSON_ROWS)
chunks = st.sampled_from([8, 64, 2**18])


@settings(max_examples=300)
@given(st.lists(pieces, max_size=30), st.sampled_from(["csv", "tsv"]), chunks)
@example([b'"a"', b"\r", b"\n"], "csv", 8)
def test_csv_rows_are_those_of_the_plain_way(sources, content, kind, chunk):
    header = {"csv": b"path,label,note\n", "tsv": b"label\tpath\n"}[kind]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "_CHUNK", chunk)
        check_same(sources[kind], header + b"".join(content))


@settings(max_examples=300)
@given(st.lists(fragments, max_size=20), chunks)
def test_json_rows_are_those_of_the_plain_way(sources, content, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "_CHUNK", chunk)
        check_same(sources["jsonl"], b"".join(content))


texts = st.text(max_size=3)
values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
labels = st.integers(0, 10**18) | st.text(min_size=1, max_size=3) | st.just("5")


@given(
    st.lists(st.tuples(labels, st.dictionaries(texts, values, max_size=3)), max_size=5),
    st.booleans(),
)
def test_sound_json_rows_are_those_of_the_plain_way(sources, rows, is_ascii):
    objects = [{**more, "label": label} for label, more in rows]
    text = "\n".join(json.dumps(row, ensure_ascii=is_ascii) for row in objects)
    check_same(sources["jsonl"], text.encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("csv", b"a.jpg,3,x\n"),
        ("csv", b'"a, ""b"".jpg","3",x\r\n'),
        ("jsonl", b'{"path": "a.jpg", "x": [1], "label": 3}\n'),
        ("jsonl", b'{"path": "a.jpg", "x": -1.5e3, "y": null, "label": 3}\n'),
    ],
)
def test_many_rows_and_a_strange_one_among_them(sources, kind, row):
    header = {"csv": b"path,label,note\n", "jsonl": b""}[kind]
    strange = {"csv": b'"\xc3\xa9",4,\n', "jsonl": b'{"label": 4, "path": "\\u0041"}\n'}[kind]
    count = MOST_ROWS + 100
    content = header + row * count + b"\n" + strange + row * 3
    check_same(sources[kind], content)
    found = index_of(sources[kind], content, False)
    assert found["labels"] == [3] * count + [4, 3, 3, 3]
    last = count + (kind == "csv")
    assert found["lines"][count - 1 :] == [last, last + 2, last + 3, last + 4, last + 5]


def test_usual_rows_are_found_by_c(sources):
    text = b'a.jpg,3,x\n"a, ""b"".jpg","3",\r\n\n x,17,"y\n"'
    found = find_csv_rows(text, len(text), 0, b",", 3, 1)
    assert found.numbers.tolist() == [3, 3, 17]
    assert (found.lines.tolist(), found.lines_passed) == ([0, 1, 3], 5)
    assert found.position == len(text) + 1
    text = b'{"a": "x", "label": "bo"}\n\n {"label":3,"b":[]}'
    found = find_json_rows(text, len(text), 0, b"label")
    assert (found.numbers.tolist(), found.position, found.lines_passed) == ([-1], 27, 2)
    assert text[found.label_starts[0] :][: found.label_lengths[0]] == b"bo"


def test_a_line_longer_than_a_block_is_read_again_with_more_room(monkeypatch):
    monkeypatch.setattr(lines, "_CHUNK", 16)
    rng = np.random.default_rng(0)
    parts = [b"x" * int(n) for n in rng.integers(0, 200, 50)]
    blocks = list(lines.line_blocks(InMemory(b"\n".join(parts))))
    assert b"\n".join(block.text[: block.end] for block in blocks) == b"\n".join(parts)
    for block, following in itertools.pairwise(blocks):
        assert following.offset == block.offset + block.end + 1
