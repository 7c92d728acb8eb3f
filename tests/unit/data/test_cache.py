from __future__ import annotations

import os
import resource
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plsc.data.loader import CachedSource, DiskCache, MemoryCache, SourceLoader
from plsc.data.order import BatchPlan
from plsc.data.samples import Recipe
from plsc.data.sources import TorchDatasetSource, open_source
from plsc.errors import DataError

SHAPE = (3, 24, 20)
BIG = 2**24


class Counting:
    """A source that counts how often each sample is read."""

    def __init__(self, source) -> None:
        self.source = source
        self.reads = np.zeros(len(source), dtype=int)

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        self.reads[index] += 1
        return self.source[index]

    def name(self, index):
        return self.source.name(index)

    def labels(self):
        return self.source.labels()


def caches(folder: Path, limit: int, count: int):
    return {"memory": MemoryCache(limit), "disk": DiskCache(folder, limit, count)}


def batches_of(source, epoch=0, threads=2):
    loader = SourceLoader(source, BatchPlan(len(source), 4, 1, 0), 0, Recipe(SHAPE, 0), num_workers=threads)
    return list(loader.epoch(epoch))


@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_each_sample_is_read_once_and_the_batches_are_the_same(label_folder, tmp_path, kind, decoded):
    plain = open_source(label_folder(12))
    counting = Counting(plain)
    cached = CachedSource(counting, caches(tmp_path, BIG, 12)[kind], SHAPE, decoded)
    for epoch in range(3):
        for ours, expected in zip(batches_of(cached, epoch), batches_of(plain, epoch), strict=True):
            assert torch.equal(ours.final_images(), expected.final_images())
            assert torch.equal(ours.labels, expected.labels)
            assert ours.names == expected.names
    assert counting.reads.tolist() == [1] * 12


@given(st.lists(st.binary(max_size=300), max_size=30), st.integers(0, 4000))
def test_the_cache_limit_holds_and_cached_content_is_correct(tmp_path_factory, entries, limit):
    folder = tmp_path_factory.mktemp("cache")
    for kind, cache in caches(folder, limit, len(entries) + 1).items():
        for index, data in enumerate(entries):
            cache.put(index, data)
            cache.put(index, data)  # a second put is ignored
        kept = [cache.get(index) for index in range(len(entries))]
        assert all(found in (None, data) for found, data in zip(kept, entries, strict=True))
        assert sum(len(data) for data in kept if data is not None) <= cache.used <= limit
        assert cache.get(len(entries)) is None
        if kind == "disk":
            assert os.fstat(cache._file.fileno()).st_size <= limit


def test_samples_that_do_not_fit_are_read_again_each_time(label_folder, tmp_path):
    source = open_source(label_folder(12))
    room = len(source[0][0]) * 5
    for cache in caches(tmp_path, room, 12).values():
        counting = Counting(source)
        cached = CachedSource(counting, cache, SHAPE, decoded=False)
        for epoch in range(3):
            batches_of(cached, epoch)
        assert counting.reads.min() == 1
        assert counting.reads.max() == 3
        assert cache.used <= room


def test_a_truncated_cache_file_is_detected(tmp_path):
    cache = DiskCache(tmp_path, BIG, 2)
    cache.put(0, b"x" * 1000)
    os.ftruncate(cache._file.fileno(), 500)
    assert cache.get(0) is None


def test_a_full_disk_only_stops_caching(tmp_path):
    cache = DiskCache(tmp_path, BIG, 9)
    cache.put(0, b"a" * 100)
    assert not list(tmp_path.iterdir())  # it has no name
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        cache.put(1, b"b" * 5000)
        cache.put(2, b"c" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [cache.get(index) for index in range(3)] == [b"a" * 100, None, None]


def test_concurrent_threads_keep_the_cache_limit(tmp_path):
    for cache in caches(tmp_path, 50_000, 400).values():

        def fill(first: int, cache=cache) -> None:
            for index in range(first, 400, 3):
                cache.put(index, bytes([index % 256]) * 500)

        threads = [threading.Thread(target=fill, args=(first,)) for first in (0, 0, 1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = [(i, data) for i in range(400) if (data := cache.get(i)) is not None]
        assert all(data == bytes([i % 256]) * 500 for i, data in found)
        assert 70 <= len(found) <= 100
        assert cache.used <= 50_000


def test_a_bad_image_is_reported_by_name_and_not_cached(label_folder, tmp_path):
    folder = label_folder(3)
    (folder / "images/1.jpg").write_bytes(b"\xff\xd8 no jpeg")
    cache = MemoryCache(BIG)
    cached = CachedSource(open_source(folder), cache, SHAPE, decoded=True)
    for _ in range(2):
        with pytest.raises(DataError, match=r"^images/1\.jpg \(label\.txt:2\): ") as caught:
            cached[1]
        assert caught.value.kind == "undecodable"
    assert cache.used == 0


def test_float_images_are_not_cached(tmp_path):
    items = [(torch.full(SHAPE, 0.5), 3)]
    cached = CachedSource(TorchDatasetSource(items), MemoryCache(BIG), SHAPE, decoded=True)
    assert torch.equal(cached[0][0], items[0][0])
    assert cached[0][1] == 3
    with pytest.raises(IndexError):
        cached[1]
