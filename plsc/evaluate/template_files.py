"""Read the published meta files of IJB-B and IJB-C.

The folder has, with the prefix ``ijbb`` or ``ijbc``:

- ``<prefix>_face_tid_mid.txt``: ``<image> <template id> <media id>`` per line;
- ``<prefix>_name_5pts_score.txt``, optional: the same images, five landmarks, and the score of the detector;
- ``<prefix>_template_pair_label.txt``, for 1:1: ``<template id> <template id> <0 or 1>`` per line;
- ``<prefix>_1N_gallery_<name>.csv`` (G1 and G2, or S1 and S2) and ``<prefix>_1N_probe_mixed.csv``, for 1:N:
  a header, then a line per image with the columns TEMPLATE_ID and SUBJECT_ID.
"""

from __future__ import annotations

import csv
import math
import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import csv as arrow

from plsc.data.files import PathTable, is_hidden
from plsc.data.sources.base import printable
from plsc.data.sources.image_folders import listed_path
from plsc.errors import DataError
from plsc.evaluate.pair_lists import ListedImages
from plsc.storage.blocks import streamed, text_lines

_MAX_LINE_BYTES = 16384
_MAX_DIGITS = 18  # such numbers fit int64
_BLOCK_BYTES = 2**23  # of pairs
_IMAGES, _SCORES = "_face_tid_mid.txt", "_name_5pts_score.txt"
_PAIRS, _GALLERY, _PROBES = "_template_pair_label.txt", "_1N_gallery_", "_1N_probe_mixed.csv"


@dataclass(frozen=True)
class Subjects:
    """Templates with their subjects: rows of `TemplateProtocol.template_ids`, and subject ids, int64 [n]."""

    templates: np.ndarray
    subjects: np.ndarray


@dataclass(frozen=True)
class TemplateProtocol:
    """The meta files of a template protocol.

    Attributes:
        name: prefix of the files, such as ``ijbc``.
        images: the images in the order of the file, [I].
        templates: template of each image, rows of `template_ids`, int64 [I].
        media: media id of each image, int64 [I].
        weights: score of the detector for each image, float64 [I]; None without the file.
        template_ids: int64 [T], ascending.
        pairs: templates of each pair, rows of `template_ids`, int32 [P, 2]; None without 1:1.
        is_same: bool [P]; None without 1:1.
        galleries: by name, such as ``G1``; empty without 1:N.
        probes: None without 1:N.
    """

    name: str
    images: ListedImages
    templates: np.ndarray
    media: np.ndarray
    weights: np.ndarray | None
    template_ids: np.ndarray
    pairs: np.ndarray | None
    is_same: np.ndarray | None
    galleries: dict[str, Subjects]
    probes: Subjects | None


def read_protocol(
    folder: str | os.PathLike[str], images: str | os.PathLike[str] | None = None, allowed: Sequence[str] = ()
) -> TemplateProtocol:
    """Read the meta files of IJB-B or IJB-C, or files of the same layout.

    Args:
        folder: a local folder with the meta files of one dataset.
        images: folder or URL of the images; by default `folder`.
        allowed: as of `located`.

    Raises:
        DataError: a file is missing or a line is invalid; the message names the file and the line.
    """
    folder = Path(folder)
    listed = sorted(path for path in folder.glob(f"*{_IMAGES}") if not is_hidden(path.name))
    if len(listed) != 1:
        found = ", ".join(printable(path.name) for path in listed) or "none"
        raise DataError(f"{folder} needs one file <dataset>{_IMAGES}, such as ijbc{_IMAGES}; found {found}")
    prefix = listed[0].name.removesuffix(_IMAGES)
    root = os.fspath(folder if images is None else images)
    paths, ids, media = _read_images(listed[0], root, allowed)
    template_ids, templates = np.unique(ids, return_inverse=True)
    scores = folder / f"{prefix}{_SCORES}"
    pairs, galleries = folder / f"{prefix}{_PAIRS}", sorted(folder.glob(f"{prefix}{_GALLERY}*.csv"))
    if not pairs.exists() and not galleries:
        raise DataError(f"{folder} has neither {pairs.name} for 1:1 nor {prefix}{_GALLERY}G1.csv for 1:N")
    compared = _read_pairs(pairs, template_ids) if pairs.exists() else (None, None)
    return TemplateProtocol(
        name=prefix,
        images=ListedImages(
            root if "://" in root else Path(root), paths, np.arange(len(paths)) + 1, listed[0].name
        ),
        templates=templates.astype(np.int64),
        media=media,
        weights=_read_scores(scores, paths) if scores.exists() else None,
        template_ids=template_ids,
        pairs=compared[0],
        is_same=compared[1],
        galleries={
            path.stem.removeprefix(f"{prefix}{_GALLERY}"): _read_subjects(path, template_ids)
            for path in galleries
        },
        probes=_read_subjects(folder / f"{prefix}{_PROBES}", template_ids) if galleries else None,
    )


def _read_images(path: Path, root: str, allowed: Sequence[str]) -> tuple[PathTable, np.ndarray, np.ndarray]:
    paths, numbers = PathTable(), array("q")

    def parse(number: int, line: bytes) -> None:
        image, template, media = line.rsplit(None, 2)
        paths.append(listed_path(image, root, allowed, str(path)))
        numbers.extend((_integer(template), _integer(media)))

    _parse_lines(path, "'<image> <template id> <media id>'", parse)
    if not len(paths):
        raise DataError(f"{path} lists no images")
    templates, media = np.array(numbers).reshape(-1, 2).T
    return paths, templates, media


def _read_scores(path: Path, paths: PathTable) -> np.ndarray:
    """Return the last number of each line, which names the same image as that line of the images."""
    scores = array("d")

    def parse(number: int, line: bytes) -> None:
        scores.append(float(line.split()[-1]))
        if not line.startswith(paths[number - 1] + b" ") or not 0 <= scores[-1] < math.inf:
            raise ValueError

    _parse_lines(path, f"the image of this line of *{_IMAGES}, and at the end a score of 0 or more", parse)
    if len(scores) != len(paths):
        raise DataError(f"{path} has {len(scores):,} lines for {len(paths):,} images; it is truncated")
    return np.array(scores)


def _read_subjects(path: Path, template_ids: np.ndarray) -> Subjects:
    subjects: dict[int, int] = {}
    columns: list[int] = []
    known = set(template_ids.tolist())

    def parse(number: int, line: bytes) -> None:
        fields = [field.strip() for field in next(csv.reader([line.decode("utf-8")]))]
        if not columns:
            columns.extend(map([field.upper() for field in fields].index, ("TEMPLATE_ID", "SUBJECT_ID")))
            return
        template, subject = (_integer(fields[column].encode()) for column in columns)
        if template not in known or subjects.setdefault(template, subject) != subject:
            raise DataError("it has no images, or another subject in a line before")

    _parse_lines(path, "a header, then a line per template, with TEMPLATE_ID and SUBJECT_ID", parse)
    templates = np.searchsorted(template_ids, np.array(list(subjects), np.int64))
    return Subjects(templates, np.array(list(subjects.values()), np.int64))


def _read_pairs(path: Path, template_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the templates, int32 [P, 2], and whether they are of the same subject, bool [P]."""
    names = ("one", "other", "flag")
    pairs, flags, count = [np.empty((0, 2), np.int32)], [np.empty(0, bool)], 0
    try:
        with (
            streamed(path, path.parent) as file,
            arrow.open_csv(
                file,
                # Without threads, errors have the number of the row.
                arrow.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES, column_names=names),
                arrow.ParseOptions(
                    delimiter="\t" if b"\t" in file.peek() else " ",
                    quote_char=False,
                    ignore_empty_lines=False,
                ),
                arrow.ConvertOptions(column_types=dict.fromkeys(names, pa.int64()), null_values=[]),
            ) as batches,
        ):
            for batch in batches:
                numbers = np.stack([batch.column(name).to_numpy() for name in names], 1)
                rows = np.minimum(np.searchsorted(template_ids, numbers[:, :2]), len(template_ids) - 1)
                bad = (template_ids[rows] != numbers[:, :2]).any(1) | ((numbers[:, 2] & 1) != numbers[:, 2])
                if bad.any():
                    line = " ".join(map(str, numbers[bad][0]))
                    raise pa.ArrowInvalid(f"Row #{count + int(bad.argmax()) + 1}: '{line}'")
                pairs.append(rows.astype(np.int32))
                flags.append(numbers[:, 2] == 1)
                count += len(numbers)
    except pa.ArrowInvalid as error:
        expected = f"'<template id> <template id> <0 or 1>', of templates of *{_IMAGES}"
        raise DataError(f"{path}: {printable(str(error))}; expected {expected}") from None
    is_same = np.concatenate(flags)
    if is_same.all() or not is_same.any():
        raise DataError(f"{path} needs pairs of the same and of different subjects")
    return np.concatenate(pairs), is_same


def _parse_lines(path: Path, expected: str, parse: Callable[[int, bytes], None]) -> None:
    """Parse each line, from its number and its text without white space at the ends; DataError names it."""
    with streamed(path, path.parent) as file:
        for number, _, line in text_lines(file, str(path), _MAX_LINE_BYTES):
            try:
                parse(number, line.strip())
            except (ValueError, IndexError, csv.Error, DataError) as error:
                reason = f" ({error})" if isinstance(error, DataError) else ""
                shown = printable(line.strip()[:60])
                raise DataError(f"{path}:{number}: expected {expected}, got '{shown}'{reason}") from None


def _integer(text: bytes) -> int:
    if not text.isdigit() or len(text) > _MAX_DIGITS:
        raise ValueError
    return int(text)
