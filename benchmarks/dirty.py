"""Find planted faults in glyphs: recall at precision 0.95, against two baselines; and train after applying.

    python demo/make_glyphs.py build/dirty/glyphs --images-per-class 30 --classes 1700
    python benchmarks/dirty_data.py build/dirty/glyphs build/dirty/3 --seed 3
    python benchmarks/dirty.py build/dirty/3 --cleanlab cleanlab/bin/python --unseen build/dirty/glyphs/unseen

1. `plsc data split --halves`; a network for each half (SmallResNet, 4 epochs, otherwise as in the demo);
   `plsc data clean --second`; for dirty/ and clean/.
2. Baselines with the same two networks, each on images that it has not seen: a vote of the 5 to 40 nearest
   neighbours; cleanlab's confident learning, from softmax probabilities of the class weights at scale 16, 32
   and 64, with three ranking rules. Of each, the best setting. Where they have no score for a kind, the
   nearest thing: for duplicates the cosine, for pairs of classes the votes between them, for classes that are
   two the mean score of their labels.
3. `plsc data apply` with all proposals, then training (4 epochs) on dirty/, clean/ and the corrected list,
   seeds 1, 2, 3: TAR at FAR 1e-2 of all pairs of images of classes that were never trained (--unseen).

Bounds, set before measuring: for every kind, recall at precision 0.95 above both baselines; in clean/,
proposals for at most 0.5 % of the images; after applying, at least 80 % of the gap of TAR between dirty and
clean, if the gap exceeds five standard errors.

Development used seed 1. The first report, of seed 2, missed the last bound (77 %). Since then images are
moved to a part of a divided class (tried on seed 1: 95.3 % TAR, if an image is moved from a probability of
0.5, 0.8 or 0.9 on; so 0.5 stays). What is reported now is seed 3.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from plsc import Entry, open_embeddings
from plsc.checkpoint import load_weights
from plsc.clean import faults
from plsc.clean.faults import (
    compare_labels,
    find_duplicates,
    mixed_classes,
    planted_copies,
    same_classes,
    sure_of_class,
    wrong_labels,
)
from plsc.clean.review import Proposals, open_images
from plsc.gallery.gallery import nearest


def train(data: Path, images: Path | None, run: Path, seed: int, epochs: int = 4) -> Path:
    """Train unless it is done; return the checkpoint."""
    checkpoint = run / f"{epochs - 1}"
    if not checkpoint.exists():
        ins = Entry()
        ins.set_dataset_dir(str(data), **({} if images is None else {"image_folder": str(images)}))
        ins.set_flip(False)
        ins.set_num_workers(0)
        ins.set_model_name("SmallResNet")
        ins.set_image_shape((1, 32, 32))
        ins.set_emb_size(128)
        ins.set_dropout(0.0)
        ins.set_global_batch_size(128)
        ins.set_train_epochs(epochs)
        ins.set_lr(0.1)
        ins.set_seed(seed)
        ins.set_log_period(30)
        ins.set_test_batch_size(500)
        ins.set_max_last_checkpoint_num(1)
        ins.set_model_save_dir(str(run))
        ins.train()
    return checkpoint


def plsc(*words: object) -> None:
    """Run a command of plsc."""
    subprocess.run([sys.executable, "-m", "plsc.cli", *map(str, words)], check=True)


def recall_at(precision: float, scores: np.ndarray, right: np.ndarray, total: int) -> float:
    """Return the highest recall of a threshold with this precision."""
    order = np.argsort(-scores, kind="stable")
    found = np.cumsum(right[order])
    enough = np.flatnonzero(found >= precision * np.arange(1, len(order) + 1))
    return float(found[enough[-1]] / total) if len(enough) else 0.0


class Truth:
    """What was planted, by the numbers of images and classes of a listing."""

    def __init__(self, path: Path, images: Any) -> None:
        planted = json.loads(path.read_text())
        self.names, self.labels = images.listing.classes, images.labels
        paths = [images.listing.paths[number] for number in images.numbers]
        self.is_wrong = np.array([name in planted["flipped"] for name in paths])
        self.right = [planted["flipped"].get(name, name.split("/")[0]) for name in paths]
        self._two = {frozenset(map(self.names.index, pair)) for pair in planted["two_classes"]}
        self._doubled = {frozenset(map(paths.index, pair)) for pair in planted["duplicates"]}
        self._one_class = np.isin(self.names, planted["one_class"])
        self._alike = {frozenset(pair) for pair in planted["alike"]}

    def _are_alike(self, pairs: np.ndarray) -> np.ndarray:
        characters = np.array([int(name) % 50_000 for name in self.names])[pairs]
        return np.array([frozenset(pair) in self._alike for pair in characters.tolist()], bool)

    def wrong(self, likely: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Return which images have a wrong label, which ones do not count, and how many there are."""
        alike = self._are_alike(np.stack([self.labels, likely], 1))
        return self.is_wrong, ~self.is_wrong & alike, int(self.is_wrong.sum())

    def doubled(self, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Do the same for pairs of images that are duplicates."""
        right = np.array([frozenset(pair) in self._doubled for pair in pairs.tolist()], bool)
        labels = self.labels[pairs]
        of_one = (labels[:, 0] == labels[:, 1]) | self.is_wrong[pairs].any(1)  # perhaps duplicates in fact
        return right, ~right & (of_one | self._are_alike(labels)), len(self._doubled)

    def same(self, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Do the same for pairs of classes that are one."""
        right = np.array([frozenset(pair) in self._two for pair in pairs.tolist()], bool)
        return right, ~right & self._are_alike(pairs), len(self._two)

    def mixed(self, classes: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Do the same for classes that are two."""
        right = self._one_class[classes]
        return right, np.zeros(len(right), bool), int(self._one_class.sum())


def recall_of(scores: np.ndarray, right: np.ndarray, ignored: np.ndarray, total: int) -> float:
    """Return the recall at precision 0.95."""
    return recall_at(0.95, scores[~ignored], right[~ignored], max(total, 1))


def proposed(found: faults.Found) -> faults.Found:
    """Return the suspects that are proposed."""
    return replace(
        found,
        sure=found.sure[found.sure >= faults.LEAST_SURE],
        subjects=found.subjects[found.sure >= faults.LEAST_SURE],
    )


def ours(images: Any, truth: Truth) -> None:
    """Print how the proposals and the whole ranking of each kind compare with what was planted."""
    views, labels, classes = images.views, images.labels, len(truth.names)
    kept = np.ones(len(labels), bool)
    first = compare_labels(views, labels, kept, classes)
    scores = first.scores()
    wrong = proposed(wrong_labels(first))
    kept[wrong.subjects[:, 0]] = False
    same = proposed(same_classes(views, labels, kept, classes))
    proposals = Proposals(images)
    proposals.same(same, kept)
    mixed, smaller = mixed_classes(views, labels, kept, classes)
    mixed = proposed(mixed)
    proposals.mixed(mixed, smaller)
    divided, names = proposals.divided.labels, proposals.divided.listing.classes
    again = compare_labels(views, divided, kept, len(names), first)
    parts_of = np.array([truth.names.index(name.split("_")[0]) for name in names])  # of a part of a class
    again = replace(again, likely=parts_of[again.likely])
    copies = planted_copies(images.source, images.numbers, images.pixels)
    doubled = find_duplicates(first.near, images.pixels, copies)
    kinds = {
        "wrong labels": (wrong, lambda found: truth.wrong(again.likely), scores),
        "duplicates": (doubled, lambda found: truth.doubled(found.subjects), None),
        "two classes that are one": (
            same,
            lambda found: truth.same(found.subjects),
            None,
        ),
        "classes that are two": (
            mixed,
            lambda found: truth.mixed(found.subjects[:, 0]),
            None,
        ),
    }
    faults.LEAST_SURE = -1.0
    ranked = {
        "two classes that are one": same_classes(views, labels, kept, classes),
        "classes that are two": mixed_classes(views, labels, kept, classes)[0],
    }
    faults.LEAST_SURE = 0.5
    print("plsc:")
    for kind, (found, judged, every) in kinds.items():
        right, ignored, total = judged(found)
        if every is not None:
            recall = recall_of(every, right, ignored, total)
            right, ignored = right[found.subjects[:, 0]], ignored[found.subjects[:, 0]]
        else:
            whole = ranked.get(kind, found)
            places = -np.arange(len(whole.sure), dtype=float)  # in the order of the scores
            recall = recall_of(places, *judged(whole))
        counted = right[~ignored]
        print(
            f"  {kind}: {recall:.3f}; planted {total:,}, estimated {found.low:,.0f} to {found.high:,.0f}, "
            f"proposed {len(right):,}, of which {ignored.sum():,} do not count; precision "
            f"{counted.mean() if len(counted) else 1:.3f}, recall {counted.sum() / max(total, 1):.3f}"
        )
    right = np.array([truth.names.index(name) for name in truth.right])
    is_right = again.likely == right
    share = sure_of_class(again, kept, wrong.subjects[:, 0])
    rows = wrong.subjects[:, 0]
    print(
        f"  likely class of wrong labels: {is_right[truth.is_wrong].mean():.3f} right; of those moved, "
        f"{(share >= 0.5).mean():.3f}, {is_right[rows][share >= 0.5].mean():.3f}"
    )
    touched = len(np.unique(rows)) / len(labels)
    print(f"  images with a proposed new label: {touched:.2%}")


def baselines(work: Path, images: Any, truth: Truth, cleanlab: str | None) -> None:
    """Print the best recall at precision 0.95 of a vote of the nearest neighbours, and of cleanlab."""
    labels, names = truth.labels, truth.names

    def best(kind: str, tried: dict[str, Any]) -> None:
        found = {name: recall_of(scores, *judged) for name, (scores, judged) in tried.items()}
        name = max(found, key=lambda one: found[one])
        print(f"  {kind}: {found[name]:.3f} ({name})")

    votes: dict[str, Any] = {}
    merges: dict[str, Any] = {}
    divisions: dict[str, Any] = {}
    cosines: dict[str, Any] = {}
    for k in (5, 10, 20, 40):
        shares, likely = np.zeros(len(labels)), np.zeros(len(labels), np.int64)
        joint = np.zeros((len(names), len(names)))
        for view in images.views:
            numbers, _ = nearest(view.unit, view.unit, k + 1)
            rows = np.flatnonzero(view.unseen)
            voted = labels[numbers[rows]]
            voted[numbers[rows] == rows[:, None]] = -1
            for row, some in zip(rows, voted, strict=True):
                counts = np.bincount(some[some >= 0], minlength=len(names))
                own, counts[labels[row]] = counts[labels[row]], 0
                likely[row], shares[row] = counts.argmax(), (counts.max() - own) / k
                joint[labels[row]] += counts
            if k == 5:
                near = np.einsum("nd,nkd->nk", view.unit, view.unit[numbers])
                cosines[f"view {len(cosines)}"] = near, numbers
        votes[f"k = {k}"] = shares, truth.wrong(likely)
        joint = joint + joint.T
        one, other = np.nonzero(np.triu(joint, 1))
        merges[f"k = {k}"] = joint[one, other], truth.same(np.stack([one, other], 1))
        bad = np.bincount(labels, shares) / np.bincount(labels)
        divisions[f"k = {k}"] = bad, truth.mixed(np.arange(len(names)))
    tried = {}
    for name, (scores, numbers) in cosines.items():
        pairs = np.stack([np.repeat(np.arange(len(labels)), numbers.shape[1]), numbers.ravel()], 1)
        is_other = labels[pairs[:, 0]] != labels[pairs[:, 1]]
        pairs, scores = pairs[is_other], scores.ravel()[is_other]
        pairs, first = np.unique(np.sort(pairs, 1), axis=0, return_index=True)
        tried[f"cosine, {name}"] = scores[first], truth.doubled(pairs)
    print("nearest neighbours:")
    best("wrong labels", votes)
    best("duplicates", tried)
    best("two classes that are one", merges)
    best("classes that are two", divisions)
    if cleanlab is None:
        return
    cosine = np.empty((len(labels), len(names)), np.float32)
    for half, view in zip((1, 2), images.views, strict=True):
        weight = load_weights(work / f"half{half}" / "3", "class_weights")["weight"].numpy()
        weight = weight / np.linalg.norm(weight, axis=1, keepdims=True)
        cosine[view.unseen] = view.unit[view.unseen] @ weight.T
    votes, merges, divisions = {}, {}, {}
    for scale in (16, 32, 64):
        exponents = np.exp(scale * (cosine - cosine.max(1, keepdims=True)))
        np.savez(
            work / "probabilities.npz",
            labels=labels,
            probabilities=exponents / exponents.sum(1, keepdims=True),
        )
        subprocess.run([cleanlab, "benchmarks/dirty_cleanlab.py", work / "probabilities.npz"], check=True)
        exponents[np.arange(len(labels)), labels] = 0
        likely = exponents.argmax(1)
        judged = truth.wrong(likely)
        with np.load(work / "cleanlab.npz") as file:
            for rule in ("self_confidence", "normalized_margin", "confidence_weighted_entropy"):
                votes[f"{rule}, scale {scale}"] = file[rule], judged
            merges[f"scale {scale}"] = file["joint"], truth.same(file["pairs"])
            divisions[f"scale {scale}"] = file["badness"], truth.mixed(file["classes"])
    print("cleanlab:")
    best("wrong labels", votes)
    best("two classes that are one", merges)
    best("classes that are two", divisions)


def retrain(folder: Path, unseen: Path) -> None:
    """Print the TAR of networks trained on the dirty, clean and corrected images."""
    corrected = folder / "corrected"
    if not corrected.exists():
        plsc("data", "apply", folder / "dirty", folder / "dirty-work" / "clean" / "changes.tsv", corrected)
    data = {
        "dirty": (folder / "dirty", None),
        "clean": (folder / "clean", None),
        "corrected": (corrected / "list.tsv", folder / "dirty"),
    }
    found: dict[str, list[float]] = {name: [] for name in data}
    for seed in (1, 2, 3):
        for name, (place, images) in data.items():
            ins = Entry()
            ins.set_flip(False)
            ins.set_checkpoint_dir(str(train(place, images, folder / "runs" / f"{name}{seed}", seed)))
            ins.set_test_batch_size(500)
            result = ins.test("all_pairs", images=str(unseen), output=folder / "runs" / f"{name}{seed}-test")
            found[name].append(100 * result["all_pairs"].tar_at_far[1e-2])
            print(f"seed {seed}, {name}: TAR {found[name][-1]:.2f} %", flush=True)
    dirty, clean, new = (np.array(found[name]) for name in data)
    gaps = clean - dirty
    error = gaps.std(ddof=1) / len(gaps) ** 0.5
    print(
        f"TAR at FAR 1e-2: dirty {dirty.mean():.2f}, clean {clean.mean():.2f}, corrected {new.mean():.2f} %; "
        f"gap {gaps.mean():.2f} (standard error {error:.2f}), "
        f"{(new - dirty).mean() / gaps.mean():.0%} of it closed"
    )


def main() -> None:
    """Clean both datasets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="output folder of dirty_data.py")
    parser.add_argument("kinds", nargs="*", default=["dirty", "clean"])
    parser.add_argument("--cleanlab", help="Python with cleanlab; see dirty_cleanlab.py")
    parser.add_argument("--unseen", type=Path, help="images of classes that are not trained: also train")
    options = parser.parse_args()
    for kind in options.kinds:
        data, work = options.folder / kind, options.folder / f"{kind}-work"
        if not (work / "halves").exists():
            plsc("data", "split", data, work / "halves", "--halves")
        models = [
            train(work / "halves" / f"half{half}.tsv", data, work / f"half{half}", seed=half)
            for half in (1, 2)
        ]
        if not (work / "clean" / "changes.tsv").exists():
            plsc("data", "clean", models[0], data, work / "clean", "--second", models[1])
        embeddings = [open_embeddings(work / "clean" / name) for name in ("embeddings", "embeddings2")]
        images = open_images(data, embeddings)
        truth = Truth(options.folder / f"{kind}.json", images)
        ours(images, truth)
        if kind == "dirty":
            baselines(work, images, truth, options.cleanlab)
    if options.unseen:
        retrain(options.folder, options.unseen)


if __name__ == "__main__":
    main()
