"""Time and memory of finding faults among synthetic embeddings of 512 values, 20 per class.

    python benchmarks/clean_scale.py --images 1000000

Memory is the highest resident memory minus that before the search, which holds the embeddings. The search
for duplicates is that for neighbours; images are not read. Bound, set before measuring: a million embeddings
in 30 minutes on two cores, with 4 GiB.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np

from plsc.clean.faults import (
    LEAST_SURE,
    View,
    compare_labels,
    mixed_classes,
    same_classes,
    wrong_labels,
)

SIZE, PER_CLASS, PART, NOISE, FLIPPED = 512, 20, 2**15, 0.7, 0.05


def embeddings(images: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return normalised embeddings, labels, and which labels are wrong."""
    rng = np.random.default_rng(0)
    right = np.arange(images) // PER_CLASS
    centres = rng.standard_normal((images // PER_CLASS + 1, SIZE), np.float32)
    unit = np.empty((images, SIZE), np.float32)
    for first in range(0, images, PART):
        some = centres[right[first : first + PART]]
        some += NOISE * rng.standard_normal(some.shape, np.float32)
        unit[first : first + PART] = some / np.linalg.norm(some, axis=1, keepdims=True)
    is_wrong = rng.random(images) < FLIPPED
    labels = np.where(is_wrong, rng.integers(right.max() + 1, size=images), right)
    return unit, labels, is_wrong


def main() -> None:
    """Print the seconds of each step, and the memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--images", type=int, default=1_000_000)
    options = parser.parse_args()
    unit, labels, is_wrong = embeddings(options.images)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    views, classes, kept = (
        [View(unit, np.ones(len(unit), bool))],
        int(labels.max()) + 1,
        np.ones(len(unit), bool),
    )
    begin = last = time.perf_counter()

    def done(what: str) -> None:
        nonlocal last
        now = time.perf_counter()
        print(f"{what}: {now - last:.1f} s", flush=True)
        last = now

    first = compare_labels(views, labels, kept, classes)
    wrong = wrong_labels(first)
    found = wrong.subjects[wrong.sure >= LEAST_SURE, 0]
    kept[found] = False
    done(f"wrong labels and neighbours of all images, recall {first.recall:.3f}")
    compare_labels(views, labels, kept, classes, first)
    done("likely classes")
    same_classes(views, labels, kept, classes)
    done("two classes that are one")
    mixed_classes(views, labels, kept, classes)
    done("classes that are two")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    hits = is_wrong[found]
    print(
        f"{len(unit):,} images: {last - begin:.0f} s, {(peak - before) / 2**20:.2f} GiB above the data; "
        f"wrong labels: precision {hits.mean():.3f}, recall {hits.sum() / is_wrong.sum():.3f}"
    )


if __name__ == "__main__":
    main()
