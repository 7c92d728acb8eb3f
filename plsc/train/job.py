"""The verbs: options and the user's parts in, results out. Each is a collective."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from plsc.checkpoint import load_weights
from plsc.checkpoint.load import read_class_names
from plsc.config import Config, Options
from plsc.config.optim import DEFAULT_RATE, REFERENCE_BATCH
from plsc.data.class_names import class_names_of
from plsc.data.reader import declares_shards
from plsc.data.sources.base import FileSource, IndexedSource, Source
from plsc.data.sources.torch_dataset import TorchDatasetSource
from plsc.errors import CheckpointError, DataError
from plsc.evaluate.embed import embed_images
from plsc.evaluate.verification import VerificationResult
from plsc.heads.joint import each_head
from plsc.models import BaseModel
from plsc.parallel.backbone import plain_name
from plsc.parallel.world import World
from plsc.train.adopt import adopt, resolve_run
from plsc.train.build import Run, UserParts, build_run, global_batch_size
from plsc.train.classes import OpenedCheckpoint
from plsc.train.data import is_generator_reader, open_training_source
from plsc.train.directories import open_directories, open_load_dir, open_start
from plsc.train.evaluation import evaluate_targets, load_targets
from plsc.train.logs import RunLog
from plsc.train.loop import Trainer, TrainResult
from plsc.train.network import (
    build_network,
    evaluated,
    evaluation_context,
    look_up_lists,
    training_mode,
    use_lists,
)
from plsc.train.resume import restore
from plsc.train.saving import Saver
from plsc.train.snapshot import seed_generators
from plsc.train.warm_start import start_from_pretrained

logger = logging.getLogger(__name__)


@dataclass
class Prediction:
    """Embeddings float32 [N, D], not normalised; names and labels of the N images, in their order.

    A name is the path of the file, or says which sample of a reader it is. A label is -1 where the reader
    gave none.
    """

    embeddings: np.ndarray
    names: list[str]
    labels: np.ndarray


def run_training(options: Options, world: World, user: UserParts) -> TrainResult:
    """Train, from the start (`model.pretrained` may give weights) or from `checkpoint.load_dir`."""
    start = open_start(options.resolve(), world)
    config = resolve_run(options, start.checkpoint, world.size, user.model)
    run = build_run(config, world, user, start.checkpoint)
    directories = open_directories(config, world, start)
    try:
        if start.note and world.is_main:
            logger.info(start.note)
        lines = [f"differs from the checkpoint: {line}" for line in config.differences]
        warm_start = None
        if start.checkpoint:
            more = restore(run, *start.checkpoint)
            lines += [f"differs from the checkpoint: {line}" for line in more]
        else:
            warm_start = start_from_pretrained(run)
            lines += warm_start.lines() if warm_start else []
            seed_generators(world, config.train.seed)
        log = RunLog(directories.local, world.is_main, run.position.step, run.total_steps)
        with closing(log):
            for line in [*_summary(run, start.checkpoint), *lines]:
                log.say(line)
            result = Trainer(run, log, Saver(run, log, directories)).train()
        result.warm_start = warm_start
        return result
    finally:
        directories.release()


def run_test(options: Options, world: World, user: UserParts) -> dict[str, VerificationResult]:
    """Return the verification of the checkpoint's network on every pair file, by name."""
    network, config = load_network(options, world, user)
    targets = load_targets(config, user.test_reader)
    if not targets:
        raise DataError(
            f"there is nothing to test on in {config.data.dataset_dir}; put a pair file there and "
            "name it with set_val_targets"
        )
    results = evaluate_targets(network, targets, config, world)
    if world.is_main:
        for name, result in results.items():
            rates = ", ".join(
                f"TAR {tar:.4f} at FAR {far:g}" for far, tar in result.tar_at_far.items()
            )
            logger.info(
                f"{name}: accuracy {result.accuracy:.4f} +- {result.accuracy_std:.4f}, {rates}"
            )
    return results


def run_prediction(options: Options, world: World, user: UserParts) -> Prediction:
    """Return the embeddings of the dataset's images, or of the predict reader's.

    Classes with names are numbered as in the checkpoint, those that it lacks behind its own.
    """
    checkpoint = open_load_dir(options.resolve(), world)
    network, config = load_network(options, world, user, checkpoint)
    network = evaluated(network, config, world)
    reader = user.predict_reader
    if reader is not None and is_generator_reader(reader):
        return _predict_stream(network, reader, config, world)
    source = open_training_source(config, reader)
    class_names, saved = class_names_of(source), read_class_names(*checkpoint)
    if class_names is not None and saved is not None:
        assert isinstance(source, IndexedSource)
        source.renumber(saved.numbered(class_names))
    # A Dataset of the user's own may not be made for several threads.
    threads = 0 if isinstance(source, TorchDatasetSource) else config.data.num_workers
    images = ImagesOf(source, range(len(source)))
    embeddings = _embed(network, images, config, world, config.data.dataset_dir, threads)
    where = source.path if isinstance(source, FileSource) else source.name
    names = [str(where(index)) for index in range(len(source))]
    return Prediction(embeddings, names, source.labels())


def load_network(
    options: Options,
    world: World,
    user: UserParts,
    checkpoint: OpenedCheckpoint | None = None,
) -> tuple[BaseModel, Config]:
    """Return a checkpoint's network, and the configuration with what the checkpoint decides of it.

    checkpoint: when not given, that of `checkpoint.load_dir`.
    """
    path, manifest = checkpoint or open_load_dir(options.resolve(), world)
    config = adopt(options, path, manifest, user.model, "model")
    if world.is_main:
        for difference in config.differences:
            logger.info(f"differs from the checkpoint: {difference}")
    network = build_network(config, world, user.model)
    use_lists(network, look_up_lists(network, config), config, world.device)
    try:
        network.load_state_dict(load_weights(path))
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} does not fit {type(network).__name__}: "
            f"{' '.join(str(error).split())[:300]}; use the model and image shape that were trained"
        ) from error
    return network, config


class ImagesOf:
    """Images of a source without their labels, read when they are asked for."""

    def __init__(self, source: Source, which: range) -> None:
        self._source = source
        self._which = which

    def __len__(self) -> int:
        return len(self._which)

    def __getitem__(self, index: int) -> Any:
        return self._source[self._which[index]][0]


def _embed(
    network: BaseModel, images: Any, options: Config, world: World, name: str, threads: int
) -> np.ndarray:
    with evaluation_context(options, world.device):
        return embed_images(
            network,
            images,
            options.model.image_shape,
            batch_size=options.train.test_batch_size,
            device=world.device,
            flip=False,
            world=world,
            name=name,
            num_threads=threads,
        )


def _predict_stream(network: BaseModel, reader: Any, options: Config, world: World) -> Prediction:
    """Every rank runs the reader; each chunk of its images is shared out over the ranks."""
    parts: list[np.ndarray] = []
    labels: list[int] = []
    whole = reader(0, 1) if declares_shards(reader) else reader()
    samples = _images_and_labels(whole)
    while chunk := list(islice(samples, options.train.test_batch_size * world.size)):
        images = [image for image, _ in chunk]
        parts.append(_embed(network, images, options, world, "the predict reader", 0))
        labels.extend(label for _, label in chunk)
    if not parts:
        raise DataError("the predict reader yielded no image")
    names = [f"sample {index}" for index in range(len(labels))]
    return Prediction(np.concatenate(parts), names, np.array(labels, dtype=np.int64))


def _images_and_labels(samples: Any) -> Iterator[tuple[Any, int]]:
    for sample in samples:
        if isinstance(sample, (tuple, list)):
            yield sample[0], int(sample[1]) if len(sample) > 1 else -1
        else:
            yield sample, -1


def _summary(run: Run, checkpoint: OpenedCheckpoint | None) -> list[str]:
    """Return what the user should know before training begins."""
    parameters = sum(p.numel() for p in run.network.parameters())
    samples = run.data.num_samples
    images = "a reader" if samples is None else f"{samples:,} images"
    resumed = f", from step {run.position.step} ({checkpoint[0]})" if checkpoint else ""
    mode = training_mode(run.options, run.world.device)
    mode = "" if mode == "float32" else f", {mode}"
    count = len(run.data.sets)
    heads = f"{count} head{'s' * (count > 1)}" if count else run.options.head.loss_type
    text = (
        f"training {plain_name(run.network)} ({parameters:,} parameters) with "
        f"{heads} over {run.head.class_num:,} classes on {images}; "
        f"{run.world.size} rank{'s' * (run.world.size > 1)}, {run.world.device.type}{mode}{resumed}"
    )
    return [text, _rates(run), *run.notes]


def _rates(run: Run) -> str:
    """Return a line with the learning rate, where it comes from, the warm-ups and automatic scales."""
    options = run.options
    if ":" in options.optim.optimizer:
        source = "of the optimizer's factory"
    elif "optim.lr" in options.explicit:
        source = "optim.lr"
    elif "optim.lr" in options.adopted:
        source = "from the checkpoint"
    else:
        batch = global_batch_size(options, run.world.size)
        source = f"default: {DEFAULT_RATE:g} x global batch {batch} / {REFERENCE_BATCH}"
    parts = [
        f"learning rate {run.rate.base:.4g} ({source})",
        f"schedule {options.optim.schedule}",
        f"warm-up {run.rate.warmup_steps} step{'s' * (run.rate.warmup_steps != 1)}",
    ]
    if options.head.margin_warmup_steps:
        parts.append(f"margin warm-up {options.head.margin_warmup_steps} steps")
    for name, head, _ in each_head(run.head, run.rows):
        if head.margin.is_auto_scale:
            of = f" of {name}" if name else ""
            parts.append(f"scale{of} {head.margin.scale:.4g} (auto, {head.class_num:,} classes)")
    return ", ".join(parts)
