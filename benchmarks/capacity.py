"""Predict the FPIR of galleries of N from embeddings of m classes, and compare it with measured FPIRs.

python benchmarks/capacity.py build/capacity --glyphs demo/output/glyphs --omniglot omniglot_small2.zip
python benchmarks/capacity.py build/capacity         # the files are there

The only input are .npz files with `embeddings` [n, D] and `labels` [n] of classes that the network never saw.

Protocol, fixed before anything was measured on these files:

Draws. 200 per m, from seeds [2024, m, draw]. A draw permutes the classes of a file: the first m calibrate,
the next 4 m are the pool of the gallery, the next 800 (or as many as are left: 798 for m = 500) are unknown.
glyphs.npz has about 3,300 classes: m = 50, 150, 500 and N = m, 2 m, 4 m. omniglot.npz has 156: m = 30,
N = 30, 60, with 66 unknown classes. The gallery of N are the first N classes of the pool, one random image
each. Probes are all images of the unknown classes; each class has the same weight.
Measured FPIR of a draw at threshold t: the weighted share of probes whose best score is at least t.

Cells. (m, N, level) for the levels 0.01, 0.05, 0.2 and 0.4. The threshold of a cell is the one where the
mean of the measured FPIR over its draws is the level. E = m level / (2 k) for N = k m is the number of class
pairs that are expected to exceed it among the calibration classes.

Ways. `plsc.evaluate.capacity`; and two rules with FAR from all images of the calibration classes, each pair
of classes with the same weight: 1 - (1 - FAR)^N, and FAR N, at most 1. Their 90 % intervals are the 5 % and
95 % quantiles of 200 bootstraps of the classes; pairs of a class with its own copy are left out.

Criteria, per cell:
1. The 90 % interval covers the measured FPIR of the draw in 85 to 97 % of the draws. Where E < 1, counts are
   too coarse for 90 %: there, coverage above 97 % is expected and reported, and below 85 % is a failure.
2. The mean interval score (Gneiting and Raftery 2007, equation 43, alpha 0.1), divided by the level, is lower
   than that of both rules.
3. Where E >= 10, the point prediction is within a factor of 1.5 of the measured FPIR in 80 % of the draws; no
   point prediction counts as a miss. Where E < 10, the share of draws with a point prediction is reported.

Also reported: the measured FPIR at the threshold that each way returns for a wanted FPIR of 0.01, 0.05 and
0.2: median, 5 % and 95 % quantile over the draws, and the share of draws without an answer.

Development used another network and other classes (--first 1500, only the characters
0 to 1,499, seeds [1, m, draw]), and synthetic embeddings.

After the first measurement the estimator was changed, with the development files; hence --seed 2025, see
docs/benchmarks/measured.md.
"""

from __future__ import annotations

import argparse
import io
import shutil
import zipfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image

from plsc import Entry
from plsc.evaluate.capacity import Capacity, measure_capacity

LEVELS = (0.01, 0.05, 0.2, 0.4)
WANTED = (0.01, 0.05, 0.2)
UNKNOWN = 800
BOOTSTRAPS = 200
TRAINED = 1500  # characters
WAYS = ("ours", "1 - (1 - FAR)^N", "FAR N")


def main() -> None:
    """Print the tables of each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("places", nargs="+", type=Path, help=".npz files, or folders of them")
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--seed", type=int, default=2024)
    parser.add_argument("--classes", type=int, nargs="+", help="calibration classes; default: by the file")
    parser.add_argument("--times", type=int, nargs="+", help="identities per calibration class")
    data = parser.add_argument_group("to write the files to the folder first")
    data.add_argument("--glyphs", type=Path, help="output folder of demo/make_glyphs.py")
    data.add_argument("--omniglot", type=Path, help="omniglot_small2.zip")
    data.add_argument("--first", type=int, default=0, help="first of the trained characters")
    data.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    if options.glyphs:
        write_data(options)
    for place in options.places:
        for path in sorted(place.glob("*.npz")) if place.is_dir() else [place]:
            file = Data(path)
            is_large = len(file.starts) > 2000
            times = options.times or ((1, 2, 4) if is_large else (1, 2))
            for m in options.classes or ((50, 150, 500) if is_large else (30,)):
                print(f"\n{path.stem}: m = {m}, {options.draws} draws\n")
                report(file, m, times, options.draws, options.seed)


class Data:
    """Normalised embeddings, sorted by class."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as file:
            embeddings, labels = file["embeddings"], file["labels"]
        order = np.argsort(labels, kind="stable")
        self.unit = (embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True))[order]
        _, self.starts, self.counts = np.unique(labels[order], return_index=True, return_counts=True)

    def images(self, classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the embeddings of these classes, and the place of each one's class in the argument."""
        rows = [np.arange(self.starts[one], self.starts[one] + self.counts[one]) for one in classes]
        return self.unit[np.concatenate(rows)], np.repeat(np.arange(len(classes)), self.counts[classes])


class Draw:
    """The classes of one draw; what is measured, and what the two rules predict."""

    def __init__(self, file: Data, m: int, times: tuple[int, ...], seed: list[int]) -> None:
        self.rng = np.random.default_rng(seed)
        classes = self.rng.permutation(len(file.starts))
        self.file, self.m, self.sizes = file, m, [m * one for one in times]
        self.calibration, rest = classes[:m], classes[m:]
        pool, unknown = rest[: self.sizes[-1]], rest[self.sizes[-1] :][:UNKNOWN]
        picked = file.starts[pool] + self.rng.integers(0, file.counts[pool])
        probes, number = file.images(unknown)
        self.weights = 1 / (np.bincount(number)[number] * len(unknown))
        ends = [0, *self.sizes]
        parts = [file.unit[picked[a:b]] for a, b in pairwise(ends)]
        # Best score of each probe per N, [sizes, probes].
        self.best = np.maximum.accumulate([(probes @ part.T).max(1) for part in parts], axis=0)

    def measured(self, size: int, threshold: float) -> float:
        """Return the FPIR of the gallery of sizes[size]."""
        return float(self.weights[self.best[size] >= threshold].sum())

    def calibrate(self, lowest: float) -> Capacity:
        """Return the table of plsc; keep the scores >= lowest for the rules."""
        images, number = self.file.images(self.calibration)
        scores = images @ images.T
        x, y = np.nonzero(scores >= lowest)
        x, y = x[number[x] < number[y]], y[number[x] < number[y]]
        order = np.argsort(-scores[x, y])
        first, second = number[x[order]], number[y[order]]
        counts = np.bincount(number)
        self.ranked = scores[x[order], y[order]]
        self.share = 1 / (counts[first] * counts[second])
        self.pairs = (first, second)
        self.far = np.cumsum(self.share) / (self.m * (self.m - 1) / 2)
        copies = self.rng.multinomial(self.m, np.full(self.m, 1 / self.m), BOOTSTRAPS)
        self.bootstraps = (copies, self.m**2 - (copies**2).sum(1))
        return measure_capacity(images, number)

    def rules(self, threshold: float, identities: int) -> list[tuple[float, float, float]]:
        """Return estimate, low and high of both rules."""
        k = int(np.searchsorted(-self.ranked, -threshold, side="right"))
        copies, pairs = self.bootstraps
        cells = np.bincount(self.pairs[0][:k] * self.m + self.pairs[1][:k], self.share[:k], self.m**2)
        fars = 2 * ((copies @ cells.reshape(self.m, self.m)) * copies).sum(1) / pairs
        values = np.array([self.far[k - 1] if k else 0.0, *np.quantile(fars, [0.05, 0.95])])
        power, product = 1 - (1 - values) ** identities, np.minimum(1, values * identities)
        return [tuple(power.tolist()), tuple(product.tolist())]

    def threshold(self, far: float) -> float:
        """Return the lowest score with at most this FAR."""
        k = int(np.searchsorted(self.far, far, side="right"))
        return float(self.ranked[k - 1] if k else np.nextafter(self.ranked[0], np.float32(2)))


def report(file: Data, m: int, times: tuple[int, ...], draws: int, seed: int) -> None:
    """Print the cells, and the FPIRs at thresholds that were asked for."""
    drawn = [Draw(file, m, times, [seed, m, index]) for index in range(draws)]
    sizes = drawn[0].sizes
    cells = [(size, level, _threshold(drawn, size, level)) for size in range(len(sizes)) for level in LEVELS]
    lowest = min(threshold for _, _, threshold in cells)
    found = np.empty((len(cells), draws, len(WAYS), 4))  # measured, estimate, low, high
    asked = np.full((len(sizes), len(WANTED), draws, len(WAYS)), np.nan)
    for index, draw in enumerate(drawn):
        table = draw.calibrate(lowest - 0.02)
        for c, (size, _, threshold) in enumerate(cells):
            ours = table.fpir(threshold, sizes[size])
            found[c, index, :, 0] = draw.measured(size, threshold)
            found[c, index, :, 1:] = [ours, *draw.rules(threshold, sizes[size])]
        for size, n in enumerate(sizes):
            for w, wanted in enumerate(WANTED):
                fars = (1 - (1 - wanted) ** (1 / n), wanted / n)
                answers = [table.threshold(wanted, n), *map(draw.threshold, fars)]
                for way, answer in enumerate(answers):
                    if answer is not None:
                        asked[size, w, index, way] = draw.measured(size, answer)
    for line in (*_cells(cells, sizes, times, m, found), "", *_asked(sizes, asked)):
        print(line, flush=True)


def _threshold(drawn: list[Draw], size: int, level: float) -> float:
    """Return the threshold at which the mean of the measured FPIR over the draws is the level."""
    scores = np.concatenate([draw.best[size] for draw in drawn])
    weights = np.concatenate([draw.weights for draw in drawn]) / len(drawn)
    order = np.argsort(-scores)
    return float(scores[order][np.searchsorted(np.cumsum(weights[order]), level)])


def _ways(part: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield measured, estimate, low and high, each [draws], per way; part: [draws, ways, 4]."""
    for way in range(part.shape[1]):
        yield tuple(part[:, way].T)


def _score(x: np.ndarray, low: np.ndarray, high: np.ndarray, level: float) -> float:
    below, above = np.maximum(0, low - x), np.maximum(0, x - high)
    return float(np.mean(high - low + 20 * (below + above)) / level)


def _cells(cells: list, sizes: list[int], times: tuple[int, ...], m: int, found: np.ndarray) -> Iterator[str]:
    yield (
        "| N | FPIR | E | cover | "
        + " | ".join(f"{title}: {way}" for title in ("score", "within 1.5") for way in WAYS)
        + " | point |"
    )
    yield "|" + "---:|" * 11
    for (size, level, _), part in zip(cells, found, strict=True):
        ways = list(_ways(part))
        covers = [np.mean((x >= low) & (x <= high)) for x, _, low, high in ways]
        near = [np.mean((y <= 1.5 * x) & (x <= 1.5 * y)) for x, y, _, _ in ways]  # NaN: False
        given = np.mean(~np.isnan(ways[0][1]))
        values = [f"{_score(x, low, high, level):.2f}" for x, _, low, high in ways] + [
            f"{one:.0%}" for one in near
        ]
        shown = " / ".join(f"{one:.0%}" for one in covers)
        expected = m * level / (2 * times[size])
        yield f"| {sizes[size]} | {level} | {expected:.2f} | {shown} | {' | '.join(values)} | {given:.0%} |"


def _asked(sizes: list[int], asked: np.ndarray) -> Iterator[str]:
    yield "| N | wanted | " + " | ".join(f"measured: {way}" for way in WAYS) + " | no answer |"
    yield "|" + "---:|" * 6
    for size, n in enumerate(sizes):
        for w, wanted in enumerate(WANTED):
            texts = []
            for values in asked[size, w].T:
                known = values[~np.isnan(values)]
                low, middle, high = np.quantile(known, [0.05, 0.5, 0.95]) if len(known) else [np.nan] * 3
                texts.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
            none = np.isnan(asked[size, w, :, 0]).mean()
            yield f"| {n} | {wanted} | {' | '.join(texts)} | {none:.0%} |"


def write_data(options: argparse.Namespace) -> None:
    """Write glyphs.npz and omniglot.npz to the folder `places`: classes that the network never saw.

    Trains, unless the folder has a checkpoint, as demo/train_glyphs.py does, in one process, on 1,500
    characters of the output of demo/make_glyphs.py, from class --first on. About 3 minutes.
    """
    (folder,) = options.places
    trained = range(options.first, options.first + TRAINED)
    images = read_glyphs(options.glyphs)
    if not (folder / "run").exists():
        chosen = [(path, label - options.first) for path, label in images if label in trained]
        train(folder, chosen, options.epochs)
    others = [(path, label) for path, label in images if label not in trained]
    embed(folder, "glyphs", [path for path, _ in others], [label for _, label in others])
    if options.omniglot:
        names, labels = unpack(options.omniglot, folder / "omniglot")
        embed(folder, "omniglot", names, labels)


def read_glyphs(folder: Path) -> list[tuple[Path, int]]:
    """Return the images and classes of the folder; those of unseen/ are numbered after the others."""
    found: list[tuple[Path, int]] = []
    for place in (folder, folder / "unseen"):
        first = 1 + max((label for _, label in found), default=-1)
        for line in (place / "label.txt").read_text().splitlines():
            path, label = line.split("\t")
            found.append(((place / path).resolve(), first + int(label)))
    return found


def _entry(save_dir: Path) -> Entry:
    ins = Entry()
    ins.set_flip(False)
    ins.set_num_workers(0)
    ins.set_model_name("SmallResNet")
    ins.set_image_shape((1, 32, 32))
    ins.set_emb_size(128)
    ins.set_dropout(0.0)
    ins.set_test_batch_size(500)
    ins.set_model_save_dir(str(save_dir))
    return ins


def train(folder: Path, images: list[tuple[Path, int]], epochs: int) -> None:
    """Train with the settings of demo/train_glyphs.py."""
    data = folder / "trained"
    data.mkdir(parents=True, exist_ok=True)
    for number, (path, _) in enumerate(images):
        shutil.copyfile(path, data / f"{number:05}.png")
    (data / "label.txt").write_text("".join(f"{i:05}.png\t{label}\n" for i, (_, label) in enumerate(images)))
    ins = _entry(folder / "run")
    ins.set_dataset_dir(str(data))
    ins.set_global_batch_size(128)
    ins.set_train_epochs(epochs)
    ins.set_lr(0.1)
    ins.set_seed(1)
    ins.set_log_period(30)
    ins.set_max_last_checkpoint_num(1)
    ins.train()


def unpack(archive: Path, folder: Path) -> tuple[list[Path], list[int]]:
    """Write the drawings as 32 x 32 pictures, centred as the glyphs are; return their paths and classes."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive) as file:
        names = sorted(name for name in file.namelist() if name.endswith(".png"))
        characters = sorted({name.rpartition("/")[0] for name in names})
        paths = [folder / f"{index:04}.png" for index in range(len(names))]
        for name, path in zip(names, paths, strict=True):
            picture = Image.open(io.BytesIO(file.read(name))).convert("L")
            picture.resize((32, 32), Image.Resampling.BOX).save(path)
    return paths, [characters.index(name.rpartition("/")[0]) for name in names]


def embed(folder: Path, name: str, images: list[Path], labels: list[int]) -> None:
    """Write <name>.npz with the embeddings of the newest checkpoint."""
    ins = _entry(folder / "run")
    ins.set_checkpoint_dir("last")
    found = ins.predict([str(path) for path in images]).embeddings
    np.savez(folder / f"{name}.npz", embeddings=found, labels=np.asarray(labels))
    print(f"{name}: {len(labels):,} images of {len(set(labels)):,} characters", flush=True)


if __name__ == "__main__":
    main()
