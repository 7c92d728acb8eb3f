"""Class ranges, and ranks that restart with a used store."""

import threading

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from plsc.parallel.world import class_ranges, unused_store


@given(st.integers(1, 500), st.integers(1, 40))
def test_ranges_are_those_of_torch_chunk_which_dtensor_shards_by(classes, ranks):
    chunks = torch.arange(classes).chunk(ranks)
    ranges = class_ranges(classes, ranks)
    assert len(ranges) == ranks
    filled = [pair for pair in ranges if pair[0] < pair[1]]
    assert filled == [(int(chunk[0]), int(chunk[-1]) + 1) for chunk in chunks]


def join(store, ranks, timeout=20.0):
    """Run `unused_store` on several ranks (threads); return what each reads after rank 0 wrote to it."""
    found = {}

    def rank(number):
        mine = unused_store(store, number, ranks, timeout)
        if number == 0:
            assert not mine.check(["key"]), "a key of an earlier attempt"
            mine.set("key", f"{ranks}")
        mine.wait(["key"])
        found[number] = mine.get("key")

    threads = [threading.Thread(target=rank, args=(number,)) for number in reversed(range(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_every_restart_gets_an_unused_part_of_the_store():
    store = dist.HashStore()
    for ranks in (3, 3, 2, 4, 1):
        assert join(store, ranks) == dict.fromkeys(range(ranks), b"%d" % ranks)


def test_keys_of_a_dead_rank_do_not_affect_its_replacement():
    store = dist.HashStore()
    store.set("plsc/hello/1", "0123")  # died before rank 0 arrived
    with pytest.raises(TimeoutError):
        unused_store(store, 0, 2, 0.2)  # answers the dead rank
    assert store.check(["plsc/answer/0123"])
    with pytest.raises(TimeoutError):
        unused_store(store, 1, 2, 0.2)
    assert join(store, 2) == {0: b"2", 1: b"2"}
