"""Runs on a GPU: they train, save, resume and agree with the CPU, with any option."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from plsc import Entry
from plsc.errors import TrainingError
from plsc.parallel.world import World
from plsc.train.callbacks import UserParts
from tests.devices import NEEDS_GPU, VISIBLE
from tests.distributed import job
from tests.distributed.launch import run_torchrun
from tests.images import write_dataset, write_pair_file
from tests.option_pairs import CHANGES, CHANGES_OF_GPUS, check_pair
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


def losses(save_dir):
    entries = map(json.loads, (save_dir / "metrics.jsonl").read_text().splitlines())
    return [entry["loss"] for entry in entries if "loss" in entry]


def test_a_gpu_trains_evaluates_saves_and_resumes_like_a_cpu(tmp_path):
    dataset = write_dataset(tmp_path / "set", classes=10, per_class=8)
    write_pair_file(dataset / "lfw.bin", dataset)
    train(dataset, tmp_path / "cpu", "cpu")
    result = train(dataset, tmp_path / "gpu", "cuda")
    assert losses(tmp_path / "gpu")[0] == pytest.approx(losses(tmp_path / "cpu")[0], rel=1e-3)
    assert result.evaluation["lfw"].pairs == 40
    more = train(dataset, tmp_path / "gpu", "cuda", set_train_epochs=3, set_checkpoint_dir=result.checkpoint)
    assert more.epochs == 3


@pytest.mark.parametrize("name", [*CHANGES, *CHANGES_OF_GPUS])
def test_an_option_makes_the_steps_of_the_plain_path(name):
    check_pair(name, name, World.single("cuda"))


def test_a_loss_that_is_read_late_stops_the_run_when_it_is_bad(tmp_path):
    dataset = write_dataset(tmp_path / "set", classes=10, per_class=8)
    with pytest.raises(TrainingError, match=r"the loss is (nan|inf) at step"):
        train(dataset, tmp_path / "run", "cuda", set_lr=1e30, set_log_period=1000)


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
