"""Evaluate the network of a checkpoint: on pair files, on held-out images, or by a protocol with a report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from plsc.checkpoint.all_ranks import on_main_rank
from plsc.checkpoint.load import read_class_names
from plsc.checkpoint.manifest import OpenedCheckpoint
from plsc.config import Config, Options
from plsc.data.class_names import ClassNames, class_names_of
from plsc.errors import DataError, OptionError, suggest
from plsc.evaluate.capacity import CapacityResult, evaluate_capacity
from plsc.evaluate.embed import ImagesOf, embed_images
from plsc.evaluate.groups import GroupRates, Groups, mean_rates, pair_rates, read_groups, search_rates
from plsc.evaluate.report import Result, Section, write_report
from plsc.evaluate.verification import VerificationResult
from plsc.export.folder import checksum_of
from plsc.models import BaseModel
from plsc.names import PROTOCOLS
from plsc.parallel.world import World
from plsc.predict.network import open_trained
from plsc.storage.urls import base_name, shown
from plsc.train.build import load_head
from plsc.train.callbacks import UserParts
from plsc.train.data import align_source, check_unseen, open_labelled
from plsc.train.targets import (
    HeldOutSet,
    Target,
    evaluate_targets,
    load_targets,
    open_held_out,
    open_pairs,
    verify_target,
)

logger = logging.getLogger(__name__)


def run_test(options: Options, world: World, user: UserParts) -> dict[str, Any]:
    """Return the results of the checkpoint's network on every pair file and on `data.val_dir`, by name."""
    network, config, checkpoint = open_trained(options, world, user.model)
    limit = int(config.train.fast_dev_run) or config.train.limit_test_batches
    targets: list[Target | HeldOutSet] = []
    targets += load_targets(config, user.test_reader, limit, world.size)
    head = None
    if config.data.val_dir is not None:
        head = load_head(*checkpoint, world)
        class_names = read_class_names(*checkpoint)
        targets.append(open_held_out(config, head.class_num, class_names, limit, world))
    check_any(targets, config)
    results = evaluate_targets(
        network,
        targets,
        world,
        head,
        flip=config.data.flip,
        image_shape=config.model.image_shape,
        batch_size=config.train.test_batch_size,
        num_threads=config.data.num_workers,
    )
    log_results(world, results)
    return results


def check_any(targets: Sequence[Target | HeldOutSet], config: Config) -> None:
    """Raise DataError if there is nothing to test on."""
    if not targets:
        raise DataError(
            f"{config.data.dataset_dir} has no pair file to test on; put one there and name it with "
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
        if self.protocol not in PROTOCOLS:
            raise OptionError(f"the protocol is {self.protocol!r}; {suggest(self.protocol, PROTOCOLS)}")
        for name, value in vars(self).items():
            if value is not None and name not in ("protocol", *PROTOCOLS[self.protocol]):
                takes = ", ".join(PROTOCOLS[self.protocol])
                raise OptionError(f"{name} is not for the protocol {self.protocol!r}, which takes {takes}")
        if self.protocol == "templates" and self.templates is None:
            raise OptionError("the protocol 'templates' needs templates, the folder of the meta files")
        is_list = self.pairs is not None and not self.pairs.endswith(".bin")
        if self.protocol == "pairs" and not is_list and self.images is not None:
            raise OptionError("images is the folder of a text list of pairs; a .bin file contains its images")


@dataclass(frozen=True)
class _Outcome:
    """A result by its name, and the function that returns its section."""

    name: str
    result: Result
    section: Callable[[], Section]


def run_protocol(
    options: Options, world: World, user: UserParts, data: ProtocolData, output: Path
) -> dict[str, Any]:
    """Return the results of the checkpoint's network by name, and write the report; a collective."""
    network, config, (path, manifest) = open_trained(options, world, user.model)
    evaluator = Evaluator(network, config, world, (path, manifest))
    outcomes = list(evaluator.run(data, user))
    results = {outcome.name: outcome.result for outcome in outcomes}
    log_results(world, results)
    for outcome in outcomes:
        if warning := outcome.result.warning():
            world.log(f"{outcome.name}: {warning}", logging.WARNING)
    fingerprint = checksum_of({name: one.cpu() for name, one in network.state_dict().items()})
    model = [
        f"Checkpoint: {path}, step {manifest.step:,}; network {config.model.name}; weights {fingerprint}.",
        *evaluator.choices(data),
    ]

    def write() -> None:
        sections = [outcome.section() for outcome in outcomes]
        sections = [replace(section, choices=[*model, *section.choices]) for section in sections]
        write_report(output, f"Evaluation: {data.protocol.replace('_', ' ')}", sections)

    on_main_rank(world, f"write {output}", write)
    world.log(f"wrote {output / 'report.md'}")
    return results


@dataclass(frozen=True)
class Evaluator:
    """Embed images on all ranks and apply the protocols; all methods are collectives."""

    network: BaseModel
    config: Config
    world: World
    checkpoint: OpenedCheckpoint

    def run(self, data: ProtocolData, user: UserParts) -> Iterator[_Outcome]:
        """Yield the results of a protocol, by the method of its name."""
        yield from getattr(self, f"run_{data.protocol}")(data, user)

    def choices(self, data: ProtocolData) -> list[str]:
        """Return how images are embedded, one sentence each."""
        precision = "Precision of the network: float32."
        if self.network.example_input is not None:
            return ["Samples: as the test reader returns them.", precision]
        channels, height, width = self.config.model.image_shape
        flipped = "the sum of the embeddings of the image and its mirror image"
        embedding = flipped if self.config.data.flip else "that of the image, without its mirror image"
        landmarks = self.config.data.landmarks
        fitted = "resized" if landmarks is None else f"aligned by {landmarks} (.bin files: resized)"
        return [
            f"Images: {fitted} to {height} x {width}, {channels} channels, normalised as (x - 127.5) / 128.",
            f"Embedding: {embedding} (data.flip).",
            precision,
        ]

    def run_pairs(self, data: ProtocolData, user: UserParts) -> Iterator[_Outcome]:
        """Yield the verification of each pair file."""
        if data.pairs is None:
            targets = load_targets(self.config, user.test_reader)
            check_any(targets, self.config)
        else:
            options = self.config.data
            target = open_pairs(
                data.pairs,
                Path(base_name(data.pairs)).stem,
                data.images,
                allowed=options.allowed,
                landmarks=options.landmarks,
                is_strict=options.bad_images == "stop",
            )
            targets = [target]
        groups = [self._groups(data, target.images) for target in targets]
        for target, own in zip(targets, groups, strict=True):
            result = verify_target(self.embed(target.images, target.name), target, self.world)
            names = target.by_pair(target.names)
            yield _Outcome(target.name, result, partial(result.section, target.name, target.pictures, names))
            if own is not None:
                pairs = np.arange(len(target.images)).reshape(-1, 2) if target.pairs is None else target.pairs
                yield _by_group(target.name, pair_rates(own, pairs, result.cosines, result.is_same))

    def run_all_pairs(self, data: ProtocolData, user: UserParts) -> Iterator[_Outcome]:
        """Yield the verification of all pairs of the images."""
        from plsc.evaluate.all_pairs import all_pair_rates, all_pairs

        images, groups, embeddings = self._embedded(data)
        result = all_pairs(embeddings, images.labels, self.world, self.world.device, self.world.log)
        choices = [f"Images: {images.place}."]
        yield _Outcome("all_pairs", result, partial(_section, result, base_name(images.place), choices))
        if groups is not None:
            rates = all_pair_rates(embeddings, images.labels, groups, result, self.world)
            yield _by_group("all_pairs", rates)

    def run_identify(self, data: ProtocolData, user: UserParts) -> Iterator[_Outcome]:
        """Yield the identification of probes in a gallery."""
        from plsc.evaluate.identification import identify, split_gallery

        probes, groups, embeddings = self._embedded(data)
        labels, datasets = probes.labels, [probes]
        if data.gallery is None:
            is_gallery = split_gallery(labels)
            gallery, gallery_labels = embeddings[is_gallery], labels[is_gallery]
            embeddings, probe_labels = embeddings[~is_gallery], labels[~is_gallery]
            groups = groups and replace(groups, of=groups.of[~is_gallery])
            choice = (
                f"Gallery: the first image of the first, third, fifth, ... class of {probes.place}. Probes: "
                "the other images; those of classes that are not in the gallery are the non-mated searches."
            )
        else:
            other = self.open(data.gallery)
            datasets.append(other)
            gallery, gallery_labels = self.embed(other.images, other.place), other.labels
            probe_labels = probes.labels_in(other)
            choice = f"Gallery: {other.place}; probes: {probes.place}."
        capacity = self._capacity(
            datasets, np.concatenate([gallery, embeddings]), np.append(gallery_labels, probe_labels)
        )
        choices = [choice, capacity] if isinstance(capacity, str) else [choice]
        if data.distractors is not None:
            others = self.open(data.distractors)
            gallery = np.concatenate([gallery, self.embed(others.images, others.place)])
            gallery_labels = np.append(gallery_labels, np.full(len(others.labels), -1))
            choices.append(f"Distractors in the gallery: {others.place}, {len(others.labels):,} images.")
        result = identify(
            gallery, gallery_labels, embeddings, probe_labels, world=self.world, device=self.world.device
        )
        yield _Outcome("identify", result, partial(_section, result, "Identification", choices))
        if not isinstance(capacity, str):
            yield _Outcome("capacity", capacity, partial(_section, capacity, "Capacity", choices[:1]))
        if groups is not None:
            is_mated = np.isin(probe_labels, gallery_labels[gallery_labels >= 0])
            yield _by_group("identify", search_rates(groups, is_mated, result))

    def _capacity(
        self, datasets: Sequence[_Dataset], embeddings: np.ndarray, labels: np.ndarray
    ) -> CapacityResult | str:
        """Return the capacity of a gallery of these images, or why there is none."""
        try:
            for dataset in datasets:
                check_unseen(dataset.place, dataset.class_names, self.checkpoint)
            return evaluate_capacity(embeddings, labels)
        except DataError as error:
            return f"The capacity of a gallery is absent: {error}."

    def run_templates(self, data: ProtocolData, user: UserParts) -> Iterator[_Outcome]:
        """Yield the comparison of templates."""
        from plsc.evaluate.template_files import read_protocol
        from plsc.evaluate.templates import evaluate_templates, template_rates

        assert data.templates is not None
        protocol = read_protocol(data.templates, data.images, self.config.data.allowed)
        protocol.images.check()
        data_options = self.config.data
        align_source(protocol.images, data_options.landmarks, data_options.bad_images == "stop")
        images = ImagesOf(protocol.images, range(len(protocol.images)))
        groups = self._groups(data, images)
        embeddings = self.embed(images, protocol.name)
        result = evaluate_templates(embeddings, protocol, self.world, self.world.device, self.world.log)
        choices = [f"Meta files: {data.templates}; images: {shown(str(protocol.images.root))}."]
        yield _Outcome("templates", result, partial(_section, result, protocol.name, choices))
        if groups is not None:
            rates = template_rates(groups, protocol, result)
            yield from (_by_group(f"{protocol.name} {name}", found) for name, found in rates.items())

    def run_retrieval(self, data: ProtocolData, user: UserParts) -> Iterator[_Outcome]:
        """Yield the retrieval of the other images of the class of each image."""
        from plsc.evaluate.retrieval import RATES, retrieval

        images, groups, embeddings = self._embedded(data)
        result = retrieval(embeddings, images.labels, self.world, self.world.device, self.world.log)
        choices = [f"Images: {images.place}."]
        yield _Outcome("retrieval", result, partial(_section, result, base_name(images.place), choices))
        if groups is not None:
            queries = replace(groups, of=groups.of[result.is_query])
            values = dict(zip(RATES.values(), result.values.T, strict=True))
            yield _by_group("retrieval", mean_rates(queries, values, "all queries"))

    def _embedded(self, data: ProtocolData) -> tuple[_Dataset, Groups | None, np.ndarray]:
        """Return the images of a protocol, their groups and their embeddings."""
        images = self.open(data.images)
        groups = self._groups(data, images.images)
        return images, groups, self.embed(images.images, images.place)

    def _groups(self, data: ProtocolData, images: Sequence[Any]) -> Groups | None:
        return None if data.groups is None else read_groups(data.groups, images)

    def open(self, place: str | None) -> _Dataset:
        """Return a labelled dataset; by default that of the run."""
        place = place or self.config.data.dataset_dir
        options = self.config.data
        source = open_labelled(
            place, options.format_arguments, options.landmarks, options.bad_images == "stop"
        )
        labels = np.array(source.labels(), np.int64)
        if labels.min() < 0:
            raise DataError(
                f"{source.name(int(labels.argmin()))} of {shown(place)} has the label {labels.min()}"
            )
        return _Dataset(shown(place), ImagesOf(source, range(len(source))), labels, class_names_of(source))

    def embed(self, images: Sequence[Any], name: str) -> np.ndarray:
        """Return the embeddings of images, float32 [N, D], on every rank."""
        flip = self.config.data.flip and self.network.example_input is None
        return embed_images(
            self.network,
            images,
            self.config.model.image_shape,
            batch_size=self.config.train.test_batch_size,
            device=self.world.device,
            flip=flip,
            world=self.world,
            name=name,
            num_threads=self.config.data.num_workers,
        )


def _by_group(name: str, rates: GroupRates) -> _Outcome:
    return _Outcome(f"{name} groups", rates, partial(rates.section, f"{name} groups"))


def _section(result: Result, title: str, choices: Sequence[str]) -> Section:
    """Return the section of a result, with the choices of the data."""
    section = result.section(title)
    return replace(section, choices=[*choices, *section.choices])


@dataclass(frozen=True)
class _Dataset:
    """A labelled dataset: N images, int64 [N] labels, and the names of the labels, if they have names."""

    place: str
    images: ImagesOf
    labels: np.ndarray
    class_names: ClassNames | None

    def labels_in(self, other: _Dataset) -> np.ndarray:
        """Return the labels as numbered in another dataset; those it lacks get unused numbers."""
        if (self.class_names is None) != (other.class_names is None):
            named, numbered = (self, other) if self.class_names is not None else (other, self)
            raise DataError(
                f"the labels of {named.place} are names and those of {numbered.place} are numbers; use the "
                "same kind, or the format argument label_map"
            )
        if self.class_names is None or other.class_names is None:
            return self.labels
        return other.class_names.numbered(self.class_names)[self.labels]
