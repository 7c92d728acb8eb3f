"""Whole runs with optimizers, groups, frozen parts and schedules: what is saved, resumed, refused."""

import json
import logging
from collections import deque
from contextlib import nullcontext

import pytest
import torch

from plsc.checkpoint import load_weights, read_manifest
from plsc.errors import CheckpointError, OptionError, TrainingError
from plsc.optim import OPTIMIZERS
from plsc.parallel.world import World
from plsc.train.callbacks import Callback, UserParts
from tests.images import write_dataset
from tests.resuming import Drawing, different, losses_of, options_of, saved_at, train

WORLD = World.single()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "set", classes=6, per_class=3)


class Adapting(torch.optim.SGD):
    """Keeps a number in its groups, as optimizers do that find their learning rate themselves."""

    def __init__(self, groups, lr, d=1.0):
        super().__init__(groups, lr, momentum=0.9)
        for group in self.param_groups:
            group["d"] = d

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] *= group["d"]
            group["d"] *= 0.9
        return super().step(closure)


class OfOthers(torch.optim.Optimizer):
    """SGD that keeps state wherever people keep it, and uses all of it."""

    def __init__(self, groups, lr=0.05):
        super().__init__(groups, {"lr": lr, "rule": len})
        self.calls = 0

    def step(self, closure=None):
        self.calls += 1
        seen = self.state["seen"]
        seen["steps"] = (*seen.get("steps", ()), self.calls)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group.setdefault("mean", torch.zeros(())).mul_(0.5).add_(group["step"])
            for parameter in group["params"]:
                state = self.state[parameter]
                square = torch.eye(parameter.shape[0])
                blocks = state.setdefault(
                    "blocks", {"left": [square, None], 2: (square.clone(), float("inf"))}
                )
                matrix = parameter.grad.flatten(1) if parameter.ndim > 1 else parameter.grad[:, None]
                blocks["left"][0].lerp_(matrix @ matrix.T, 0.1)
                factor = group["lr"] * float(group["mean"]) / (len(seen["steps"]) + self.calls)
                change = torch.linalg.solve(blocks["left"][0] + blocks[2][0], matrix)
                parameter.data.sub_(change.view_as(parameter), alpha=factor)


class OwnStateDict(torch.optim.AdamW):
    """Hides what it needs in an object that only its own methods know."""

    def __init__(self, groups):
        super().__init__(groups, lr=0.01)
        self.noise = torch.Generator().manual_seed(3)

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(torch.rand((), generator=self.noise))
        return super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "noise": self.noise.get_state()}

    def load_state_dict(self, state):
        self.noise.set_state(state.pop("noise"))
        super().load_state_dict(state)


class ForgetsInner(OwnStateDict):
    def __init__(self, groups):
        super().__init__(groups)
        self.inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1, momentum=0.9)

    def step(self, closure=None):
        (parameter,) = self.inner.param_groups[0]["params"]
        parameter.grad = torch.ones(1)
        self.inner.step()
        return super().step(closure)


def lookahead(groups):
    optimizers = pytest.importorskip("timm.optim", reason="timm is not installed")
    return optimizers.create_optimizer_v2(groups, "lookahead_radam", lr=0.02, weight_decay=0.01)


def falling(step, total_steps):
    return 1 - step / (total_steps + 1)


KINDS = {
    "adamw": {
        "optim__optimizer": "adamw", "optim__freeze": ("norm",),
        "optim__groups": ({"pattern": "fc", "lr_factor": 0.3, "weight_decay": 0.1, "eps": 1e-6},),
        "optim__schedule": f"{__name__}:falling", "optim__warmup_steps": 2,
        "head__weight_decay": 0.01,
    },
    "dense nadam": {
        "optim__optimizer": "nadam", "head__loss_type": "arcface", "head__lr_factor": 0.1,
        "optim__schedule": {"name": "cosine", "end_factor": 0.1}, "optim__clip_norm": 1.0,
    },
    "factory": {
        "optim__optimizer": f"{__name__}:Adapting", "optim__optimizer_arguments": {"lr": 0.05},
        "optim__groups": ({"pattern": "type:Linear", "lr_factor": 0.3},),
    },
    **{name: {"optim__optimizer": name} for name in OPTIMIZERS if name != "adamw"},
    "adam": {"optim__optimizer": "adam", "optim__optimizer_arguments": {"amsgrad": True}},
    "adagrad": {
        "optim__optimizer": "adagrad", "head__optimizer": "adagrad", "head__state_dtype": "bfloat16",
    },
}  # fmt: skip


class Unmade(torch.optim.Optimizer):
    """Wraps an optimizer as published versions of Lookahead do, without Optimizer.__init__."""

    def __init__(self, groups):
        self.optimizer = torch.optim.SGD(groups, 0.05)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        self.defaults = self.optimizer.defaults

    def step(self, closure=None):
        return self.optimizer.step(closure)


def start_foreign(dataset, folder, make, **more):
    every = {"train__batch_size": 4, "checkpoint__every_n_steps": 3, "checkpoint__keep_last": -1}
    options = options_of(dataset, folder, **every, **more)
    options.set("optim.optimizer", "mine:make")
    return train(options, WORLD, user=UserParts(optimizer=make))


class Hiding(torch.optim.SGD):
    """Keeps a history in an object that checkpoints cannot hold."""

    def __init__(self, groups, history, change):
        super().__init__(groups, lr=0.01)
        self.history, self.change = history, change

    def step(self, closure=None):
        self.change(self.history)
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "change", "is_refused"),
    [
        (deque, lambda history: history.append(1), True),
        (lambda: ([1],), lambda history: history[0].append(1), True),
        (lambda: logging.getLogger("mine"), lambda history: history.debug("a step"), False),
    ],
)
def test_attributes_that_change_and_cannot_be_saved_are_refused_after_the_first_step(
    make, change, is_refused, dataset, tmp_path
):
    with pytest.raises(CheckpointError, match="history") if is_refused else nullcontext():
        start_foreign(dataset, tmp_path / "run", lambda groups: Hiding(groups, make(), change))
    assert (tmp_path / "run/0-step3").exists() is not is_refused


@pytest.mark.parametrize("make", [OfOthers, OwnStateDict, lookahead])
def test_a_run_with_an_optimizer_of_other_people_resumes_to_the_same_bits(make, dataset, tmp_path):
    start_foreign(dataset, tmp_path / "whole", make)
    before = str(saved_at(tmp_path / "whole", 3))
    start_foreign(dataset, tmp_path / "resumed", make, checkpoint__load_dir=before)
    assert different(tmp_path / "resumed/1", tmp_path / "whole/1") == []


@pytest.mark.parametrize(
    ("make", "error", "noun"), [(Unmade, AttributeError, "hooks"), (ForgetsInner, CheckpointError, "inner")]
)
def test_an_optimizer_that_cannot_step_or_be_saved_is_refused_at_the_start(
    make, error, noun, dataset, tmp_path
):
    with pytest.raises(error, match=noun):
        start_foreign(dataset, tmp_path / "run", make)
    assert not (tmp_path / "run/0-step3").exists()


def test_what_is_no_state_of_an_optimizer_of_other_people_is_refused(dataset, tmp_path):
    start_foreign(dataset, tmp_path / "run", OfOthers, train__epochs=1)
    path = tmp_path / "run/0/manifest.json"
    manifest = json.loads(path.read_text())
    for name, value in (("groups", [7]), ("attributes", [1]), ("own", "x")):
        scalars = {**manifest["scalars"], f"optimizer_{name}": value}
        path.write_text(json.dumps({**manifest, "scalars": scalars}))
        with pytest.raises(CheckpointError, match="optimizer"):
            start_foreign(dataset, tmp_path / "next", OfOthers, checkpoint__load_dir=str(path.parent))


def test_a_schedule_that_counts_its_calls_is_refused(dataset, tmp_path):
    rates = iter([1.0, 0.5, 0.25])
    options = options_of(dataset, tmp_path / "run", optim__schedule="mine:rate")
    with pytest.raises(OptionError, match="depend only on the step"):
        train(options, WORLD, user=UserParts(schedule=lambda step: next(rates)))


class Thawing(Callback):
    """Trains what was frozen from the second epoch on, or replaces a parameter."""

    def __init__(self, replaced):
        self.replaced = replaced

    def epoch_start(self, context):
        network = context.network
        if context.epoch and self.replaced:
            network.fc.weight = torch.nn.Parameter(torch.zeros_like(network.fc.weight))
        elif context.epoch:
            network.conv.requires_grad_(True)


@pytest.mark.parametrize(("replaced", "name"), [(False, "conv.weight"), (True, "fc.weight")])
def test_parameters_that_the_optimizer_lacks_stop_the_run(replaced, name, dataset, tmp_path):
    frozen = options_of(dataset, tmp_path / "run", train__epochs=2, optim__freeze=("conv",))
    with pytest.raises(TrainingError, match=name):
        train(frozen, WORLD, user=UserParts(callbacks=(Thawing(replaced),)))


class Detached(Drawing):
    def build_network(self, input, label, is_train=True):
        return super().build_network(input, label, is_train).detach()


def test_a_network_without_gradients_is_reported_once(dataset, tmp_path, capsys):
    train(options_of(dataset, tmp_path / "run", train__batch_size=4), WORLD, Detached)
    assert capsys.readouterr().err.count("6 of 6 trainable parameters have no gradient") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_to_the_same_bits(kind, dataset, tmp_path):
    settings = KINDS[kind]

    def start(name, **more):
        base = {"train__batch_size": 6, "checkpoint__every_n_steps": 2, "checkpoint__keep_last": -1}
        options = options_of(dataset, tmp_path / name, **base, **more)
        return train(options, WORLD)

    start("whole", **settings)
    # Nothing is set again but what is code: the checkpoint has it all.
    code = {name: value for name, value in settings.items() if ":" in str(value)[:50]}
    start("resumed", checkpoint__load_dir=str(saved_at(tmp_path / "whole", 2)), **code)
    assert different(tmp_path / "resumed/1", tmp_path / "whole/1") == []
    later = {s: x for s, x in losses_of(tmp_path / "whole").items() if s > 2}
    assert losses_of(tmp_path / "resumed") == later
    if kind == "factory":
        numbers = read_manifest(tmp_path / "whole/1").scalars["optimizer_groups"]
        assert numbers == [{"$dict": [["d", pytest.approx(0.9**6)]]}] * 2


def test_frozen_parts_keep_their_bits_and_a_run_may_freeze_and_thaw_where_it_goes_on(
    dataset, tmp_path, capsys
):
    def start(name, **more):
        options = options_of(
            dataset, tmp_path / name, train__batch_size=4, optim__optimizer="adagrad", **more
        )
        train(options, WORLD)
        return load_weights(tmp_path / name / str(options.train.epochs - 1))

    first = start("first", train__epochs=1, optim__freeze=("conv", "norm"))
    torch.manual_seed(5)
    untrained = Drawing().state_dict()
    frozen = {key for key, value in first.items() if value.equal(untrained[key])}
    assert frozen == {key for key in untrained if key.startswith(("conv", "norm"))}
    capsys.readouterr()
    last = str(tmp_path / "first/0")
    thawed = start("thawed", checkpoint__load_dir=last, train__epochs=2, optim__freeze=("fc",))
    said = capsys.readouterr().out
    assert "no optimizer state for 4 parameters" in said
    assert "optim.freeze" in said
    changed = {key for key, value in thawed.items() if not value.equal(first[key])}
    assert changed == {key for key in frozen if "conv" in key or "norm" in key}


def test_states_that_are_missing_or_no_counts_are_refused(dataset, tmp_path):
    adam = {"optim__optimizer": "adam", "train__epochs": 1, "train__batch_size": 6}
    train(options_of(dataset, tmp_path / "a", **adam), WORLD)
    again = {**adam, "train__epochs": 2, "checkpoint__load_dir": str(tmp_path / "a/0")}
    more = {"optim__optimizer_arguments": {"amsgrad": True}}
    with pytest.raises(CheckpointError, match=r"max_exp_avg_sq\.backbone.* missing"):
        train(options_of(dataset, tmp_path / "b", **again, **more), WORLD)
