"""Callbacks: which events are called when, what they see, what they can change, and what they cost."""

from __future__ import annotations

import json
import math
import pickle
import shutil

import numpy as np
import pytest
import torch

from plsc import Callback, EarlyStopping
from plsc.checkpoint.remote import verify
from plsc.errors import CheckpointError, DataError, OptionError
from plsc.train.callbacks import EVENTS
from tests.images import write_dataset, write_pair_file
from tests.resuming import different
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


class Keeping(Callback):
    """Keeps a state of any kind."""

    def __init__(self, state, late=None):
        self.given, self.late, self.loaded, self.steps = state, late, None, 0

    def after_step(self, context):
        self.steps += 1

    def state_dict(self):
        return {"given": self.given, "late": self.late if self.steps else None}

    def load_state_dict(self, state):
        self.loaded = state["given"]


def test_any_plain_state_of_a_callback_comes_back(dataset, tmp_path):
    state = {
        "best": math.inf, "numpy": np.float32(0.5), 3: {(1, 2)}, "last": (np.arange(3), [torch.ones(2)]),
        "text": "\x1b[0m",
    }  # fmt: skip
    ins = entry(dataset, tmp_path / "run", set_train_epochs=1)
    ins.add_callback(Keeping(state))
    ins.train()
    resumed = Keeping({"last": [torch.zeros(3)]})  # of another shape
    ins = entry(dataset, tmp_path / "run", set_train_epochs=2)
    ins.add_callback(resumed)
    ins.set_checkpoint_dir("last")
    ins.train()
    assert repr(resumed.loaded) == repr(state)


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


def test_an_exception_in_a_callback_ends_the_run_and_other_callbacks_are_told(dataset, tmp_path):
    seen = []
    ins = entry(dataset, tmp_path / "run", set_train_epochs=3)
    ins.add_callback(lambda context: seen.append(context.error), "exception")
    ins.add_callback(lambda context: 1 // (5 - context.step), "after_step")
    with pytest.raises(ZeroDivisionError):
        ins.train()
    assert isinstance(seen[0], ZeroDivisionError)
    assert (tmp_path / "run" / "0" / "manifest.json").exists()  # the save of epoch 1 has waited for it


def fail(context):
    raise ZeroDivisionError("as a user's mistake")


@pytest.mark.parametrize(
    ("callback", "event", "error"),
    [
        (fail, "epoch_end", ZeroDivisionError),
        (fail, "evaluated", ZeroDivisionError),
        (EarlyStopping("my accuracy"), None, OptionError),
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
    ins.add_callback(lambda context: seen.append((tmp_path / "run/0").exists()), "exception")
    with pytest.raises(ZeroDivisionError):
        ins.train()
    assert seen == [True]
    assert verify(tmp_path / "run/0").epoch == 1


@pytest.mark.parametrize("metric", ["lfw acuracy", "lfw_accuracy", "LFW Accuracy"])
def test_early_stopping_refuses_a_misspelt_evaluation_metric_at_the_start(dataset, tmp_path, metric):
    ins = entry(dataset, tmp_path / "run", set_with_test=True)
    ins.add_callback(EarlyStopping(metric))
    with pytest.raises(OptionError, match=rf"no metric '{metric}'; did you mean 'lfw accuracy'\?"):
        ins.train()
    assert not list((tmp_path / "run").glob("0*"))


@pytest.mark.parametrize("metric", ["mean_loss", "accuracy", "my accuracy", "lfw accuracy2"])
def test_early_stopping_takes_other_metrics(dataset, tmp_path, metric):
    ins = entry(dataset, tmp_path / "run", set_with_test=True, set_calc_acc=True)
    if metric not in ("mean_loss", "accuracy"):
        ins.add_callback(lambda context: context.log(metric, 0.5), "after_step")
    ins.add_callback(EarlyStopping(metric))
    assert ins.train().epochs == 1


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
