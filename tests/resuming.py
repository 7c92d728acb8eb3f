"""Small runs, and what tests compare of them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

from plsc.checkpoint import list_checkpoints
from plsc.config import Options
from plsc.machine import on_terminal
from plsc.models import BaseModel
from plsc.parallel.world import World
from plsc.train import build
from plsc.train.callbacks import UserParts
from plsc.train.run import run_training


class Drawing(BaseModel):
    """Batch norm, dropout, and draws from every global generator when it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 4, stride=4)
        self.norm = nn.BatchNorm2d(6)
        self.dropout = nn.Dropout(0.3)
        self.fc = nn.Linear(6 * 4 * 4, 8)

    def build_network(self, input, label, is_train=True):
        x = self.dropout(self.norm(self.conv(input))).flatten(1)
        if is_train:
            x = x * (1 + 0.1 * random.random()) * (1 + 0.1 * np.random.rand())
            x = nn.functional.dropout(x, 0.1)
        return self.fc(x)


class Steady(BaseModel):
    """Batch norm and dropout, and nothing that depends on the ranks once batch norm is synchronised."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 4, stride=4)
        self.norm = nn.BatchNorm2d(6)
        self.channels = nn.Dropout2d(0.1)
        self.dropout = nn.Dropout(0.3)
        self.fc = nn.Linear(6 * 4 * 4, 8)

    def build_network(self, input, label, is_train=True):
        return self.fc(self.dropout(self.channels(self.norm(self.conv(input)))).flatten(1))


PLAIN = {"optim.warmup_steps": 0, "optim.clip_norm": 0.0, "optim.schedule": "constant"}


def options_of(dataset: Path, save_dir: Path, **changes) -> Options:
    """Return options of a small run; `changes` are named as data__order."""
    options = Options()
    settings = {
        "data.dataset_dir": str(dataset), "checkpoint.save_dir": str(save_dir),
        "model.image_shape": (3, 16, 16), "model.emb_size": 8, "train.epochs": 2,
        "train.log_period": 1, "data.num_workers": 0, "optim.lr": 0.02,
        **({} if "checkpoint__load_dir" in changes else PLAIN),
    } | {name.replace("__", "."): value for name, value in changes.items()}  # fmt: skip
    options.set_together(settings)
    return options


def train(options: Options, world: World, network=Drawing, user=None):
    """Train as the facade does."""
    user = user or UserParts()
    torch.manual_seed(5)
    user.model = network()
    with on_terminal():
        return run_training(options, world, user)


def saved_at(save_dir: Path, step: int) -> Path:
    """Return the checkpoint of a step."""
    return next(path for path, manifest in list_checkpoints(save_dir) if manifest.step == step)


def tensors_of(checkpoint: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Return every tensor in every file, by the rank in the file's name and key."""
    found = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                found[path.name[:11], key] = file.get_tensor(key)
    assert found, checkpoint
    return found


def joined(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return all tensors, with the shards of all files concatenated, except per-rank tensors."""
    parts: dict[str, list[torch.Tensor]] = {}
    for (_, key), tensor in tensors_of(checkpoint).items():
        if not key.startswith("rank"):
            parts.setdefault(key, []).append(tensor)
    return {key: torch.cat(pieces) if pieces[0].ndim else pieces[0] for key, pieces in parts.items()}


def different(ours: Path, theirs: Path) -> list[tuple[str, str]]:
    """Return the places of the tensors in which two checkpoints differ by a bit."""
    mine, right = tensors_of(ours), tensors_of(theirs)
    assert mine.keys() == right.keys()
    return [key for key, tensor in mine.items() if not tensor.equal(right[key])]


def losses_of(save_dir: Path) -> dict[int, float]:
    """Return the logged losses by step."""
    entries = map(json.loads, (save_dir / "metrics.jsonl").read_text().splitlines())
    return {entry["step"]: entry["loss"] for entry in entries if "loss" in entry}


def compute_in_float64(patch: pytest.MonkeyPatch) -> None:
    """From now on runs are in float64, whose results hardly depend on the order of sums."""
    network, head = build.build_network, build.build_head
    patch.setattr(build, "build_network", lambda *args: network(*args).double())
    in_float64 = {"row_dtype": torch.float64}
    patch.setattr(build, "build_head", lambda *args, **named: head(*args, **{**named, **in_float64}))
