"""Template protocols as in IJB-B and IJB-C: 1:1 verification and 1:N identification of sets of images.

A template is a set of images and video frames (media) of one subject. The embeddings of the images of a
medium are averaged, then the media of the template (Whitelam et al., 2017; Maze et al., 2018).

The published meta files are in one folder, with the prefix ``ijbb`` or ``ijbc``:

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from pyarrow import csv as arrow
from torch import Tensor

from plsc.data.files import PathTable, is_hidden, listed_path
from plsc.data.sources.base import printable
from plsc.errors import DataError, naming
from plsc.evaluate.curves import roc_curve
from plsc.evaluate.identification import (
    FPIRS,
    RANKS,
    IdentificationResult,
    check_finite,
    identify,
    norms_of,
    share,
    unit_rows,
)  # fmt: skip
from plsc.evaluate.report import Result, Table
from plsc.evaluate.verification import ListedImages, PairRates, rates_of_curve
from plsc.parallel.world import World
from plsc.storage.blocks import streamed, text_lines

_CHUNK = 8192  # images that are pooled at a time
_AT_A_TIME = 512  # pairs that are compared at a time; their embeddings fit in the cache
_POINTS = 500  # of the ROC curve in the picture
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


@dataclass(frozen=True)
class TemplatePairs(PairRates):
    """The result of the 1:1 protocol."""

    curve: tuple[np.ndarray, np.ndarray] = field(repr=False, compare=False)  # FAR and TAR, thinned

    def summary(self) -> str:
        """Return the rates for the log."""
        rates = (f"TAR {self.tar_at_far[far]:.4f} at FAR {far:g}" for far in self.resolved_fars())
        return f"1:1 {' '.join(rates)}"

    def _choices(self) -> list[str]:
        return [
            "TAR at FAR: of all thresholds with at most this FAR; with 95% Wilson score intervals.",
        ]

    def _tables(self) -> list[Table]:
        counted = f"{self.positives:,} same and {self.negatives:,} different pairs"
        return [self.rates(title=f"1:1 ({counted}, AUC {self.auc:.5f})")]

    def _pictures(self, name: str, stem: str) -> dict[str, Callable[[Path], None]]:
        from plsc.evaluate.plots import plot_rates  # imports matplotlib

        curve, limits = {f"{name}  (AUC {self.auc:.3f})": self.curve}, (min(0.1, 1 / self.negatives), 1.0)
        labels = "False accept rate", "True accept rate"
        return {f"{stem}_roc.png": lambda path: plot_rates(curve, path, *labels, limits)}


@dataclass(frozen=True)
class TemplateSearch(Result):
    """The result of the 1:N protocol: means over the galleries; rates are fractions, 0..1."""

    rank1: float
    rank5: float
    rank10: float
    tpir_at_fpir: dict[float, float]  # 1 - FNIR, of the FPIRs that every gallery resolves
    insightface: dict[str, float]  # rank-k and TPIR at FPIR as its ijb_evals.py, by the names of the rows
    galleries: dict[str, IdentificationResult]

    def summary(self) -> str:
        """Return the rates for the log."""
        tpirs = "".join(f" TPIR {tpir:.4f} at FPIR {fpir:g}" for fpir, tpir in self.tpir_at_fpir.items())
        return f"1:N rank-1 {self.rank1:.4f} rank-5 {self.rank5:.4f}{tpirs}"

    def _choices(self) -> list[str]:
        return [
            f"1:N: mean over the galleries {', '.join(self.galleries)}; TPIR is 1 - FNIR.",
            "Column insightface: as its ijb_evals.py since pull request 1739. TPIR: the share of mated "
            "searches whose mate is first, without a tie, and above the floor(FPIR x n)-th highest of the "
            "top scores of the n non-mated searches; mean over the galleries. rank-k: mates found in all "
            "galleries, of the probes.",
            *dict.fromkeys(choice for result in self.galleries.values() for choice in result._choices()),
        ]

    def _tables(self) -> list[Table]:
        def row(title: str, mean: float, values: Iterable[float]) -> list[str]:
            return [title, *(f"{value:.4f}" for value in (mean, self.insightface[title], *values))]

        results = self.galleries.values()
        rows = [
            row(f"rank-{k}", getattr(self, f"rank{k}"), (getattr(one, f"rank{k}") for one in results))
            for k in RANKS
        ]
        for fpir, tpir in self.tpir_at_fpir.items():
            rows.append(row(f"TPIR at FPIR {fpir:g}", tpir, (1 - one.fnir_at_fpir[fpir] for one in results)))
        counted = {"subjects": "identities", "mated searches": "mated", "non-mated searches": "non_mated"}
        for what, name in counted.items():
            rows.append([what, "", "", *(f"{getattr(one, name):,}" for one in results)])
        return [Table(("1:N", "mean", "insightface", *self.galleries), rows)]

    def _pictures(self, name: str, stem: str) -> dict[str, Callable[[Path], None]]:
        from plsc.evaluate.plots import plot_cmc  # imports matplotlib

        cmcs = {gallery: result.cmc() for gallery, result in self.galleries.items()}
        return {f"{stem}_cmc.png": lambda path: plot_cmc(cmcs, path)}


@dataclass(frozen=True)
class TemplateResult(Result):
    """The result of `evaluate_templates`; a protocol whose files are absent is None."""

    images: int
    media: int
    templates: int
    weighted: bool  # by the score of the detector
    verification: TemplatePairs | None
    identification: TemplateSearch | None

    def _parts(self) -> list[Result]:
        return [part for part in (self.verification, self.identification) if part is not None]

    def summary(self) -> str:
        """Return the rates for the log."""
        return f"{'; '.join(part.summary() for part in self._parts())} ({self.templates:,} templates)"

    def _choices(self) -> list[str]:
        weights = "weighted by the score of the detector" if self.weighted else "not weighted"
        return [
            f"Embeddings of images, {weights}, not normalised, are averaged per medium, then the media per "
            "template.",
            "The score of two templates is the cosine of their embeddings.",
            *(choice for part in self._parts() for choice in part._choices()),
        ]

    def _tables(self) -> list[Table]:
        counts = [f"{self.images:,}", f"{self.media:,}", f"{self.templates:,}"]
        own = Table(["Images", "Media", "Templates"], [counts])
        return [own, *(table for part in self._parts() for table in part._tables())]

    def _pictures(self, name: str, stem: str) -> dict[str, Callable[[Path], None]]:
        parts = (part._pictures(name, stem) for part in self._parts())
        return {file: draw for pictures in parts for file, draw in pictures.items()}


def evaluate_templates(
    embeddings: np.ndarray,
    protocol: TemplateProtocol,
    world: World | None = None,
) -> TemplateResult:
    """Apply the 1:1 and 1:N protocols whose files are present; a collective.

    Args:
        embeddings: [I, D], of the images of the protocol, not normalised, the same on every rank.
        protocol: from `plsc.evaluate.templates.read_protocol`.
        world: as of `identify`.

    Raises:
        DataError: an embedding is not finite, or a gallery has no mated searches.
    """
    world = world or World.single("cpu")
    pooled = pool_templates(embeddings, protocol.templates, protocol.media, protocol.weights)
    pairs = None
    if protocol.pairs is not None and protocol.is_same is not None:
        scores = _pair_scores(pooled, protocol.pairs, world)
        pairs = _pair_rates(scores, protocol.is_same)
    search = None
    if protocol.galleries and protocol.probes is not None:
        results = {}
        probes, probe_subjects = pooled[protocol.probes.templates], protocol.probes.subjects
        for name, gallery in protocol.galleries.items():
            rows, subjects = pooled[gallery.templates], gallery.subjects
            with naming("gallery {} of {}".format, name, protocol.name):
                results[name] = identify(rows, subjects, probes, probe_subjects, world)
        search = _mean_over_galleries(results)
    media = np.unique(np.stack([protocol.templates, protocol.media]), axis=1)
    return TemplateResult(
        images=len(embeddings),
        media=media.shape[1],
        templates=len(protocol.template_ids),
        weighted=protocol.weights is not None,
        verification=pairs,
        identification=search,
    )


def pool_templates(
    embeddings: np.ndarray, templates: np.ndarray, media: np.ndarray, weights: np.ndarray | None = None
) -> np.ndarray:
    """Return the mean over the media of each template of the mean over their images, float64 [T, D].

    Args:
        embeddings: [I, D]; may be memory-mapped.
        templates: of each image, int64 [I], every number of 0..T - 1.
        media: of each image, int64 [I]; a medium of two templates is one of each.
        weights: factor of each embedding, [I].

    Raises:
        DataError: an embedding is not finite.
    """
    order = np.lexsort([media, templates])
    template, medium = templates[order], media[order]
    new_template = np.diff(template, prepend=-1) != 0
    new_medium = new_template | (np.diff(medium, prepend=0) != 0)
    group = np.cumsum(new_medium) - 1  # of each image: its (template, medium)
    images = np.bincount(group)
    media_of_template = np.bincount(template[new_medium])
    factors = 1 / (images[group] * media_of_template[template])
    if weights is not None:
        factors = factors * weights[order]
    pooled = np.zeros((len(media_of_template), embeddings.shape[1]))
    for start in range(0, len(order), _CHUNK):
        part = slice(start, start + _CHUNK)
        rows = np.asarray(embeddings[order[part]], np.float64)
        check_finite(rows, "template image ", order[part])
        numbers, firsts = np.unique(template[part], return_index=True)
        pooled[numbers] += np.add.reduceat(rows * factors[part, None], firsts)
    return pooled


def _pair_scores(pooled: np.ndarray, pairs: np.ndarray, world: World) -> np.ndarray:
    """Return the cosine of each pair, float64 [P]; each rank computes a part."""
    units = unit_rows(pooled, norms_of(pooled, "template"), world.device)

    def compare(start: int, stop: int) -> Tensor:
        both = torch.from_numpy(pairs[start:stop].astype(np.int64)).to(world.device).split(_AT_A_TIME)
        return torch.cat([(units[one] * units[other]).sum(1) for one, other in (part.T for part in both)])[
            :, None
        ]

    return share(compare, 0, len(pairs), world, width=1)[:, 0]


def _pair_rates(scores: np.ndarray, is_same: np.ndarray) -> TemplatePairs:
    far, tar = roc_curve(scores, is_same)
    rates = rates_of_curve(far, tar, is_same)
    shown = np.geomspace(1 / rates["negatives"], 1, _POINTS)
    curve = (shown, tar[np.searchsorted(far, shown, side="right") - 1])
    return TemplatePairs(**rates, curve=curve)


def _mean_over_galleries(results: dict[str, IdentificationResult]) -> TemplateSearch:
    def mean(values: list[float]) -> float:
        return float(np.mean(values))

    found = list(results.values())
    resolved = [fpir for fpir in FPIRS if all(fpir in result.fnir_at_fpir for result in found)]
    return TemplateSearch(
        **{f"rank{k}": mean([getattr(result, f"rank{k}") for result in found]) for k in RANKS},
        tpir_at_fpir={fpir: mean([1 - result.fnir_at_fpir[fpir] for result in found]) for fpir in resolved},
        insightface=_as_insightface(found, resolved),
        galleries=results,
    )


def _as_insightface(results: list[IdentificationResult], fpirs: list[float]) -> dict[str, float]:
    """Return rank-k and TPIR as `evaluation_1N` of insightface's ijb_evals.py, ties against the mate."""
    probes = results[0].mated + results[0].non_mated
    rates = {f"rank-{k}": sum(int((one.ranks <= k).sum()) for one in results) / probes for k in RANKS}
    for fpir in fpirs:
        tpirs = []
        for one in results:
            limit = np.sort(one.top_scores)[::-1][max(int(one.non_mated * fpir) - 1, 0)]
            tpirs.append(np.mean((one.ranks == 1) & (one.mate_scores > limit)))
        rates[f"TPIR at FPIR {fpir:g}"] = float(np.mean(tpirs))
    return rates
