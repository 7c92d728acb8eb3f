"""Long-tailed glyphs: which order of the images, and which margins, for classes with few images.

    python demo/make_glyphs.py build/long_tail/glyphs --images-per-class 110 --classes 1140
    python benchmarks/long_tail.py build/long_tail

902 characters, in random order: character k = 0, 1, ... has max(3, round(100 (k + 1)^-0.5)) images
for training (Zipf's law with exponent 0.5). Ten more images of each, which are never trained, are classified
by the nearest class weights. SmallResNet, ArcFace, 12 epochs with equally many steps for each way, otherwise
as in the demo; seeds 1, 2 and 3 of the training.

Accuracy is reported for the classes of at least 20 images (head), 6 to 19 (middle) and 3 to 5 (tail), and TAR
at FAR 1e-2 of all pairs of images of characters that are never trained. The ways: as they come; order
balanced (0.5, and 0); order classes (4 images per class); margins per class (as in the Landmarks recipe).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from plsc import Entry

EPOCHS, HELD_OUT, SEEDS = 12, 10, (1, 2, 3)
WAYS: dict[str, dict[str, object]] = {
    "as they come": {},
    "balanced 0.5": {"data.order": "balanced"},
    "balanced 0": {"data.order": {"name": "balanced", "balance": 0.0}},
    "4 images per class": {"data.order": "classes"},
    "margins per class": {"head.class_margins": {"a": 0.5, "b": 0.05}},
}
GROUPS = {"head": (20, 10**9), "middle": (6, 19), "tail": (3, 5)}


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
        test += [f"{path}\tc{k:05d}" for path in files[-HELD_OUT:]]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.tsv").write_text("\n".join(train) + "\n")
    (folder / "test.tsv").write_text("\n".join(test) + "\n")
    return np.array(counts)


def trained(folder: Path, run: Path, seed: int, options: dict[str, object]) -> Path:
    """Train unless it is done; return the checkpoint."""
    checkpoint = run / f"{EPOCHS - 1}"
    if not checkpoint.exists():
        ins = Entry()
        ins.set_dataset_dir(str(folder / "train.tsv"), image_folder=str((folder / "glyphs").resolve()))
        ins.set_flip(False)
        ins.set_num_workers(0)
        ins.set_model_name("SmallResNet")
        ins.set_image_shape((1, 32, 32))
        ins.set_emb_size(128)
        ins.set_dropout(0.0)
        ins.set_global_batch_size(128)
        ins.set_train_epochs(EPOCHS)
        ins.set_lr(0.1)
        ins.set_seed(seed)
        ins.set_max_last_checkpoint_num(1)
        ins.set_model_save_dir(str(run))
        for path, value in options.items():
            ins.options.set(path, value)
        ins.train()
    return checkpoint


def measure(folder: Path, checkpoint: Path, counts: np.ndarray) -> list[float]:
    """Return the accuracies of the groups and the TAR of unseen classes, in percent."""
    out = checkpoint.parent / "test"
    ins = Entry()
    ins.set_flip(False)
    ins.set_checkpoint_dir(str(checkpoint))
    ins.set_test_batch_size(500)
    found = ins.test("all_pairs", images=str(folder / "glyphs" / "unseen"), output=out / "unseen")
    lines = (folder / "test.tsv").read_text().splitlines()[1:]
    images, names = zip(*(line.split("\t") for line in lines), strict=True)
    ins = Entry()
    ins.set_flip(False)
    ins.set_checkpoint_dir(str(checkpoint))
    ins.set_test_batch_size(500)
    paths = [str(folder / "glyphs" / name) for name in images]
    labels = np.array([int(name.removeprefix("c")) for name in names])
    right = np.asarray(ins.predict(paths, field="id").ids) == labels
    groups = [
        right[(counts[labels] >= low) & (counts[labels] <= high)].mean() for low, high in GROUPS.values()
    ]
    return [100 * float(one) for one in (*groups, right.mean(), found["all_pairs"].tar_at_far[1e-2])]


def main() -> None:
    """Train every way with every seed; print the means and the standard deviations over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    counts = write_lists(folder / "glyphs", folder)
    sizes = [int(np.sum((counts >= low) & (counts <= high))) for low, high in GROUPS.values()]
    print(f"{counts.sum():,} images; classes: {dict(zip(GROUPS, sizes, strict=True))}")
    print("way | " + " | ".join([*GROUPS, "all", "TAR, unseen"]))
    for way, options in WAYS.items():
        found = []
        for seed in SEEDS:
            run = folder / "runs" / f"{way.replace(' ', '_')}-{seed}"
            found.append(measure(folder, trained(folder, run, seed, options), counts))
        means, deviations = np.mean(found, 0), np.std(found, 0, ddof=1)
        print(
            f"{way} | " + " | ".join(f"{m:.1f} ± {d:.1f}" for m, d in zip(means, deviations, strict=True)),
            flush=True,
        )


if __name__ == "__main__":
    main()
