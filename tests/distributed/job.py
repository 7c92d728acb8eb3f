"""A training script like a user's, for tests: job.py DATASET SAVE_DIR [setter=value ...]

Values are Python literals. `verb=test` or `verb=predict` runs that instead of train.
"""

from __future__ import annotations

import ast
import sys

from plsc import Entry


def main() -> None:
    dataset, save_dir, *settings = sys.argv[1:]
    ins = Entry()
    ins.set_dataset_dir(dataset)
    ins.set_model_save_dir(save_dir)
    ins.set_model_name("SmallResNet")
    ins.set_image_shape((3, 16, 16))
    ins.set_emb_size(16)
    ins.set_train_batch_size(8)
    ins.set_train_epochs(2)
    ins.set_log_period(1)
    ins.set_lr(1.0)
    ins.set_num_workers(0)
    verb = "train"
    for setting in settings:
        name, _, value = setting.partition("=")
        if name == "verb":
            verb = value
        else:
            getattr(ins, name)(ast.literal_eval(value))
    print(f"result: {getattr(ins, verb)()}")


if __name__ == "__main__":
    main()
