"""Accuracy on unseen classes with the scale of AdaCos and with 64, for 100 to 100,000 classes.

    python benchmarks/scale.py results/                                   # about two hours on two cores
    python benchmarks/scale.py results/ --classes 1000 --batches 1024     # two minutes

The classes are synthetic. A class is a point in 16 dimensions. A sample is this point with noise, followed by
16 numbers that do not depend on the class; a fixed random network with two layers maps them to 256 "pixels".
An MLP learns to invert this. Training ends after --images images, for any number of classes. From
--sampled-from classes on, the head samples a tenth of them. All other options are defaults. Accuracy is
measured on 6,000 pairs of 1,000 other classes. Writes results.md.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plsc import Entry
from plsc.evaluate.verification import verify
from plsc.models import BaseModel

SIZE, HIDDEN, UNSEEN, PAIRS = 16, 16, 1000, 6000
NOISE, NUISANCE = 0.4, 1.5


class Mlp(BaseModel):
    """An MLP of three layers for synthetic images of so many values, followed by batch norm."""

    def __init__(self, emb_size: int = 512, inputs: int = SIZE * SIZE) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for before, after in ((inputs, 512), (512, 512)):
            parts += [nn.Linear(before, after, bias=False), nn.BatchNorm1d(after), nn.ReLU()]
        self.layers = nn.Sequential(*parts, nn.Linear(512, emb_size), nn.BatchNorm1d(emb_size))

    def build_network(self, input: Tensor, label: Tensor | None, is_train: bool = True) -> Tensor:
        """Return the embeddings [b, D]."""
        return self.layers(input.flatten(1))


class Classes:
    """Creates samples of any number of classes; higher class numbers are the unseen ones."""

    def __init__(self, classes: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.points = torch.randn(classes + UNSEEN, HIDDEN, generator=generator)
        self.first = torch.randn(2 * HIDDEN, 128, generator=generator) / math.sqrt(2 * HIDDEN)
        self.second = torch.randn(128, SIZE * SIZE, generator=generator) / math.sqrt(128)

    def images(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Return images [n, 1, SIZE, SIZE] of the labels."""
        noise = torch.randn(len(labels), 2 * HIDDEN, generator=generator)
        noise[:, HIDDEN:] *= NUISANCE
        noise[:, :HIDDEN] = self.points[labels] + NOISE * noise[:, :HIDDEN]
        pixels = torch.tanh(torch.tanh(2 * noise @ self.first) @ self.second * 2)
        return pixels.view(-1, 1, SIZE, SIZE)


def train(classes: int, batch: int, emb_size: int, scale: float, options: Any) -> dict[str, float]:
    """Train once; return the accuracy on pairs of unseen classes, for embeddings and for raw pixels."""
    made = Classes(classes)

    def reader() -> Any:
        generator = torch.Generator().manual_seed(options.seed)
        for _ in range(options.images // 4096):
            labels = torch.randint(classes, (4096,), generator=generator)
            yield from zip(made.images(labels, generator).numpy(), labels.tolist(), strict=True)

    ins = Entry()
    ins.set_model(Mlp(emb_size))
    ins.set_emb_size(emb_size)
    ins.set_image_shape((1, SIZE, SIZE))
    ins.set_class_num(classes)
    ins.set_train_batch_size(batch)
    ins.set_train_epochs(1)
    ins.set_train_image_num(options.images // 4096 * 4096)
    ins.set_with_test(False)
    ins.set_num_workers(0)
    ins.set_seed(options.seed)
    ins.set_scale(scale)
    if classes >= options.sampled_from:
        ins.set_sample_ratio(0.1)
    ins.set_model_save_dir(str(options.folder / f"{classes}-{batch}-{emb_size}-{scale:.1f}"))
    ins.set_save_every_n_epochs(0)
    ins.train_reader = reader
    result = ins.train()
    generator = torch.Generator().manual_seed(1)
    unseen = torch.randint(UNSEEN, (PAIRS, 2), generator=generator)
    unseen[1::2, 1] = unseen[1::2, 0]
    is_same = (unseen[:, 0] == unseen[:, 1]).numpy()
    images = made.images(classes + unseen.flatten(), generator)
    ins.set_checkpoint_dir(str(result.checkpoint))
    ins.predict_reader = lambda: ((image, 0) for image in images.numpy())
    found = verify(ins.predict().embeddings, is_same)
    raw = verify(images.flatten(1).numpy(), is_same)
    return {"accuracy": found.accuracy, "tar": found.tar_at_far[0.01], "raw": raw.accuracy}


def main() -> None:
    """Train each setting with both scales and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the results")
    parser.add_argument("--classes", type=int, nargs="*", default=[100, 1000, 10_000, 100_000])
    parser.add_argument("--batches", type=int, nargs="*", default=[32, 1024])
    parser.add_argument("--emb-sizes", type=int, nargs="*", default=[512])
    parser.add_argument("--images", type=int, default=1_000_000)
    parser.add_argument("--sampled-from", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    lines = [
        "| classes | D | batch | scale | accuracy | TAR at FAR 1e-2 | raw pixels |",
        "|---" * 7 + "|",
    ]
    for classes in options.classes:
        for emb_size in options.emb_sizes:
            for batch in options.batches:
                for scale in (math.sqrt(2) * math.log(classes - 1), 64.0):
                    found = train(classes, batch, emb_size, scale, options)
                    lines.append(
                        f"| {classes:,} | {emb_size} | {batch} | {scale:.1f} | {found['accuracy']:.3f} "
                        f"| {found['tar']:.3f} | {found['raw']:.3f} |"
                    )
                    (options.folder / "results.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
