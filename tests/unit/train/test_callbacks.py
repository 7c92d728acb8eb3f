"""Callbacks: which events are called when, what they see, what they can change, and what they cost."""

from __future__ import annotations

import json

import pytest
import torch

from plsc import Callback, EarlyStopping
from plsc.errors import OptionError
from plsc.train.callbacks import EVENTS
from tests.images import write_dataset, write_pair_file
from tests.system.small_entry import entry


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = write_dataset(tmp_path_factory.mktemp("callbacks") / "faces", classes=4, per_class=6)
    write_pair_file(folder / "lfw.bin", folder)
    return folder


class Recorder(Callback):
    def __init__(self):
        self.events = []


for event in EVENTS:
    setattr(Recorder, event, lambda self, context, event=event: self.events.append((event, context.step)))


def test_events_come_in_order(dataset, tmp_path):
    recorder = Recorder()
    ins = entry(dataset, tmp_path / "run", set_with_test=True)
    ins.add_callback(recorder)
    ins.train()
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
        seen.append((context.step, len(output), float(context.output.mean_loss)))

    ins = entry(dataset, tmp_path / "run", set_train_epochs=3, set_micro_batches=2)
    ins.add_callback(look, "after_backward", every=2, layers=["stages.3"])
    ins.train()
    assert [(step, images) for step, images, _ in seen] == [(1, 12), (3, 12), (5, 12)]


def test_hooks_exist_only_in_steps_in_which_a_callback_uses_them(dataset, tmp_path):
    counts = []

    def count(context):
        counts.append(sum(len(module._forward_hooks) for module in context.network.modules()))

    ins = entry(dataset, tmp_path / "run", set_train_epochs=2)
    ins.add_callback(count, "after_forward")
    ins.add_callback(lambda context: context.layer_output("stem"), "after_forward", every=4, layers=["stem"])
    ins.train()
    assert counts == [0, 0, 0, 1]


def test_callbacks_change_no_bit_of_the_training(dataset, tmp_path):
    plain = entry(dataset, tmp_path / "plain").train()
    ins = entry(dataset, tmp_path / "watched")
    ins.add_callback(Recorder())
    ins.add_callback(lambda context: context.layer_output("stem"), "after_step", layers=["stem"])
    assert ins.train().metrics["loss"] == plain.metrics["loss"]


def test_scalars_of_a_callback_are_in_the_log(dataset, tmp_path):
    ins = entry(dataset, tmp_path / "run")
    ins.add_callback(
        lambda context: context.log("norm", context.weight("neck.fc.weight").norm()), "after_step"
    )
    ins.train()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [line["norm"] > 0 for line in lines if "loss" in line] == [True, True]


def test_a_callback_can_stop_the_run_and_the_checkpoint_is_complete(dataset, tmp_path):
    ins = entry(dataset, tmp_path / "run", set_train_epochs=5)
    ins.add_callback(lambda context: context.stop("enough") if context.step == 3 else None, "after_step")
    result = ins.train()
    assert (result.steps, result.epochs) == (3, 1)
    assert result.checkpoint.name == "1-step3"


def test_early_stopping_ends_after_patience_epochs_and_its_state_is_resumed(dataset, tmp_path):
    def run(epochs, resume):
        ins = entry(dataset, tmp_path / "run", set_train_epochs=epochs)
        ins.add_callback(EarlyStopping("loss", patience=3, min_delta=100.0))
        if resume:
            ins.set_checkpoint_dir("last")
        return ins.train()

    assert run(2, False).epochs == 2  # one epoch without improvement
    assert run(9, True).epochs == 4


def test_an_exception_in_a_callback_ends_the_run_and_other_callbacks_are_told(dataset, tmp_path):
    seen = []
    ins = entry(dataset, tmp_path / "run", set_train_epochs=3)
    ins.add_callback(lambda context: seen.append(context.error), "exception")
    ins.add_callback(lambda context: 1 // (5 - context.step), "after_step")
    with pytest.raises(ZeroDivisionError):
        ins.train()
    assert isinstance(seen[0], ZeroDivisionError)
    assert (tmp_path / "run" / "0" / "manifest.json").exists()  # the save of epoch 1 has waited for it


def test_wrong_callbacks_raise_with_the_known_names(dataset, tmp_path):
    ins = entry(dataset, tmp_path / "run")
    with pytest.raises(OptionError, match=r"'after_stp'.*did you mean 'after_step'"):
        ins.add_callback(print, "after_stp")
    with pytest.raises(OptionError, match=r"expected an instance of plsc\.Callback"):
        ins.add_callback(Recorder)
    ins.add_callback(print, "after_step", layers=["stages.9"])
    with pytest.raises(OptionError, match=r"names the layer 'stages\.9'"):
        ins.train()
    ins = entry(dataset, tmp_path / "run", set_compile=True)
    ins.add_callback(print, "after_step", layers=["stem"])
    with pytest.raises(OptionError, match=r"not available with speed\.compile"):
        ins.train()
    late = entry(dataset, tmp_path / "late")
    late.add_callback(lambda context: context.layer_output("stem"), "after_step")
    with pytest.raises(OptionError, match=r"add the callback with layers=\['stem'\]"):
        late.train()


def test_class_weights_are_seen_as_a_parameter_of_the_head(dataset, tmp_path):
    shapes = []
    ins = entry(dataset, tmp_path / "run")
    ins.add_callback(lambda context: shapes.append(context.weight("head.weight").shape), "run_end")
    ins.train()
    assert shapes == [torch.Size([4, 8])]
