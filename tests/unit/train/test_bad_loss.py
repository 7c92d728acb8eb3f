"""A loss that is not finite: the message names the layer and the images, and the batch is saved."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from plsc import Callback
from plsc.errors import TrainingError
from plsc.parallel.world import World
from plsc.train import step as step_module
from plsc.train.callbacks import UserParts
from plsc.train.step import LossReader
from tests.images import write_dataset
from tests.resuming import losses_of, options_of, train
from tests.spoiled import Spoiled, SpoilImage

WORLD = World.single()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "set", classes=6, per_class=4)


def failure(dataset, folder, callback, **settings):
    """Return the message of a run that fails."""
    options = options_of(dataset, folder, train__batch_size=6, **settings)
    with pytest.raises(TrainingError) as caught:
        train(options, WORLD, Spoiled, UserParts(callbacks=(callback,)))
    return str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"train__micro_batches": 2, "memory__recompute": "block"},
        {"optim__optimizer_arguments": {"foreach": False}},  # the loss is read before an update
    ],
    ids=str,
)
def test_the_layer_and_the_image_are_named_and_the_batch_is_saved(dataset, tmp_path, settings):
    spoil = SpoilImage()
    text = failure(dataset, tmp_path / "run", spoil, **settings)
    bad = spoil.names[4]
    assert "the loss is nan at step 4 (epoch 1, learning rate 0.02)" in text
    assert f"the first layer with a nan or inf: block.1; samples: {bad}; the batch is saved to" in text
    report = json.loads((tmp_path / "run/bad_batch.json").read_text())
    assert report["step"] == 4
    assert list(losses_of(tmp_path / "run")) == [1, 2, 3]  # so log lines count, too
    assert report["layer"] == "block.1"
    assert report["bad_samples"] == [bad]
    assert report["samples"] == spoil.names
    saved = load_file(tmp_path / "run/bad_batch.safetensors")
    assert saved["images"].equal(spoil.images)
    assert saved["labels"].equal(spoil.labels)


def test_a_late_loss_names_the_same_layer_because_a_fused_optimizer_skips_the_update(
    dataset, tmp_path, monkeypatch
):
    monkeypatch.setattr(step_module, "LossReader", lambda stop, is_late: LossReader(stop, True))
    fused, loop = (
        failure(dataset, tmp_path / str(arguments), SpoilImage(), train__log_period=100,
                optim__optimizer_arguments=arguments)
        for arguments in (None, {"foreach": False})
    )  # fmt: skip
    assert "at step 4 " in fused
    assert "a nan or inf: block.1; samples: " in fused
    assert "at step 4 " in loop
    assert ", after an update with this loss;" in loop


class SpoilClassWeights(Callback):
    def batch_start(self, context):
        if context.step == 2:
            context.head.weight.data[0] = torch.nan


def test_the_head_is_named_if_all_layers_are_finite(dataset, tmp_path):
    text = failure(dataset, tmp_path / "run", SpoilClassWeights())
    assert "at step 3 " in text
    assert "no layer of the network has a nan or inf, so the head produced it; samples of the batch:" in text
    assert "and 2 more" in text
