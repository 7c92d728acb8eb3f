"""Template protocols as in IJB-B and IJB-C: 1:1 verification and 1:N identification of sets of images.

A template is a set of images and video frames (media) of one subject. The embeddings of the images of a
medium are averaged, then the media of the template (Whitelam et al., 2017; Maze et al., 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from plsc.errors import DataError, naming
from plsc.evaluate.curves import roc_curve
from plsc.evaluate.groups import GroupRates, Groups, pair_rates, search_rates
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
from plsc.evaluate.template_files import TemplateProtocol
from plsc.evaluate.verification import PairRates, rates_of_curve
from plsc.parallel.world import World

_CHUNK = 8192  # images that are pooled at a time
_PAIRS = 512  # compared at a time; their embeddings fit in the cache
_POINTS = 500  # of the ROC curve in the picture


@dataclass(frozen=True)
class TemplatePairs(PairRates):
    """The result of the 1:1 protocol; rates are fractions, 0..1."""

    tar_at_far: dict[float, float]
    tar_intervals: dict[float, tuple[float, float]]  # 95% Wilson score interval
    unresolved_fars: tuple[float, ...]  # FARs below 1 / negatives: their TAR is that of zero false accepts
    auc: float
    pairs: int
    positives: int
    negatives: int
    curve: tuple[np.ndarray, np.ndarray] = field(repr=False, compare=False)  # FAR and TAR, thinned
    scores: np.ndarray = field(repr=False, compare=False)  # of each pair, float64 [P]

    def summary(self) -> str:
        """Return the rates for the log."""
        rates = (f"TAR {self.tar_at_far[far]:.4f} at FAR {far:g}" for far in self.resolved_fars())
        return f"1:1 {' '.join(rates)}"

    def _choices(self) -> list[str]:
        return [
            "TAR at FAR: the highest TAR of all thresholds whose FAR is at most the given one.",
            "Intervals: 95% Wilson score intervals of the TAR, for independent pairs.",
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
            "Column insightface: as its ijb_evals.py since pull request 1739 (its ijb_1n.py merges the "
            "galleries). TPIR: the share of mated searches whose mate is first, without a tie, and above "
            "the floor(FPIR x n)-th highest of the top scores of the n non-mated searches; mean over the "
            "galleries. rank-k: the mates found in all galleries, as a share of the probes.",
            "insightface adds the embedding of the mirror image (flip; here: see Embedding), keeps the norms "
            "of embeddings (as here), and weights them by the detector score (here: see above).",
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
    device: torch.device | str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> TemplateResult:
    """Apply the 1:1 and 1:N protocols whose files are present; a collective.

    Args:
        embeddings: [I, D], of the images of the protocol, not normalised, the same on every rank.
        protocol: from `plsc.evaluate.template_files.read_protocol`.
        world: the ranks that share the work; None: this process only.
        device: where the products are computed.
        progress: called with a line of text about every ten seconds, such as `world.log`.

    Raises:
        DataError: an embedding is not finite, or a gallery has no mated searches.
    """
    pooled = pool_templates(embeddings, protocol.templates, protocol.media, protocol.weights)
    pairs = None
    if protocol.pairs is not None and protocol.is_same is not None:
        scores = _pair_scores(pooled, protocol.pairs, world, device)
        pairs = _pair_rates(scores, protocol.is_same)
    search = None
    if protocol.galleries and protocol.probes is not None:
        results = {}
        probes, probe_subjects = pooled[protocol.probes.templates], protocol.probes.subjects
        for name, gallery in protocol.galleries.items():
            rows, subjects = pooled[gallery.templates], gallery.subjects
            with naming("gallery {} of {}".format, name, protocol.name):
                results[name] = identify(
                    rows, subjects, probes, probe_subjects, world, device, progress=progress
                )
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


def template_rates(
    groups: Groups, protocol: TemplateProtocol, result: TemplateResult
) -> dict[str, GroupRates]:
    """Return the rates per group of images of 1:1 and of each gallery, by ``1:1`` and its name."""
    groups = groups.pooled(protocol.templates, len(protocol.template_ids))
    found = {}
    if result.verification is not None and protocol.pairs is not None and protocol.is_same is not None:
        found["1:1"] = pair_rates(groups, protocol.pairs, result.verification.scores, protocol.is_same)
    if result.identification is not None and protocol.probes is not None:
        own = replace(groups, of=groups.of[protocol.probes.templates])
        for name, one in result.identification.galleries.items():
            is_mated = np.isin(protocol.probes.subjects, protocol.galleries[name].subjects)
            found[name] = search_rates(own, is_mated, one)
    return found


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
        DataError: an embedding is not finite, or the shapes do not match.
    """
    if embeddings.ndim != 2 or not len(embeddings) == len(templates) == len(media):
        raise DataError(
            f"the embeddings have shape {list(embeddings.shape)} for {len(templates)} images of templates"
        )
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


def _pair_scores(
    pooled: np.ndarray, pairs: np.ndarray, world: World | None, device: torch.device | str
) -> np.ndarray:
    """Return the cosine of each pair, float64 [P]; each rank computes a part."""
    units = unit_rows(pooled, norms_of(pooled, "template"), device)

    def compare(start: int, stop: int) -> Tensor:
        both = torch.from_numpy(pairs[start:stop].astype(np.int64)).to(device).split(_PAIRS)
        return torch.cat([(units[one] * units[other]).sum(1) for one, other in (part.T for part in both)])[
            :, None
        ]

    return share(compare, 0, len(pairs), world=world, width=1)[:, 0]


def _pair_rates(scores: np.ndarray, is_same: np.ndarray) -> TemplatePairs:
    far, tar = roc_curve(scores, is_same)
    rates = rates_of_curve(far, tar, is_same)
    shown = np.geomspace(1 / rates["negatives"], 1, _POINTS)
    curve = (shown, tar[np.searchsorted(far, shown, side="right") - 1])
    return TemplatePairs(**rates, curve=curve, scores=scores)


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
