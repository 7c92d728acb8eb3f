"""Runs on a GPU: they train, save, resume and agree with the CPU, with any option, and do not wait for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from plsc import Entry
from plsc.errors import TrainingError
from plsc.parallel.world import World
from plsc.train.callbacks import UserParts
from plsc.train.loop import exchange_status
from plsc.train.run import build_run
from plsc.train.step import Step
from tests.devices import NEEDS_GPU, VISIBLE
from tests.distributed import job
from tests.distributed.launch import run_torchrun
from tests.images import write_dataset, write_pair_file
from tests.option_pairs import CHANGES, CHANGES_OF_GPUS, check_pair
from tests.overflowing import logged
from tests.resuming import different, options_of, saved_at
from tests.resuming import train as train_network
from tests.spoiled import Spoiled, SpoilImage

pytestmark = NEEDS_GPU


def train(dataset, save_dir, device, **settings):
    ins = Entry()
    ins.set_device(device)
    ins.set_dataset_dir(dataset)
    ins.set_model_save_dir(save_dir)
    ins.set_model_name("SmallResNet")
    ins.set_image_shape((3, 16, 16))
    ins.set_emb_size(16)
    ins.set_dropout(0.0)
    ins.set_train_batch_size(16)
    ins.set_train_epochs(2)
    ins.set_log_period(1)
    ins.set_num_workers(1)
    for name, value in settings.items():
        getattr(ins, name)(value)
    return ins.train()


def test_a_gpu_trains_evaluates_saves_and_resumes_like_a_cpu(tmp_path):
    dataset = write_dataset(tmp_path / "set", classes=10, per_class=8)
    write_pair_file(dataset / "lfw.bin", dataset)
    train(dataset, tmp_path / "cpu", "cpu")
    result = train(dataset, tmp_path / "gpu", "cuda")
    ours, theirs = (logged(tmp_path / name, "loss")["loss"] for name in ("gpu", "cpu"))
    assert ours[0] == pytest.approx(theirs[0], rel=1e-3)
    assert result.evaluation["lfw"].pairs == 40
    more = train(dataset, tmp_path / "gpu", "cuda", set_train_epochs=3, set_checkpoint_dir=result.checkpoint)
    assert more.epochs == 3


@pytest.mark.parametrize("name", [*CHANGES, *CHANGES_OF_GPUS])
def test_an_option_makes_the_steps_of_the_plain_path(name):
    check_pair(name, name, World.single("cuda"))


@pytest.mark.parametrize("arguments", [None, {"foreach": True}])
def test_a_loss_is_read_late_and_only_a_fused_optimizer_skips_its_update(tmp_path, arguments):
    dataset = write_dataset(tmp_path / "set", classes=6, per_class=4)
    options = options_of(
        dataset, tmp_path / "run", train__batch_size=6, train__log_period=100,
        train__callbacks="check_content",
        optim__optimizer_arguments=arguments,
    )  # fmt: skip
    spoil = SpoilImage()
    with pytest.raises(TrainingError) as caught:
        train_network(options, World.single("cuda"), Spoiled, UserParts(callbacks=(spoil,)))
    text = str(caught.value)
    assert "the loss is nan at step 4 " in text
    if arguments is None:
        assert f"a nan or inf: block.1; samples: {spoil.names[4]}; the batch" in text
    else:
        assert ", after an update with this loss;" in text
    assert load_file(tmp_path / "run/bad_batch.safetensors")["images"].equal(spoil.images)


def test_a_deterministic_run_resumes_to_the_same_bits(tmp_path):
    # In processes of their own: cuBLAS is asked once in each whether it is deterministic.
    dataset = write_dataset(tmp_path / "set", classes=10, per_class=8)

    def run(name, *settings):
        run_torchrun(
            Path(job.__file__), 0, str(dataset), str(tmp_path / name), "set_device='cuda'",
            "set_deterministic=True", "set_save_every_n_steps=4", *settings,
            env=VISIBLE,
        )  # fmt: skip

    run("whole", "set_max_last_checkpoint_num=-1")
    run("resumed", f"set_checkpoint_dir={str(saved_at(tmp_path / 'whole', 4))!r}")
    assert not different(saved_at(tmp_path / "whole", 20), saved_at(tmp_path / "resumed", 20))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """160 images: 10 steps of 16."""
    return write_dataset(tmp_path_factory.mktemp("data") / "set", classes=16, per_class=10)


def options(dataset, save_dir, **changes):
    return options_of(
        dataset, save_dir, train__batch_size=16, train__epochs=2, model__name="SmallResNet",
        model__emb_size=32, optim__lr=0.1 * 16 / 1024, **changes,
    )  # fmt: skip


def train_named(made):
    return train_network(made, World.single("cuda"), lambda: None)  # the network that the options name


def test_a_scale_that_overflows_float16_falls_and_training_goes_on_and_resumes(dataset, tmp_path):
    settings = {
        "precision__mode": "float16", "checkpoint__every_n_steps": 3,
        "precision__scaling_arguments": {"init_loss_scaling": 2.0**24, "decr_every_n_nan_or_inf": 1},
        "checkpoint__keep_last": -1,
        "train__deterministic": False,
    }  # fmt: skip
    train_named(options(dataset, tmp_path / "whole", **settings))
    found = logged(tmp_path / "whole", "loss_scale", "skipped_steps", "lr")
    skipped = found["skipped_steps"][-1]
    assert 1 <= skipped < 20
    assert found["loss_scale"][-1] == 2.0 ** (24 - skipped)
    again = saved_at(tmp_path / "whole", 3)
    train_named(options(dataset, tmp_path / "again", **settings, checkpoint__load_dir=str(again)))
    rest = logged(tmp_path / "again", "loss_scale", "skipped_steps", "lr")
    assert rest == {name: values[3:] for name, values in found.items()}
    if not different(tmp_path / "again/1", tmp_path / "whole/1"):
        print("to the bit")  # cuDNN's choice of algorithms may differ between runs


@pytest.mark.parametrize("mode", ["float32", "bfloat16"])
def test_a_step_that_is_not_logged_does_not_wait_for_the_device(mode, dataset, tmp_path):
    made = options(dataset, tmp_path / "run", precision__mode=mode, optim__clip_norm=1.0)
    run = build_run(made, World.single("cuda"), UserParts())
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
