"""Train with a custom reader: a function that returns a generator of (CHW float32 image, label).

    python demo/custom_reader.py demo/output/glyphs demo/output/custom_reader

Each call of the function is one epoch. plsc seeds `random` and `numpy.random` from the run's seed and the
epoch, identically on all ranks, so that every rank generates the same order and takes its share of it. The
reader runs in a separate process, a few batches ahead.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from plsc import Entry

Reader = Callable[[], Iterator[tuple[np.ndarray, int]]]


def make_reader(folder: Path, samples: list[tuple[str, int]]) -> Reader:
    """Return a reader that yields the images of a folder in random order, with random contrast."""

    def reader() -> Iterator[tuple[np.ndarray, int]]:
        order = list(range(len(samples)))
        random.shuffle(order)
        for index in order:
            path, label = samples[index]
            with Image.open(folder / path) as image:
                pixels = np.asarray(image, dtype=np.float32)[None]  # [1, H, W]
            contrast = np.random.uniform(0.8, 1.2)
            yield (pixels - 127.5) / 128 * contrast, label

    return reader


def main() -> None:
    """Train on the samples of the reader."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path, help="output folder of make_glyphs.py")
    parser.add_argument("run", type=Path, help="new folder for checkpoints, metrics and plots")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    lines = (options.data / "label.txt").read_text().splitlines()
    samples = [(path, int(label)) for path, label in (line.split("\t") for line in lines)]

    ins = Entry()
    ins.train_reader = make_reader(options.data, samples)
    ins.set_train_image_num(len(samples))  # required, because a generator has no length
    ins.set_class_num(max(label for _, label in samples) + 1)  # required, too
    ins.set_model_name("SmallResNet")
    ins.set_image_shape((1, 32, 32))
    ins.set_emb_size(64)
    ins.set_loss_type("dist_arcface")
    ins.set_lr(0.1)
    ins.set_global_batch_size(128)
    ins.set_train_steps(options.steps)
    ins.set_log_period(5)
    ins.set_with_test(False)
    ins.set_model_save_dir(str(options.run))
    ins.train()


if __name__ == "__main__":
    main()
