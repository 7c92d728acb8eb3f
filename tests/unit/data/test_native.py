"""Reading many files or ranges in one call equals reading each of them."""

import ctypes
import mmap
import os
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plsc.data import native
from plsc.data.files import PathTable
from plsc.data.lines import MAX_LINE_BYTES, is_base64, parse_line
from plsc.data.native import crc32, crc32_rows, move_blocks, read_files, read_ranges
from plsc.data.partition.parts import (
    checksum,
    checksum_reference,
)

needs_library = pytest.mark.skipif(native.library() is None, reason="the C library is not built")


def read(folder: Path, *names: str, may_leave: bool = False) -> list[bytes | None]:
    table = PathTable()
    for name in names:
        table.append(os.fsencode(name))
    return list(read_files(os.fsencode(folder), *table.arrays(), np.arange(len(names)), may_leave))


@needs_library
def test_files_that_are_not_plain_or_empty_are_left_to_python(tmp_path):
    (tmp_path / "a").write_bytes(b"first")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "closed").symlink_to("gone")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**40)
    names = ["a", "gone", "empty", "folder", "pipe", "huge", "closed", "x" * 5000, "a\0", "/etc/passwd"]
    assert read(tmp_path, *names, "link") == [b"first"] + [None] * 9 + [b"first"]
    assert read(Path("/" + "y" * 5000), "a") == [None]


@needs_library
def test_a_link_is_read_only_if_it_stays_in_the_folder(tmp_path):
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub/a").write_bytes(b"inside")
    (tmp_path / "secret").write_bytes(b"outside")
    (folder / "stays").symlink_to("sub/../sub/a")
    (folder / "leaves").symlink_to("../secret")
    (folder / "up").symlink_to("..")
    (folder / "absolute").symlink_to(tmp_path / "secret")
    names = ["sub/a", "stays", "sub/../sub/a", "leaves", "up/secret", "../secret", "absolute"]
    assert read(folder, *names) == [b"inside"] * 3 + [None] * 4
    assert read(folder, *names, may_leave=True) == [b"inside"] * 3 + [b"outside"] * 4
    (tmp_path / "link").symlink_to("data")
    assert read(tmp_path / "link", *names) == [b"inside"] * 3 + [None] * 4


@needs_library
def test_more_than_the_buffer_of_a_mebibyte_is_read_by_several_calls(tmp_path):
    contents = [bytes([65 + n]) * (n * 60_000 + 1) for n in range(20)]
    names = [str(n) for n in range(20)]
    for name, content in zip(names, contents, strict=True):
        (tmp_path / name).write_bytes(content)
    expected = [content if len(content) <= 2**20 else None for content in contents]
    assert None in expected
    assert read(tmp_path, *names) == expected
    (tmp_path / "all").write_bytes(b"".join(contents))
    lengths = np.array([len(content) for content in contents])
    with (tmp_path / "all").open("rb") as file:
        numbers = np.full(20, file.fileno(), np.int32)
        assert list(read_ranges(numbers, np.cumsum(lengths) - lengths, lengths)) == expected


@needs_library
def test_ranges_outside_a_file_are_left_to_python(tmp_path):
    (tmp_path / "a").write_bytes(b"0123456789")
    with (tmp_path / "a").open("rb") as file:
        numbers = np.array([file.fileno()] * 6 + [-1], np.int32)
        offsets = np.array([3, 8, -1, 2**62, 0, 0, 0])
        lengths = np.array([4, 3, 2, 4, 0, -5, 4])
        assert list(read_ranges(numbers, offsets, lengths)) == [b"3456"] + [None] * 6


@needs_library
def test_concurrent_threads_use_separate_buffers(tmp_path):
    for number in range(50):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 3000)
    names = [str(number) for number in range(50)]
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: read(tmp_path, *names), range(40)):
            assert found == [bytes([number]) * 3000 for number in range(50)]


DATA = os.urandom(9000)


@given(st.integers(0, 64), st.integers(0, 8900), st.integers(0, 2**32 - 1))
def test_crc32_equals_zlib_for_every_length_offset_and_start_value(first, length, before):
    piece = memoryview(DATA)[first : first + length]
    assert crc32(piece, before) == zlib.crc32(piece, before)
    rows = np.frombuffer(DATA, np.uint8)[first : first + length // 5 * 5].reshape(5, -1)
    assert crc32_rows(np.ascontiguousarray(rows)).tolist() == [zlib.crc32(row) for row in rows]


@pytest.mark.parametrize("has_library", [pytest.param(True, marks=needs_library), False])
def test_blocks_are_moved_in_any_order_and_a_short_file_is_an_error(tmp_path, monkeypatch, has_library):
    if not has_library:
        monkeypatch.setattr(native, "function", lambda *_: None)
    data = np.random.default_rng(0).integers(0, 256, (4, 5000), np.uint8)
    numbers = np.array([3, 0, 9, 1])
    with (tmp_path / "blocks").open("w+b", buffering=0) as file:
        move_blocks(file.fileno(), True, numbers, data)
        found = np.empty_like(data)
        move_blocks(file.fileno(), False, numbers, found)
        assert np.array_equal(found, data)
        with pytest.raises(OSError, match="Input/output error"):
            move_blocks(file.fileno(), False, np.array([10]), found[:1])
    with (tmp_path / "blocks").open("rb", buffering=0) as file, pytest.raises(OSError, match="Bad file"):
        move_blocks(file.fileno(), True, numbers, data)


# The C functions for reading and copying lines, compared with their Python counterparts.


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


@needs_library
@given(texts, st.booleans())
def test_newlines_equal_those_found_by_python(data, at_end):
    array = FENCED.holding(data, at_end)
    expected = [match.start() for match in re.finditer(b"\n", data)]
    assert native.find_newlines(array).tolist() == expected


@needs_library
@given(texts, st.booleans(), st.integers(0, 3), st.sampled_from([5, 20, MAX_LINE_BYTES]))
def test_lines_and_labels_equal_the_reference_implementation(data, at_end, begin, longest):
    array = FENCED.holding(data, at_end)
    newlines = np.flatnonzero(array == 10)
    newlines = newlines[newlines >= begin]
    if len(data) >= begin and not data.endswith(b"\n"):
        newlines = np.append(newlines, len(data))
    found, suspects = native.read_lines(array, begin, newlines, 7, longest)
    expected, start = [], begin
    for number, newline in enumerate(newlines.tolist(), start=7):
        end = newline - (newline > start and data[newline - 1 : newline] == b"\r")
        expected += [[start, end, number]] * (end > start)
        start = newline + 1
    assert found[[0, 1, 4]].T.tolist() == expected
    for start, end, tab, label, _ in found.T.tolist():
        if tab >= 0:
            assert parse_line(data[start:end]) == (tab - start, label)
            assert end - start <= longest
        elif end - start <= longest and re.fullmatch(rb"[^\t\r]+\t[0-9]{1,18}", data[start:end]):
            raise AssertionError("a usual line is left to parse_line")
    assert suspects == int((found[2] < 0).sum())


@needs_library
@pytest.mark.parametrize("newlines", [[3, 3], [-2], [11], [2**62]])
def test_line_ends_outside_the_data_are_refused(newlines):
    data = FENCED.holding(b"QUJD\t1\nQUJ")
    with pytest.raises(ValueError, match="ascending"):
        native.read_lines(data, 0, np.array(newlines), 1, MAX_LINE_BYTES)


@needs_library
@given(st.text("ABYZabyz0189+/=\t\r\n", max_size=150).map(str.encode), st.binary(max_size=1), st.booleans())
def test_a_byte_that_is_not_of_base64_is_found_anywhere(text, other, at_end):
    for place in range(len(text) + 1):
        data = text[:place] + other + text[place:]
        expected = re.fullmatch(rb"[A-Za-z0-9+/=\t\r\n]*", data) is not None
        assert is_base64(FENCED.holding(data, at_end)) is expected


@needs_library
@given(st.binary(max_size=300), st.one_of(st.integers(0, 50), st.integers(2**18 - 99, 2**18 + 9)))
def test_checksums_equal_the_reference_implementation(data, offset):
    ours = checksum(FENCED.holding(data), offset)
    assert ours == checksum_reference(np.frombuffer(data, dtype=np.uint8), offset)
