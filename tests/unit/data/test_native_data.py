"""The C parts of reading and copying lines beside what they must do, in Python."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import resource
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from plsc.data import lines as lines_module
from plsc.data import native as native_lines
from plsc.data.line_reader import Buffers, LineReader
from plsc.data.lines import MAX_LINE_BYTES, parse_line
from plsc.data.native import partition as native
from plsc.data.native import search
from plsc.data.native.partition import CopyError, LinePlaces
from plsc.data.partition.buckets import Spread
from plsc.data.partition.checksum import checksum_plainly, factors
from plsc.data.partition.copying import copy_lines_plainly
from plsc.data.partition.files import map_file, open_direct
from plsc.data.partition.frames import read_frames_plainly

LIBRARY = native.functions()
if LIBRARY is None:
    pytest.skip("the C library is not built here", allow_module_level=True)
SEARCH = search.functions()


class Fenced:
    """Pages between two that nobody may touch: reading past either end of the data ends the process."""

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
def test_newlines_are_those_that_python_finds(data, at_end):
    array = FENCED.holding(data, at_end)
    expected = [match.start() for match in re.finditer(b"\n", data)]
    assert native_lines.find_newlines(array).tolist() == expected


def test_more_newlines_than_one_call_finds_are_all_found():
    data = np.full(50_000, 10, dtype=np.uint8)
    assert native_lines.find_newlines(data).tolist() == list(range(50_000))


@given(texts, st.booleans(), st.integers(0, 3), st.sampled_from([5, 20, MAX_LINE_BYTES]))
def test_lines_and_labels_are_those_of_the_naive_reader(data, at_end, begin, longest):
    array = FENCED.holding(data, at_end)
    newlines = np.flatnonzero(array == 10)
    newlines = newlines[newlines >= begin]
    if len(data) >= begin and not data.endswith(b"\n"):
        newlines = np.append(newlines, len(data))
    found, suspects = native_lines.read_lines(array, begin, newlines, 7, longest)
    padded = np.append(array, np.uint8(0))  # where a missing newline would be
    expected, _ = lines_module._cut_plainly(padded, begin, newlines, 7)
    assert found[[0, 1, 4]].tolist() == expected[[0, 1, 4]].tolist()
    for start, end, tab, label, _ in found.T.tolist():
        if tab >= 0:
            assert parse_line(data[start:end]) == (tab - start, label)
            assert end - start <= longest
        elif end - start <= longest and re.fullmatch(
            rb".+\t[0-9]{1,18}", data[start:end], re.DOTALL
        ):
            raise AssertionError("a usual line is left to the naive reader")
    assert suspects == int((found[2] < 0).sum())


@pytest.mark.parametrize("newlines", [[5, 3], [3, 3], [-2], [11], [2**62], [-(2**62)]])
def test_ends_of_lines_that_are_no_places_in_the_data_are_refused(newlines):
    data = FENCED.holding(b"QUJD\t1\nQUJ")
    with pytest.raises(ValueError, match="do not rise within 10 bytes"):
        native_lines.read_lines(data, 0, np.array(newlines), 1, MAX_LINE_BYTES)


@given(st.binary(max_size=300), st.one_of(st.integers(0, 50), st.integers(2**18 - 99, 2**18 + 9)))
def test_checksums_are_those_of_the_array_operations(data, offset):
    ours = native.checksum(LIBRARY, FENCED.holding(data), offset, factors())
    assert ours == checksum_plainly(np.frombuffer(data, dtype=np.uint8), offset)


def test_checksums_agree_over_many_blocks():
    data = np.random.default_rng(0).integers(0, 256, 1_000_003, dtype=np.uint8)
    assert native.checksum(LIBRARY, data, 262_141, factors()) == checksum_plainly(data, 262_141)


def some_places(lengths: list[int], files: int = 2) -> LinePlaces:
    """Return lines of random bytes, spread over memories, with gaps between."""
    rng = np.random.default_rng(sum(lengths))
    which = rng.integers(0, files, len(lengths)).astype(np.int32)
    starts, sizes = [], [0] * files
    for file, length in zip(which.tolist(), lengths, strict=True):
        starts.append(sizes[file] + 3)
        sizes[file] += 3 + length
    memories = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    return LinePlaces(np.array(starts, np.int64), np.array(lengths, np.int64), memories, which)


def copied(copy, path: Path, offset: int) -> tuple[int, bytes]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        total = copy(handle, offset)
        return total, path.read_bytes()
    finally:
        os.close(handle)


@pytest.mark.parametrize("offset", [0, 5, 4096, 262_140, 300_001])
@pytest.mark.parametrize("is_refused", [False, True])
def test_a_file_is_the_same_when_it_is_written_past_the_cache_or_that_is_refused(
    tmp_path, offset, is_refused
):
    lines = some_places([5000, 1, 70_000] * 20)
    order = np.random.default_rng(1).permutation(60)
    plain = copied(
        lambda handle, at: copy_lines_plainly(lines, order, handle, at), tmp_path / "plain", offset
    )
    direct = open_direct(tmp_path / "plain")
    if direct < 0:
        pytest.skip(f"{tmp_path} cannot be written past the cache")
    os.close(direct)

    def copy(handle: int, at: int) -> int:
        refuses = os.open(tmp_path / "ours", os.O_RDONLY)
        direct = open_direct(tmp_path / "ours")
        try:
            chosen = refuses if is_refused else direct
            return native.copy_lines(LIBRARY, lines, order, handle, at, factors(), chosen)
        finally:
            os.close(refuses)
            os.close(direct)

    assert copied(copy, tmp_path / "ours", offset) == plain


@pytest.mark.parametrize("offset", [0, 5, 262_140, 262_144, 300_001])
@pytest.mark.parametrize(
    "lengths", [[0, 1, 2, 7, 8, 9], [5000] * 200, [300_000, 1, 600_000], [262_143, 262_143], []]
)
def test_lines_are_copied_in_any_order_to_any_offset_as_joining_them_does(
    tmp_path, lengths, offset
):
    lines = some_places(lengths)
    order = np.random.default_rng(1).permutation(len(lengths))
    ours = copied(
        lambda handle, at: native.copy_lines(LIBRARY, lines, order, handle, at, factors()),
        tmp_path / "ours", offset,
    )  # fmt: skip
    plain = copied(
        lambda handle, at: copy_lines_plainly(lines, order, handle, at), tmp_path / "plain", offset
    )
    pieces = [
        lines.memories[lines.files[i]][lines.starts[i] :][: lines.lengths[i]].tobytes() + b"\n"
        for i in order
    ]
    assert ours == plain
    assert ours[1][offset:] == b"".join(pieces)


@pytest.mark.parametrize(
    ("start", "length", "file"),
    [
        (0, 11, 0), (11, 0, 0), (-1, 3, 0), (5, -1, 0), (2**63 - 1, 5, 0), (5, 2**63 - 1, 0),
        (0, 1, 1), (0, 1, -1),
    ],
)  # fmt: skip
def test_a_line_outside_of_its_memory_is_refused(start, length, file):
    places = LinePlaces(
        np.array([start]), np.array([length]), [FENCED.holding(b"0123456789")], np.array([file], np.int32)
    )  # fmt: skip
    with Path(os.devnull).open("wb") as null:
        with pytest.raises(CopyError):
            native.copy_lines(LIBRARY, places, np.array([0]), null.fileno(), 0, factors())
        handles, none = np.array([null.fileno()], np.int32), np.zeros(1, np.int64)
        for order in ([0], [1], [-1]):
            with pytest.raises(CopyError):
                native.write_frames(
                    LIBRARY, places, none, np.array(order), np.array([1]), handles, none
                )
        with pytest.raises(CopyError):  # more lines than there are
            native.write_frames(LIBRARY, places, none, none, np.array([2]), handles, none)


@pytest.fixture
def tiny_files() -> Iterator[None]:
    """No file may grow beyond 300,000 bytes, as if the disk were full there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))  # Python ignores the signal
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_an_error_of_the_system(tmp_path, tiny_files):
    lines = some_places([5000] * 100, files=1)
    order, counts = np.arange(100), np.array([100])
    with (tmp_path / "full").open("wb") as full:
        direct = open_direct(tmp_path / "full")
        for other in {-1, direct}:
            with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
                native.copy_lines(LIBRARY, lines, order, full.fileno(), 0, factors(), other)
        handles = np.array([full.fileno()], np.int32)
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            native.write_frames(
                LIBRARY, lines, order, order, counts, handles, np.zeros(1, np.int64)
            )
        if direct >= 0:
            os.close(direct)


def test_a_mapped_file_that_is_cut_short_is_an_error_and_not_the_end_of_the_process(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(bytes(100_000))
    data = map_file(path, 100_000)
    os.truncate(path, 5000)
    lines = LinePlaces(np.array([0, 50_000]), np.array([4000, 4000]), [data])
    with Path(os.devnull).open("wb") as null, native.truncation_caught():
        with pytest.raises(CopyError) as caught:
            native.copy_lines(LIBRARY, lines, np.arange(2), null.fileno(), 0, factors())
        assert caught.value.line == 1
        native.copy_lines(LIBRARY, lines, np.array([0]), null.fileno(), 0, factors())
        assert native.read_frames(LIBRARY, data[90_000:], 1) is None


class TestBuckets:
    @pytest.mark.parametrize("lengths", [[0, 1, 5, 40] * 9, [2000, 1500, 70_000] * 300])
    @pytest.mark.parametrize(("above", "bits"), [(0, 0), (0, 5), (7, 3), (56, 8)])
    def test_bucket_files_hold_what_the_plain_way_writes(
        self, tmp_path, monkeypatch, lengths, above, bits
    ):
        lines, numbers = some_places(lengths), np.arange(len(lengths)) * 3
        found = {}
        for name in ("ours", "plain"):
            if name == "plain":
                monkeypatch.setattr(native, "functions", lambda: None)
            (tmp_path / name).mkdir()
            spread = Spread(tmp_path / name, 5, bits)
            spread._above = above
            with spread:
                spread.add(lines, numbers)
                spread.add(lines, numbers + 10_000)
            found[name] = [
                (bucket.lines, bucket.size, bucket.path.read_bytes()) for bucket in spread.buckets
            ]
            assert all(size == len(content) for _, size, content in found[name])
        assert found["ours"] == found["plain"]
        assert sum(bucket[0] for bucket in found["ours"]) == 2 * len(lengths)

    @given(
        frames=st.lists(st.lists(st.binary(max_size=9), max_size=4), max_size=4),
        damage=st.sampled_from(["none", "cut", "byte", "random"]),
        where=st.integers(0, 10**6), value=st.integers(0, 255), noise=st.binary(max_size=80),
        more=st.integers(-1, 2),
    )  # fmt: skip
    def test_frames_of_any_bytes_are_read_or_refused_as_the_plain_way_does(
        self, frames, damage, where, value, noise, more
    ):
        data = bytearray()
        for lines in frames:
            data += len(lines).to_bytes(8, "little")
            data += b"".join((3 * i).to_bytes(8, "little") for i in range(len(lines)))
            data += b"".join((len(line) + 1).to_bytes(4, "little") for line in lines)
            data += b"".join(line + b"\n" for line in lines)
        if damage == "cut":
            del data[where % (len(data) + 1) :]
        elif damage == "byte" and data:
            data[where % len(data)] = value
        elif damage == "random":
            data = bytearray(noise)
        count = max(0, sum(map(len, frames)) + more)
        array = FENCED.holding(bytes(data))
        ours, plain = native.read_frames(LIBRARY, array, count), read_frames_plainly(array, count)
        assert (ours is None) == (plain is None)
        if ours is not None:
            assert [row.tolist() for row in ours] == [row.tolist() for row in plain]
        if damage == "none" and more == 0:
            assert ours is not None


@given(texts, st.booleans(), st.sampled_from([5, MAX_LINE_BYTES]), st.sampled_from([1, 3, 8192]))
def test_lines_found_in_one_pass_are_those_of_the_reader(data, at_end, longest, room):
    array = FENCED.holding(data, at_end)
    found: list[search.FoundLines] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "MOST_LINES", room)
        patch.setattr(lines_module, "MAX_LINE_BYTES", longest)
        reader = LineReader(BytesIO(data), "a", Buffers(1, 2**10))
        try:
            found += search.search_lines(SEARCH, array, 0, len(data), longest, factors())
        except search.UnusualLine:
            event("unusual")
            return
        expected = [(one.starts + reader.base, one.ends + reader.base) for one in reader]
    for ours, theirs in zip(
        ([one.starts for one in found], [one.ends for one in found]),
        zip(*expected, strict=True) if expected else ([], []),
        strict=True,
    ):
        assert [n for some in ours for n in some] == [n for some in theirs for n in some]
    assert sum(one.blanks for one in found) == reader.blanks
    total = sum(one.checksum for one in found) % 2**64
    assert total == checksum_plainly(np.frombuffer(data, np.uint8), 0)
