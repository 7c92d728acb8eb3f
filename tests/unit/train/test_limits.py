"""Limits of a run: batches per epoch and evaluation, time, one step without files."""

import tempfile

import numpy as np
import pytest
import torch

from plsc.data.order import BatchPlan, spread
from plsc.data.reader import ReaderLoader
from plsc.errors import OptionError
from plsc.parallel.world import World
from plsc.train.callbacks import UserParts
from tests.command_line import options_from
from tests.overflowing import logged
from tests.resuming import different, options_of, saved_at, tensors_of, train
from tests.system.small_entry import entry

WORLD = World.single()


@pytest.mark.parametrize(("limit", "steps"), [(2, 2), (9, 6), (0.5, 3), (0.01, 1), (1.0, 6)])
def test_a_limit_is_a_number_or_a_share_of_the_batches_of_an_epoch(limit, steps):
    assert BatchPlan(24, 4, 1, 0, limit=limit).steps_per_epoch == steps
    images = [(torch.zeros(3, 2, 2), 0)] * 24
    loader = ReaderLoader(
        lambda: iter(images), 0, 1, (3, 2, 2), global_batch=4, seed=0, num_samples=24, limit=limit
    )
    assert len(list(loader.epoch(0))) == loader.steps_per_epoch == steps


def test_a_limit_of_a_reader_of_unknown_length_is_a_number():
    def reader():
        while True:
            yield torch.zeros(3, 2, 2), 0

    def loader(limit):
        return ReaderLoader(reader, 0, 1, (3, 2, 2), global_batch=4, seed=0, limit=limit)

    assert len(list(loader(5).epoch(0))) == loader(5).steps_per_epoch == 5
    with pytest.raises(OptionError, match=r"limit_train_batches is 0\.5, but the length"):
        loader(0.5)


def weights_of(checkpoint):
    return {key: value for (_, key), value in tensors_of(checkpoint).items() if key.endswith("weight")}


FALLING = {
    "train__batch_size": 4, "train__epochs": 4, "checkpoint__keep_last": -1, "checkpoint__every_n_steps": 1,
    "data__val_targets": "",
}  # fmt: skip


@pytest.fixture(scope="module")
def unlimited(dataset, tmp_path_factory):
    """Four epochs of six steps, every step saved."""
    folder = tmp_path_factory.mktemp("unlimited")
    schedule = {"optim__schedule": "cosine", "optim__warmup_steps": "1ep"}
    train(options_of(dataset, folder / "whole", **FALLING, **schedule), WORLD)
    small = {**FALLING, **schedule, "train__limit_train_batches": 2}
    train(options_of(dataset, folder / "limited", **small), WORLD)
    return folder


@pytest.mark.parametrize(
    ("of", "step", "limit", "total"),
    [
        ("whole", 13, 2, 16),  # a step of the third epoch is made, and one more
        ("whole", 16, 2, 18),  # the limit of the third epoch is used up
        ("limited", 5, 1.0, 16),
        ("limited", 5, None, 8),
        ("whole", 3, 2, 9),  # within the warm-up
    ],
)
def test_a_run_resumed_with_another_limit_ends_after_the_limited_steps_left(
    unlimited, dataset, tmp_path, capsys, of, step, limit, total
):
    def start(name, load, **more):
        options = options_of(dataset, tmp_path / name, checkpoint__load_dir=str(load), **FALLING, **more)
        return train(options, WORLD)

    changed = {} if limit is None else {"train__limit_train_batches": limit}
    before = saved_at(unlimited / of, step)
    result = start("changed", before, **changed)
    assert (result.steps, result.epochs) == (total, 4)
    assert f" step {total}/{total} " in capsys.readouterr().out
    found = logged(tmp_path / "changed", "step", "lr")
    assert found["step"] == list(range(step + 1, total + 1))
    assert 0 < found["lr"][-1] == min(found["lr"])
    moved, began = (weights_of(saved_at(tmp_path / "changed", total)), weights_of(before))
    assert not any(value.equal(began[key]) for key, value in moved.items())
    # From then on, an unset limit continues to the same bits.
    assert start("unset", saved_at(tmp_path / "changed", step + 1)).steps == total
    assert not different(tmp_path / "changed/3", tmp_path / "unset/3")


def test_a_limited_generator_resumes_where_its_limit_is_used_up(dataset, tmp_path):
    def reader():
        for number in range(40):
            yield np.full((3, 16, 16), number / 40, np.float32), number % 4

    def start(name, **more):
        options = options_of(dataset, tmp_path / name, **FALLING, head__class_num=4, **more)
        return train(options, WORLD, user=UserParts(train_reader=reader))

    start("whole", train__limit_train_batches=6)
    middle = str(saved_at(tmp_path / "whole", 16))
    result = start("resumed", train__limit_train_batches=2, checkpoint__load_dir=middle)
    assert (result.steps, result.epochs) == (18, 4)


def test_a_run_whose_remaining_steps_have_rate_zero_says_so(dataset, tmp_path, capsys):
    folder = tmp_path / "run"
    schedule = {"train__batch_size": 4, "optim__schedule": {"name": "cosine", "steps": 6}}
    train(options_of(dataset, folder, **schedule, train__epochs=1), WORLD)
    again = {**schedule, "train__epochs": 3, "checkpoint__load_dir": "last"}
    assert "--model.pretrained" not in capsys.readouterr().out
    train(options_of(dataset, folder, **again), WORLD)
    assert "--model.pretrained" in capsys.readouterr().out


def test_a_limited_evaluation_keeps_ten_folds_and_both_kinds_of_pairs(dataset, tmp_path):
    ins = entry(dataset, tmp_path / "run", set_with_test=True, set_test_batch_size=30)
    ins.set_limit_val_batches(1)
    result = ins.train()
    found = result.evaluation["lfw"]
    assert (found.pairs, found.positives) == (15, 8)
    ins = entry(dataset, tmp_path / "run", set_checkpoint_dir=result.checkpoint, set_test_batch_size=2)
    for limit, pairs in ((1.0, 40), (0.5, 20), (1, 10)):
        ins.set_limit_test_batches(limit)
        assert ins.test()["lfw"].pairs == pairs


def test_an_evaluation_takes_samples_of_all_classes_of_a_sorted_set():
    labels = np.repeat(np.arange(5), 20)
    chosen = spread(labels, batch=10, limit=1)
    assert np.bincount(labels[chosen]).tolist() == [2] * 5
    assert (np.diff(chosen) > 0).all()
    assert spread(labels, batch=10, limit=1.0).tolist() == list(range(100))
    assert len(spread(labels, batch=30, limit=0.5)) == 60


def files(folder):
    return sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))


def test_a_fast_run_makes_one_step_and_leaves_no_file(dataset, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    fast = {"set_fast_dev_run": True, "set_with_test": True, "set_test_batch_size": 20, "set_train_epochs": 5}
    result = entry(dataset, tmp_path / "run", **fast).train()
    assert (result.steps, result.checkpoint, result.evaluation["lfw"].pairs) == (1, None, 10)
    assert not (tmp_path / "run").exists()

    entry(dataset, tmp_path / "run").train()
    before = files(tmp_path / "run")
    resumed = entry(dataset, tmp_path / "run", set_checkpoint_dir="last", **fast).train()
    assert resumed.steps == 3
    assert files(tmp_path / "run") == before
    assert not list((tmp_path / "temporary").glob("plsc-*"))


def test_a_fast_run_of_several_steps_makes_these_and_as_many_batches_per_evaluation(dataset, tmp_path):
    several = {"set_fast_dev_run": 3, "set_with_test": True, "set_test_batch_size": 10}
    result = entry(dataset, tmp_path / "run", **several).train()
    assert (result.steps, result.epochs, result.evaluation["lfw"].pairs) == (3, 1, 15)
    assert options_from("--train.fast_dev_run", "3").train.fast_dev_run == 3
    assert options_from("--train.fast_dev_run", "true").train.fast_dev_run is True
