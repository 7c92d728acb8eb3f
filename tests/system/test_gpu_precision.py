"""Mixed precision on a GPU: real overflows, and steps in which nobody waits for the device."""

from __future__ import annotations

import pytest
import torch

from plsc.parallel.world import World
from plsc.train.callbacks import UserParts
from plsc.train.loop import exchange_status
from plsc.train.run import build_run
from plsc.train.step import Step
from tests.devices import NEEDS_GPU
from tests.images import write_dataset
from tests.overflowing import logged
from tests.resuming import different, options_of, saved_at, train

pytestmark = NEEDS_GPU


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """160 images: 10 steps of 16."""
    return write_dataset(tmp_path_factory.mktemp("data") / "set", classes=16, per_class=10)


@pytest.fixture
def world():
    return World.single("cuda")


def options(dataset, save_dir, **changes):
    return options_of(
        dataset, save_dir, train__batch_size=16, train__epochs=2, model__name="SmallResNet",
        model__emb_size=32, optim__lr=0.1 * 16 / 1024, **changes,
    )  # fmt: skip


def train_named(made, world):
    return train(made, world, lambda: None)  # the network that the options name


@pytest.mark.parametrize("mode", ["float16", "bfloat16"])
def test_sixteen_bits_learn_what_float32_learns_at_first(mode, dataset, tmp_path, world):
    scaling = {"init_loss_scaling": 256.0}
    train_named(options(dataset, tmp_path / "float32"), world)
    train_named(
        options(dataset, tmp_path / mode, precision__mode=mode, precision__scaling_arguments=scaling),
        world,
    )
    right, found = (logged(tmp_path / name, "loss")["loss"] for name in ("float32", mode))
    assert found[0] == pytest.approx(right[0], rel=0.005)
    assert found[-1] < 0.8 * found[0]


def test_a_scale_that_overflows_float16_falls_and_training_goes_on_and_resumes(dataset, tmp_path, world):
    settings = {
        "precision__mode": "float16", "checkpoint__every_n_steps": 3,
        "precision__scaling_arguments": {"init_loss_scaling": 2.0**24, "decr_every_n_nan_or_inf": 1},
        "checkpoint__keep_last": -1,
        "train__deterministic": False,
    }  # fmt: skip
    train_named(options(dataset, tmp_path / "whole", **settings), world)
    found = logged(tmp_path / "whole", "loss_scale", "skipped_steps", "lr")
    skipped = found["skipped_steps"][-1]
    assert 1 <= skipped < 20
    assert found["loss_scale"][-1] == 2.0 ** (24 - skipped)
    again = saved_at(tmp_path / "whole", 3)
    train_named(options(dataset, tmp_path / "again", **settings, checkpoint__load_dir=str(again)), world)
    rest = logged(tmp_path / "again", "loss_scale", "skipped_steps", "lr")
    assert rest == {name: values[3:] for name, values in found.items()}
    if not different(tmp_path / "again/1", tmp_path / "whole/1"):
        print("to the bit")  # cuDNN's choice of algorithms may differ between runs


@pytest.mark.parametrize("mode", ["float32", "bfloat16"])
def test_a_step_that_is_not_logged_does_not_wait_for_the_device(mode, dataset, tmp_path, world):
    made = options(dataset, tmp_path / "run", precision__mode=mode, optim__clip_norm=1.0)
    run = build_run(made, world, UserParts())
    run.network.train()
    step = Step(run)
    for number, batch in enumerate(run.data.loader.epoch(0, 0)):
        sizes = exchange_status(run.world, batch, run.head.class_num).sizes
        torch.cuda.set_sync_debug_mode("error" if number >= 3 else "default")  # kernels are made first
        try:
            result = step.make(batch, sizes, False)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        run.position.advance(result.is_skipped)
        step.losses.read(everything=False)
        if number == 6:
            break
    assert len(step.losses.read(everything=True)) == 1
