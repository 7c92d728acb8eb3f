"""What 8-bit class weights, and drawing them in pages, cost in accuracy: paired runs over several seeds.

    python demo/make_glyphs.py demo/output/glyphs
    python benchmarks/coded_weights.py build/coded long demo/output/glyphs
    python benchmarks/coded_weights.py build/coded pages demo/output/glyphs
    python benchmarks/coded_weights.py build/coded synthetic

- long: 20,000 steps of the full softmax on the demo's 4,168 classes, float32 against int8. In every second
  class only three images are trained; accuracy is reported for these classes, too.
- pages: a tenth of these classes per step, 8 bits, drawn one by one, in pages of a random order of the
  classes, and in pages of an order in which neighbours look alike.
- synthetic: the same with 100,000 synthetic classes; there an order is by the first coordinate of a class.

An MLP with batch norm, ArcFace, SGD for the network and row-wise Adagrad for the class weights, a cosine
schedule. The arms of a seed have the same network, batches and initial class weights. Accuracy is the share
of held-out images of the trained classes whose own class is nearest, in percent.

A loss is the mean over the seeds of the difference to the first arm. Bound, set before measuring: at most 0.5
points on all held-out images, in each arm.

Every run is a process with one thread, two at a time. Finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from scale import Classes
from torch import Tensor, nn

from plsc.heads import RowAdagrad, Sampling, ShardedHead, build_margin
from plsc.heads.weights import decode_rows, initial_rows

FEW, DIMENSION = 3, 64
ARMS = {
    "long": ("float32", "int8"),
    "pages": ("rows", "pages, random order", "pages, similar order"),
    "synthetic": ("rows", "pages, random order", "pages, similar order"),
}


@dataclass
class Samples:
    """Inputs [N, F] and classes [N], to train and held out; `order`: of the classes by similarity."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    order: Tensor
    has_few: Tensor  # bool [classes]


def read_glyphs(folder: Path, seed: int) -> Samples:
    """Return the demo's images; three of each class are trained (every second class) or held out (others)."""
    lines = [line.split() for line in (folder / "label.txt").read_text().splitlines()]
    labels = torch.tensor([int(label) for _, label in lines])
    cache = folder.parent / "glyphs.pt"
    if not cache.exists():
        images = [np.array(Image.open(folder / path).convert("L")) for path, _ in lines]
        torch.save(torch.from_numpy(np.stack(images)).flatten(1), cache)
    pixels = (torch.load(cache).float() - 127.5) / 128
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(labels), generator=generator)
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    sizes = torch.bincount(labels)
    place = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    has_few = torch.arange(len(sizes)) % 2 == 0
    is_trained = (place < FEW) == has_few[labels[by_class]]
    trained, held_out = by_class[is_trained], by_class[~is_trained]
    centers = torch.zeros(len(sizes), pixels.shape[1]).index_add_(0, labels, pixels) / sizes[:, None]
    return Samples(
        (pixels[trained], labels[trained]),
        (pixels[held_out], labels[held_out]),
        chain(nn.functional.normalize(centers)),
        has_few,
    )


def chain(centers: Tensor) -> Tensor:
    """Return an order in which each class follows one of its nearest neighbours, greedily."""
    similarity = centers @ centers.T
    order = [0]
    for _ in range(len(centers) - 1):
        similarity[:, order[-1]] = -torch.inf
        order.append(int(similarity[order[-1]].argmax()))
    return torch.tensor(order)


def make_samples(classes: int, seed: int) -> Samples:
    """Return four training samples and a held-out one (of 10,000 classes) of synthetic classes."""
    made, generator = Classes(classes), torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat(4)
    test = torch.randperm(classes, generator=generator)[:10_000]
    return Samples(
        (made.images(labels, generator).flatten(1), labels),
        (made.images(test, generator).flatten(1), test),
        made.points[:classes, 0].argsort(),
        torch.zeros(classes, dtype=torch.bool),
    )


def numbered(arm: str, samples: Samples) -> Tensor:
    """Return the number of each class in the head of an arm."""
    classes = len(samples.order)
    if arm.endswith("similar order"):
        return samples.order.argsort()
    return torch.randperm(classes, generator=torch.Generator().manual_seed(7))


def run(part: str, arm: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Train one arm and return its accuracies in percent."""
    is_synthetic = part == "synthetic"
    samples = make_samples(options.classes, seed) if is_synthetic else read_glyphs(options.glyphs, seed)
    number = numbered(arm, samples)
    pixels, labels = samples.train
    torch.manual_seed(seed)
    width = 512
    network = nn.Sequential(
        nn.Linear(pixels.shape[1], width, bias=False), nn.BatchNorm1d(width), nn.ReLU(),
        nn.Linear(width, width, bias=False), nn.BatchNorm1d(width), nn.ReLU(),
        nn.Linear(width, DIMENSION), nn.BatchNorm1d(DIMENSION),
    )  # fmt: skip
    margin = build_margin("arcface", scale="auto")
    sampling = None if part == "long" else Sampling(options.ratio, in_pages=arm != "rows")
    dtype = "float32" if arm == "float32" else "int8"
    head = ShardedHead(len(number), DIMENSION, margin, sampling=sampling, row_dtype=dtype, seed=seed)
    with torch.no_grad():  # a class has the same initial weights in each arm
        initial = initial_rows(seed, 0, len(number), DIMENSION, torch.int8)
        head.weight[number] = initial if dtype == "int8" else decode_rows(initial)
    rows = RowAdagrad(head, lr=options.lr)
    sgd = torch.optim.SGD(network.parameters(), options.lr, momentum=0.9, weight_decay=5e-4)
    steps, warmup = options.steps[part], 500
    generator = torch.Generator().manual_seed(100 + seed)
    order, position = torch.empty(0, dtype=torch.int64), 0
    for step in range(steps):
        if position + options.batch > len(order):
            order, position = torch.randperm(len(labels), generator=generator), 0
        chosen, position = order[position : position + options.batch], position + options.batch
        factor = min(1.0, (step + 1) / warmup) * (1 + math.cos(math.pi * step / steps)) / 2
        for group in (*sgd.param_groups, *rows.param_groups):
            group["lr"] = options.lr * factor
        sgd.zero_grad()
        loss = head(network(pixels[chosen]), number[labels[chosen]]).loss
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 5.0)
        sgd.step()
        rows.step()
        if step % 1000 == 999:
            print(f"{part} {arm} seed {seed} step {step + 1} loss {loss.item():.3f}", file=sys.stderr)
    network.eval(), head.eval()
    pixels, labels = samples.test
    with torch.no_grad():
        hits = [
            head.topk(network(some), 1)[1][:, 0] == number[classes]
            for some, classes in zip(pixels.split(2000), labels.split(2000), strict=True)
        ]
    hit, few = torch.cat(hits).float() * 100, samples.has_few[labels]
    found = {"all": hit.mean().item()}
    if few.any():
        found |= {"few images": hit[few].mean().item(), "others": hit[~few].mean().item()}
    return found


def finished(part: str, arm: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Return the result of a run, which is made in another process if there is none yet."""
    path = options.folder / f"{part}-{arm.replace(', ', '-').replace(' ', '-')}-{seed}.json"
    if not path.exists():
        command = [sys.executable, __file__, *sys.argv[1:], "--run", arm, str(seed)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
        path.write_text(done.stdout)
    return json.loads(path.read_text())


def main() -> None:
    """Run the missing trainings of a part and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the results")
    parser.add_argument("part", choices=ARMS)
    parser.add_argument("glyphs", type=Path, nargs="?", help="folder that demo/make_glyphs.py made")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3, 4, 5])
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--ratio", type=float, default=0.1)
    parser.add_argument("--classes", type=int, default=100_000, help="number of synthetic classes")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.steps = {"long": 20_000, "pages": 4_000, "synthetic": 6_000}
    options.folder.mkdir(parents=True, exist_ok=True)
    part = options.part
    if options.run:
        print(json.dumps(run(part, options.run[0], int(options.run[1]), options)))
        return
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        jobs = {
            (arm, seed): pool.submit(finished, part, arm, seed, options)
            for seed in options.seeds
            for arm in ARMS[part]
        }
    found = {key: job.result() for key, job in jobs.items()}
    names = list(found[ARMS[part][0], options.seeds[0]])
    print(f"| arm | {' | '.join(names)} | loss of {names[0]}: mean, each seed |")
    print("|---" * (len(names) + 2) + "|")
    for arm in ARMS[part]:
        cells = [statistics.mean(found[arm, seed][name] for seed in options.seeds) for name in names]
        losses = [found[ARMS[part][0], seed][names[0]] - found[arm, seed][names[0]] for seed in options.seeds]
        each = ", ".join(f"{loss:.2f}" for loss in losses)
        print(
            f"| {arm} | {' | '.join(f'{cell:.2f}' for cell in cells)} "
            f"| {statistics.mean(losses):.2f}: {each} |"
        )


if __name__ == "__main__":
    main()
