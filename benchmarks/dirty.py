"""Find planted faults of a dataset: `plsc data clean`, next to a vote of neighbours and cleanlab.

    python demo/make_glyphs.py build/dirty/glyphs --images-per-class 30 --classes 1700
    python benchmarks/dirty.py build/dirty/glyphs build/dirty/1 --cleanlab
    python benchmarks/dirty.py --fonts build/dirty/fonts        # draw the second set; Debian 12
    python benchmarks/dirty.py build/dirty/fonts build/dirty/2

The sets: the demo's glyphs; and up to 750 characters that the fonts of the demo lack and 8 others draw.

Plantings of a set, as hard links in class folders:

- clean: nothing.
- dirty: an eighth of the characters are two classes, each with half of the images; then 20 % of all images
  are in another class, drawn at random; as many images as divided characters have a near duplicate in
  another class: shifted by up to one pixel, brighter or darker by up to 10 %, and saved as JPEG.
- similar: 5 % of the images are in one of the five classes that look most alike.

Look alike: the mean images, without the level of the paper, correlate most. Where the correlation is at least
0.85, a proposal that is not planted counts neither as right nor as wrong.

Each planting: `plsc data split --halves`; a network for each half, trained as in the demo (--epochs 4);
`plsc data clean --second`. Both baselines have the same two networks, each on images that it has not seen: a
vote of the ten nearest neighbours; cleanlab's confident learning (pip install cleanlab; AGPL), from softmax
probabilities of the class weights at scale 32.

Printed: recall of the whole ranking at precision 0.95 and 0.85, and how many proposals are right. Goals: a
higher recall than both baselines; on clean, proposals for at most 0.5 % of the images.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from measuring import HERE, Report, glyph_entry
from PIL import Image, ImageChops, ImageEnhance

sys.path.insert(0, str(HERE.parent / "demo"))
from fonts import Face, bundled_faces, read_face
from glyph_classes import find_classes
from make_glyphs import write_class

from plsc import open_embeddings
from plsc.checkpoint import load_weights
from plsc.clean.faults import compare_labels
from plsc.clean.review import open_images

EIGHTH, FLIPPED, SIMILAR, ALIKE, VOTERS = 8, 0.2, 0.05, 0.85, 10
RIVAL, SCALE = "vote of ten neighbours", 32
KINDS = ("wrong label", "duplicate", "two classes that are one")
CHARACTERS, FAMILIES, PER_CLASS = 750, 8, 36
PACKAGES = """
fonts-symbola fonts-noto-extra fonts-noto-ui-core fonts-noto-mono fonts-lxgw-wenkai fonts-migmix fonts-klee
fonts-babelstone-modern fonts-ricty-diminished fonts-oflb-asana-math fonts-mathjax fonts-texgyre-math
fonts-texgyre fonts-lmodern fonts-3270 fonts-jetbrains-mono fonts-katex fonts-takao-gothic fonts-mplus
fonts-inter fonts-mononoki fonts-liberation2 fonts-sil-doulos fonts-opensymbol fonts-urw-base35
fonts-fantasque-sans fonts-mph-2b-damase fonts-anonymous-pro fonts-sil-gentium fonts-hermit fonts-elstob
fonts-league-mono fonts-monoid fonts-ebgaramond fonts-courier-prime fonts-inconsolata fonts-agave
fonts-quattrocento fonts-sil-padauk fonts-lohit-knda fonts-navilu fonts-gubbi fonts-lohit-guru
fonts-guru-extra fonts-lohit-orya fonts-orya-extra fonts-samyak-orya fonts-lohit-taml
fonts-lohit-taml-classical fonts-samyak-taml fonts-meera-inimai fonts-taml-tscu fonts-taml-tamu
"""
Change = dict[str, str]


@dataclass
class Truth:
    """What was planted. right: the class of each image that is in a wrong one."""

    right: dict[str, str] = field(default_factory=dict)
    doubled: set[frozenset[str]] = field(default_factory=set)
    one: set[frozenset[str]] = field(default_factory=set)
    alike: set[frozenset[str]] = field(default_factory=set)

    def judge(self, change: Change) -> tuple[str, bool, bool]:
        """Return the kind of a change, whether it is right, and whether it counts."""
        image, of, to, reason = (change.get(key, "") for key in ("image", "class", "to", "reason"))
        if change["change"] == "merge":
            is_right = frozenset((of, to)) in self.one
            return KINDS[2], is_right, is_right or not self.is_alike(of, to)
        if "duplicate of " in reason:
            other = reason.partition("duplicate of ")[2]
            is_right = frozenset((image, other)) in self.doubled
            return KINDS[1], is_right, is_right or other.split("/")[0] != of
        return KINDS[0], image in self.right, image in self.right or not self.is_alike(of, to)

    def is_alike(self, *classes: str) -> bool:
        """Return whether classes, or those that they are parts of, look alike."""
        return frozenset(name.split("-")[0].split("_")[0] for name in classes) in self.alike


def plant(paths: dict[str, list[Path]], kind: str, near: np.ndarray, folder: Path) -> Truth:
    """Write a dataset of class folders. near: correlations of the mean images, [C, C]."""
    rng, truth, names = np.random.default_rng(3), Truth(), list(paths)
    truth.alike = {frozenset((names[i], names[j])) for i, j in np.argwhere(near >= ALIKE)}
    count = len(names) // EIGHTH if kind == "dirty" else 0
    order = rng.permutation(names).tolist()
    halved = order[:count]
    truth.one = {frozenset((name, f"{name}-2")) for name in halved}
    images = [
        (file, f"{name}-2" if name in halved and number % 2 else name)
        for name in names
        for number, file in enumerate(paths[name])
    ]
    classes = sorted({name for _, name in images})
    share = {"dirty": FLIPPED, "similar": SIMILAR}.get(kind, 0.0)

    def other(name: str) -> str:
        if kind == "similar":
            return names[rng.choice(np.argsort(-near[names.index(name)])[:5])]
        return str(rng.choice([one for one in classes if one != name]))

    kept = []
    for number, (file, name) in enumerate(images):
        given = other(name) if rng.random() < share else name
        place = f"{given}/{number:05}{file.suffix}"
        (folder / given).mkdir(parents=True, exist_ok=True)
        os.link(file, folder / place)
        if given != name:
            truth.right[place] = name
        else:
            kept.append(place)
    for number in rng.permutation(len(kept))[:count]:
        place, name = kept[number], kept[number].split("/")[0]
        copy = f"{other(name)}/{Path(place).stem}-copy.jpg"
        (folder / copy).write_bytes(near_duplicate(rng, folder / place))
        truth.doubled.add(frozenset((place, copy)))
        truth.right[copy] = name
    return truth


def near_duplicate(rng: np.random.Generator, file: Path) -> bytes:
    """Return the image shifted, of another brightness, as JPEG."""
    image = ImageChops.offset(Image.open(file).convert("L"), *rng.integers(-1, 2, 2).tolist())
    written = io.BytesIO()
    ImageEnhance.Brightness(image).enhance(rng.uniform(0.9, 1.1)).save(written, "JPEG", quality=80)
    return written.getvalue()


def correlations(paths: Iterable[list[Path]]) -> np.ndarray:
    """Return the correlations of the mean images of the classes, [C, C]; -1 of a class with itself."""
    means = []
    for files in paths:
        images = np.stack([np.asarray(Image.open(file).convert("L"), np.float32).ravel() for file in files])
        images -= np.median(images, 1, keepdims=True)  # the paper
        means.append((images / np.linalg.norm(images, axis=1, keepdims=True)).mean(0))
    found = np.corrcoef(means)
    np.fill_diagonal(found, -1)
    return found


def clean(data: Path, work: Path, epochs: int) -> list[Path]:
    """Train a network on each half and write the proposals; return the checkpoints."""
    plsc("data", "split", data, work / "halves", "--halves")
    for half in (1, 2):
        ins = glyph_entry(work / f"half{half}", half, epochs)
        ins.set_dataset_dir(str(work / "halves" / f"half{half}.tsv"), image_folder=str(data))
        ins.train()
    models = [work / f"half{half}" / str(epochs - 1) for half in (1, 2)]
    plsc("data", "clean", models[0], data, work / "clean", "--second", models[1])
    return models


def plsc(*words: object) -> None:
    """Run a command of plsc."""
    subprocess.run([sys.executable, "-m", "plsc.cli", *map(str, words)], check=True)


def rankings(data: Path, work: Path, models: list[Path], with_cleanlab: bool) -> dict[str, list[Change]]:
    """Return per method all images as if they were proposed to be moved, most suspicious first."""
    stored = [open_embeddings(work / "clean" / name) for name in ("embeddings", "embeddings2")]
    images = open_images(data, stored)
    labels, names, rows = images.labels, images.listing.classes, np.arange(len(images.labels))
    first = compare_labels(images.views, labels, np.ones(len(labels), bool), len(names))
    votes = np.zeros((len(labels), len(names)), np.float32)
    cosines = votes.copy()
    for view, model in zip(images.views, models, strict=True):
        weight = load_weights(model, "class_weights")["weight"].numpy()
        weight /= np.linalg.norm(weight, axis=1, keepdims=True)
        for part in np.array_split(np.flatnonzero(view.unseen), 20):
            near = view.unit[part] @ view.unit.T
            near[np.arange(len(part)), part] = -2
            cosines[part] = view.unit[part] @ weight.T
            for row, some in zip(part, labels[np.argpartition(-near, VOTERS)[:, :VOTERS]], strict=True):
                votes[row] = np.bincount(some, minlength=len(names))
    own = votes[rows, labels]
    votes[rows, labels] = -1
    found = {"plsc": (first.scores(), first.likely), RIVAL: (votes.max(1) - own, votes.argmax(1))}
    if with_cleanlab:
        from cleanlab.rank import get_label_quality_scores

        shares = np.exp(SCALE * (cosines - cosines.max(1, keepdims=True)).astype(np.float64))
        shares /= shares.sum(1, keepdims=True)
        quality = get_label_quality_scores(labels, shares, adjust_pred_probs=False)
        shares[rows, labels] = 0
        found["cleanlab"] = 1 - quality, shares.argmax(1)
    return {
        way: [
            {
                "change": "move",
                "image": images.path(row),
                "class": names[labels[row]],
                "to": names[likely[row]],
            }
            for row in np.argsort(-scores, kind="stable")
        ]
        for way, (scores, likely) in found.items()
    }


def recall_at(precision: float, ranked: list[bool], total: int) -> float:
    """Return the highest recall of a ranking with this precision, most suspicious first."""
    found = np.cumsum(ranked)
    enough = np.flatnonzero(found >= precision * np.arange(1, len(ranked) + 1))
    return float(found[enough[-1]] / max(total, 1)) if len(enough) else 0.0


def measure(
    report: Report, kind: str, paths: dict[str, list[Path]], near: np.ndarray, options: argparse.Namespace
) -> None:
    """Plant, clean, and print what was found."""
    data, work = options.folder / kind, options.folder / f"{kind}-work"
    truth = plant(paths, kind, near, data)
    models = clean(data, work, options.epochs)
    planted = dict(zip(KINDS, map(len, (truth.right, truth.doubled, truth.one)), strict=True))
    report.print(f"\n### {kind}\n")
    report.header("wrong labels", "recall at precision 0.95", "at 0.85")
    for way, ranked in rankings(data, work, models, options.cleanlab).items():
        judged = [is_right for _, is_right, counts in map(truth.judge, ranked) if counts]
        recalls = [recall_at(precision, judged, planted[KINDS[0]]) for precision in (0.95, 0.85)]
        report.keep(kind="ranking", planting=kind, way=way, recalls=recalls)
        report.row(way, *(f"{recall:.3f}" for recall in recalls))
    for title in ("changes", "questions"):
        report.print()
        report.header(title, "planted", "proposed", "right", "precision", "recall")
        proposals: dict[str, dict[tuple[str, str], bool]] = {name: {} for name in KINDS}
        with (work / "clean" / f"{title}.tsv").open(newline="", encoding="utf-8") as file:
            for change in csv.DictReader(file, delimiter="\t"):
                name, is_right, counts = truth.judge(change)
                if counts:
                    proposals[name].setdefault((change["class"], change["image"] + change["to"]), is_right)
        for name, found in proposals.items():
            right = sum(found.values())
            shares = f"{right / max(len(found), 1):.3f}", f"{right / max(planted[name], 1):.3f}"
            report.keep(kind=title, planting=kind, of=name, proposed=len(found), right=right)
            report.row(name, planted[name], len(found), right, *shares)


def draw_fonts(folder: Path) -> None:
    """Write the second set: `label.txt`, and images of characters that the demo lacks."""
    known = frozenset().union(*(face.code_points for face in bundled_faces()))
    faces = [replace(face, code_points=face.code_points - known) for face in faces_of(folder / "packages")]
    classes = [one for one in find_classes(faces) if len({faces[f].family for f, _ in one.faces}) >= FAMILIES]
    lines: list[str] = []
    for label, number in enumerate(np.random.default_rng(1).permutation(len(classes))[:CHARACTERS]):
        drawn = [(faces[f].path, chr(code)) for f, code in classes[number].faces]
        lines += write_class((folder, label, drawn), PER_CLASS, seed=7)
    (folder / "label.txt").write_text("".join(lines))
    print(f"{min(len(classes), CHARACTERS)} characters, {len(lines)} images")


def faces_of(folder: Path) -> list[Face]:
    """Download the packages unless they are there; return the first face of each family."""
    folder.mkdir(parents=True, exist_ok=True)
    faces: dict[str, Face] = {}
    for package in PACKAGES.split():
        place = folder / package
        if not place.exists():
            subprocess.run(["apt-get", "download", "-qq", package], check=True, cwd=folder)
            subprocess.run(["dpkg-deb", "-x", next(folder.glob(f"{package}_*.deb")), place], check=True)
        for file in sorted(place.glob("usr/share/fonts/**/*.[to]t[fc]")):
            with contextlib.suppress(RuntimeError, OSError):  # not a font that FreeType can read
                face = read_face(file, evaluation=False)
                faces.setdefault(face.family, face)
    return list(faces.values())


def main() -> None:
    """Draw the second set, or measure a set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("images", type=Path, nargs="?", help="a folder with label.txt")
    parser.add_argument("folder", type=Path, nargs="?", help="new folder for data, networks and results")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--cleanlab", action="store_true", help="also measure cleanlab")
    parser.add_argument("--fonts", type=Path, help="only draw the second set into this folder")
    options = parser.parse_args()
    if options.fonts:
        draw_fonts(options.fonts)
        return
    paths: dict[str, list[Path]] = defaultdict(list)
    for line in (options.images / "label.txt").read_text().splitlines():
        path, label = line.split("\t")
        paths[f"{int(label):05}"].append((options.images / path).resolve())
    near = correlations(paths.values())
    report = Report(options.folder, "dirty")
    for kind in ("clean", "dirty", "similar"):
        measure(report, kind, paths, near, options)


if __name__ == "__main__":
    main()
