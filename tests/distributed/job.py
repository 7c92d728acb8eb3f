"""A training script for tests: job.py DATASET SAVE_DIR [setter=value ...] [-- another run ...]

Values are Python literals. `setter*=(1, 2)` passes several arguments; `transform=1` sets a transform that
changes nothing; `NAME=text` sets an environment variable. `verb=test` or `verb=predict` runs that instead of
train, with `arguments=(2,)`. Failures of all runs but the last are printed.
"""

from __future__ import annotations

import ast
import os
import sys
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist

from plsc import Entry
from plsc.errors import PlscError
from tests.system.small_entry import entry
from tests.undrawn import draw_nothing


def small_entry(dataset: str | Path, save_dir: str | Path) -> Entry:
    """Return an entry that trains a small network for two epochs."""
    how = {"set_emb_size": 16, "set_train_batch_size": 8, "set_train_epochs": 2, "set_with_test": True}
    return entry(dataset, save_dir, **how, set_lr=0.01, set_num_workers=0)


def run(dataset: str, save_dir: str, *settings: str) -> None:
    ins = small_entry(dataset, save_dir)
    verb, arguments = "train", ()
    for setting in settings:
        name, _, value = setting.partition("=")
        if name == "verb":
            verb = value
        elif name == "arguments":
            arguments = ast.literal_eval(value)
        elif name == "transform":
            ins.train_transform = torch.clone
        elif name.isupper():
            os.environ[name] = value
        elif name.endswith("*"):
            getattr(ins, name[:-1])(*ast.literal_eval(value))
        else:
            getattr(ins, name)(ast.literal_eval(value))
    print(f"result: {getattr(ins, verb)(*arguments)}", flush=True)


def main() -> None:
    draw_nothing()
    runs = [list(words) for is_mark, words in groupby(sys.argv[1:], "--".__eq__) if not is_mark]
    if len(runs) > 1 and "RANK" in os.environ:
        dist.init_process_group("gloo")  # for all runs
    for number, words in enumerate(runs, start=1):
        try:
            run(*words)
        except PlscError as error:
            if number == len(runs):
                raise
            print(f"run {number} failed: {error}", file=sys.stderr, flush=True)
    if dist.is_initialized() and len(runs) > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
