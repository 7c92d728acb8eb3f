"""Runs bad input of each kind in turn on all ranks: bad_input_worker.py DATASET FOLDER

Prints a JSON line for each case and rank: what was raised, its text, and what that must contain.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.distributed.job import small_entry

GOOD, FOLDER = Path(sys.argv[1]), Path(sys.argv[2])


def run(
    dataset: Path = GOOD, name: str = "unused", verb: str = "train", **settings: Any
) -> Callable[[], Any]:
    def run() -> Any:
        ins = small_entry(dataset, FOLDER / name)
        for setter, value in settings.items():
            getattr(ins, setter)(value)
        return getattr(ins, verb)()

    return run


def main() -> None:
    run(name="run")()
    missing, rank = FOLDER / f"missing-{os.environ['RANK']}", os.environ["RANK"]
    shutil.copytree(GOOD, missing)
    for image in (missing / "images").iterdir():
        image.unlink()
    pairs = FOLDER / f"malicious-{rank}.bin"
    pairs.write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    checkpoint = str(FOLDER / "run/0")
    for name, expected, start in (
        ("no dataset folder", "does not exist", run(FOLDER / "nowhere")),
        ("label out of range", "outside 0..2", run(set_class_num=3)),
        ("missing images", "label.txt:", run(missing)),
        ("malicious pair file", "os.system", run(set_val_targets=str(pairs))),
        ("no manifest", "manifest.json", run(set_checkpoint_dir=str(GOOD))),
        ("other class count", "classes 5", run(set_checkpoint_dir=checkpoint, set_class_num=9)),
        ("loss not finite", "the loss is", run(set_lr=1e30, set_train_epochs=50)),
        ("nothing to test on", "no checkpoint is set", run(verb="test")),
    ):
        try:
            start()
            caught = None
        except Exception as error:
            caught = error
        text = {"case": name, "expected": expected, "raised": type(caught).__name__, "text": str(caught)}
        # A single write, because lines of several ranks share the pipe.
        print(f"CASE {json.dumps(text)}\n", end="", flush=True)


if __name__ == "__main__":
    main()
