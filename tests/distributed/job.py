"""A training script like a user's, for tests: job.py DATASET SAVE_DIR [setter=value ...]

Values are Python literals; `setter*=(1, 2)` gives several arguments. `verb=test` or `verb=predict` runs that
instead of train; `arguments=(2,)` is for the verb.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from plsc import Entry


def small_entry(dataset: str | Path, save_dir: str | Path) -> Entry:
    """Return an entry that trains a small network for two epochs."""
    ins = Entry()
    ins.set_dataset_dir(str(dataset))
    ins.set_model_save_dir(str(save_dir))
    ins.set_model_name("SmallResNet")
    ins.set_image_shape((3, 16, 16))
    ins.set_emb_size(16)
    ins.set_train_batch_size(8)
    ins.set_train_epochs(2)
    ins.set_log_period(1)
    ins.set_lr(1.0)
    ins.set_num_workers(0)
    return ins


def main() -> None:
    dataset, save_dir, *settings = sys.argv[1:]
    ins = small_entry(dataset, save_dir)
    verb, arguments = "train", ()
    for setting in settings:
        name, _, value = setting.partition("=")
        if name == "verb":
            verb = value
        elif name == "arguments":
            arguments = ast.literal_eval(value)
        elif name.endswith("*"):
            getattr(ins, name[:-1])(*ast.literal_eval(value))
        else:
            getattr(ins, name)(ast.literal_eval(value))
    print(f"result: {getattr(ins, verb)(*arguments)}")


if __name__ == "__main__":
    main()
