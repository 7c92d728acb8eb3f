"""Does training start with a million classes? Held-out rank-1 after the same number of epochs as with 10,000.

    python benchmarks/start.py build/start --classes 10000
    python benchmarks/start.py build/start --classes 1000000     # 45 minutes on two cores

The classes are synthetic: a class is a point in 32 dimensions. A sample is this point with noise, followed by
32 numbers that do not depend on the class; a fixed random network maps them to 128 values. There are four
training samples per class, and one held-out sample of each of 10,000 classes. An MLP is trained with
embeddings of 128 values, and a tenth of the classes per step. All other options are defaults.

Rank-1 is the share of held-out samples of which the class weight of their class is the nearest of all. Bound,
set before measuring: with a million classes at least half of that with 10,000.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scale import Mlp
from torch import Tensor

from plsc import Entry
from plsc.checkpoint import load_weights

COORDINATES, PER_CLASS, HELD_OUT, SHAPE = 32, 4, 10_000, (1, 8, 16)


class Samples:
    """Four samples per class, as a generator of shuffled batches; and the samples that are held out."""

    shards_itself = True  # there is one rank

    def __init__(self, classes: int, batch: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.batch = batch
        self.points = torch.randn(classes, COORDINATES, generator=generator)
        self.first = torch.randn(2 * COORDINATES, 128, generator=generator) / math.sqrt(2 * COORDINATES)
        self.second = torch.randn(128, 128, generator=generator) / math.sqrt(128)
        every = torch.arange(classes).repeat(PER_CLASS).split(2**16)
        self.vectors = torch.cat([self.draw(labels, generator).half() for labels in every])
        self.held_out = torch.randperm(classes, generator=generator)[:HELD_OUT]
        self.probes = self.draw(self.held_out, generator)

    def draw(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Return samples [n, 128] of these classes."""
        noise = torch.randn(len(labels), 2 * COORDINATES, generator=generator)
        noise[:, :COORDINATES] = self.points[labels] + 0.4 * noise[:, :COORDINATES]
        return torch.tanh(torch.tanh(2 * noise @ self.first) @ self.second * 2)

    def __call__(self, rank: int, ranks: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the batches of an epoch."""
        for numbers in torch.randperm(len(self.vectors)).split(self.batch):
            vectors, labels = self.vectors[numbers].float(), numbers % len(self.points)
            yield vectors.view(-1, *SHAPE).numpy(), labels.numpy()


def rank_1(embeddings: Tensor, weight: Tensor, labels: Tensor) -> float:
    """Return the share of embeddings whose own class weight has the highest cosine."""
    unit = torch.nn.functional.normalize(weight)
    parts = zip(embeddings.split(1000), labels.split(1000), strict=True)
    return float(np.mean([((some @ unit.T).argmax(1) == own).float().mean().item() for some, own in parts]))


def main() -> None:
    """Train, and print the rank-1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--classes", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=512)
    options = parser.parse_args()
    samples = Samples(options.classes, options.batch)
    ins: Any = Entry()
    ins.set_model(Mlp(128, inputs=128))
    ins.set_emb_size(128)
    ins.set_image_shape(SHAPE)
    ins.set_class_num(options.classes)
    ins.set_train_batch_size(options.batch)
    ins.set_train_epochs(options.epochs)
    ins.set_sample_ratio(0.1)
    ins.set_flip(False)  # the values of a vector have no mirror image
    ins.set_with_test(False)
    ins.set_model_save_dir(str(options.folder / f"{options.classes}"))
    ins.set_train_image_num(len(samples.vectors))
    ins.train_reader = samples
    result = ins.train()
    ins.set_checkpoint_dir(str(result.checkpoint))
    ins.predict_reader = lambda: ((probe.view(SHAPE).numpy(), 0) for probe in samples.probes)
    embeddings = torch.from_numpy(ins.predict().embeddings)
    weight = load_weights(result.checkpoint, "class_weights")["weight"]
    found = {"classes": options.classes, "steps": result.steps}
    print(json.dumps({**found, "rank-1": rank_1(embeddings, weight, samples.held_out)}))


if __name__ == "__main__":
    main()
