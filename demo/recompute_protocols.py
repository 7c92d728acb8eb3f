"""Check the numbers of the protocols: compute them again from saved embeddings, with plain numpy.

    python demo/recompute_protocols.py demo/output/glyphs demo/output/run

Does not import plsc. Fails if a number differs from the reports.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import numpy as np

TOLERANCE = 0.002  # rounding may change the result of a score at a threshold


def main() -> None:
    """Compare the main numbers of each protocol."""
    files, run = Path(sys.argv[1]) / "unseen", Path(sys.argv[2])
    with np.load(run / "unseen.npz") as file:
        embeddings, labels, paths = file["embeddings"].astype(np.float64), file["labels"], file["paths"]
    row = {path: index for index, path in enumerate(paths)}
    reported = {path.parent.name: read_report(path) for path in run.glob("protocols/*/report.json")}
    found = {
        "all_pairs": all_pairs(unit(embeddings), labels),
        "identify": identification(files, unit(embeddings), row),
        "templates": templates(files / "templates", embeddings, row),
    }
    wrong = [
        f"{name} {'/'.join(key)}: reported {value_at(reported[name], key)}, recomputed {value}"
        for name, values in found.items()
        for key, value in values.items()
        if not abs(value_at(reported[name], key) - value) <= TOLERANCE
    ]
    if wrong:
        sys.exit("recompute: the reports are wrong: " + "; ".join(wrong))
    print(f"recompute: all {sum(map(len, found.values()))} numbers of the protocols are correct")


def all_pairs(units: np.ndarray, labels: np.ndarray) -> dict[tuple[str, ...], float]:
    """Compare every image with every other."""
    first, second = np.triu_indices(len(units), 1)
    scores = (units @ units.T)[first, second]
    same = labels[first] == labels[second]
    return {("tar_at_far", far): rate(scores, same, float(far)) for far in ("0.1", "0.01", "0.001", "0.0001")}


def identification(files: Path, units: np.ndarray, row: dict[str, int]) -> dict[tuple[str, ...], float]:
    """Search the gallery with its distractors for every probe."""
    names = ("gallery", "distractors", "probes")
    (gallery, subjects), (others, _), (probes, wanted) = (read_rows(files / f"{name}.csv") for name in names)
    subjects = np.append(subjects, -1 - np.arange(len(others)))  # each distractor is one more subject
    scores = units[[row[path] for path in probes]] @ units[[row[path] for path in gallery + others]].T
    return search(scores, subjects, wanted)


def templates(folder: Path, embeddings: np.ndarray, row: dict[str, int]) -> dict[tuple[str, ...], float]:
    """Pool media and templates, compare the pairs of templates, and search both galleries."""
    media: dict[int, dict[int, list[np.ndarray]]] = {}
    for line in (folder / "glyphs_face_tid_mid.txt").read_text().splitlines():
        path, template, medium = line.split()
        media.setdefault(int(template), {}).setdefault(int(medium), []).append(embeddings[row[path]])
    pooled = {
        template: np.mean([np.mean(images, axis=0) for images in parts.values()], axis=0)
        for template, parts in media.items()
    }
    pairs = np.loadtxt(folder / "glyphs_template_pair_label.txt", dtype=int)
    first, second = (unit(np.stack([pooled[t] for t in pairs[:, side].tolist()])) for side in (0, 1))
    scores, same = np.sum(first * second, axis=1), pairs[:, 2] == 1
    found: dict[tuple[str, ...], float] = {
        ("verification", "tar_at_far", far): rate(scores, same, float(far))
        for far in ("0.1", "0.01", "0.001")
    }
    probes, wanted = read_rows(folder / "glyphs_1N_probe_mixed.csv")
    probed = unit(np.stack([pooled[int(template)] for template in probes]))
    for name in ("G1", "G2"):
        gallery, subjects = read_rows(folder / f"glyphs_1N_gallery_{name}.csv")
        enrolled = unit(np.stack([pooled[int(template)] for template in gallery]))
        values = search(probed @ enrolled.T, subjects, wanted)
        found |= {("identification", "galleries", name, *key): value for key, value in values.items()}
    return found


def search(scores: np.ndarray, subjects: np.ndarray, wanted: np.ndarray) -> dict[tuple[str, ...], float]:
    """Return the rates of searches, [probes, gallery]; each subject has one entry in the gallery."""
    place = {subject: index for index, subject in enumerate(subjects.tolist())}
    mated = np.array([subject in place for subject in wanted.tolist()])
    mates = scores[mated, [place[subject] for subject in wanted[mated].tolist()]]
    ranks = (scores[mated] >= mates[:, None]).sum(axis=1)
    highest = np.sort(scores[~mated].max(axis=1))[::-1]
    allowed = len(highest) // 10
    accepted = (mates > highest[allowed]) & (ranks <= 50)
    return {
        ("rank1",): float(np.mean(ranks <= 1)),
        ("rank5",): float(np.mean(ranks <= 5)),
        ("fnir_at_fpir", "0.1"): float(1 - np.mean(accepted)),
    }


def rate(scores: np.ndarray, same: np.ndarray, far: float) -> float:
    """Return the TAR at a FAR: accept the scores above the first different pair that is too many."""
    different = scores[~same]
    allowed = int(far * len(different) + 1e-9)
    limit = np.partition(different, len(different) - 1 - allowed)[len(different) - 1 - allowed]
    return float(np.mean(scores[same] > limit))


def read_rows(path: Path) -> tuple[list[str], np.ndarray]:
    """Return the first column of a CSV file and the second one, integers."""
    with path.open(newline="") as file:
        _, *rows = csv.reader(file)
    return [first for first, _ in rows], np.array([int(second) for _, second in rows])


def read_report(path: Path) -> dict[str, object]:
    """Return the values of the first section of a report."""
    values, *_ = json.loads(path.read_text()).values()
    return values


def value_at(values: object, key: tuple[str, ...]) -> float:
    """Return a value by its keys."""
    for name in key:
        assert isinstance(values, dict)
        values = values[name]
    assert isinstance(values, float)
    return values


def unit(rows: np.ndarray) -> np.ndarray:
    """Normalise each row."""
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


if __name__ == "__main__":
    main()
