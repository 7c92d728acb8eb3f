"""Reading many files or ranges in one call equals reading each of them."""

from __future__ import annotations

import io
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from plsc.data import native
from plsc.data.augment import Augmentation
from plsc.data.files import PathTable
from plsc.data.loader import SourceLoader
from plsc.data.native import crc32, crc32_rows, move_blocks, read_files, read_ranges
from plsc.data.order import BatchPlan
from plsc.data.samples import Recipe
from plsc.data.sources import open_source
from plsc.data.writers import writer_of
from plsc.errors import DataError

needs_library = pytest.mark.skipif(native.library() is None, reason="the C library is not built")


def read(folder: Path, *names: str, may_leave: bool = False) -> list[bytes | None]:
    table = PathTable()
    for name in names:
        table.append(os.fsencode(name))
    return list(read_files(os.fsencode(folder), *table.arrays(), np.arange(len(names)), may_leave))


def jpeg_bytes(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (shade * 9, 50, 200)).save(file, "JPEG")
    return file.getvalue()


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
def test_more_than_the_buffer_is_read_by_several_calls(tmp_path, monkeypatch):
    buffer = np.empty(100, np.uint8)
    monkeypatch.setattr(native._memory, "buffer", buffer, raising=False)
    contents = [bytes([65 + n]) * (n * 9 + 1) for n in range(20)]  # of 1 to 172 bytes
    names = [str(n) for n in range(20)]
    for name, content in zip(names, contents, strict=True):
        (tmp_path / name).write_bytes(content)
    expected = [content if len(content) <= 100 else None for content in contents]
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


@pytest.mark.parametrize("suffix", [".rec", ".tar", ""])
def test_a_bad_sample_in_a_joint_read_is_reported_and_replaced(tmp_path, monkeypatch, suffix):
    location = str(tmp_path / f"set{suffix}")
    images = [b"no image" if n == 5 else jpeg_bytes(n) for n in range(12)]
    writer_of(location)(location, ((image, n) for n, image in enumerate(images)))
    source = open_source(location)

    def batches(policy: str) -> list[object]:
        recipe = Recipe((3, 16, 16), 0, Augmentation(), bad_images=policy)
        loader = SourceLoader(source, BatchPlan(12, 4, 1, 0, "keep"), 0, recipe, num_workers=2)
        return [
            (b.final_images().tolist(), b.labels.tolist(), list(b.names), b.problems) for b in loader.epoch(0)
        ]

    together = batches("replace"), batches("skip")
    with pytest.raises(DataError) as stopped:
        batches("stop")
    monkeypatch.setattr(type(source), "read_many", None)
    assert together == (batches("replace"), batches("skip"))
    with pytest.raises(DataError) as alone:
        batches("stop")
    assert str(stopped.value) == str(alone.value)


DATA = os.urandom(9000)


def test_without_the_library_python_does_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "function", lambda *_: None)
    (tmp_path / "a").write_bytes(b"first")
    assert read(tmp_path, "a", "a") == [None, None]
    assert crc32(DATA) == zlib.crc32(DATA)


@given(st.integers(0, 64), st.integers(0, 8900), st.integers(0, 2**32 - 1))
def test_crc32_equals_zlib_for_every_length_offset_and_start_value(first, length, before):
    piece = memoryview(DATA)[first : first + length]
    assert crc32(piece, before) == zlib.crc32(piece, before)


@pytest.mark.parametrize("size", [16, 64, 70, 4352])
def test_checksums_of_rows_are_zlib_s(size):
    rows = np.random.default_rng(0).integers(0, 256, (5, size), np.uint8)
    assert crc32_rows(rows).tolist() == [zlib.crc32(row) for row in rows]


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
