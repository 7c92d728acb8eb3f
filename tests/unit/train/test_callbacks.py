"""Callbacks: events, what they see and change; tables of layers, bad losses, averages of the weights."""

import itertools
import json
import pickle
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from plsc import Callback, load_network
from plsc.checkpoint import load_weights
from plsc.checkpoint.remote import verify
from plsc.errors import CheckpointError, DataError, OptionError, TrainingError
from plsc.models import BaseModel
from plsc.train import step as step_module
from plsc.train.callbacks import EVENTS
from plsc.train.step import LossReader
from tests.resuming import different, losses_of
from tests.spoiled import Spoiled, SpoilImage
from tests.system.small_entry import entry


class Recorder(Callback):
    def __init__(self):
        self.events = []


for event in EVENTS:
    setattr(Recorder, event, lambda self, context, event=event: self.events.append((event, context.step)))


def test_events_come_in_order_and_change_no_bit_of_the_training(dataset, tmp_path):
    plain = entry(dataset, tmp_path / "plain").train()
    recorder = Recorder()
    ins = entry(dataset, tmp_path / "run", set_with_test=True)
    ins.add_callback(recorder)
    ins.add_callback(lambda context: context.layer_output("stem"), "after_step", layers=["stem"])
    assert ins.train().metrics["loss"] == plain.metrics["loss"]
    step = ["step_start", "batch_start", "after_forward", "after_backward", "after_step", "logged"]
    names = [event for event, _ in recorder.events]
    assert names == [
        "run_start", "epoch_start", *step, *step, "step_start",
        "evaluation_start", "evaluated", "epoch_end", "saved", "run_end",
    ]  # fmt: skip
    steps = [made for event, made in recorder.events if event in ("after_forward", "after_step")]
    assert steps == [0, 1, 1, 2]


def test_functions_see_layers_weights_and_gradients_in_every_nth_step(dataset, tmp_path):
    seen = []

    def look(context):
        output = context.layer_output("stages.3")
        weight, gradient = context.weight("neck.fc.weight"), context.gradient("neck.fc.weight")
        assert weight.shape == gradient.shape
        assert float(gradient.abs().sum()) > 0
        assert context.gradient("head.weight") is None
        assert context.weight("head.weight").shape == (4, 8)
        seen.append((context.step, len(output), float(context.output.mean_loss)))

    ins = entry(dataset, tmp_path / "run", set_train_epochs=3, set_micro_batches=2)
    ins.add_callback(look, "after_backward", every=2, layers=["stages.3"])
    ins.train()
    assert [(step, images) for step, images, _ in seen] == [(1, 12), (3, 12), (5, 12)]


class StopAfter(Callback):
    """Stops a run after the fourth of its epochs, those before a resume included."""

    epochs = 0

    def epoch_end(self, context):
        self.epochs += context.metric("loss") > 0
        if self.epochs == 4:
            context.stop("four epochs")

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]


def test_a_callback_stops_a_run_by_a_state_that_is_resumed(dataset, tmp_path):
    def run(epochs, resume):
        ins = entry(dataset, tmp_path / "run", set_train_epochs=epochs)
        ins.add_callback(StopAfter())
        if resume:
            ins.set_checkpoint_dir("last")
        return ins.train()

    assert run(2, False).epochs == 2
    assert run(9, True).epochs == 4


class Keeping(Callback):
    """Keeps a state of any kind."""

    def __init__(self, state, late):
        self.given, self.late, self.steps = state, late, 0

    def after_step(self, context):
        self.steps += 1

    def state_dict(self):
        return {"given": self.given, "late": self.late if self.steps else None}


@pytest.mark.parametrize(
    ("state", "late"), [(object(), None), (None, {"a": [len]}), (torch.ones(1).cfloat(), None)]
)
def test_a_state_that_cannot_be_saved_is_refused_before_or_after_the_first_step(
    state, late, dataset, tmp_path
):
    callback = Keeping(state, late)
    ins = entry(dataset, tmp_path / "run")
    ins.add_callback(callback)
    with pytest.raises(CheckpointError, match=r"callback Keeping|callbacks\.Keeping"):
        ins.train()
    assert callback.steps == (late is not None)


def fail(context):
    raise ZeroDivisionError("as a user's mistake")


@pytest.mark.parametrize(
    ("callback", "event", "error"),
    [
        (fail, "epoch_end", ZeroDivisionError),
        (fail, "evaluated", ZeroDivisionError),
        (lambda context: context.metric("my accuracy"), "epoch_end", OptionError),
    ],
)
def test_an_epoch_is_saved_before_an_error_at_its_end(dataset, tmp_path, callback, event, error):
    ins = entry(dataset, tmp_path / "run", set_train_epochs=2, set_with_test=True, set_save_every_n_epochs=2)
    ins.add_callback(callback, event)
    with pytest.raises(error):
        ins.train()
    manifest = verify(tmp_path / "run/0")
    assert (manifest.epoch, manifest.step_in_epoch) == (1, 0)
    assert "lfw accuracy" in manifest.scalars["metrics"]


def test_an_epoch_is_saved_before_an_evaluation_fails(dataset, tmp_path):
    copy = tmp_path / "faces"
    shutil.copytree(dataset, copy)
    settings = {"set_ema_decay": 0.5, "set_train_epochs": 2}
    entry(copy, tmp_path / "whole", **settings).train()
    names, *flags = pickle.loads((copy / "lfw.bin").read_bytes())
    names[7] = b"\xff\xd8 damaged"
    (copy / "lfw.bin").write_bytes(pickle.dumps((names, *flags)))
    with pytest.raises(DataError, match="image 7 of lfw"):
        entry(copy, tmp_path / "run", set_with_test=True, **settings).train()
    assert different(tmp_path / "run/0", tmp_path / "whole/0") == []
    entry(copy, tmp_path / "run", set_checkpoint_dir="last", **settings).train()
    assert different(tmp_path / "run/1", tmp_path / "whole/1") == []


class Large(Callback):
    """Has a state that takes a while to write, and fails in the first step after it is saved."""

    def state_dict(self):
        return {"large": torch.zeros(2**26)}

    def step_start(self, context):
        if context.step == 2 and context.epoch == 1:
            raise ZeroDivisionError


def test_an_error_in_the_next_epoch_waits_for_the_checkpoint_that_is_being_written(dataset, tmp_path):
    ins = entry(dataset, tmp_path / "run", set_train_epochs=2)
    ins.add_callback(Large())
    seen = []
    ins.add_callback(lambda context: seen.append(((tmp_path / "run/0").exists(), context.error)), "exception")
    with pytest.raises(ZeroDivisionError) as caught:
        ins.train()
    assert seen == [(True, caught.value)]
    assert verify(tmp_path / "run/0").epoch == 1


def test_wrong_callbacks_raise_with_the_known_names(dataset, tmp_path):
    ins = entry(dataset, tmp_path / "run")
    with pytest.raises(OptionError, match="'after_step'"):
        ins.add_callback(print, "after_stp")
    with pytest.raises(OptionError, match="instance"):
        ins.add_callback(Recorder)
    ins.add_callback(print, "after_step", layers=["stages.9"])
    with pytest.raises(OptionError, match=r"'stages\.9'"):
        ins.train()
    for settings in ({}, {"set_callbacks": "check_shape"}):
        ins = entry(dataset, tmp_path / "run", set_compile=True, **settings)
        if not settings:
            ins.add_callback(print, "after_step", layers=["stem"])
        with pytest.raises(OptionError, match=r"speed\.compile"):
            ins.train()
    late = entry(dataset, tmp_path / "late")
    late.add_callback(lambda context: context.layer_output("stem"), "after_step")
    with pytest.raises(KeyError, match="stem"):
        late.train()


class Known(BaseModel):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 4, stride=4), nn.ReLU())
        self.unused = nn.Linear(2, 2)
        self.fc = nn.Linear(6 * 4 * 4, 8)
        self.scale = nn.Parameter(torch.tensor([1.0, 3.0]))
        nn.init.constant_(self.fc.weight, 0.0)
        nn.init.constant_(self.fc.bias, 0.5)

    def build_network(self, input, label, is_train=True):
        return self.fc(self.body(input).flatten(1)) * self.scale[0]


def table(dataset, folder, messages, **settings):
    """Return the title and the cells of the table of the layers in the first batch."""
    ins = entry(dataset, folder, **settings)
    ins.set_model(Known())
    ins.train()
    (start,) = (n for n, text in enumerate(messages) if text.startswith("layers in the first batch"))
    rows = itertools.takewhile(lambda text: "  " in text, messages[start + 1 :])
    return messages[start], [[cell.strip() for cell in row.split("  ") if cell.strip()] for row in rows]


def test_check_shape_shows_the_layers_of_a_known_network(dataset, tmp_path, messages):
    title, rows = table(dataset, tmp_path, messages, set_callbacks="check_shape", set_micro_batches=2)
    assert title == "layers in the first batch: 12 images of rank 0, micro-batch 1 of 2"
    assert rows == [
        ["layer", "kind", "parameters", "output"],
        ["(network)", "Known", "scale [2]", "[6, 8]"],
        ["body.0", "Conv2d", "weight [6, 3, 4, 4], bias [6]", "[6, 6, 4, 4]"],
        ["body.1", "ReLU", "-", "[6, 6, 4, 4]"],
        ["unused", "Linear", "weight [2, 2], bias [2]", "-"],
        ["fc", "Linear", "weight [8, 96], bias [8]", "[6, 8]"],
    ]


def test_check_content_shows_the_values_of_a_known_network(dataset, tmp_path, messages):
    _, rows = table(dataset, tmp_path, messages, set_callbacks="check_content")
    head = ["layer", "kind", "parameters", "output", "mean", "std", "zeros", "nan or inf", "first values"]
    assert rows[0] == head
    assert ["scale", "[2]", "2", "1", "0.00%", "0.00%", "1, 3"] in rows
    assert ["weight", "[8, 96]", "0", "0", "100.00%", "0.00%", "0, 0, 0"] in rows
    fc = next(row for row in rows if row[0] == "fc")
    assert fc[3:] == ["[12, 8]", "0.5", "0", "0.00%", "0.00%", "0.5, 0.5, 0.5"]


def failure(dataset, folder, callback, **settings):
    """Return the message of a run whose loss is not finite."""
    ins = entry(dataset, folder, set_train_epochs=2, **settings)
    ins.set_model(Spoiled())
    ins.add_callback(callback)
    with pytest.raises(TrainingError) as caught:
        ins.train()
    return str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"set_micro_batches": 2, "set_recompute": "all"},
        {"set_optimizer": {"optimizer": "sgd", "foreach": False}},  # the loss is read before an update
    ],
    ids=str,
)
def test_a_loss_of_nan_names_layer_and_image_and_the_batch_is_saved(dataset, tmp_path, settings):
    spoil = SpoilImage()
    text = failure(dataset, tmp_path, spoil, **settings)
    bad = spoil.names[4]
    assert "nan at step 4 (epoch 2" in text
    assert f"block.1; samples: {bad};" in text
    assert list(losses_of(tmp_path)) == [1, 2, 3]  # so log lines count, too
    with safe_open(tmp_path / "bad_batch.safetensors", "pt") as file:
        assert json.loads(file.metadata()["names"]) == spoil.names
    saved = load_file(tmp_path / "bad_batch.safetensors")
    assert saved["images"].equal(spoil.images)
    assert saved["labels"].equal(spoil.labels)


@pytest.mark.parametrize(
    ("arguments", "noun"), [({}, "block.1"), ({"foreach": False}, "after an update")], ids=["fused", "loop"]
)
def test_a_late_loss_names_the_same_layer_because_a_fused_optimizer_skips_the_update(
    arguments, noun, dataset, tmp_path, monkeypatch
):
    monkeypatch.setattr(step_module, "LossReader", lambda stop, is_late: LossReader(stop, True))
    optimizer = {"optimizer": "sgd", **arguments}
    text = failure(dataset, tmp_path, SpoilImage(), set_log_period=100, set_optimizer=optimizer)
    assert "at step 4 " in text
    assert noun in text


class SpoilClassWeights(Callback):
    def batch_start(self, context):
        if context.step == 2:
            context.head.weight.data[0] = torch.nan


def test_the_head_is_named_if_all_layers_are_finite(dataset, tmp_path):
    assert "the head" in failure(dataset, tmp_path, SpoilClassWeights())


DECAY = 0.9


class Reference(Callback):
    """Averages the weights with the formula of the docstring; notes the weights that are evaluated."""

    def run_start(self, context):
        self.average = {name: p.detach().clone() for name, p in context.network.named_parameters()}

    def after_step(self, context):
        decay = min(DECAY, (1 + context.step) / (10 + context.step))
        for name, p in context.network.named_parameters():
            self.average[name] = decay * self.average[name] + (1 - decay) * p.detach()

    def evaluation_start(self, context):
        self.evaluated_with = {name: p.detach().clone() for name, p in context.network.named_parameters()}


def test_the_average_is_evaluated_saved_and_loaded_and_the_weights_train_on(dataset, tmp_path):
    reference = Reference()
    ins = entry(dataset, tmp_path / "run", set_ema_decay=DECAY, set_with_test=True)
    ins.add_callback(reference)
    result = ins.train()
    plain = entry(dataset, tmp_path / "plain").train()
    averaged, raw = load_weights(result.checkpoint), load_weights(result.checkpoint, averaged=False)
    torch.testing.assert_close(reference.evaluated_with, reference.average)
    for name, value in reference.average.items():
        torch.testing.assert_close(averaged[name], value)
    for name in ("stem.0.weight", "neck.norm_out.running_mean"):
        assert not torch.equal(averaged[name], raw[name])
    assert all(raw[name].equal(value) for name, value in load_weights(plain.checkpoint).items())
    network = load_network(result.checkpoint)
    assert torch.equal(network.state_dict()["stem.0.weight"], averaged["stem.0.weight"])
    test = entry(dataset, tmp_path / "test", set_checkpoint_dir=result.checkpoint, set_with_test=True).test()
    assert test["lfw"].accuracy == result.evaluation["lfw"].accuracy


def test_a_resumed_run_has_the_same_average_and_one_without_starts_from_the_weights(dataset, tmp_path):
    whole = entry(dataset, tmp_path / "whole", set_ema_decay=DECAY, set_train_epochs=2).train()
    last = {"set_train_epochs": 2, "set_checkpoint_dir": "last"}
    entry(dataset, tmp_path / "half", set_ema_decay=DECAY).train()
    resumed = entry(dataset, tmp_path / "half", **last).train()  # the option comes from the checkpoint
    expected = load_weights(whole.checkpoint)
    assert all(value.equal(expected[name]) for name, value in load_weights(resumed.checkpoint).items())
    entry(dataset, tmp_path / "plain").train()
    started = entry(dataset, tmp_path / "plain", **last, set_ema_decay=0.5).train().checkpoint
    averaged, raw = (load_weights(started, averaged=choice)["stem.0.weight"] for choice in (True, False))
    assert not torch.equal(averaged, raw)
