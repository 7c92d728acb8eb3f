"""Measure galleries that are mapped to a new network, against galleries of the real embeddings.

    python benchmarks/upgrade.py demo/output/glyphs build/upgrade --omniglot omniglot_small2.zip

The first folder is the output of demo/make_glyphs.py. Trains 5 networks per seed, a few minutes each on two
cores; those in the folder are used again. Writes upgrade.json to the folder.

Protocol, fixed before anything was measured with it:

Runs. Seeds 11, 12 and 13 for the old networks and 21, 22 and 23 for the new ones: equal seeds would share the
initial weights. The settings are those of demo/train_glyphs.py, in one process, on 4,168 characters.
old -> new: another seed; another width (embeddings of 256 values, not 128); another architecture (`Plain`,
below); more classes (the old network is trained on the characters 0..2,083 only).

Images. Of the 630 unseen characters, in a random order of the seed, the first ones with 1,000 images together
are the anchors, and the others are the test. All 156 characters of Omniglot are a second test; the anchors
are still the glyphs. One random image per character is enrolled, and all other images of the test are probes.

Galleries: old-old and new-new; mapped by the class weights of common classes, by the anchors, and by both.
Reference: a network with one hidden layer of 512 GELU, trained on the pairs of "both" (Adam, 1e-3, batches of
256, 200 epochs, a quarter of each kind kept aside to choose the epoch by the mean cosine).

Metrics: rank-1 of the probes, and TAR at FAR 1e-2 over all pairs of a probe and an entry, with the threshold
of that gallery. A cell is a change and a test; its values are means over the seeds.

Goals, per cell and metric:
1. Where new-new exceeds old-old by 5 points, mapped-new (weights) is at least old-old. Elsewhere, it is at
   least 95 % of old-old. The same for anchors and for both. What is missed is shown as missed.
2. (Of an order of the entries by expected error, which was removed: on other images it was no better than
   random.)
3. The hidden layer is added to plsc only if its rank-1 is 0.5 points higher on average over all cells.
4. The cosine that is printed, measured on images, differs by at most 0.02 from the mean over the test glyphs,
   and 93 to 97 % of the test glyphs reach the bound, on average over all changes and seeds.
5. The threshold of new-new at FAR 1e-2 accepts 0.5 to 2 % of the pairs of a probe and a mapped entry of
   another character, per cell, for each of the three maps. The same at 1e-3 is shown. (Until seed 11 was
   measured, this was said of thresholds moved by a line through quantiles of the pairs kept aside. They met
   it, but were further off than the threshold itself, so the line was removed.)
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from capacity import read_glyphs, unpack
from torch import nn

from plsc import Entry
from plsc.gallery.embedder import open_embedder
from plsc.gallery.upgrade import Pairs, fit_map
from plsc.models.base_model import BaseModel
from plsc.models.layers import EmbeddingNeck

CLASSES, ANCHORS, FAR = 4168, 1000, 1e-2
CHANGES = {
    "seed": ("old", "new"),
    "width": ("old", "wide"),
    "architecture": ("old", "plain"),
    "classes": ("half", "new"),
}


class Plain(BaseModel):
    """Convolutions without shortcuts."""

    def __init__(self) -> None:
        super().__init__()
        widths = [1, 32, 64, 128, 256]
        layers = [
            nn.Sequential(nn.Conv2d(a, b, 3, 1 if a == 1 else 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in itertools.pairwise(widths)
        ]
        self.layers = nn.Sequential(*layers)
        self.neck = EmbeddingNeck(256, 128, 0.0, "norm-dropout-linear-norm", cells=16)

    def build_network(
        self, input: torch.Tensor, label: torch.Tensor | None, is_train: bool = True
    ) -> torch.Tensor:
        """Return the embeddings, [batch, 128]."""
        return self.neck(self.layers(input))


def main() -> None:
    """Train what is missing, measure, and print a table per test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("glyphs", type=Path, help="output folder of demo/make_glyphs.py")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--omniglot", type=Path, required=True, help="omniglot_small2.zip")
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13])
    options = parser.parse_args()
    images = [(path, label - CLASSES) for path, label in read_glyphs(options.glyphs) if label >= CLASSES]
    names, characters = unpack(options.omniglot, options.folder / "omniglot")
    tests = {"glyphs": images, "omniglot": list(zip(names, characters, strict=True))}
    values: dict[str, list[dict[str, float]]] = defaultdict(list)
    for seed in options.seeds:
        runs = {name: Network(options, name, seed) for name in ("old", "half", "new", "wide", "plain")}
        embeddings = {
            (name, test): run.embed([path for path, _ in listed])
            for name, run in runs.items()
            for test, listed in tests.items()
        }
        labels = {test: np.array([label for _, label in listed]) for test, listed in tests.items()}
        for change, (old, new) in CHANGES.items():
            pairs = {test: (embeddings[old, test], embeddings[new, test]) for test in tests}
            found = measure(runs[old], runs[new], pairs, labels, seed)
            for test, cell in found.items():
                values[f"{change}, {test}"].append(cell)
    (options.folder / "upgrade.json").write_text(json.dumps(values, indent=1) + "\n")
    for name, cells in values.items():
        print(f"\n{name}")
        for metric in cells[0]:
            print(f"  {metric:60} {np.mean([cell[metric] for cell in cells]):.4f}")


class Network:
    """A trained network in a folder."""

    def __init__(self, options: argparse.Namespace, name: str, seed: int) -> None:
        self._name, self._folder = name, options.folder / f"{name}{seed}"
        if self._folder.exists():
            return
        data = options.glyphs
        if name == "half":
            data = options.folder / "half"
            data.mkdir(exist_ok=True)
            shutil.copytree(options.glyphs / "images", data / "images", dirs_exist_ok=True)
            lines = (options.glyphs / "label.txt").read_text().splitlines(keepends=True)
            kept = [line for line in lines if int(line.split("\t")[1]) < CLASSES // 2]
            (data / "label.txt").write_text("".join(kept))
        ins = self._entry()
        ins.set_seed(seed if name in ("old", "half") else seed + 10)
        ins.set_dataset_dir(str(data))
        ins.set_global_batch_size(128)
        ins.set_train_epochs(3)
        ins.set_lr(0.1)
        ins.set_log_period(100)
        ins.set_max_last_checkpoint_num(1)
        ins.train()

    def checkpoint(self) -> str:
        """Return the folder of the only checkpoint."""
        return str(next(path for path in self._folder.iterdir() if path.name.isdecimal()))

    def embed(self, paths: list[Path]) -> np.ndarray:
        """Return unit vectors, float32 [images, D]."""
        ins = self._entry()
        ins.set_checkpoint_dir(self.checkpoint())
        found = ins.predict([str(path) for path in paths]).embeddings
        return found / np.linalg.norm(found, axis=1, keepdims=True)

    def _entry(self) -> Entry:
        ins = Entry()
        ins.set_flip(False)
        ins.set_num_workers(0)
        ins.set_image_shape((1, 32, 32))
        ins.set_emb_size(256 if self._name == "wide" else 128)
        ins.set_dropout(0.0)
        ins.set_test_batch_size(500)
        ins.set_model_save_dir(str(self._folder))
        if self._name == "plain":
            ins.set_model(Plain())
        else:
            ins.set_model_name("SmallResNet")
        return ins


def measure(
    old: Network,
    new: Network,
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
    weights = [open_embedder(one.checkpoint()).classes()[0] for one in (old, new)]
    common = np.arange(min(map(len, weights)))
    classes = Pairs(weights[0], weights[1], (common, common))
    maps = {
        "weights": fit_map(classes),
        "anchors": fit_map(None, images),
        "both": fit_map(classes, images),
    }
    hidden = hidden_layer([classes, images], seed)
    cells = {}
    for test, (ours, theirs) in pairs.items():
        kept = ~is_anchor if test == "glyphs" else np.ones(len(ours), bool)
        mine, real, numbers = ours[kept], theirs[kept], labels[test][kept]
        enrolled = np.array([rng.choice(np.flatnonzero(numbers == one)) for one in np.unique(numbers)])
        probes = np.setdiff1d(np.arange(len(numbers)), enrolled)
        galleries = {"old-old": mine, "new-new": real}
        galleries |= {f"mapped by {name}": one.apply(mine) for name, one in maps.items()}
        galleries["mapped by hidden layer"] = hidden(mine)
        same = numbers[probes][:, None] == numbers[enrolled]
        cell: dict[str, float] = {}
        strangers: dict[str, np.ndarray] = {}
        for name, vectors in galleries.items():
            scores = (mine if name == "old-old" else real)[probes] @ vectors[enrolled].T
            cell[f"rank-1, {name}"] = float(same[np.arange(len(probes)), scores.argmax(axis=1)].mean())
            cell[f"TAR, {name}"] = tar(scores, same)
            strangers[name] = scores[~same]
        for name in maps:
            for far in (FAR, FAR / 10):
                threshold = np.quantile(strangers["new-new"], 1 - far)
                share = (strangers[f"mapped by {name}"] >= threshold).mean()
                cell[f"accepted strangers, threshold of {far:g}, {name}"] = float(share)
        cosines = (galleries["mapped by both"] * real).sum(axis=1)
        cell["cosine, printed"] = maps["both"].about["cosine"]
        cell["cosine, of the test"] = float(cosines.mean())
        cell["share that reaches the bound"] = float((cosines >= maps["both"].about["bound"]).mean())
        cells[test] = cell
    return cells


def tar(scores: np.ndarray, same: np.ndarray) -> float:
    """Return TAR at FAR."""
    return float((scores[same] >= np.quantile(scores[~same], 1 - FAR)).mean())


def hidden_layer(kinds: list[Pairs], seed: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that maps embeddings by a network with a hidden layer."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    parts: dict[bool, list[tuple[torch.Tensor, ...]]] = {True: [], False: []}
    for pairs in kinds:
        is_kept = rng.random(len(pairs)) < 0.25
        for kept in (True, False):
            rows = [one[is_kept == kept] for one in pairs.rows]
            both = zip((pairs.old, pairs.new), rows, strict=True)
            parts[kept].append(tuple(unit(torch.from_numpy(one[row])) for one, row in both))
    (aside, aside_target), (x, y) = (map(torch.cat, zip(*parts[kept], strict=True)) for kept in (True, False))
    network = nn.Sequential(nn.Linear(x.shape[1], 512), nn.GELU(), nn.Linear(512, y.shape[1]))
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    best, state = -1.0, network.state_dict()
    for _ in range(200):
        for rows in torch.randperm(len(x)).split(256):
            loss = 1 - (unit(network(x[rows])) * y[rows]).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            cosine = float((unit(network(aside)) * aside_target).sum(1).mean())
        if cosine > best:
            best, state = cosine, {name: one.clone() for name, one in network.state_dict().items()}
    network.load_state_dict(state)
    return lambda rows: unit(network(torch.from_numpy(rows))).detach().numpy()


def unit(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of norm 1."""
    return nn.functional.normalize(rows)


if __name__ == "__main__":
    main()
