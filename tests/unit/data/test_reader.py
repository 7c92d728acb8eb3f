import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from plsc.data.order import BatchPlan
from plsc.data.reader import ReaderLoader
from plsc.errors import DataError, OptionError

SHAPE = (1, 2, 2)


def shuffled(count: int):
    """A typical reader: it shuffles and draws from global generators."""

    def reader():
        order = list(range(count))
        random.shuffle(order)
        for value in order:
            noise = random.random() + np.random.rand() + float(torch.rand(()))
            yield np.full(SHAPE, value + noise / 8, dtype=np.float32), value

    return reader


def loader(reader, rank=0, ranks=1, batch=4, **options) -> ReaderLoader:
    return ReaderLoader(reader, rank, ranks, SHAPE, global_batch=batch, **{"seed": 3, **options})


def labels(batches) -> list[list[int]]:
    return [batch.labels.tolist() for batch in batches]


@settings(max_examples=50)
@given(st.integers(1, 20), st.integers(1, 8), st.integers(1, 5), st.sampled_from(["pad", "keep"]))
def test_ranks_read_the_same_global_batches_by_stride(count, batch, ranks, last_batch):
    whole = list(loader(shuffled(count), batch=batch, last_batch=last_batch).epoch(0))
    parts = [
        list(loader(shuffled(count), r, ranks, batch, last_batch=last_batch).epoch(0)) for r in range(ranks)
    ]
    assert {len(part) for part in parts} == {len(whole)}
    for step, expected in enumerate(whole):
        for rank, part in enumerate(parts):
            assert torch.equal(part[step].images, expected.images[rank::ranks])
            assert part[step].labels.tolist() == expected.labels[rank::ranks].tolist()


@given(st.integers(1, 20), st.integers(1, 8), st.sampled_from(["pad", "keep", "drop"]))
def test_the_last_batch_equals_that_of_a_batch_plan(count, batch, last_batch):
    if last_batch == "drop" and count < batch:
        return
    plan = BatchPlan(count, batch, 1, 0, last_batch, "sequential")
    in_order = [(np.zeros(SHAPE, np.float32), value) for value in range(count)]
    batches = loader(lambda: iter(in_order), batch=batch, last_batch=last_batch)
    assert batches.steps_per_epoch is None
    counted = loader(lambda: iter(in_order), batch=batch, last_batch=last_batch, num_samples=count)
    assert counted.steps_per_epoch == plan.steps_per_epoch
    assert labels(batches.epoch(0)) == [
        plan.global_indices(0, step).tolist() for step in range(plan.steps_per_epoch)
    ]
    assert batches.steps_per_epoch == plan.steps_per_epoch


def test_epochs_differ_and_do_not_depend_on_the_global_generators():
    batches = loader(shuffled(20), batch=5)
    expected = labels(batches.epoch(1))
    random.seed(99)
    found = []
    for batch in batches.epoch(1):
        random.random(), np.random.rand()
        found.append(batch.labels.tolist())
    assert found == expected
    assert labels(batches.epoch(2)) != expected


def test_a_reader_that_became_shorter_is_reported_on_resuming():
    with pytest.raises(DataError, match="ended after 2 steps, before step 5"):
        list(loader(shuffled(8)).epoch(0, start_step=5))


@pytest.mark.parametrize("example", [None, torch.zeros(1, *SHAPE, dtype=torch.uint8)])
@pytest.mark.filterwarnings("error")
def test_read_only_arrays_as_of_pillow_images_give_no_warning(example, request):
    request.addfinalizer(lambda: torch.set_warn_always(False))
    torch.set_warn_always(True)
    picture = np.asarray(Image.new("RGB", (2, 2), (7, 8, 9)))[:, :, :1].transpose(2, 0, 1)
    assert not picture.flags.writeable
    (batch,) = loader(lambda: iter([(picture, 0)] * 4), example=example).epoch(0)
    inputs = batch.images if example is None else batch.input(torch.device("cpu"), torch.contiguous_format)
    assert (inputs == 7).all()


def test_a_reader_may_reuse_its_buffer():
    def reader():
        buffer = np.zeros(SHAPE, dtype=np.uint8)
        for value in range(4):
            buffer[:] = value
            yield buffer, value

    (batch,) = loader(reader).epoch(0)
    assert batch.images.dtype == torch.uint8
    assert batch.images[:, 0, 0, 0].tolist() == [0, 1, 2, 3]


GOOD = np.zeros(SHAPE, dtype=np.float32)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ((GOOD, 0, 1), "tuple"),
        ((GOOD.tolist(), 0), "list"),
        ((GOOD[:, :1], 0), "(1, 1, 2)"),
        ((GOOD + np.inf, 0), "inf"),
        ((GOOD.astype(np.int64), 0), "int64"),
        ((GOOD, 1.0), "float"),
        ((GOOD, 10), "label 10"),
    ],
)
def test_a_bad_sample_is_reported_with_its_index(item, message):
    def reader():
        yield from [(GOOD, 9)] * 5
        yield item

    for ahead in (False, True):
        with pytest.raises(DataError) as caught:
            list(loader(reader, class_num=10, ahead=ahead).epoch(2))
        assert "sample 5 of epoch 2" in str(caught.value)
        assert message in str(caught.value)


def test_an_invalid_or_empty_reader_is_refused():
    with pytest.raises(TypeError, match="iterable"):
        list(loader(lambda: 5).epoch(0))
    once = shuffled(4)()
    used = loader(lambda: once)
    list(used.epoch(0))
    with pytest.raises(DataError, match="generator"):
        list(used.epoch(1))
    with pytest.raises(OptionError, match="for 4 ranks"):
        loader(own_shard(9), 0, 4, 3)
    mixed = [(GOOD, 0), (GOOD.astype(np.uint8), 0)]
    with pytest.raises(DataError, match="mixes uint8 and float"):
        list(loader(lambda: iter(mixed)).epoch(0))

    def mistaken():
        yield GOOD, 0
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        list(loader(mistaken, ahead=True).epoch(0))


def own_shard(count: int):
    """A reader that shuffles identically on all ranks and takes its own part."""

    def reader(rank, ranks):
        order = list(range(count))
        random.shuffle(order)
        for value in order[rank::ranks]:
            yield np.full(SHAPE, value, dtype=np.float32), value

    reader.shards_itself = True
    return reader


@given(st.integers(1, 30), st.integers(1, 8), st.integers(1, 5))
def test_self_sharding_readers_together_read_each_sample_once(count, share, ranks):
    batch = share * ranks
    if count < ranks:
        return
    parts = [
        labels(loader(own_shard(count), r, ranks, batch, last_batch="keep").epoch(2)) for r in range(ranks)
    ]
    assert sorted(value for part in parts for step in part for value in step) == list(range(count))
    assert all(len(step) == share for part in parts for step in part[:-1])


@pytest.mark.parametrize("start", [0, 2])
def test_prefetching_does_not_change_batches(start):
    inline, ahead = loader(shuffled(23)), loader(shuffled(23), ahead=True)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for epoch in (0, 1):
        expected = list(inline.epoch(epoch, start))
        found = list(ahead.epoch(epoch, start))
        assert len(found) == 6 - start
        for left, right in zip(expected, found, strict=True):
            assert torch.equal(left.images, right.images)
            assert (left.labels.tolist(), left.names) == (right.labels.tolist(), right.names)
    assert ahead.steps_per_epoch == inline.steps_per_epoch == 6
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


def test_an_endless_reader_is_prefetched_by_a_bounded_number_of_batches(tmp_path):
    def reader():
        for value in range(10**9):
            (tmp_path / "count").write_text(str(value))
            yield GOOD, 0

    batches = loader(reader, ahead=True).epoch(0)
    for _ in range(3):
        next(batches)
    batches.close()
    assert int((tmp_path / "count").read_text()) < 4 * (3 + 8)
