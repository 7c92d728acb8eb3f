"""Evaluation on pair files and labelled images; the network of a checkpoint."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from plsc.checkpoint import load_weights
from plsc.checkpoint.load import read_class_names
from plsc.checkpoint.manifest import Checker
from plsc.checkpoint.remote import fetch
from plsc.checkpoint.shard_file import checksum
from plsc.config import Config, Options
from plsc.config.option import name_of, shown_value
from plsc.data.order import spread
from plsc.data.pairs import read_pairs
from plsc.errors import CheckpointError, DataError, OptionError, refusing
from plsc.evaluate.classification import classify
from plsc.evaluate.embed import embed_images
from plsc.evaluate.verification import VerificationResult, verify
from plsc.export.folder import MODEL_NAME, WEIGHTS_NAME, read_about, trained_on_aligned
from plsc.heads import Head
from plsc.heads.joint import JointHead
from plsc.models import BaseModel
from plsc.models.base_model import safe_arguments
from plsc.parallel.world import World
from plsc.storage.urls import is_url, shown
from plsc.train.adopt import adopt
from plsc.train.classes import OpenedCheckpoint
from plsc.train.directories import open_checkpoint, open_load_dir
from plsc.train.heads import load_head
from plsc.train.held_out import HeldOutSet, open_held_out
from plsc.train.network import (
    build_network,
    evaluated,
    evaluation_context,
    look_up_lists,
    use_lists,
)

if TYPE_CHECKING:
    from plsc.train.build import UserParts

logger = logging.getLogger(__name__)
_DEFAULT_TARGET = "lfw"
_FOLDS = 10

TestReader = Callable[[str, str], tuple[Sequence[Any], Sequence[str]]]
"""``reader(dataset_dir, val_targets)`` returns the same as plsc.utils.jpeg_reader.test."""


@dataclass(frozen=True)
class Target:
    """A pair file: images 2p and 2p + 1 are pair p.

    images: [2P] encoded images, or arrays from a reader. is_same: bool [P].
    """

    METRICS: ClassVar = VerificationResult.METRICS

    name: str
    images: Sequence[Any]
    is_same: np.ndarray


def load_targets(
    options: Config, test_reader: TestReader | None = None, limit: int | float = 1.0, ranks: int = 1
) -> list[Target]:
    """Return the pair files that `data.val_targets` names, in order; by default lfw.bin if it exists.

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
            pairs = read_pairs(folder / f"{name}.bin")
            targets.append(Target(name, pairs.images, pairs.is_same))
    for target in targets:
        same = int(target.is_same.sum())
        if len(target.is_same) < _FOLDS or same in (0, len(target.is_same)):
            raise DataError(
                f"{target.name} has {len(target.is_same)} pairs, {same} of them of the same class; expected "
                f"at least {_FOLDS} pairs, with both same and different classes"
            )
    batch = options.train.test_batch_size * ranks / 2  # pairs
    return [_limited(target, spread(target.is_same, batch, limit, _FOLDS)) for target in targets]


def _limited(target: Target, pairs: np.ndarray) -> Target:
    if len(pairs) == len(target.is_same):
        return target
    images = [target.images[2 * pair + side] for pair in pairs.tolist() for side in (0, 1)]
    return Target(target.name, images, target.is_same[pairs])


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
        embeddings = _embed(
            network,
            target.images,
            options,
            world,
            target.name,
            options.data.num_workers,
            flip=options.data.flip and not is_labelled and network.example_input is None,
            gather=not is_labelled,
        )
        if isinstance(target, HeldOutSet):
            assert isinstance(head, Head)
            results[target.name] = classify(
                head, embeddings, target.labels, batch_size=options.train.test_batch_size, world=world
            )
        else:
            # Every rank has all embeddings, but only one evaluates them, so that results are identical.
            result = verify(embeddings, target.is_same, _FOLDS) if world.is_main else None
            results[target.name] = world.broadcast_object(result)
    return results


def run_test(options: Options, world: World, user: UserParts) -> dict[str, Any]:
    """Return the results of the checkpoint's network on every pair file and on `data.val_dir`, by name."""
    checkpoint = open_load_dir(options.resolve(), world)
    network, config = load_for_run(options, world, user.model, checkpoint)
    limit = 1 if config.train.fast_dev_run else config.train.limit_test_batches
    targets: list[Target | HeldOutSet] = []
    targets += load_targets(config, user.test_reader, limit, world.size)
    head = None
    if config.data.val_dir is not None:
        head = load_head(*checkpoint, world)
        names, class_names = [target.name for target in targets], read_class_names(*checkpoint)
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
    checkpoint: str | os.PathLike[str],
    model: BaseModel | str | None = None,
    device: torch.device | str = "cpu",
) -> BaseModel:
    """Return the trained network of a checkpoint, in evaluation mode.

    It takes images [B, C, H, W], normalised as (x - 127.5) / 128, and returns embeddings [B, D], which are
    not normalised. For one process, without any collective.

    Args:
        checkpoint: its folder, or its URL, from which it is downloaded to the cache. Or a local folder of
            `Entry.convert_for_prediction`.
        model: for a custom network: an instance, or the name of its class, ``package.module:Class``.
        device: device of the network.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or it does not fit the network.
        OptionError: the network cannot be built.
    """
    world = World.single(str(device))
    with torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):  # it is seeded
        return load_with_config(checkpoint, model, world)[0].eval()


def load_with_config(
    checkpoint: str | os.PathLike[str], model: BaseModel | str | None, world: World
) -> tuple[BaseModel, Config]:
    """Return the network of the checkpoint at a path or URL, and its configuration.

    model: as in `load_network`.
    """
    network = model if isinstance(model, BaseModel) else None
    options = Options()
    if model is not None:
        options.set("model.name", model if network is None else name_of(type(network)))
    place = os.fspath(checkpoint)
    folder = fetch(place, world) if is_url(place) else Path(place)
    manifest = None if (folder / MODEL_NAME).is_file() else open_checkpoint(folder)
    saved = (read_about(folder)["options"] if manifest is None else manifest.options).get("model")
    name = saved.get("name") if isinstance(saved, dict) else None
    if model is None and isinstance(name, str) and ":" in name:
        raise CheckpointError(
            f"{shown(place)} was saved with the custom network {shown_value(name)}, and no code is taken "
            f"from a checkpoint; pass an instance or its class: load_network(path, model={shown_value(name)})"
        )
    if manifest is None:
        return read_model(folder, options, network, world)
    return load_for_run(options, world, network, (folder, manifest))


def read_model(
    folder: Path, options: Options, custom: BaseModel | None, world: World
) -> tuple[BaseModel, Config]:
    """Return the network of a folder of `Entry.convert_for_prediction`, and its configuration.

    custom: a custom network to load the weights into. Raises CheckpointError for a damaged folder.
    """
    about, check = read_about(folder), Checker(str(folder / MODEL_NAME))
    config = options.resolve(about["options"], "model")
    if custom is None and ":" in config.model.name:
        config = replace(config, arguments=safe_arguments(about.get("arguments") or {}))
    network = build_network(config, world, custom)
    path, held = folder / WEIGHTS_NAME, check.mapping(about.get("weights"), "the weights")
    if not path.is_file() or not asdict(checksum(path)).items() <= held.items():
        raise check.wrong(f"{WEIGHTS_NAME} is missing, or its checksum differs", "choose another model")
    try:
        network.load_state_dict(load_file(path))
    except (SafetensorError, RuntimeError) as error:
        first = str(error).splitlines()[-1].strip()
        raise check.wrong(
            f"the weights do not fit {type(network).__name__}: {first}", "pass the network that was trained"
        ) from error
    return network, config


def load_for_run(
    options: Options,
    world: World,
    custom: BaseModel | None,
    checkpoint: OpenedCheckpoint | None = None,
) -> tuple[BaseModel, Config]:
    """Return the network of a checkpoint, and the configuration with the checkpoint's model options.

    custom: a custom network to load the weights into. checkpoint: by default that of `checkpoint.load_dir`.
    """
    path, manifest = checkpoint or open_load_dir(options.resolve(), world)
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
    return network, config


def _first_problem(error: RuntimeError) -> str:
    """Return the first problem that ``load_state_dict`` lists, and the number of the others."""
    _, *problems = (line.strip().rstrip(".") for line in str(error).splitlines() if line.strip())
    first = problems[0][:300] if problems else str(error)[:300]
    return f"{first} (and {len(problems) - 1} more)" if len(problems) > 1 else first


def _embed(
    network: BaseModel,
    images: Any,
    options: Config,
    world: World,
    name: str,
    threads: int,
    flip: bool = False,
    gather: bool = True,
) -> np.ndarray:
    with evaluation_context(options, world.device):
        return embed_images(
            network,
            images,
            options.model.image_shape,
            batch_size=options.train.test_batch_size,
            device=world.device,
            flip=flip,
            world=world,
            name=name,
            num_threads=threads,
            gather=gather,
        )
