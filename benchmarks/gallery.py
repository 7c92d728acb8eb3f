"""What plsc says about galleries that it cannot see, compared with galleries that were drawn.

    python benchmarks/gallery.py capacity build/gallery --glyphs demo/output/glyphs --omniglot OMNIGLOT
    python benchmarks/gallery.py upgrade build/gallery --glyphs demo/output/glyphs --omniglot OMNIGLOT
    python benchmarks/gallery.py capacity build/gallery     # the embeddings are there; --quick: 3 draws

--glyphs: output of demo/make_glyphs.py; --omniglot: omniglot_small2.zip. Networks are trained as in the demo,
a few minutes each on two cores; those in the folder are used again. The protocols were fixed before anything
was measured.

capacity: predict the FPIR of galleries of N from embeddings of m classes. 200 draws per m permute the classes
of a file of embeddings (the network was trained on 1,500 others): the first m calibrate, the next 4 m are the
pool of the gallery, the next 800 (or as many as are left) are unknown. glyphs.npz has about 3,300 classes:
m = 50, 150, 500 and N = m, 2 m, 4 m. omniglot.npz has 156: m = 30, N = 30, 60. The gallery of N are the first
N classes of the pool, one random image each. Probes are all images of the unknown classes; each class has the
same weight. A cell is (m, N, level): its threshold is the one where the mean of the measured FPIR over the
draws is the level. Reported: in how many draws the 90 % interval of `measure_capacity` covers the measured
FPIR (goal: 85 to 97 %; more where counts are coarse), and the measured FPIR at the threshold that is returned
for a wanted one, next to the rule 1 - (1 - FAR)^N: median, 5 % and 95 % quantile.

upgrade: map a gallery to a new network. Seeds 11, 12 and 13 for the old networks and 21, 22 and 23 for the
new ones, on 4,168 characters. old -> new: another seed; another width (embeddings of 256 values); more
classes (the old network is trained on the first half of them). Of the 630 unseen characters, in a random
order of the seed, the first ones with 1,000 images together are the anchors, and the others are the test.
Omniglot is a second test. One random image per character is enrolled; all others are probes. Galleries:
old-old and new-new; mapped by the class weights of common classes, by the anchors, and by both. rank-1 of the
probes, and TAR at FAR 1e-2 with the threshold of that gallery. Goal: where new-new is better than old-old by
5 points, mapped-new is at least old-old; elsewhere at least 95 % of it.
"""

from __future__ import annotations

import argparse
import io
import itertools
import zipfile
from collections import defaultdict
from pathlib import Path

import numpy as np
from measuring import Report, glyph_entry
from PIL import Image

from plsc import Entry
from plsc.evaluate.capacity import Capacity, measure_capacity
from plsc.gallery.embedder import open_embedder
from plsc.gallery.upgrade import Pairs, fit_map

LEVELS, WANTED = (0.01, 0.05, 0.2, 0.4), (0.01, 0.05, 0.2)
UNKNOWN, TRAINED, SEED = 800, 1500, 2025  # classes; seed of the draws
CLASSES, ANCHORS, FAR = 4168, 1000, 1e-2
CHANGES = {
    "seed": ("old", "new"),
    "width": ("old", "wide"),
    "classes": ("half", "new"),
}
Listed = list[tuple[Path, int]]  # images with their classes


def compare_capacity(options: argparse.Namespace, report: Report) -> None:
    """Print the tables of each file of embeddings."""
    if options.glyphs:
        write_embeddings(options)
    for path in sorted(options.folder.glob("*.npz")):
        file = Embeddings(path)
        is_large = len(file.starts) > 2000
        for m in (50, 150, 500) if is_large else (30,):
            draws = 3 if options.quick else 200
            report.print(f"\n### {path.stem}: m = {m}, {draws} draws\n")
            report_capacity(report, file, m, (1, 2, 4) if is_large else (1, 2), draws, SEED)


class Embeddings:
    """Normalised embeddings, sorted by class."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as file:
            embeddings, labels = file["embeddings"], file["labels"]
        order = np.argsort(labels, kind="stable")
        self.unit = unit(embeddings)[order]
        _, self.starts, self.counts = np.unique(labels[order], return_index=True, return_counts=True)

    def images(self, classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the embeddings of these classes, and the place of each one's class in the argument."""
        rows = [np.arange(self.starts[one], self.starts[one] + self.counts[one]) for one in classes]
        return self.unit[np.concatenate(rows)], np.repeat(np.arange(len(classes)), self.counts[classes])


class Draw:
    """The classes of one draw: what is measured, and what is predicted."""

    def __init__(self, file: Embeddings, m: int, times: tuple[int, ...], seed: list[int]) -> None:
        rng = np.random.default_rng(seed)
        classes = rng.permutation(len(file.starts))
        self.sizes = [m * one for one in times]
        self.calibration, rest = file.images(classes[:m]), classes[m:]
        pool, unknown = rest[: self.sizes[-1]], rest[self.sizes[-1] :][:UNKNOWN]
        picked = file.starts[pool] + rng.integers(0, file.counts[pool])
        probes, number = file.images(unknown)
        self.weights = 1 / (np.bincount(number)[number] * len(unknown))
        parts = [file.unit[picked[a:b]] for a, b in itertools.pairwise([0, *self.sizes])]
        # Best score of each probe per N, [sizes, probes].
        self.best = np.maximum.accumulate([(probes @ part.T).max(1) for part in parts], axis=0)

    def measured(self, size: int, threshold: float) -> float:
        """Return the FPIR of the gallery of sizes[size]."""
        return float(self.weights[self.best[size] >= threshold].sum())

    def capacity(self) -> Capacity:
        """Return the table of plsc."""
        return measure_capacity(*self.calibration)

    def threshold(self, wanted: float, identities: int) -> float:
        """Return the threshold of the rule: the lowest score with at most this FAR per pair of classes."""
        images, number = self.calibration
        x, y = np.nonzero(number[:, None] < number[None])
        counts, scores = np.bincount(number), (images @ images.T)[x, y]
        order = np.argsort(-scores)
        far = np.cumsum((1 / (counts[number[x]] * counts[number[y]]))[order])
        k = int(np.searchsorted(far / far[-1], 1 - (1 - wanted) ** (1 / identities), side="right"))
        ranked = scores[order]
        return float(ranked[k - 1] if k else np.nextafter(ranked[0], np.float32(2)))


def report_capacity(
    report: Report, file: Embeddings, m: int, times: tuple[int, ...], draws: int, seed: int
) -> None:
    """Print the coverage of the cells, and the FPIRs at thresholds that were asked for."""
    drawn = [Draw(file, m, times, [seed, m, index]) for index in range(draws)]
    tables, sizes = [draw.capacity() for draw in drawn], drawn[0].sizes
    report.header("N", "FPIR", "interval covers", "has a point prediction")
    for size, level in itertools.product(range(len(sizes)), LEVELS):
        threshold = threshold_of(drawn, size, level)
        found = [table.fpir(threshold, sizes[size]) for table in tables]
        measured = [draw.measured(size, threshold) for draw in drawn]
        covers = [low <= x <= high for (_, low, high), x in zip(found, measured, strict=True)]
        given = np.mean([point is not None for point, _, _ in found])
        report.keep(kind="cell", m=m, N=sizes[size], level=level, covers=float(np.mean(covers)))
        report.row(sizes[size], level, f"{np.mean(covers):.0%}", f"{given:.0%}")
    report.print()
    report.header("N", "wanted", "measured: plsc", "measured: 1 - (1 - FAR)^N", "no answer")
    for (size, n), wanted in itertools.product(enumerate(sizes), WANTED):
        answers = [table.threshold(wanted, n) for table in tables]
        asked = zip(drawn, answers, strict=True)
        ours = [draw.measured(size, answer) for draw, answer in asked if answer is not None]
        rule = [draw.measured(size, draw.threshold(wanted, n)) for draw in drawn]
        report.row(n, wanted, spread(ours), spread(rule), f"{1 - len(ours) / draws:.0%}")


def threshold_of(drawn: list[Draw], size: int, level: float) -> float:
    """Return the threshold at which the mean of the measured FPIR over the draws is the level."""
    scores = np.concatenate([draw.best[size] for draw in drawn])
    weights = np.concatenate([draw.weights for draw in drawn]) / len(drawn)
    order = np.argsort(-scores)
    return float(scores[order][np.searchsorted(np.cumsum(weights[order]), level)])


def spread(values: list[float]) -> str:
    """Return the median, and the 5 % and 95 % quantiles."""
    low, middle, high = np.quantile(values or [np.nan], [0.05, 0.5, 0.95])
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def write_embeddings(options: argparse.Namespace) -> None:
    """Write glyphs.npz and omniglot.npz to the folder: classes that the network never saw."""
    images = read_glyphs(options.glyphs)
    run = options.folder / "run"
    if not run.exists():
        chosen = [(path, label) for path, label in images if label < TRAINED]
        ins = glyph_entry(run)
        ins.set_dataset_dir(write_list(options.folder / "trained.tsv", chosen), image_folder="/")
        ins.train()
    sets = {"glyphs": [one for one in images if one[1] >= TRAINED]}
    if options.omniglot:
        sets["omniglot"] = unpack(options.omniglot, options.folder / "omniglot")
    for name, listed in sets.items():
        found = embed(glyph_entry(run), listed)
        np.savez(options.folder / name, embeddings=found, labels=[label for _, label in listed])


def read_glyphs(folder: Path) -> Listed:
    """Return the images and classes of the folder; those of unseen/ are numbered after the others."""
    found: Listed = []
    for place in (folder, folder / "unseen"):
        first = 1 + max((label for _, label in found), default=-1)
        for line in (place / "label.txt").read_text().splitlines():
            path, label = line.split("\t")
            found.append(((place / path).resolve(), first + int(label)))
    return found


def write_list(file: Path, listed: Listed) -> str:
    """Write a list of images; the names of the classes keep their order."""
    lines = [f"{path.relative_to('/')}\t{label:05}\n" for path, label in listed]
    file.write_text("path\tclass_name\n" + "".join(lines))
    return str(file)


def unpack(archive: Path, folder: Path) -> Listed:
    """Write the drawings as 32 x 32 pictures, centred as the glyphs are; return their paths and classes."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive) as file:
        names = sorted(name for name in file.namelist() if name.endswith(".png"))
        characters = sorted({name.rpartition("/")[0] for name in names})
        listed = [
            (folder / f"{index:04}.png", characters.index(name.rpartition("/")[0]))
            for index, name in enumerate(names)
        ]
        for name, (path, _) in zip(names, listed, strict=True):
            picture = Image.open(io.BytesIO(file.read(name))).convert("L")
            picture.resize((32, 32), Image.Resampling.BOX).save(path)
    return listed


def embed(ins: Entry, listed: Listed) -> np.ndarray:
    """Return unit vectors of the newest checkpoint, float32 [images, D]."""
    ins.set_checkpoint_dir("last")
    return unit(ins.predict([str(path) for path, _ in listed]).embeddings)


def unit(vectors: np.ndarray) -> np.ndarray:
    """Return vectors of norm 1."""
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def compare_upgrades(options: argparse.Namespace, report: Report) -> None:
    """Train what is missing, measure, and print a table per change and test."""
    images = read_glyphs(options.glyphs)
    tests = {
        "glyphs": [(path, label) for path, label in images if label >= CLASSES],
        "omniglot": unpack(options.omniglot, options.folder / "omniglot"),
    }
    labels = {test: np.array([label for _, label in listed]) for test, listed in tests.items()}
    values: dict[str, list[dict[str, float]]] = defaultdict(list)
    for seed in (11, 12, 13):
        runs = {name: trained(options, images, name, seed) for name in ("old", "half", "new", "wide")}
        found = {
            (name, test): embed(ins, listed) for name, ins in runs.items() for test, listed in tests.items()
        }
        for change, (old, new) in CHANGES.items():
            pairs = {test: (found[old, test], found[new, test]) for test in tests}
            weights = [class_weights(runs[name]) for name in (old, new)]
            for test, cell in upgrade(weights, pairs, labels, seed).items():
                values[f"{change}, {test}"].append(cell)
                report.keep(kind="upgrade", change=change, test=test, seed=seed, **cell)
    for name, cells in values.items():
        report.print(f"\n### {name}\n")
        report.header("gallery", "rank-1", f"TAR at FAR {FAR}")
        for gallery in ("old-old", "new-new", "weights", "anchors", "both"):
            means = [
                np.mean([cell[f"{metric}, {gallery}"] for cell in cells]) for metric in ("rank-1", "TAR")
            ]
            report.row(gallery, *(f"{100 * mean:.1f}" for mean in means))
        for fact in ("cosine, printed", "cosine, of the test", "share that reaches the bound"):
            report.print(f"{fact}: {np.mean([cell[fact] for cell in cells]):.3f}")


def trained(options: argparse.Namespace, images: Listed, name: str, seed: int) -> Entry:
    """Train a network unless it is there; return an entry that has it."""
    run = options.folder / f"{name}{seed}"
    ins = glyph_entry(run, seed if name in ("old", "half") else seed + 10)
    if name == "wide":
        ins.set_emb_size(256)
    if not run.exists():
        most = CLASSES // 2 if name == "half" else CLASSES
        chosen = [(path, label) for path, label in images if label < most]
        ins.set_dataset_dir(write_list(options.folder / f"{name}.tsv", chosen), image_folder="/")
        ins.train()
    return ins


def class_weights(ins: Entry) -> np.ndarray:
    """Return the class weights of the only checkpoint of a run."""
    run = Path(ins.options.checkpoint.save_dir)
    return open_embedder(str(next(path for path in run.iterdir() if path.name.isdecimal()))).classes()[0]


def upgrade(
    weights: list[np.ndarray],
    pairs: dict[str, tuple[np.ndarray, np.ndarray]],
    labels: dict[str, np.ndarray],
    seed: int,
) -> dict[str, dict[str, float]]:
    """Return the metrics of a change and seed, by test."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(np.unique(labels["glyphs"]))
    counts = np.cumsum([(labels["glyphs"] == one).sum() for one in order])
    is_anchor = np.isin(labels["glyphs"], order[: np.searchsorted(counts, ANCHORS) + 1])
    rows = np.flatnonzero(is_anchor)[:ANCHORS]
    images = Pairs(*pairs["glyphs"], (rows, rows))
    common = np.arange(min(map(len, weights)))
    classes = Pairs(weights[0], weights[1], (common, common))
    maps = {"weights": fit_map(classes), "anchors": fit_map(None, images), "both": fit_map(classes, images)}
    cells = {}
    for test, (ours, theirs) in pairs.items():
        kept = ~is_anchor if test == "glyphs" else np.ones(len(ours), bool)
        mine, real, numbers = ours[kept], theirs[kept], labels[test][kept]
        enrolled = np.array([rng.choice(np.flatnonzero(numbers == one)) for one in np.unique(numbers)])
        probes = np.setdiff1d(np.arange(len(numbers)), enrolled)
        galleries = {
            "old-old": mine,
            "new-new": real,
            **{name: one.apply(mine) for name, one in maps.items()},
        }
        same = numbers[probes][:, None] == numbers[enrolled]
        cell: dict[str, float] = {}
        for name, vectors in galleries.items():
            scores = (mine if name == "old-old" else real)[probes] @ vectors[enrolled].T
            cell[f"rank-1, {name}"] = float(same[np.arange(len(probes)), scores.argmax(axis=1)].mean())
            cell[f"TAR, {name}"] = float((scores[same] >= np.quantile(scores[~same], 1 - FAR)).mean())
        cosines, about = (galleries["both"] * real).sum(axis=1), maps["both"].about
        cell["cosine, printed"], cell["cosine, of the test"] = about["cosine"], float(cosines.mean())
        cell["share that reaches the bound"] = float((cosines >= about["bound"]).mean())
        cells[test] = cell
    return cells


def main() -> None:
    """Run the chosen comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("capacity", "upgrade"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--glyphs", type=Path, help="output folder of demo/make_glyphs.py")
    parser.add_argument("--omniglot", type=Path, help="omniglot_small2.zip")
    parser.add_argument("--quick", action="store_true", help="three draws")
    options = parser.parse_args()
    report = Report(options.folder, options.what)
    (compare_capacity if options.what == "capacity" else compare_upgrades)(options, report)


if __name__ == "__main__":
    main()
