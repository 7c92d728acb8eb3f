"""The same script on a GPU: it trains, saves, resumes and agrees with the CPU."""

from __future__ import annotations

import json

import pytest
import torch

from plsc import Entry
from tests.images import write_dataset, write_pair_file

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]


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
    more = train(
        dataset, tmp_path / "gpu", "cuda", set_train_epochs=3, set_checkpoint_dir=result.checkpoint
    )
    assert more.epochs == 3


def test_copies_beside_the_step_and_the_layout_change_nothing_but_rounding(tmp_path):
    dataset = write_dataset(tmp_path / "set", classes=10, per_class=8)
    plain = {"set_channels_last": "off", "set_overlap_copies": False}
    train(dataset, tmp_path / "plain", "cuda", **plain)
    train(dataset, tmp_path / "copies", "cuda", set_channels_last="off")
    train(dataset, tmp_path / "last", "cuda", set_channels_last="on")
    assert losses(tmp_path / "copies") == losses(tmp_path / "plain")
    assert losses(tmp_path / "last")[:3] == pytest.approx(losses(tmp_path / "plain")[:3], rel=1e-3)


def test_a_compiled_backbone_trains_as_the_plain_one(tmp_path):
    dataset = write_dataset(tmp_path / "set", classes=10, per_class=8)
    train(dataset, tmp_path / "plain", "cuda")
    train(dataset, tmp_path / "compiled", "cuda", set_compile=True, set_train_steps=3)
    assert losses(tmp_path / "compiled")[:3] == pytest.approx(
        losses(tmp_path / "plain")[:3], rel=1e-3
    )
