"""Evaluation on pair files and labelled images; the network of a checkpoint."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from plsc.checkpoint import load_weights
from plsc.checkpoint.load import read_class_names
from plsc.checkpoint.manifest import Checker
from plsc.checkpoint.remote import fetch
from plsc.config import Config, Options
from plsc.config.option import importable, name_of, shown_value
from plsc.data.alignment import Face
from plsc.data.order import spread
from plsc.data.pair_lists import read_pair_list
from plsc.data.pairs import read_pairs
from plsc.errors import CheckpointError, DataError, OptionError, refusing
from plsc.evaluate.classification import classify
from plsc.evaluate.embed import ImagesOf, embed_images
from plsc.evaluate.verification import VerificationResult, verify
from plsc.export.folder import MODEL_NAME, WEIGHTS_NAME, check_file, read_about, trained_on_aligned
from plsc.heads import Head
from plsc.heads.joint import JointHead
from plsc.models import BaseModel
from plsc.models.base_model import Custom, safe_arguments
from plsc.parallel.world import World
from plsc.storage.urls import is_url, shown
from plsc.train.classes import OpenedCheckpoint
from plsc.train.data import align_source
from plsc.train.directories import open_checkpoint, open_load_dir
from plsc.train.heads import choose_head, load_head
from plsc.train.held_out import HeldOutSet, open_held_out
from plsc.train.network import build_network, evaluated, evaluation_context, look_up_lists, use_lists
from plsc.train.settle import adopt
from plsc.train.user_parts import TestReader, UserParts

logger = logging.getLogger(__name__)
_DEFAULT_TARGET = "lfw"
_FOLDS = 10

"""``reader(dataset_dir, val_targets)`` returns the same as plsc.utils.jpeg_reader.test."""


@dataclass(frozen=True)
class Target:
    """The P pairs of a file.

    images: N encoded images or faces to align, or arrays from a reader. is_same: bool [P]. pairs: the images
    of each pair, int64 [P, 2]; None: 2p and 2p + 1. names: of the images, if they have any.
    """

    METRICS: ClassVar = VerificationResult.METRICS

    name: str
    images: Sequence[Any]
    is_same: np.ndarray
    pairs: np.ndarray | None = None
    names: Sequence[str] | None = None

    def by_pair(self, items: Sequence[Any] | None) -> Sequence[Any] | None:
        """Return images or names in the order of the pairs: those of pair p are 2p and 2p + 1."""
        return items if self.pairs is None or items is None else _chosen(items, self.pairs.reshape(-1))

    @property
    def pictures(self) -> Sequence[Any] | None:
        """The images in the order of the pairs; None if they are arrays."""
        return self.by_pair(self.images if isinstance(self.images[0], (bytes, Face)) else None)


def _chosen(items: Sequence[Any], numbers: np.ndarray) -> Sequence[Any]:
    if isinstance(items, ImagesOf):
        return items[numbers]
    return [items[number] for number in numbers.tolist()]


def open_pairs(path: str, name: str, options: Config, folder: str | None = None) -> Target:
    """Return the pairs of a .bin file, or of a text list, whose images are below `folder`."""
    if path.endswith(".bin"):
        stored = read_pairs(path)
        return Target(name, stored.images, stored.is_same)
    listed = read_pair_list(path, folder)
    numbers = np.arange(len(listed.images))
    names = [listed.images.listed(number) for number in numbers.tolist()]
    images = ImagesOf(align_source(listed.images, options), numbers)
    return Target(name, images, listed.is_same, listed.pairs, names)


def load_targets(
    options: Config, test_reader: TestReader | None = None, limit: int | float = 1.0, ranks: int = 1
) -> list[Target]:
    """Return the pair files and lists that `data.val_targets` names; by default lfw.bin if it exists.

    limit: limit of the batches per file; at least ten pairs are left. Raises DataError for a missing or
    damaged file, or one with too few pairs for ten folds.
    """
    names = options.data.val_targets
    folder = Path(options.data.dataset_dir)
    if test_reader is not None:
        targets = _read_targets(test_reader, str(folder), names or _DEFAULT_TARGET)
    else:
        folder = folder.parent if folder.is_file() else folder  # such as the folder of train.rec
        if names is None:
            names = _DEFAULT_TARGET if (folder / f"{_DEFAULT_TARGET}.bin").exists() else ""
        targets = []
        for name in filter(None, (part.strip() for part in names.split(","))):
            stored, listed = folder / f"{name}.bin", folder / name
            is_list = listed.is_file() and not stored.is_file()
            targets.append(open_pairs(str(listed if is_list else stored), name, options))
    for target in targets:
        same = int(target.is_same.sum())
        if len(target.is_same) < _FOLDS or same in (0, len(target.is_same)):
            raise DataError(
                f"{target.name} has {len(target.is_same)} pairs, {same} of them of the same class; expected "
                f"at least {_FOLDS} pairs, with both same and different classes"
            )
    batch = options.train.test_batch_size * ranks / 2  # pairs
    return [_limited(target, spread(target.is_same, batch, limit, _FOLDS)) for target in targets]


def _limited(target: Target, chosen: np.ndarray) -> Target:
    if len(chosen) == len(target.is_same):
        return target
    pairs = np.arange(len(target.images)).reshape(-1, 2) if target.pairs is None else target.pairs
    numbers, rows = np.unique(pairs[chosen], return_inverse=True)
    names = None if target.names is None else _chosen(target.names, numbers)
    images = _chosen(target.images, numbers)
    return Target(target.name, images, target.is_same[chosen], rows.reshape(-1, 2), names)


def _read_targets(test_reader: TestReader, folder: str, names: str) -> list[Target]:
    """Return the pair files of a test reader. Raises OptionError for a wrong reader or result."""
    if not callable(test_reader):
        raise OptionError(
            f"test_reader is {shown_value(test_reader)}; expected a function reader(dataset_dir, val_targets)"
        )
    result = test_reader(folder, names)
    expected = "expected ([(images, is_same), ...], names), as plsc.utils.jpeg_reader.test returns"
    with refusing("cannot use the result of test_reader", expected):
        pair_sets, found = result
        return [
            Target(name, list(arrays[0]), np.asarray(is_same, dtype=bool))
            for name, (arrays, is_same) in zip(found, pair_sets, strict=True)
        ]


def evaluate_targets(
    network: BaseModel,
    targets: Sequence[Target | HeldOutSet],
    options: Config,
    world: World,
    head: Head | JointHead | None = None,
) -> dict[str, Any]:
    """Return a VerificationResult per pair file, a ClassificationResult for a held-out set; a collective.

    Results are identical on all ranks. head: needed for a held-out set.
    """
    results: dict[str, Any] = {}
    network = evaluated(network, options, world)
    for target in targets:
        is_labelled = isinstance(target, HeldOutSet)
        embeddings = embed(
            network,
            target.images,
            options,
            world,
            target.name,
            flip=options.data.flip and not is_labelled and network.example_input is None,
            gather=not is_labelled,
        )
        if isinstance(target, HeldOutSet):
            assert isinstance(head, Head)
            results[target.name] = classify(
                head, embeddings, target.labels, batch_size=options.train.test_batch_size, world=world
            )
        else:
            results[target.name] = verify_target(embeddings, target, world)
    return results


def verify_target(embeddings: np.ndarray, target: Target, world: World) -> VerificationResult:
    """Return the result of one rank on all ranks, so that it is identical; a collective."""
    result = verify(embeddings, target.is_same, _FOLDS, target.pairs) if world.is_main else None
    return world.broadcast_object(result)


def run_test(options: Options, world: World, user: UserParts, head_name: str | None = None) -> dict[str, Any]:
    """Return the results of the checkpoint's network on every pair file and on `data.val_dir`, by name."""
    network, config, checkpoint = open_trained(options, world, user.model)
    limit = int(config.train.fast_dev_run) or config.train.limit_test_batches
    targets: list[Target | HeldOutSet] = []
    targets += load_targets(config, user.test_reader, limit, world.size)
    head = None
    if config.data.val_dir is not None:
        name = choose_head(*checkpoint, head_name)
        head = load_head(*checkpoint, world, name)
        names, class_names = [target.name for target in targets], read_class_names(*checkpoint, name)
        targets += open_held_out(config, head.class_num, class_names, names, limit, world.size)
    if not targets:
        raise DataError(
            f"{config.data.dataset_dir} has no pair file to test on; put one there and name it with "
            "set_val_targets(), or set a labelled dataset with set_val_dir()"
        )
    results = evaluate_targets(network, targets, config, world, head)
    log_results(world, results)
    return results


def log_results(world: World, results: Mapping[str, Any]) -> None:
    """Log a line per result; for pairs, with the TAR at each FAR that is resolved."""
    for name, result in results.items():
        tars = ""
        if isinstance(result, VerificationResult):
            resolved = [far for far in result.tar_at_far if far not in result.unresolved_fars]
            tars = "".join(f", TAR {result.tar_at_far[far]:.4f} at FAR {far:g}" for far in resolved)
        world.log(f"{name}: {result.summary()}{tars}")


def load_network(
    checkpoint: str | os.PathLike[str], model: Custom | str | None = None, device: torch.device | str = "cpu"
) -> BaseModel:
    """Return the trained network of a checkpoint, in evaluation mode.

    It takes images [B, C, H, W], normalised as (x - 127.5) / 128, and returns embeddings [B, D], which are
    not normalised. For one process, without any collective.

    Args:
        checkpoint: its folder, or its URL, from which it is downloaded to the cache. Or a local folder of
            `Entry.convert_for_prediction`.
        model: for a custom network: an instance, its class, or the name of the class,
            ``package.module:Class``.
        device: device of the network.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or it does not fit the network.
        OptionError: the network cannot be built.
    """
    world = World.single(str(device))
    with torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):  # it is seeded
        return load_with_config(checkpoint, model, world)[0].eval()


def load_with_config(
    checkpoint: str | os.PathLike[str], model: Custom | str | None, world: World
) -> tuple[BaseModel, Config]:
    """Return the network of the checkpoint at a path or URL, and its configuration.

    model: as in `load_network`.
    """
    named: Any = type(model) if isinstance(model, BaseModel) else model
    is_class = isinstance(named, type) and issubclass(named, BaseModel)
    network: Any = model if is_class else None
    options = Options()
    if model is not None:
        options.set("model.name", name_of(named) if is_class else named)
    place = os.fspath(checkpoint)
    folder = fetch(place, world) if is_url(place) else Path(place)
    manifest = None if (folder / MODEL_NAME).is_file() else open_checkpoint(folder)
    saved = (read_about(folder)["options"] if manifest is None else manifest.options).get("model")
    name = saved.get("name") if isinstance(saved, dict) else None
    if model is None and isinstance(name, str) and ":" in name:
        reference, hint = importable(name)
        named = shown_value(reference)
        raise CheckpointError(
            f"{shown(place)} was saved with the custom network {shown_value(name)}, and no code is taken "
            f"from a checkpoint; name its class: load_network(path, model={named}), or --model.name {named}"
            f"{hint}"
        )
    if manifest is None:
        return read_model(folder, options, network, world)
    return open_trained(options, world, network, (folder, manifest))[:2]


def read_model(
    folder: Path, options: Options, custom: Custom | None, world: World
) -> tuple[BaseModel, Config]:
    """Return the network of a folder of `Entry.convert_for_prediction`, and its configuration.

    custom: a custom network to load the weights into. Raises CheckpointError for a damaged folder.
    """
    about, check = read_about(folder), Checker(str(folder / MODEL_NAME))
    config = options.resolve(about["options"], "model")
    if not isinstance(custom, BaseModel) and ":" in config.model.name:
        config = replace(config, arguments=safe_arguments(about.get("arguments") or {}))
    network = build_network(config, world, custom)
    path = folder / WEIGHTS_NAME
    check_file(path, about.get("weights"))
    try:
        network.load_state_dict(load_file(path))
    except (SafetensorError, RuntimeError) as error:
        first = str(error).splitlines()[-1].strip()
        raise check.wrong(
            f"the weights do not fit {type(network).__name__}: {first}", "pass the network that was trained"
        ) from error
    return network, config


def open_trained(
    options: Options, world: World, custom: Custom | None, checkpoint: OpenedCheckpoint | None = None
) -> tuple[BaseModel, Config, OpenedCheckpoint]:
    """Return the network of a checkpoint, the configuration with its model options, and the checkpoint.

    The network is all that has to be named: schedule and optimizer of the run are not built. `load_head`
    returns the head. custom: a custom network to load the weights into. checkpoint: by default that of
    `checkpoint.load_dir`.
    """
    path, manifest = checkpoint or open_load_dir(options, world)
    config = adopt(options, path, manifest, custom, "model")
    if world.is_main:
        for difference in config.differences:
            logger.info(f"differs from the checkpoint: {difference}")
        if trained_on_aligned(manifest) and config.data.landmarks is None:
            logger.info(
                "note: the network was trained on faces aligned by data.landmarks; align the images to test "
                "or predict in the same way"
            )
    network = build_network(config, world, custom)
    use_lists(network, look_up_lists(network, config), config, world.device)
    try:
        network.load_state_dict(load_weights(path))
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} does not fit {type(network).__name__}: {_first_problem(error)}; use the network, "
            "embedding size and image shape that were trained"
        ) from error
    return network, config, (path, manifest)


def _first_problem(error: RuntimeError) -> str:
    """Return the first problem that ``load_state_dict`` lists, and the number of the others."""
    _, *problems = (line.strip().rstrip(".") for line in str(error).splitlines() if line.strip())
    first = problems[0][:300] if problems else str(error)[:300]
    return f"{first} (and {len(problems) - 1} more)" if len(problems) > 1 else first


def embed(model: BaseModel, images: Any, options: Config, world: World, name: str, **how: Any) -> np.ndarray:
    """Return the embeddings of images with the options of a run; how: other arguments of `embed_images`."""
    with evaluation_context(options, world.device):
        return embed_images(
            model,
            images,
            options.model.image_shape,
            batch_size=options.train.test_batch_size,
            device=world.device,
            world=world,
            name=name,
            num_threads=options.data.num_workers,
            **how,
        )
