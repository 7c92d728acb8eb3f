"""The verbs: options and the user's parts in, results out. Each is a collective."""

from __future__ import annotations

import logging
from collections.abc import Iterator
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
from plsc.train.acceleration import evaluated
from plsc.train.adopt import adopt
from plsc.train.build import Run, UserParts, build_network, build_run, global_batch_size
from plsc.train.class_numbers import OpenedCheckpoint
from plsc.train.directories import Places, open_load_dir, open_places, open_start
from plsc.train.evaluation import evaluate_targets, load_targets
from plsc.train.feed import is_generator_reader, open_training_source
from plsc.train.logs import RunLog
from plsc.train.loop import Trainer, TrainResult
from plsc.train.precision import evaluation_context, look_up_lists, training_mode, use_lists
from plsc.train.randomness import seed_generators
from plsc.train.resume import resolve_run, restore
from plsc.train.saving import Saver
from plsc.train.warm_start import WarmStart, start_from_pretrained

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
    checkpoint, start = open_start(options.resolve(), world)
    config = resolve_run(options, checkpoint, world.size, user.model)
    differences = list(config.differences)
    run = build_run(config, world, user, checkpoint)
    run.resumed_from = checkpoint[0] if checkpoint else None
    run.run_id = start.run_id
    places = open_places(config, world, start)
    try:
        run.save_dir = places.local
        if start.note and world.is_main:
            logger.info(start.note)
        warm_start = None
        if checkpoint:
            differences += restore(run, *checkpoint)
        else:
            warm_start = start_from_pretrained(run)
            seed_generators(world, config.train.seed)
        return _train(run, places, differences, warm_start)
    finally:
        places.release()


def _train(
    run: Run, places: Places, differences: list[str], warm_start: WarmStart | None
) -> TrainResult:
    options, world = run.options, run.world
    log = RunLog(run.save_dir, world.is_main, run.position.step, run.total_steps)
    try:
        log.say(_summary(run))
        for difference in differences:
            log.say(f"differs from the checkpoint: {difference}")
        if run.position.epoch >= options.train.epochs:
            log.say(
                f"{run.resumed_from} is the end of a run of {options.train.epochs} epochs: "
                "there is nothing left to train; set_train_epochs to more"
            )
        if warm_start:
            log.say("\n".join(warm_start.lines()))
        result = Trainer(run, log, Saver(run, log, places)).train()
        result.warm_start = warm_start
        return result
    finally:
        log.close()


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
    embeddings = _embed(network, _Images(source), config, world, config.data.dataset_dir, threads)
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


class _Images:
    """The images of a source without their labels, read when they are asked for."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        return self._source[index][0]


def _embed(
    network: BaseModel, images: Any, options: Config, world: World, name: str, threads: int
) -> np.ndarray:
    channels, height, width = options.model.image_shape
    with evaluation_context(options, world.device):
        return embed_images(
            network,
            images,
            (channels, height, width),
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


def _summary(run: Run) -> str:
    parameters = sum(p.numel() for p in run.network.parameters())
    images = "a reader" if run.num_samples is None else f"{run.num_samples:,} images"
    resumed = f", from step {run.position.step} ({run.resumed_from})" if run.resumed_from else ""
    mode = training_mode(run.options, run.world.device)
    mode = "" if mode == "float32" else f", {mode}"
    count = len(run.sets)
    heads = f"{count} head{'s' * (count > 1)}" if count else run.options.head.loss_type
    text = (
        f"training {plain_name(run.network)} ({parameters:,} parameters) with "
        f"{heads} over {run.head.class_num:,} classes on {images}; "
        f"{run.world.size} rank{'s' * (run.world.size > 1)}, {run.world.device.type}{mode}{resumed}"
    )
    return "\n".join(filter(None, (text, _rates(run), run.notes)))


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
