"""Evaluate the network of a checkpoint: on pair files, on held-out images, or by a protocol with a report."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from plsc.checkpoint.load import read_class_names
from plsc.config import Options
from plsc.data.class_names import ClassNames
from plsc.data.sources.base import class_names_of
from plsc.errors import DataError, OptionError, suggest
from plsc.evaluate.capacity import CapacityResult, evaluate_capacity
from plsc.evaluate.embed import ImagesOf
from plsc.evaluate.groups import GroupRates, Groups, mean_rates, pair_rates, read_groups, search_rates
from plsc.evaluate.identification import RATES, identify, retrieval, split_gallery
from plsc.evaluate.report import Result, Section, write_report
from plsc.evaluate.templates import evaluate_templates, read_protocol
from plsc.evaluate.verification import VerificationResult
from plsc.export.folder import checksum_of
from plsc.names import PROTOCOLS
from plsc.parallel.failure import on_main_rank
from plsc.parallel.world import World
from plsc.predict.network import Trained, open_trained
from plsc.storage.urls import base_name, shown
from plsc.train.build import load_head, open_targets
from plsc.train.callbacks import UserParts
from plsc.train.data import align_source, check_unseen, open_labelled
from plsc.train.targets import (
    HeldOutSet,
    Target,
    TestReader,
    evaluate_targets,
    open_pairs,
    verify_target,
)

logger = logging.getLogger(__name__)


def run_test(options: Options, world: World, user: UserParts) -> dict[str, Any]:
    """Return the results of the checkpoint's network on every pair file and on `data.val_dir`, by name."""
    trained = open_trained(options, world, user.model)
    config, checkpoint = trained.config, trained.checkpoint
    limit = int(config.train.fast_dev_run) or config.train.limit_test_batches
    head = None if config.data.val_dir is None else load_head(*checkpoint, world)
    classes = None if head is None else (head.class_num, read_class_names(*checkpoint))
    targets = open_targets(config, world, user.test_reader, limit, classes)
    check_any(targets, config.data.dataset_dir)
    results = evaluate_targets(trained.evaluated, targets, head)
    log_results(world, results)
    return results


def check_any(targets: Sequence[Target | HeldOutSet], folder: str) -> None:
    """Raise DataError if there is nothing to test on."""
    if not targets:
        raise DataError(
            f"{folder} has no pair file to test on; put one there and name it with "
            "data.val_targets, or a labelled dataset as data.val_dir"
        )


def log_results(world: World, results: Mapping[str, Any]) -> None:
    """Log a line per result; for pairs, with the TAR at each FAR that is resolved."""
    for name, result in results.items():
        tars = ""
        if isinstance(result, VerificationResult):
            resolved = result.resolved_fars()
            tars = "".join(f", TAR {result.tar_at_far[far]:.4f} at FAR {far:g}" for far in resolved)
        world.log(f"{name}: {result.summary()}{tars}")


@dataclass(frozen=True)
class ProtocolData:
    """A protocol and its data, paths or URLs; see `Entry.test`."""

    protocol: str
    images: str | None = None
    pairs: str | None = None
    gallery: str | None = None
    distractors: str | None = None
    templates: str | None = None
    groups: str | None = None

    def __post_init__(self) -> None:
        takes, problem = PROTOCOLS.get(self.protocol, ()), ""
        given = [name for name, value in vars(self).items() if value is not None and name != "protocol"]
        if not takes:
            problem = f"is unknown; {suggest(self.protocol, PROTOCOLS)}"
        elif {*given} - {*takes}:
            problem = f"takes {', '.join(takes)}, not {', '.join(given)}"
        elif self.protocol == "templates" and self.templates is None:
            problem = "needs templates, the folder of the meta files"
        elif self.protocol == "pairs" and self.images and (self.pairs or ".bin").endswith(".bin"):
            problem = "takes images for a text list of pairs; a .bin file contains its images"
        if problem:
            raise OptionError(f"the protocol {self.protocol!r} {problem}")


Outcome = tuple[str, Result, Section]
"""A result, its name, and its section of the report."""


def run_protocol(
    options: Options, world: World, user: UserParts, data: ProtocolData, output: Path
) -> dict[str, Any]:
    """Return the results of the checkpoint's network by name, and write the report; a collective."""
    trained = open_trained(options, world, user.model)
    evaluator = Evaluator(trained, data, user.test_reader)
    outcomes: list[Outcome] = list(getattr(evaluator, f"run_{data.protocol}")())
    results = {name: result for name, result, _ in outcomes}
    log_results(world, results)
    for name, result, _ in outcomes:
        if warning := result.warning():
            world.log(f"{name}: {warning}", logging.WARNING)
    fingerprint = checksum_of({name: one.cpu() for name, one in trained.network.state_dict().items()})
    model = [
        f"Checkpoint: {trained.path}, step {trained.manifest.step:,}; network {trained.config.model.name}; "
        f"weights {fingerprint}.",
        *evaluator.choices(),
    ]
    sections = [replace(section, choices=[*model, *section.choices]) for _, _, section in outcomes]
    title = f"Evaluation: {data.protocol.replace('_', ' ')}"
    on_main_rank(world, f"write {output}", lambda: write_report(output, title, sections))
    world.log(f"wrote {output / 'report.md'}")
    return results


@dataclass(frozen=True)
class Evaluator:
    """Embed the images of a protocol on all ranks and apply it, by the method of its name; a collective."""

    trained: Trained
    data: ProtocolData
    test_reader: TestReader | None

    def choices(self) -> list[str]:
        """Return how images are embedded, one sentence each."""
        precision = "Precision of the network: float32."
        config = self.trained.config
        if self.trained.network.example_input is not None:
            return ["Samples: as the test reader returns them.", precision]
        channels, height, width = config.model.image_shape
        flipped = "the sum of the embeddings of the image and its mirror image"
        embedding = flipped if config.data.flip else "that of the image, without its mirror image"
        landmarks = config.data.landmarks
        fitted = "resized" if landmarks is None else f"aligned by {landmarks} (.bin files: resized)"
        return [
            f"Images: {fitted} to {height} x {width}, {channels} channels, normalised as (x - 127.5) / 128.",
            f"Embedding: {embedding} (data.flip).",
            precision,
        ]

    def run_pairs(self) -> Iterator[Outcome]:
        """Yield the verification of each pair file."""
        config, data = self.trained.config, self.data
        if data.pairs is None:
            opened = open_targets(config, self.trained.world, self.test_reader)
            targets = [target for target in opened if isinstance(target, Target)]
            check_any(targets, config.data.dataset_dir)
        else:
            place, is_strict = config.data, config.data.bad_images == "stop"
            how: Any = {"allowed": place.allowed, "landmarks": place.landmarks, "is_strict": is_strict}
            targets = [open_pairs(data.pairs, Path(base_name(shown(data.pairs))).stem, data.images, **how)]
        groups = [self._groups(target.images) for target in targets]
        for target, own in zip(targets, groups, strict=True):
            result = verify_target(self.trained.embed(target.images, target.name), target, self.trained.world)
            yield target.name, result, result.section(target.name)
            if own is not None:
                pairs = np.arange(len(target.images)).reshape(-1, 2) if target.pairs is None else target.pairs
                yield _by_group(target.name, pair_rates(own, pairs, result.cosines, result.is_same))

    def run_identify(self) -> Iterator[Outcome]:
        """Yield the identification of probes in a gallery."""
        probes, groups, embeddings = self._embedded()
        labels, datasets = probes.labels, [probes]
        if self.data.gallery is None:
            is_gallery = split_gallery(labels)
            gallery, gallery_labels = embeddings[is_gallery], labels[is_gallery]
            embeddings, probe_labels = embeddings[~is_gallery], labels[~is_gallery]
            groups = groups and replace(groups, of=groups.of[~is_gallery])
            choice = (
                f"Gallery: the first image of the first, third, fifth, ... class of {probes.place}. Probes: "
                "the other images; those of classes that are not in the gallery are the non-mated searches."
            )
        else:
            other = open_dataset(self.trained, self.data.gallery)
            datasets.append(other)
            gallery, gallery_labels = self.trained.embed(other.images, other.place), other.labels
            probe_labels = probes.labels_in(other)
            choice = f"Gallery: {other.place}; probes: {probes.place}."
        capacity = self._capacity(
            datasets, np.concatenate([gallery, embeddings]), np.append(gallery_labels, probe_labels)
        )
        choices = [choice, capacity] if isinstance(capacity, str) else [choice]
        if self.data.distractors is not None:
            others = open_dataset(self.trained, self.data.distractors)
            gallery = np.concatenate([gallery, self.trained.embed(others.images, others.place)])
            gallery_labels = np.append(gallery_labels, np.full(len(others.labels), -1))
            choices.append(f"Distractors in the gallery: {others.place}, {len(others.labels):,} images.")
        result = identify(gallery, gallery_labels, embeddings, probe_labels, self.trained.world)
        yield "identify", result, result.section("Identification", choices)
        if not isinstance(capacity, str):
            yield "capacity", capacity, capacity.section("Capacity", choices[:1])
        if groups is not None:
            is_mated = np.isin(probe_labels, gallery_labels[gallery_labels >= 0])
            yield _by_group("identify", search_rates(groups, is_mated, result))

    def _capacity(
        self, datasets: Sequence[Dataset], embeddings: np.ndarray, labels: np.ndarray
    ) -> CapacityResult | str:
        """Return the capacity of a gallery of these images, or why there is none."""
        try:
            for dataset in datasets:
                check_unseen(dataset.place, dataset.class_names, self.trained.checkpoint)
            return evaluate_capacity(embeddings, labels)
        except DataError as error:
            return f"The capacity of a gallery is absent: {error}."

    def run_templates(self) -> Iterator[Outcome]:
        """Yield the comparison of templates."""
        config, data = self.trained.config, self.data
        assert data.templates is not None
        protocol = read_protocol(data.templates, data.images, config.data.allowed)
        protocol.images.check()
        align_source(protocol.images, config.data.landmarks, config.data.bad_images == "stop")
        images = ImagesOf(protocol.images, range(len(protocol.images)))
        embeddings = self.trained.embed(images, protocol.name)
        result = evaluate_templates(embeddings, protocol, self.trained.world)
        choices = [f"Meta files: {data.templates}; images: {shown(str(protocol.images.root))}."]
        yield "templates", result, result.section(protocol.name, choices)

    def run_retrieval(self) -> Iterator[Outcome]:
        """Yield the retrieval of the other images of the class of each image."""
        images, groups, embeddings = self._embedded()
        result = retrieval(embeddings, images.labels, self.trained.world)
        choices = [f"Images: {images.place}."]
        yield "retrieval", result, result.section(base_name(images.place), choices)
        if groups is not None:
            queries = replace(groups, of=groups.of[result.is_query])
            values = dict(zip(RATES.values(), result.values.T, strict=True))
            yield _by_group("retrieval", mean_rates(queries, values, "all queries"))

    def _embedded(self) -> tuple[Dataset, Groups | None, np.ndarray]:
        """Return the images of a protocol, their groups and their embeddings."""
        images = open_dataset(self.trained, self.data.images)
        groups = self._groups(images.images)
        return images, groups, self.trained.embed(images.images, images.place)

    def _groups(self, images: Sequence[Any]) -> Groups | None:
        return None if self.data.groups is None else read_groups(self.data.groups, images)


def open_dataset(trained: Trained, place: str | None) -> Dataset:
    """Return a labelled dataset; by default that of the run."""
    data = trained.config.data
    place = place or data.dataset_dir
    source = open_labelled(place, data.format_arguments, data.landmarks, data.bad_images == "stop")
    labels = np.array(source.labels(), np.int64)
    if labels.min() < 0:
        raise DataError(f"{source.name(int(labels.argmin()))} of {shown(place)} has the label {labels.min()}")
    return Dataset(shown(place), ImagesOf(source, range(len(source))), labels, class_names_of(source))


def _by_group(name: str, rates: GroupRates) -> Outcome:
    return f"{name} groups", rates, rates.section(f"{name} groups")


@dataclass(frozen=True)
class Dataset:
    """A labelled dataset: N images, int64 [N] labels, and the names of the labels, if they have names."""

    place: str
    images: ImagesOf
    labels: np.ndarray
    class_names: ClassNames | None

    def labels_in(self, other: Dataset) -> np.ndarray:
        """Return the labels as numbered in another dataset; those it lacks get unused numbers."""
        if (self.class_names is None) != (other.class_names is None):
            named, numbered = (self, other) if self.class_names is not None else (other, self)
            raise DataError(f"the labels of {named.place} are names, those of {numbered.place} are numbers")
        if self.class_names is None or other.class_names is None:
            return self.labels
        return other.class_names.numbered(self.class_names)[self.labels]
