"""Lists of images: files that choose from a dataset, or label it anew, without copies of its images.

A list has the columns ``path`` and ``class_name``, separated by tabs. Its paths lie below the folder of the
dataset, which the format argument ``image_folder`` names when the list is read. `split` writes lists for
training and for tests on held-out classes or images, or of two halves.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from plsc.data.files import name_key
from plsc.data.sources import Source, open_source
from plsc.data.sources.base import FileSource, printable
from plsc.errors import DataError, check_name
from plsc.seeds import hash_key
from plsc.storage.disk import publishing_folder
from plsc.storage.urls import is_url, shown

_UNLISTABLE = re.compile(r"[\t\r\n\ud800-\udfff]|\A\s|\s\Z")  # a file name that is not UTF-8 has surrogates
_MOST_PAIRS = 30_000  # same pairs, and as many different ones
_LEAST_PAIRS = 5  # of each kind: the accuracy of a pair list needs ten pairs


@dataclass(frozen=True)
class Listing:
    """N images of C classes.

    folder: folder or URL of the images. paths: N paths relative to it, each once. labels: int64 [N], 0 to
    C - 1; every class has images. classes: the C class names, sorted as strings; if labels are numbers, their
    digits.
    """

    folder: str
    paths: Sequence[str]
    labels: np.ndarray
    classes: Sequence[str]


def read_listing(location: str | Path, **reading: Any) -> tuple[Source, Listing]:
    """Open a dataset of image files; row i of the listing is sample i of the source.

    reading: options of `open_source`.

    Raises:
        DataError: the images are not files, two samples are the same file, or a path or class name cannot be
            in a list.
    """
    source = open_source(location, **reading)
    if not isinstance(source, FileSource):
        raise DataError(f"the images of {shown(str(location))} are inside its files; expected image files")
    paths = source.paths()
    first: dict[str, int] = {}
    for number, path in enumerate(paths):
        if first.setdefault(path, number) != number:
            raise DataError(f"{source.name(number)} is the same image as {source.name(first[path])}")
    numbers, labels = np.unique(source.labels(), return_inverse=True)
    names = source.class_names
    found = [str(number) if names is None else names[number] for number in numbers.tolist()]
    classes = sorted(found)
    ranks = {name: rank for rank, name in enumerate(classes)}
    check_listable(itertools.chain(paths, map(check_name, classes)))
    labels = np.array([ranks[name] for name in found], np.int64)[labels]
    return source, Listing(str(source.root), paths, labels, classes)


def check_listable(texts: Iterable[str]) -> None:
    """Raise DataError for the first path or class name that a list cannot contain."""
    for text in texts:
        if _UNLISTABLE.search(text):
            raise DataError(
                f"'{printable(text)}' cannot be in a list: not UTF-8, or a tab, line end or outer blank"
            )


def write_list(path: Path, listing: Listing, numbers: np.ndarray) -> dict[str, int]:
    """Write a list of the images `numbers`, int64 [n], in this order; return the numbers of both kinds."""
    labels = listing.labels[numbers]
    paths = (listing.paths[number] for number in numbers.tolist())
    classes = (listing.classes[label] for label in labels.tolist())
    write_rows(path, ("path", "class_name"), zip(paths, classes, strict=True))
    return {"images": len(numbers), "classes": len(np.unique(labels))}


def write_rows(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table whose columns are separated by tabs; header: its first line, () for none."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerows([header] if header else [])
        writer.writerows(rows)


def absolute(place: str) -> str:
    """Return a path or URL for people who are elsewhere, without secrets."""
    return shown(place if is_url(place) else os.path.abspath(place))  # noqa: PTH100 - of a string


def train_command(out: str, name: str, folder: str) -> str:
    """Return the command that trains on the list `name` in `out`; folder: that of the images."""
    return f"plsc train --data.dataset_dir {shlex.quote(str(Path(out, name)))} {reading_flag(folder)}"


def reading_flag(folder: str) -> str:
    """Return the flag for the folder of the images of a list."""
    arguments = json.dumps({"image_folder": shown(folder)}, ensure_ascii=False)  # which is YAML, too
    return f"--data.format_arguments {shlex.quote(arguments)}"


# Split.


def split(
    location: str | Path,
    out: str | Path,
    *,
    held_out: float = 0.1,
    by: Literal["class", "image"] = "class",
    halves: bool = False,
    seed: int = 0,
    **reading: Any,
) -> dict[str, Any]:
    """Write lists of the images of a dataset to a new folder.

    Args:
        held_out: share of the classes, or of the images of each class, in ``held_out.tsv``, between 0 and 1;
            the others are in ``train.tsv``. Pairs, gallery and probes are made of the held-out images.
        by: ``class`` or ``image``.
        halves: instead, write ``half1.tsv`` and ``half2.tsv``; see `halves_of`.
        seed: of the choice of classes, images and pairs.
        reading: options of `open_source`.

    Returns:
        `counts` of images and classes by file, `folder`, that of the images, and `by`; None for halves.

    Raises:
        DataError: invalid data, nothing can be held out, or the folder exists.
    """
    with publishing_folder(out) as folder:
        _, listing = read_listing(location, **reading)
        is_second = halves_of(listing) if halves else held_out_of(listing, held_out, by, seed)
        names = ("half1.tsv", "half2.tsv") if halves else ("train.tsv", "held_out.tsv")
        counts: dict[str, dict[str, int]] = {}
        for name, is_in in zip(names, (~is_second, is_second), strict=True):
            counts[name] = write_list(folder / name, listing, np.flatnonzero(is_in))
        if not halves:
            counts |= _write_tests(folder, listing, np.flatnonzero(is_second), seed)
    return {"counts": counts, "folder": listing.folder, "by": None if halves else by}


def describe(done: dict[str, Any], out: str) -> str:
    """Return what `split` has written, and the commands that use it."""
    counts, folder = done["counts"], done["folder"]
    places = {name: shlex.quote(str(Path(out, name))) for name in counts}
    lines = [
        f"wrote {places[name]}: {', '.join(f'{count:,} {kind}' for kind, count in found.items())}"
        for name, found in counts.items()
    ]
    commands = [train_command(out, name, folder) for name in counts if name.startswith(("train", "half"))]
    test = "plsc test last --protocol"
    if done["by"] == "image":
        commands[0] += f" --data.val_dir {places['held_out.tsv']}"
    if "pairs.txt" in counts:
        commands[0] += " --data.val_targets pairs.txt"
        commands.append(f"{test} pairs --pairs {places['pairs.txt']} --output report-pairs")
    elif done["by"]:
        lines.append("no pairs.txt: the held-out images have too few pairs of one class, or of two classes")
    if "gallery.tsv" in counts:
        chosen = f"--gallery {places['gallery.tsv']} --images {places['probes.tsv']}"
        commands.append(f"{test} identify {chosen} {reading_flag(folder)} --output report-identify")
    elif done["by"]:
        lines.append("no gallery.tsv and probes.tsv: no enrolled class has a second held-out image")
    return "\n".join([*lines, "Next:", *commands])


def halves_of(listing: Listing) -> np.ndarray:
    """Return which images are in the second half, bool [N]; each class is divided as evenly as possible.

    It depends only on the paths and class names, not on their order or on other classes.
    """
    place = place_in_class(listing.labels, _hashes(listing.paths, "half"))
    first = (_hashes(listing.classes, "half") % 2).astype(np.int64)  # of an odd class, either half has more
    return (place + first[listing.labels]) % 2 == 1


def held_out_of(listing: Listing, share: float, by: str, seed: int) -> np.ndarray:
    """Return which images are held out, bool [N]; see `split`. Raises DataError if none can be."""
    if by == "class":
        classes = len(listing.classes)
        count = min(max(round(share * classes), 1), classes - 1)
        found = np.isin(listing.labels, np.argsort(_hashes(listing.classes, seed))[:count])
    else:
        # The share of all images, in the order of their classes, so that small classes take turns.
        is_held = np.diff(np.floor(np.arange(len(listing.labels) + 1) * share + 0.5)) > 0
        held = np.bincount(np.sort(listing.labels), weights=is_held)
        wanted = np.minimum(held, np.bincount(listing.labels) - 1)
        found = place_in_class(listing.labels, _hashes(listing.paths, seed)) < wanted[listing.labels]
    if not (0 < share < 1 and found.any()):
        raise DataError(f"a share of {share:g} by {by} is none: a class, and an image of each, must be left")
    return found


def draw_pairs(labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return distinct random pairs of images of the same class, and as many of different classes.

    Args:
        labels: int64 [n], 0 or more.

    Returns:
        Same and different pairs, both int64 [P, 2]; P is at most 30,000, and 0 if there are none of a kind.
    """
    rng = np.random.default_rng(hash_key(seed))
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    images = np.bincount(labels)
    different = (len(labels) ** 2 - int((images**2).sum())) // 2
    same, distance = np.empty((0, 2), np.int64), 1
    while len(same) < _MOST_PAIRS and distance < images.max(initial=0):
        # Each image with the one `distance` places later, so that large classes have few pairs more.
        pairs = np.stack([order[:-distance], order[distance:]], 1)
        pairs = pairs[labels[pairs[:, 0]] == labels[pairs[:, 1]]]
        same, distance = np.concatenate([same, rng.permutation(pairs)]), distance + 1
    same = same[: min(_MOST_PAIRS, different)]
    found, ends = np.empty(0, np.int64), np.cumsum(images)[labels]
    while len(found) < len(same):
        one = rng.integers(len(labels), size=2 * len(same))
        # The images of other classes are those after the class, and from the start on.
        other = order[(ends[one] + rng.integers(len(labels) - images[labels[one]])) % len(labels)]
        codes = np.minimum(one, other) * len(labels) + np.maximum(one, other)
        found = np.unique(np.concatenate([found, codes]))
    found = rng.permutation(found)[: len(same)]
    return same, np.stack([found // len(labels), found % len(labels)], 1)


def _write_tests(folder: Path, listing: Listing, numbers: np.ndarray, seed: int) -> dict[str, dict[str, int]]:
    """Write pairs, gallery and probes of these images, if there can be any; return their numbers."""
    counts: dict[str, dict[str, int]] = {}
    labels = listing.labels[numbers]
    same, different = draw_pairs(labels, seed)
    if len(same) >= _LEAST_PAIRS:
        # In turn, because the folds of the accuracy are contiguous.
        pairs = numbers[np.stack([same, different], 1).reshape(-1, 2)].tolist()
        with (folder / "pairs.txt").open("w", encoding="utf-8", newline="") as file:
            file.write(f"# images: {absolute(listing.folder)}\n")  # as plsc/evaluate/verification.py reads it
            for position, (one, other) in enumerate(pairs):
                file.write(f"{listing.paths[one]}\t{listing.paths[other]}\t{1 - position % 2}\n")
        counts["pairs.txt"] = {"pairs": len(pairs)}
    # As split_gallery of plsc/evaluate/identification.py: the first image of every other class is enrolled.
    is_gallery = np.zeros(len(labels), bool)
    is_gallery[np.unique(labels, return_index=True)[1][::2]] = True
    if np.isin(labels[~is_gallery], labels[is_gallery]).any():
        counts["gallery.tsv"] = write_list(folder / "gallery.tsv", listing, numbers[is_gallery])
        counts["probes.tsv"] = write_list(folder / "probes.tsv", listing, numbers[~is_gallery])
    return counts


def place_in_class(labels: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the place of each image among those of its class by the order of the keys, int64 [N]."""
    order = np.lexsort((keys, labels))
    images = np.bincount(labels)
    place = np.empty(len(labels), np.int64)
    place[order] = np.arange(len(labels)) - np.repeat(np.cumsum(images) - images, images)
    return place


def _hashes(texts: Sequence[str], key: object) -> np.ndarray:
    found = (hashlib.sha256(f"{key} {name_key(text)}".encode()).digest()[:8] for text in texts)
    return np.frombuffer(b"".join(found), ">u8")
