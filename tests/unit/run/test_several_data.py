"""The plan and the source of several datasets, and the options that name them."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plsc.config import Options
from plsc.config.text import render_options
from plsc.data.mixture import JoinedSource, MixturePlan, Share, split_batch
from plsc.data.order import BatchPlan
from plsc.entry import Entry
from plsc.errors import DataError, OptionError
from plsc.storage.urls import without_secrets
from tests.command_line import options_from


def plan_of(sizes, per_step, ranks, order="global"):
    shares = tuple(
        Share(
            BatchPlan(size, 1, 1, seed, order=order, block_samples=2, pool_samples=4),
            count,
        )
        for seed, (size, count) in enumerate(zip(sizes, per_step, strict=True))
    )
    return MixturePlan(shares, ranks, -(-sum(sizes) // sum(per_step)))


SETS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=4)


@given(SETS, st.integers(1, 5), st.sampled_from(["global", "block", "sequential"]))
def test_ranks_share_every_step_equally_and_each_data_set_goes_through_epochs_of_its_own(sets, ranks, order):
    sizes, per_step = zip(*sets, strict=True)
    plan, alone = (plan_of(sizes, per_step, n, order) for n in (ranks, 1))
    starts = np.cumsum([0, *sizes])
    seen = [[] for _ in sizes]
    for step in range(2 * plan.steps_per_epoch):
        where = divmod(step, plan.steps_per_epoch)
        parts = [plan.indices(*where, rank) for rank in range(ranks)]
        whole = np.concatenate(parts)
        assert sorted(whole) == sorted(alone.indices(*where, 0))
        counts = np.array([len(part) for part in parts])
        assert counts.max() - counts.min() <= 1
        assert counts.max() <= plan.largest_batch
        for k, count in enumerate(per_step):
            mine = [(starts[k] <= part) & (part < starts[k + 1]) for part in parts]
            held = np.array([m.sum() for m in mine])
            assert held.sum() == count
            assert held.max() - held.min() <= 1
            # The ranks' parts end to end are the dataset's own order.
            seen[k].extend(whole[np.concatenate(mine)] - starts[k])
    for size, samples in zip(sizes, seen, strict=True):
        for start in range(0, len(samples) - size + 1, size):
            assert sorted(samples[start : start + size]) == list(range(size))


def test_the_order_of_a_data_set_does_not_depend_on_the_others():
    three, two = plan_of([5, 7, 4], [2, 3, 1], 1), plan_of([5, 7], [2, 3], 1)
    for step in range(9):
        assert np.array_equal(three.shares[1].indices(step), two.shares[1].indices(step))
    epochs = [tuple(three.shares[1].plan.samples_at(e, np.arange(7))) for e in range(4)]
    assert len(set(epochs)) == 4  # shuffled anew


def test_samples_are_interleaved_so_that_each_part_of_a_batch_has_some_of_all():
    batch = plan_of([40, 20], [8, 4], 1).indices(0, 0, 0)
    for part in np.split(batch, 4):
        assert (part < 40).sum() == 2


def test_a_sample_that_comes_again_in_an_epoch_of_the_run_is_augmented_anew():
    plan = plan_of([50, 2], [4, 2], 1)
    keys = [plan.draw_epoch(epoch, step) for epoch in range(2) for step in range(9)]
    assert keys == list(range(18))


@given(
    st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=6),
    st.integers(0, 50),
)
def test_images_are_split_by_weight_and_everybody_has_one(weights, more):
    total = len(weights) + more
    counts = split_batch(total, weights)
    assert sum(counts) == total
    assert min(counts) >= 1
    for a, wa in zip(counts, weights, strict=True):
        for b, wb in zip(counts, weights, strict=True):
            assert a >= b or wa <= wb or a == b


def test_the_split_rounds_by_largest_remainders_and_refuses_more_sets_than_images():
    assert split_batch(9, [2, 1]) == [6, 3]
    above = 1 + 2**-52  # no float between this and 1
    assert split_batch(21, [above, 0.2687, above, 1.0, 1.0, 1e-300]) == [5, 1, 5, 5, 4, 1]
    assert split_batch(10, [1, 1, 1]) == [4, 3, 3]
    assert split_batch(8, [1e9, 1, 1]) == [6, 1, 1]
    with pytest.raises(OptionError, match=r"a step of 2 images .* 3 datasets"):
        split_batch(2, [1, 1, 1])


class Numbered:
    def __init__(self, *labels):
        self._labels = np.array(labels)

    def __len__(self):
        return len(self._labels)

    def __getitem__(self, index):
        if self._labels[index] == 9:
            raise DataError("is empty").at(self.name(index))
        return f"image {index}".encode(), int(self._labels[index])

    def name(self, index):
        return f"sample {index}"

    def labels(self):
        return self._labels


def test_a_joined_source_numbers_samples_and_classes_on_and_keeps_bad_labels_apart():
    joined = JoinedSource(["a", "b"], [Numbered(0, 2, 3), Numbered(1, 9, -1)], [3, 2])
    assert [len(joined), joined[1], joined[3]] == [6, (b"image 1", 2), (b"image 0", 4)]
    assert joined.labels().tolist() == [0, 2, -1, 4, -1, -1]
    assert joined.name(5) == "b: sample 2"
    for index, said in (
        (2, r"a: sample 2: label 3 is outside 0\.\.2"),
        (5, r"b: sample 2: label -1 is outside 0\.\.1"),
        (4, "b: sample 1: is empty"),
    ):
        with pytest.raises(DataError, match=said):
            joined[index]
    with pytest.raises(IndexError):
        joined[6]


def two_sets():
    ins = Entry()
    ins.add_dataset("faces", "./faces", weight=2)
    ins.add_dataset("glyphs", "s3://me:secret@bucket/x", loss_type="cosface", margin=0.35)
    return ins.options


def test_data_sets_are_options_like_any_other(tmp_path):
    options = two_sets()
    (config := tmp_path / "run.yaml").write_text(render_options(options))
    again = options_from("--config", str(config))
    assert again.data_sets() == options.data_sets()
    plain = json.loads(json.dumps(options.as_dict()))
    flags = "--data.datasets", json.dumps(plain["data"]["datasets"])
    assert options_from(*flags).data_sets() == options.data_sets()
    assert "secret" not in json.dumps(without_secrets(plain))
    assert Options().data_sets() == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"name": "faces", "path": "x"}, "two datasets are named 'faces'"),
        ({"name": "a.b", "path": "x"}, "letters, digits, _ and -"),
        ({"name": None, "path": "x"}, "name is None; expected a string"),
        ({"name": "b", "path": " "}, "dataset b: .*path.* non-empty"),
        ({"name": "b", "path": None}, "dataset b: .*path is None; expected a string"),
        ({"name": "b", "path": "x", "weight": 0}, r"dataset b: .*weight.* greater than 0"),
        ({"name": "b", "path": "x", "weight": float("nan")}, "expected a number"),
        ({"name": "b", "path": "x", "weight": "2"}, "expected a number"),
        ({"name": "b", "path": "x", "loss_type": "cos"}, "dataset b: .* one of dist_softmax"),
        (
            {"name": "b", "path": "x", "sample_ratio": 2.0},
            "sample_ratio is 2.0; expected a number greater than 0 and at most 1",
        ),
        ({"name": "b", "path": "x", "sample_ratio": {"one": 0.1}}, r"such numbers by their first step"),
    ],
)
def test_a_wrong_data_set_is_refused_in_one_line_and_changes_nothing(values, said):
    ins = Entry()
    ins.add_dataset("faces", "./faces")
    with pytest.raises(OptionError, match=said) as caught:
        ins.add_dataset(**values)
    assert "\n" not in str(caught.value)
    assert [one.name for one in ins.options.data_sets()] == ["faces"]


def test_a_misspelt_key_in_a_config_is_named():
    with pytest.raises(OptionError, match=r"no option 'wieght'.*did you mean 'weight'"):
        Options().set("data.datasets", [{"name": "a", "path": "x", "wieght": 2}])
    with pytest.raises(OptionError, match="list of mappings"):
        Options().set("data.datasets", ["a"])
