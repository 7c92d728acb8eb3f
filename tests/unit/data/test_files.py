import multiprocessing
import os
import pickle
import tempfile
from pathlib import Path

import fsspec
import numpy as np
import pytest

from plsc.data.files import Shards, load_or_build
from plsc.errors import DataError


@pytest.fixture
def data(tmp_path) -> Path:
    path = tmp_path / "data" / "part.txt"
    path.parent.mkdir()
    path.write_bytes(b"a\nbb\nccc\n")
    return path


class Builder:
    """Counts its calls and returns arrays that tell which call made them."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.calls += 1
        return {
            "starts": np.arange(5, dtype=np.int64) * self.calls,
            "text": np.frombuffer(b"abc", dtype=np.uint8),
            "table": np.ones((2, 3), dtype=np.float32),
            "none": np.zeros(0, dtype=np.int64),
        }


def index_file(data: Path) -> Path:
    (found,) = data.parent.glob(".*.plsc-index")
    return found


def test_an_existing_index_is_reused(data):
    build = Builder()
    first, second = (
        load_or_build(Shards([data]), "test-1", build),
        load_or_build(Shards([data]), "test-1", build),
    )
    assert build.calls == 1
    for name, array in build().items():
        assert second[name].dtype == array.dtype
        if name != "starts":
            assert np.array_equal(second[name], array)
        assert np.array_equal(first[name], second[name])
    assert index_file(data).name == ".part.txt.test-1.plsc-index"


def test_a_pickle_of_an_array_is_small_and_maps_the_same_file_again(data):
    big = {"starts": np.arange(100_000, dtype=np.int64)}
    array = load_or_build(Shards([data]), "test-1", lambda: big)["starts"]
    assert not array.flags.writeable
    assert not array.flags.owndata
    text = pickle.dumps(array)
    assert len(text) < 1000
    assert np.array_equal(pickle.loads(text), big["starts"])
    assert np.array_equal(pickle.loads(pickle.dumps(array[7:9])), [7, 8])
    assert np.array_equal(pickle.loads(pickle.dumps(array + 1)), big["starts"] + 1)


def change_content(data: Path) -> None:
    """As an archive that is unpacked over it: same size and time of modification."""
    before = data.stat()
    data.write_bytes(data.read_bytes()[::-1])
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [lambda data: data.write_bytes(b"d"), change_content])
def test_a_changed_file_is_detected_and_a_pickle_of_its_former_index_refused(data, change):
    build = Builder()
    text = pickle.dumps(load_or_build(Shards([data]), "test-1", build)["starts"])
    change(data)
    assert load_or_build(Shards([data]), "test-1", build)["starts"][1] == 2
    with pytest.raises(DataError, match="changed"):
        pickle.loads(text)


def test_a_file_that_was_replaced_after_it_was_indexed_is_not_opened(data):
    shards = Shards([str(data)])
    data.write_bytes(b"d\nee\nfff\n")
    for one in (shards, pickle.loads(pickle.dumps(shards))):
        with pytest.raises(DataError, match="changed"):
            one[0].read_at(0, 1)
    shards = Shards([str(data)])
    assert shards[0].read_at(0, 1) == b"d"
    data.write_bytes(b"g\nhh\niii\n")  # the same inode
    with pytest.raises(DataError, match="changed"):
        shards[0]


def test_an_index_is_no_more_readable_than_its_data(data):
    mask = os.umask(0o022)
    try:
        for mode, expected in ((0o644, 0o644), (0o640, 0o640), (0o600, 0o600), (0o444, 0o644)):
            other = data.with_name(f"{mode}.txt")
            other.write_bytes(b"a\n")
            other.chmod(mode)
            load_or_build(Shards([data, other]), "test-1", Builder())
            assert index_file(data).stat().st_mode & 0o777 == expected
            index_file(data).unlink()
    finally:
        os.umask(mask)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_an_index_of_another_user_is_not_used(data, cache):
    load_or_build(Shards([data]), "test-1", Builder())
    os.chown(index_file(data), 65534, 65534)
    build = Builder()
    build.calls = 5
    assert load_or_build(Shards([data]), "test-1", build)["starts"][1] == 6
    os.chown(data.parent, 65534, 65534)  # whose owner could put a link in the place of a new file
    assert load_or_build(Shards([data]), "test-1", build)["starts"][1] == 7
    assert load_or_build(Shards([data]), "test-1", build)["starts"][1] == 7
    assert len(list(cache.rglob("*.plsc-index"))) == 1


def test_each_kind_and_list_of_files_has_its_own_index(data):
    other = data.with_name("other.txt")
    other.write_bytes(b"x")
    build = Builder()
    long = "x" * 300
    for _ in range(2):
        for files in ([data], [data, other], [other, data], [other]):
            load_or_build(Shards(files), "test-1", build)
        for kind in ("test-2", f"test-1 {long}1", f"test-1 {long}2", "test-1 a/b"):
            load_or_build(Shards([data]), kind, build)
    assert build.calls == 8
    moved = data.parent.rename(data.parent.with_name("moved"))
    load_or_build(Shards([moved / data.name]), "test-1", build)
    assert build.calls == 8


def test_every_bit_flip_or_truncation_of_an_index_is_detected(data):
    expected = Builder()()
    load_or_build(Shards([data]), "test-1", Builder())
    path = index_file(data)
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    header = b"\x02" + b"\0" * 7
    others = [b"", rng.bytes(3000), header, header + b"[]", header + b"{}"]
    for _ in range(200):
        bad = bytearray(good)
        bad[rng.integers(len(bad))] ^= 1 << rng.integers(8)
        if rng.random() < 0.3:
            bad = bad[: rng.integers(len(bad))]
        path.write_bytes(others.pop() if others else bad)
        found = load_or_build(Shards([data]), "test-1", Builder())
        for name, array in expected.items():
            assert np.array_equal(found[name], array)
        del found


def test_a_file_that_grows_while_its_index_is_built_is_refused(data):
    def build() -> dict[str, np.ndarray]:
        data.write_bytes(b"longer than before")
        return Builder()()

    with pytest.raises(DataError, match="changed"):
        load_or_build(Shards([data]), "test-1", build)
    assert not list(data.parent.glob(".*.plsc-index"))


@pytest.mark.parametrize("has_versions", [True, False])
def test_remote_files_with_a_version_have_their_index_in_the_cache_folder(cache, monkeypatch, has_versions):
    memory = fsspec.filesystem("memory")
    memory.pipe("/set/part.txt", b"abc")
    if not has_versions:
        info = {"name": "/set/part.txt", "size": 3, "type": "file"}
        monkeypatch.setattr(type(memory), "info", lambda *_, **__: info)
    build = Builder()
    for _ in range(2):
        load_or_build(Shards(["memory://set/part.txt"]), "test-1", build)
    assert build.calls == (1 if has_versions else 2)
    assert len(list(cache.glob("index/*"))) == has_versions


def _without_rights(data: Path, cache: Path, results: multiprocessing.Queue) -> None:
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    build = Builder()
    for _ in range(2):
        load_or_build(Shards([data]), "test-1", build)
    results.put((build.calls, list(data.parent.glob(".*")), len(list(cache.rglob("*.plsc-index")))))


@pytest.mark.parametrize(("writable_cache", "calls"), [(True, 1), (False, 2)])
def test_a_read_only_data_folder_is_supported(data, cache, writable_cache, calls):
    cache.mkdir()
    cache.chmod(0o777 if writable_cache else 0o555)
    data.parent.chmod(0o555)
    for folder in data.parent.parents:
        if Path(tempfile.gettempdir()) in folder.parents:
            folder.chmod(0o755)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=_without_rights, args=(data, cache, results))
    process.start()
    process.join()
    data.parent.chmod(0o755)
    assert process.exitcode == 0
    assert results.get() == (calls, [], 1 if writable_cache else 0)


def _build_and_check(data: Path, barrier: multiprocessing.Barrier) -> None:
    def build() -> dict[str, np.ndarray]:
        barrier.wait()  # all of them build at the same time
        return {"numbers": np.arange(300_000, dtype=np.int64)}

    found = load_or_build(Shards([data]), "test-1", build)
    assert np.array_equal(found["numbers"], np.arange(300_000))


def test_many_processes_may_build_an_index_concurrently(data):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    processes = [context.Process(target=_build_and_check, args=(data, barrier)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(list(data.parent.iterdir())) == 2
