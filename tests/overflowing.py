"""A network that overflows where a script says so, and what a run does about it.

A script has a letter a step: ``.`` all is finite; ``g`` a gradient of the backbone is inf before the ranks
sum them, ``p`` after that; ``e`` the activations are inf, and so the running statistics and the embeddings;
``l`` the loss alone is nan. All of them on the last rank only.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from plsc.checkpoint.save import local_of
from plsc.models import BaseModel
from plsc.train import loop
from plsc.train import run as build
from plsc.train.saving import collect_tensors
from plsc.train.step import Step
from tests.resuming import train


class Overflow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.inf


class Scripted(BaseModel):
    """Batch norm, whose statistics overflow too."""

    kind = "."

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 4, stride=4)
        self.norm = nn.BatchNorm2d(6)
        self.fc = nn.Linear(6 * 4 * 4, 8)

    def build_network(self, input, label, is_train=True):
        x = self.conv(input)
        if is_train and Scripted.kind == "e":
            x = x * math.inf
        x = self.fc(self.norm(x).flatten(1))
        return Overflow.apply(x) if is_train and Scripted.kind == "g" else x


def state_of(run) -> dict[str, torch.Tensor]:
    """Return copies of everything that learning changes: weights, momentum, rows, running statistics."""
    found = collect_tensors(run.network, run.head, run.optimizer, run.rows)
    return {role.key: local_of(value).clone() for role, value in found.items()}


def train_scripted(options, world, script: str, network=Scripted):
    """Train so that each step goes as the script says; what a skipped step leaves must be what it found."""

    class ScriptedStep(Step):
        def __init__(self, run):
            super().__init__(run)
            self.run, sync, call = run, run.head.sync_gradients, run.call

            def synchronise():
                sync()
                if Scripted.kind == "p":
                    run.network.fc.weight.grad[0, 0] = math.inf

            def call_back(event):
                if event == "after_backward" and Scripted.kind == "l":
                    run.current.output.mean_loss.fill_(math.nan)
                call(event)

            run.head.sync_gradients, run.call = synchronise, call_back

        def make(self, batch, sizes, is_logged):
            run, kind = self.run, script[self.run.position.step]
            Scripted.kind = kind if world.rank == world.size - 1 else "."
            before = state_of(run)
            made = super().make(batch, sizes, is_logged)
            assert made.is_skipped == (kind in "gpe"), run.position
            after = state_of(run)
            changed = {key for key in after if key not in before or not before[key].equal(after[key])}
            if made.is_skipped:
                assert not changed, f"step {run.position.step} changed {changed}"
                assert before.keys() == after.keys()
            elif Scripted.kind != "l":  # a late bad loss: a fused optimizer skips its update
                assert {"backbone.fc.weight", "backbone.norm.running_mean"} <= changed
                assert len(run.head.weight) == 0 or any(key.startswith("head") for key in changed)
            return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scripted, "kind", ".")  # and again afterwards
        patch.setattr(loop, "Step", ScriptedStep)
        return train(options, world, network)


def scale_in_any_mode(patch: pytest.MonkeyPatch) -> None:
    """From now on the loss of runs with scaling arguments is scaled, not only in float16 on a GPU."""
    scaler = build.build_scaler
    patch.setattr(
        build, "build_scaler", lambda arguments, mode: scaler(arguments, "float16" if arguments else mode)
    )


def logged(save_dir: Path, *names: str) -> dict[str, list]:
    """Return what was logged of each step, by name."""
    lines = map(json.loads, (save_dir / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if "loss" in line]
    return {name: [step[name] for step in steps] for name in names}
