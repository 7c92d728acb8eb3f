from hypothesis import given
from hypothesis import strategies as st

from plsc.parallel.shard import class_ranges


@given(st.integers(0, 500), st.integers(1, 40))
def test_ranges_cover_every_class_once_in_order(classes, ranks):
    ranges = class_ranges(classes, ranks)
    assert len(ranges) == ranks
    assert [c for start, stop in ranges for c in range(start, stop)] == list(range(classes))


@given(st.integers(1, 500), st.integers(1, 40))
def test_ranges_are_those_of_torch_chunk_which_dtensor_shards_by(classes, ranks):
    import torch

    chunks = torch.arange(classes).chunk(ranks)
    filled = [pair for pair in class_ranges(classes, ranks) if pair[0] < pair[1]]
    assert filled == [(int(chunk[0]), int(chunk[-1]) + 1) for chunk in chunks]
