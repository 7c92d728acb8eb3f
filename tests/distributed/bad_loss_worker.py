"""Trains on several ranks; the last one gets an image that spoils its loss. All ranks write the message.

bad_loss_worker.py DATASET FOLDER [setter=value ...]
"""

import ast
import os
import sys
from pathlib import Path

from plsc.errors import TrainingError
from tests.spoiled import Spoiled, SpoilImage
from tests.system.small_entry import entry


def main():
    dataset, folder, *settings = sys.argv[1:]
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ins = entry(dataset, Path(folder) / "run", set_train_epochs=5, set_train_batch_size=4)
    ins.set_model(Spoiled())
    for setting in settings:
        name, _, value = setting.partition("=")
        getattr(ins, name)(ast.literal_eval(value))
    spoil = SpoilImage(image=1, rank=ranks - 1)
    ins.add_callback(spoil)
    try:
        ins.train()
    except TrainingError as error:
        names = getattr(spoil, "names", ["", ""])
        Path(folder, f"{rank}.txt").write_text(f"{names[1]}\n{error}")


if __name__ == "__main__":
    main()
