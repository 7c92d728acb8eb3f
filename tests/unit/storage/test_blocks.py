import concurrent.futures
import multiprocessing
import os
import pickle
import random
from pathlib import Path

import fsspec
import numpy as np
import pytest

from plsc.errors import DataError
from plsc.storage import blocks, urls
from plsc.storage.blocks import BLOCK_BYTES, open_bytes
from plsc.storage.urls import cache_folder, own_folder, with_retries

SIZE = 2 * BLOCK_BYTES + 12345
CONTENT = np.random.default_rng(0).bytes(SIZE)


def local(tmp_path: Path) -> str:
    (tmp_path / "file.bin").write_bytes(CONTENT)
    return str(tmp_path / "file.bin")


def in_memory(tmp_path: Path) -> str:
    fsspec.filesystem("memory").pipe("/blocks/file.bin", CONTENT)
    return "memory://blocks/file.bin"


def on_s3(tmp_path: Path) -> str:
    filesystem = fsspec.filesystem("s3")
    filesystem.mkdirs("blocks", exist_ok=True)
    filesystem.pipe("blocks/file.bin", CONTENT)
    return "s3://blocks/file.bin"


@pytest.fixture(params=[local, on_s3], ids=lambda make: make.__name__)
def location(request, tmp_path) -> str:
    if request.param is on_s3:
        request.getfixturevalue("s3")
    return request.param(tmp_path)


def check_random_reads(data, seed: int) -> None:
    numbers = random.Random(seed)
    for _ in range(30):
        offset = numbers.randrange(SIZE)
        length = min(numbers.choice([0, 1, 5000, BLOCK_BYTES + 7]), SIZE - offset)
        assert data.read_at(offset, length) == CONTENT[offset : offset + length]


def test_every_range_is_read_correctly(location):
    data = open_bytes(location)
    assert data.size == SIZE
    assert data.read_at(0, SIZE) == CONTENT
    check_random_reads(data, 1)
    check_random_reads(open_bytes(location), 2)
    for offset, length in ((SIZE, 1), (-1, 4), (0, SIZE + 1), (5, -1), (2**62, 2**62)):
        with pytest.raises(DataError, match=r"cannot read -?\d+ bytes at offset"):
            data.read_at(offset, length)


def test_threads_a_pickled_copy_and_a_forked_process_read_the_same(location):
    data = open_bytes(location)
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda seed: check_random_reads(data, seed), range(6)))

    copy = pickle.loads(pickle.dumps(data))
    assert copy.size == SIZE
    check_random_reads(copy, 3)
    process = multiprocessing.get_context("fork").Process(target=check_random_reads, args=(data, 4))
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_a_local_file_that_shrinks_or_changes_is_detected(tmp_path):
    path = Path(local(tmp_path))
    data = open_bytes(path)
    text = pickle.dumps(data)
    os.truncate(path, 100)
    with pytest.raises(DataError, match="shorter"):
        data.read_at(50, 100)
    with pytest.raises(DataError, match="changed"):
        pickle.loads(text)


def test_blocks_are_cached_but_truncated_ones_and_those_of_a_file_that_has_changed_are_not_used(
    tmp_path, cache
):
    location = in_memory(tmp_path)
    open_bytes(location).read_at(0, SIZE)
    (path,) = cache.glob("blocks/*/0")
    marked = bytearray(path.read_bytes())
    marked[3] ^= 255
    path.write_bytes(marked)
    assert open_bytes(location).read_at(3, 1) == marked[3:4]  # the second time, from the cache
    for path in cache.glob("blocks/*/*"):
        os.truncate(path, 10)
    assert open_bytes(location).read_at(0, SIZE) == CONTENT
    other, before = bytes(reversed(CONTENT)), open_bytes(location)
    fsspec.filesystem("memory").pipe("/blocks/file.bin", other)
    for path in cache.glob("blocks/*/*"):
        path.unlink()
    with pytest.raises(DataError, match="changed"):
        before.read_at(0, 1)
    assert not list(cache.glob("blocks/*/*"))  # the new content under the old version
    assert open_bytes(location).read_at(0, SIZE) == other


def test_the_cache_is_bounded_and_evicts_the_least_recently_used_blocks(cache, monkeypatch):
    content = bytes(20 * BLOCK_BYTES)
    fsspec.filesystem("memory").pipe("/blocks/long.bin", content)
    limit = 8 * BLOCK_BYTES
    monkeypatch.setattr(blocks, "CACHE_BYTES", limit)
    data = open_bytes("memory://blocks/long.bin")
    for block in range(20):
        data.read_at(block * BLOCK_BYTES, 100)
        cached = [(int(path.name), path.stat().st_size) for path in cache.glob("blocks/*/*")]
        assert sum(size for _, size in cached) <= limit
    assert max(cached)[0] == 19
    assert sum(size for _, size in cached) > limit // 2


def test_no_cache_is_kept_when_it_cannot_be_written(tmp_path, cache):
    cache.write_bytes(b"a file is in the way")
    assert open_bytes(in_memory(tmp_path)).read_at(0, SIZE) == CONTENT


class Flaky:
    """Fail several times, then succeed."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.failures, self.error, self.calls = failures, error, 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        return "answer"


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(urls.time, "sleep", found.append)
    return found


def test_a_temporary_failure_is_retried_with_growing_waits_that_do_not_draw_from_the_user(waits):
    state = random.getstate()
    assert with_retries(Flaky(3, TimeoutError("slow")), "it") == "answer"
    assert len(waits) == 3
    assert waits == sorted(waits)
    assert waits[-1] < 1
    assert random.getstate() == state


def test_a_failure_is_reported_when_tries_or_time_are_over_or_at_once_if_it_is_final(waits):
    for error, limits, calls in (
        (ConnectionError("refused"), {"attempts": 4}, 4),
        (ConnectionError("refused"), {"total_seconds": 0}, 1),
        (FileNotFoundError("refused"), {}, 1),
        (PermissionError("refused"), {}, 1),
    ):
        call = Flaky(99, error)
        with pytest.raises(DataError, match=r"it failed .*refused"):
            with_retries(call, "it failed", **limits)
        assert call.calls == calls


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize(
    ("prepared", "owner", "mode"),
    [
        (".", (12345, -1), 0o755),
        ("cache", (12345, -1), 0o700),
        ("cache/blocks", (12345, -1), 0o700),
        ("cache", (-1, 12345), 0o2775),
    ],
)
def test_a_cache_folder_of_another_user_or_group_is_not_used(cache, tmp_path, prepared, owner, mode):
    (tmp_path / prepared).mkdir(parents=True, exist_ok=True)
    os.chown(tmp_path / prepared, *owner)
    (tmp_path / prepared).chmod(mode)
    with pytest.raises(DataError, match="others may write"):
        own_folder(cache, "X") if prepared == "." else cache_folder("blocks", "0")


def test_what_is_run_is_not_below_a_folder_that_others_may_write_to(cache, tmp_path):
    tmp_path.chmod(0o777)
    assert cache_folder("blocks") == cache / "blocks"
    with pytest.raises(DataError, match="others may write"):
        own_folder(cache, "X")


@pytest.mark.parametrize(("folder", "mode"), [(".", 0o777), ("blocks", 0o1777)])
def test_a_cache_folder_that_all_may_write_to_is_not_used(cache, folder, mode):
    (cache / folder).mkdir(parents=True)
    (cache / folder).chmod(mode)
    with pytest.raises(DataError, match="others may write"):
        cache_folder("blocks")


def test_a_local_file_that_cannot_be_read_is_named(tmp_path):
    data = open_bytes(local(tmp_path))
    os.dup2(os.open(tmp_path, os.O_RDONLY), data.fileno())  # the system reads no folders
    with pytest.raises(DataError, match=r"file\.bin"):
        data.read_at(0, 10)
    with pytest.raises(DataError, match="null"):
        open_bytes(f"{tmp_path}/a\0b")
