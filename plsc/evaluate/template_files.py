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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plsc.data.files import PathTable, is_hidden
from plsc.data.sources.base import printable
from plsc.data.sources.image_folders import listed_path
from plsc.errors import DataError
from plsc.evaluate.pair_lists import ListedImages
from plsc.storage.blocks import streamed, text_lines

_MAX_LINE_BYTES = 16384
_MAX_DIGITS = 18  # such numbers fit int64
_BLOCK_BYTES = 2**23
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
    paths, templates, media = PathTable(), array("q"), array("q")
    for number, line in _lines(path):
        try:
            fields = line.rsplit(None, 2)
            if len(fields) != 3:
                raise ValueError(f"expected '<image> <template id> <media id>', got {_shown(line)}")
            paths.append(listed_path(fields[0], root, allowed, str(path)))
            templates.append(_integer(fields[1]))
            media.append(_integer(fields[2]))
        except (ValueError, DataError) as problem:
            raise _error(path, number, problem) from None
    if not len(paths):
        raise DataError(f"{path} lists no images")
    return paths, np.array(templates), np.array(media)


def _read_scores(path: Path, paths: PathTable) -> np.ndarray:
    """Return the last number of each line, which names the same image as that line of the images."""
    scores = array("d")
    for number, line in _lines(path):
        try:
            if number > len(paths) or not line.startswith(paths[number - 1] + b" "):
                raise ValueError(f"expected image {number} of *{_IMAGES}, got {_shown(line)}")
            score = float(line.split()[-1])
            if not (math.isfinite(score) and score >= 0):
                raise ValueError(f"the score of the detector is {score}; expected 0 or more")
        except ValueError as problem:
            raise _error(path, number, problem) from None
        scores.append(score)
    if len(scores) != len(paths):
        raise DataError(f"{path} has {len(scores):,} lines for {len(paths):,} images; it is truncated")
    return np.array(scores)


def _read_subjects(path: Path, template_ids: np.ndarray) -> Subjects:
    subjects: dict[int, int] = {}
    columns: list[int] = []
    known = set(template_ids.tolist())
    for number, line in _lines(path):
        try:
            fields = next(csv.reader([line.decode("utf-8")]))
            if not columns:
                header = [field.strip().upper() for field in fields]
                columns = [header.index("TEMPLATE_ID"), header.index("SUBJECT_ID")]
                continue
            if len(fields) <= max(columns):
                raise ValueError(f"expected a TEMPLATE_ID and a SUBJECT_ID, got {_shown(line)}")
            template, subject = (_integer(fields[column].strip().encode()) for column in columns)
            if template not in known:
                raise ValueError(f"template {template} has no images in *{_IMAGES}")
            if subjects.setdefault(template, subject) != subject:
                raise ValueError(
                    f"template {template} has subject {subject}, but {subjects[template]} in a line before"
                )
        except (ValueError, csv.Error) as problem:
            reason = "expected a header with TEMPLATE_ID and SUBJECT_ID" if not columns else problem
            raise _error(path, number, reason) from None
    if not subjects:
        raise DataError(f"{path} lists no templates")
    templates = np.searchsorted(template_ids, np.array(list(subjects)))
    return Subjects(templates, np.array(list(subjects.values()), np.int64))


def _read_pairs(path: Path, template_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the templates, int32 [P, 2], and whether they are of the same subject, bool [P]."""
    pairs, flags, first = [], [], 1
    for block in _blocks(path):
        numbers = _three_integers(block)
        if numbers is None:
            raise _error(path, *_first_bad_line(block, first))
        rows = np.minimum(np.searchsorted(template_ids, numbers[:, :2]), len(template_ids) - 1)
        unknown = (template_ids[rows] != numbers[:, :2]).any(axis=1)
        bad = unknown | (numbers[:, 2] > 1)
        if bad.any():
            index = int(bad.argmax())
            one, other, flag = numbers[index].tolist()
            what = (
                f"a template of {one} and {other} has no images" if unknown[index] else f"the flag is {flag}"
            )
            raise _error(path, first + index, f"{what}; expected two templates of *{_IMAGES}, and 0 or 1")
        pairs.append(rows.astype(np.int32))
        flags.append(numbers[:, 2] == 1)
        first += len(numbers)
    is_same = np.concatenate(flags) if flags else np.empty(0, bool)
    if is_same.all() or not is_same.any():
        raise DataError(f"{path} needs pairs of the same and of different subjects")
    return np.concatenate(pairs), is_same


def _three_integers(block: bytes) -> np.ndarray | None:
    """Return the numbers of lines of three integers, int64 [n, 3]; None if any line has something else."""
    data = np.frombuffer(block, np.uint8)
    is_digit = data - 48 < 10  # smaller bytes wrap around
    line_ends = np.flatnonzero(data == 10)
    if not (is_digit | (data == 10) | (data == 32) | (data == 9) | (data == 13)).all():
        return None
    edges = np.flatnonzero(np.diff(is_digit.view(np.int8), prepend=0, append=0))
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    if len(starts) != 3 * len(line_ends) or lengths.max(initial=0) > _MAX_DIGITS:
        return None
    of_line = starts.reshape(-1, 3)
    if (of_line[:, 2] > line_ends).any() or (of_line[1:, 0] < line_ends[:-1]).any():
        return None
    values = np.zeros(len(starts), np.int64)
    for place in range(lengths.max(initial=0)):
        digit = data[np.minimum(starts + place, len(data) - 1)].astype(np.int64) - 48
        values = np.where(place < lengths, 10 * values + digit, values)
    return values.reshape(-1, 3)


def _first_bad_line(block: bytes, first: int) -> tuple[int, str]:
    lines = block.split(b"\n")
    bad = next(index for index, line in enumerate(lines) if not _has_three_integers(line))
    return first + bad, f"expected '<template id> <template id> <0 or 1>', got {_shown(lines[bad])}"


def _has_three_integers(line: bytes) -> bool:
    fields = line.split()
    return len(fields) == 3 and all(field.isdigit() and len(field) <= _MAX_DIGITS for field in fields)


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield whole lines of a file, many at a time; the last one ends with a newline, too."""
    rest = b""
    with streamed(path, path.parent) as file:
        while piece := file.read(_BLOCK_BYTES):
            whole, newline, rest = (rest + piece).rpartition(b"\n")
            if newline:
                yield whole + newline
            elif len(rest) > _MAX_LINE_BYTES:
                raise DataError(f"{path} has a line of over {_MAX_LINE_BYTES:,} bytes; it is damaged")
    if rest:
        yield rest + b"\n"


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the text of each line, without white space around it."""
    with streamed(path, path.parent) as file:
        for number, _, line in text_lines(file, str(path), _MAX_LINE_BYTES):
            yield number, line.strip()


def _integer(text: bytes) -> int:
    if not text.isdigit() or len(text) > _MAX_DIGITS:
        raise ValueError(f"expected a non-negative integer of up to {_MAX_DIGITS} digits, got {_shown(text)}")
    return int(text)


def _shown(text: bytes) -> str:
    return f"'{printable(text[:60])}'"


def _error(path: Path, line: int, problem: object) -> DataError:
    return DataError(f"{path}:{line}: {problem}; fix the line")
