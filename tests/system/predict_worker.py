"""A prediction on several ranks: predict_worker.py FOLDER OUTPUT [KILL_AT]

FOLDER has a dataset, faces, and a checkpoint, run/0. With KILL_AT, all ranks and their launcher are killed
when this image is read. With OUTPUT `written`, what is predicted without a folder is saved per rank.
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from plsc.predict import predict as prediction
from tests.system.small_entry import entry
from tests.undrawn import draw_nothing

LAYERS = ("stages.2", "neck.fc")


class Faces:
    """The images of a dataset in the order of label.txt."""

    def __init__(self, folder, kill_at):
        lines = [line.split("\t") for line in (folder / "label.txt").read_text().splitlines()]
        self.files = [folder / name for name, _ in lines]
        self.targets = [int(label) for _, label in lines]
        self.kill_at = kill_at

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        if index == self.kill_at:
            os.killpg(0, signal.SIGKILL)
        return Image.open(self.files[index]).convert("RGB"), self.targets[index]


if __name__ == "__main__":
    draw_nothing()
    folder, output = Path(sys.argv[1]), sys.argv[2]
    prediction.MOST_ROWS = 4
    ins = entry(folder / "faces", folder / "unused", set_checkpoint_dir=folder / "run" / "0")
    ins.set_test_batch_size(3)
    ins.set_bad_images("skip")
    ins.predict_reader = Faces(folder / "faces", int(sys.argv[3]) if len(sys.argv) > 3 else None)
    how = {"layers": LAYERS, "field": prediction.FIELDS}
    ins.predict(**how, output=folder / output)
    if output == "written":
        found = ins.predict(**how)
        values = {name: getattr(found, name) for name in ("embeddings", "names", "labels", "ids", "probs")}
        np.savez(folder / f"memory-{os.environ['RANK']}.npz", **values, **found.layers)
