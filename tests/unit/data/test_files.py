import os
import pickle
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


def test_an_existing_index_is_reused_and_lies_in_the_cache_folder(data, cache):
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
    (index,) = cache.glob("index/*.part.txt.test-1")
    assert index.stat().st_mode & 0o777 == 0o600
    assert list(data.parent.iterdir()) == [data]  # whose owner could write one with other paths


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
    os.utime(data, ns=(-1, -1))
    shards = Shards([str(data)])
    data.chmod(0o600)  # as a backup by hard links changes the time of change
    assert shards[0].read_at(0, 1) == b"d"
    data.write_bytes(b"g\nhh\niii\n")  # the same inode
    with pytest.raises(DataError, match="changed"):
        shards[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_an_index_of_another_user_is_not_used(data, cache):
    load_or_build(Shards([data]), "test-1", Builder())
    os.chown(next(cache.glob("index/*")), 65534, 65534)
    build = Builder()
    build.calls = 5
    assert load_or_build(Shards([data]), "test-1", build)["starts"][1] == 6


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


def test_every_bit_flip_or_truncation_of_an_index_is_detected(data, cache):
    expected = Builder()()
    load_or_build(Shards([data]), "test-1", Builder())
    (path,) = cache.glob("index/*")
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


def test_a_file_that_grows_while_its_index_is_built_is_refused(data, cache):
    def build() -> dict[str, np.ndarray]:
        data.write_bytes(b"longer than before")
        return Builder()()

    with pytest.raises(DataError, match="changed"):
        load_or_build(Shards([data]), "test-1", build)
    assert not list(cache.glob("index/*"))


@pytest.mark.parametrize("has_versions", [True, False])
def test_remote_files_with_a_version_have_an_index(cache, monkeypatch, has_versions):
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


def test_without_a_cache_folder_the_index_stays_in_memory(data, cache):
    cache.touch()
    build = Builder()
    for _ in range(2):
        load_or_build(Shards([data]), "test-1", build)
    assert build.calls == 2
