"""The C functions for reading and copying lines, compared with their Python counterparts."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plsc.data import lines as lines_module
from plsc.data import native as native_lines
from plsc.data.lines import MAX_LINE_BYTES, parse_line
from plsc.data.partition import parts
from plsc.data.partition.local import BucketWriter
from plsc.data.partition.parts import (
    LinePlaces,
    checksum,
    checksum_reference,
    copy_lines,
    copy_lines_reference,
    line_keys,
)

if native_lines.library() is None:
    pytest.skip("the C library is not built here", allow_module_level=True)


class Fenced:
    """Pages between two protected ones: reading past either end of the data kills the process."""

    def __init__(self, pages: int = 4) -> None:
        page = mmap.PAGESIZE
        self._map = mmap.mmap(-1, (pages + 2) * page)
        whole = np.frombuffer(self._map, dtype=np.uint8)
        self.inside = whole[page:-page]
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        for fence in (whole.ctypes.data, whole.ctypes.data + (pages + 1) * page):
            assert protect(ctypes.c_void_p(fence), ctypes.c_size_t(page), 0) == 0

    def holding(self, data: bytes, at_end: bool = True) -> np.ndarray:
        begin = len(self.inside) - len(data) if at_end else 0
        array = self.inside[begin : begin + len(data)]
        array[:] = np.frombuffer(data, dtype=np.uint8)
        return array


FENCED = Fenced()
texts = st.one_of(
    st.binary(max_size=200),
    st.text("A\t\t\n\r\n0579", max_size=200).map(str.encode),
    st.lists(
        st.sampled_from([b"QUJD\t1\n", b"A\t12\r\n", b"\n", b"\r\n", b"\t5\n", b"A\t" + b"9" * 18 + b"\n"]),
        max_size=20,
    ).map(b"".join),
)  # fmt: skip


@given(texts, st.booleans())
def test_newlines_equal_those_found_by_python(data, at_end):
    array = FENCED.holding(data, at_end)
    expected = [match.start() for match in re.finditer(b"\n", data)]
    assert native_lines.find_newlines(array).tolist() == expected


@given(texts, st.booleans(), st.integers(0, 3), st.sampled_from([5, 20, MAX_LINE_BYTES]))
def test_lines_and_labels_equal_the_reference_implementation(data, at_end, begin, longest):
    array = FENCED.holding(data, at_end)
    newlines = np.flatnonzero(array == 10)
    newlines = newlines[newlines >= begin]
    if len(data) >= begin and not data.endswith(b"\n"):
        newlines = np.append(newlines, len(data))
    found, suspects = native_lines.read_lines(array, begin, newlines, 7, longest)
    padded = np.append(array, np.uint8(0))  # position of a missing last newline
    expected, _ = lines_module._cut_reference(padded, begin, newlines, 7)
    assert found[[0, 1, 4]].tolist() == expected[[0, 1, 4]].tolist()
    for start, end, tab, label, _ in found.T.tolist():
        if tab >= 0:
            assert parse_line(data[start:end]) == (tab - start, label)
            assert end - start <= longest
        elif end - start <= longest and re.fullmatch(rb"[^\t\r]+\t[0-9]{1,18}", data[start:end]):
            raise AssertionError("a usual line is left to parse_line")
    assert suspects == int((found[2] < 0).sum())


@pytest.mark.parametrize("newlines", [[5, 3], [3, 3], [-2], [11], [2**62], [-(2**62)]])
def test_line_ends_outside_the_data_are_refused(newlines):
    data = FENCED.holding(b"QUJD\t1\nQUJ")
    with pytest.raises(ValueError, match="are not ascending positions within 10 bytes"):
        native_lines.read_lines(data, 0, np.array(newlines), 1, MAX_LINE_BYTES)


@given(st.text("ABYZabyz0189+/=\t\r\n", max_size=150).map(str.encode), st.binary(max_size=1), st.booleans())
def test_a_byte_that_is_not_of_base64_is_found_anywhere(text, other, at_end):
    for place in range(len(text) + 1):
        data = text[:place] + other + text[place:]
        expected = re.fullmatch(rb"[A-Za-z0-9+/=\t\r\n]*", data) is not None
        assert lines_module.is_base64(FENCED.holding(data, at_end)) is expected


@given(st.binary(max_size=300), st.one_of(st.integers(0, 50), st.integers(2**18 - 99, 2**18 + 9)))
def test_checksums_equal_the_reference_implementation(data, offset):
    ours = checksum(FENCED.holding(data), offset)
    assert ours == checksum_reference(np.frombuffer(data, dtype=np.uint8), offset)


def test_checksums_agree_over_many_blocks():
    data = np.random.default_rng(0).integers(0, 256, 1_000_003, dtype=np.uint8)
    assert checksum(data, 262_141) == checksum_reference(data, 262_141)


def some_places(lengths: list[int]) -> tuple[LinePlaces, list[bytes]]:
    """Return lines of random bytes, in random order with gaps between, and their content."""
    rng = np.random.default_rng(sum(lengths))
    sizes = np.array(lengths, np.int64)
    order = rng.permutation(len(lengths))
    starts = np.empty_like(sizes)
    starts[order] = np.cumsum(sizes[order] + 3) - sizes[order]
    data = rng.integers(0, 256, sum(lengths) + 3 * len(lengths), np.uint8)
    contents = [data[start:][:size].tobytes() for start, size in zip(starts.tolist(), lengths, strict=True)]
    return LinePlaces.within(data, starts, sizes), contents


def copied(copy, path: Path, offset: int) -> tuple[int, bytes]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        total = copy(handle, offset)
        return total, path.read_bytes()
    finally:
        os.close(handle)


@pytest.mark.parametrize("offset", [0, 5, 262_140, 262_144, 300_001])
@pytest.mark.parametrize(
    "lengths", [[0, 1, 2, 7, 8, 9], [5000] * 200, [300_000, 1, 600_000], [262_143, 262_143], []]
)
def test_lines_are_copied_in_any_order_to_any_offset(tmp_path, lengths, offset):
    lines, contents = some_places(lengths)
    order = np.random.default_rng(1).permutation(len(lengths))
    ours = copied(lambda handle, at: copy_lines(lines, order, handle, at), tmp_path / "ours", offset)
    plain = copied(
        lambda handle, at: copy_lines_reference(lines, order, handle, at), tmp_path / "plain", offset
    )
    assert ours == plain
    assert ours[1][offset:] == b"".join(contents[i] + b"\n" for i in order)


@pytest.mark.parametrize("lengths", [[0, 1, 5, 40] * 9, [2000, 1500, 70_000] * 300])
@pytest.mark.parametrize(("above", "bits"), [(0, 0), (0, 5), (7, 3), (56, 8)])
def test_buckets_have_the_lines_with_their_key_prefix_with_and_without_the_library(
    tmp_path, monkeypatch, lengths, above, bits
):
    (lines, contents), numbers = some_places(lengths), np.arange(len(lengths)) * 3
    found = {}
    for name in ("ours", "plain"):
        if name == "plain":
            monkeypatch.setattr(parts, "function", lambda *_: None)
        (tmp_path / name).mkdir()
        spread = BucketWriter(tmp_path / name, 5, bits)
        spread._above = above
        with spread:
            spread.add(lines, numbers)
            spread.add(lines, numbers + 10_000)
        found[name] = []
        for index, bucket in enumerate(spread.buckets):
            loaded = bucket.load()
            keys = [int(key) for key in line_keys(5, loaded.numbers)]
            assert {key << above >> (64 - bits) & (2**bits - 1) for key in keys} <= {index}
            held = loaded.lines
            places = zip(held.addresses.tolist(), held.lengths.tolist(), strict=True)
            pieces = [ctypes.string_at(address, length) for address, length in places]
            found[name].append(list(zip(loaded.numbers.tolist(), pieces, strict=True)))
    assert found["ours"] == found["plain"]
    expected = {
        (number + more, content)
        for number, content in zip(numbers.tolist(), contents, strict=True)
        for more in (0, 10_000)
    }
    assert {line for bucket in found["ours"] for line in bucket} == expected
