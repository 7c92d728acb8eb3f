"""What a step is drawn from, and what it costs in accuracy: the classes of the softmax, and the images.

    python benchmarks/sampling.py classes                 # synthetic classes, 10,000: an hour
    python benchmarks/sampling.py classes --classes 20000
    python demo/make_glyphs.py build/long_tail/glyphs --images-per-class 110 --classes 1140
    python benchmarks/sampling.py images build/long_tail  # long-tailed glyphs: hours
    python benchmarks/sampling.py classes --quick         # to test the script

classes: groups of ten that are similar. A sample is a random nonlinear image (64 values) of its class centre
with noise; 8 samples per class are trained (4 from 20,000 classes on), 2 are held out. A network of two
layers and an ArcFace head (m = 0.2, s = 32). Held-out rank-1: the nearest class weights of all classes. Goal,
set before measuring: two thirds of the gap between all classes and sampled ones.

images: 902 characters, in random order: character k = 0, 1, ... has max(3, round(100 (k + 1)^-0.5)) images
for training (Zipf's law with exponent 0.5). Ten more images of each, which are never trained, are classified
by the nearest class weights. Training as in demo/train_glyphs.py, but 12 epochs, with equally many steps for
each way. Accuracy is reported for the classes of at least 20 images (head), 6 to 19 (middle) and 3 to 5
(tail).
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from measuring import glyph_entry
from torch import Tensor, nn

from plsc.heads import RowSGD, Sampling, ShardedHead
from plsc.heads.margins import ArcFace

GROUP, LATENT, SEEN, SIZE, HELD_OUT = 10, 24, 64, 64, 2
SCALE, MARGIN, RATIO, RATE = 32.0, 0.2, 0.1, 0.1
EPOCHS, TESTED, SEEDS = 12, 10, (1, 2, 3)
ORDERS: dict[str, dict[str, object]] = {
    "as they come": {},
    "balanced 0.5": {"data.order": "balanced"},
    "4 images per class": {"data.order": "classes"},
    "margins per class": {"head.class_margins": {"a": 0.5, "b": 0.05}},
}
GROUPS = {"head": (20, 10**9), "middle": (6, 19), "tail": (3, 5)}


def compare_classes(options: argparse.Namespace) -> None:
    """Train every way of sampling with every seed; print means and standard deviations."""
    seeds = (1,) if options.quick else (1, 2, 3, 4, 5)
    for way in ways(1):
        found = np.array([train_classes(way, options, seed) for seed in seeds])
        print(way, "rank-1", mean_and_spread(found[:, 0]), f"%, {found[:, 1].mean():.0f} s", flush=True)


def ways(steps: int) -> dict[str, Sampling]:
    """Return the sampling of each way."""
    return {
        "all classes": Sampling(),
        "sampled": Sampling(RATIO),
        "sampled, up to half of them hard": Sampling(RATIO, hard=0.5),
        "all classes for a twentieth of the steps, then as the last": Sampling(
            {0: 1.0, max(1, steps // 20): RATIO}, hard=0.5
        ),
    }


def samples(classes: int, trained: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return training samples [C, trained, 64] and held-out ones [C, 2, 64]."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randn(-(-classes // GROUP), LATENT, generator=generator)
    noise = torch.randn(classes, LATENT, generator=generator)
    centres = groups.repeat_interleave(GROUP, 0)[:classes] + 0.5 * noise
    each = torch.randn(classes, trained + HELD_OUT, LATENT, generator=generator)
    mixed = (centres[:, None] + 0.5 * each) @ torch.randn(LATENT, SEEN, generator=generator) / LATENT**0.5
    return mixed.tanh()[:, :trained], mixed.tanh()[:, trained:]


def train_classes(way: str, options: argparse.Namespace, seed: int) -> tuple[float, float]:
    """Return the held-out rank-1 in percent, and the seconds of the training."""
    classes = 200 if options.quick else options.classes
    each, size, epochs = (4, 64, 4) if classes >= 20_000 else (8, 256, 10)
    trained, held_out = samples(classes, each, seed)
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.Linear(SEEN, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, SIZE), nn.BatchNorm1d(SIZE)
    )
    count = classes * each
    steps = epochs * (count // size)
    head = ShardedHead(classes, SIZE, ArcFace(SCALE, MARGIN), sampling=ways(steps)[way], seed=seed)
    rows = RowSGD(head, lr=RATE, momentum=0.9)
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE, momentum=0.9, nesterov=True)
    flat, step, begin = trained.reshape(count, SEEN), 0, time.perf_counter()
    for epoch in range(epochs):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(1000 * seed + epoch))
        for batch in order[: count // size * size].view(-1, size):
            rate = RATE * min(1, (step + 1) / 100) * (1 + math.cos(math.pi * step / steps)) / 2
            for group in (*optimizer.param_groups, *rows.param_groups):
                group["lr"] = rate
            optimizer.zero_grad()
            head(network(flat[batch]), batch // each).loss.backward()
            optimizer.step()
            rows.step()
            step += 1
    seconds = time.perf_counter() - begin
    network.eval()
    weight = nn.functional.normalize(head.weight.detach())
    with torch.no_grad():
        parts = network(held_out.reshape(-1, SEEN)).split(1000)
        near = torch.cat([(part @ weight.T).argmax(1) for part in parts])
    right = near == torch.arange(classes).repeat_interleave(HELD_OUT)
    return 100 * float(right.float().mean()), seconds


def compare_images(options: argparse.Namespace) -> None:
    """Train with every order of the images and every seed; print means and standard deviations."""
    folder = options.folder
    counts = write_lists(folder / "glyphs", folder)
    print(f"{counts.sum():,} images; way | {' | '.join([*GROUPS, 'all'])}")
    for way, changed in ORDERS.items():
        found = []
        for seed in SEEDS:
            run = folder / "runs" / f"{way.replace(' ', '_')}-{seed}"
            if not (run / f"{EPOCHS - 1}").exists():
                ins = glyph_entry(run, seed, EPOCHS)
                images = str((folder / "glyphs").resolve())
                ins.set_dataset_dir(str(folder / "train.tsv"), image_folder=images)
                for path, value in changed.items():
                    ins.options.set(path, value)
                ins.train()
            found.append(accuracies(folder, run, counts))
        print(way, "|", " | ".join(map(mean_and_spread, np.array(found).T)), flush=True)


def write_lists(glyphs: Path, folder: Path) -> np.ndarray:
    """Write train.tsv and test.tsv; return the number of training images of each class."""
    paths: dict[int, list[str]] = {}
    for line in (glyphs / "label.txt").read_text().splitlines():
        path, label = line.split("\t")
        paths.setdefault(int(label), []).append(path)
    rng = np.random.default_rng(0)
    train, test = (["path\tclass_name"] for _ in range(2))
    counts = []
    for k, label in enumerate(rng.permutation(sorted(paths)).tolist()):
        files = rng.permutation(paths[label]).tolist()
        count = max(3, round(100 * (k + 1) ** -0.5))
        counts.append(count)
        # The name of a class is its place k, so labels are in the order of the counts.
        train += [f"{path}\tc{k:05d}" for path in files[:count]]
        test += [f"{path}\tc{k:05d}" for path in files[-TESTED:]]
    (folder / "train.tsv").write_text("\n".join(train) + "\n")
    (folder / "test.tsv").write_text("\n".join(test) + "\n")
    return np.array(counts)


def accuracies(folder: Path, run: Path, counts: np.ndarray) -> list[float]:
    """Return the accuracies of the groups and of all classes, in percent."""
    lines = (folder / "test.tsv").read_text().splitlines()[1:]
    images, names = zip(*(line.split("\t") for line in lines), strict=True)
    ins = glyph_entry(run)
    ins.set_checkpoint_dir("last")
    labels = np.array([int(name.removeprefix("c")) for name in names])
    found = ins.predict([str(folder / "glyphs" / name) for name in images], field="id").ids
    right = np.asarray(found) == labels
    groups = [(counts[labels] >= low) & (counts[labels] <= high) for low, high in GROUPS.values()]
    return [100 * float(right[group].mean()) for group in (*groups, slice(None))]


def mean_and_spread(values: np.ndarray) -> str:
    """Return the mean and the standard deviation over the seeds."""
    return f"{values.mean():.2f} ± {values.std(ddof=1) if len(values) > 1 else 0:.2f}"


def main() -> None:
    """Run the chosen comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("classes", "images"))
    parser.add_argument("folder", type=Path, nargs="?", help="images: with the folder `glyphs`")
    parser.add_argument("--classes", type=int, default=10_000)
    parser.add_argument("--quick", action="store_true", help="classes: 200 of them, one seed")
    options = parser.parse_args()
    (compare_classes if options.what == "classes" else compare_images)(options)


if __name__ == "__main__":
    main()
