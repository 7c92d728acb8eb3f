"""The trained network of a checkpoint, or of a folder of `Entry.convert_for_prediction`."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plsc.checkpoint import load_weights, read_manifest
from plsc.checkpoint.manifest import OpenedCheckpoint
from plsc.checkpoint.remote import fetch
from plsc.checkpoint.tensor_files import read_tensors
from plsc.config import Config, Options
from plsc.config.option import importable, name_of, shown_value
from plsc.errors import CheckpointError
from plsc.export.folder import MODEL_NAME, WEIGHTS_NAME, check_file, read_about, trained_on_aligned
from plsc.models import BaseModel
from plsc.models.base_model import Custom, safe_arguments
from plsc.names import names_code
from plsc.parallel.world import World
from plsc.storage.urls import is_url, shown
from plsc.train.build import build_network, look_up_lists, use_lists
from plsc.train.folder import RunFolder
from plsc.train.settle import adopt

logger = logging.getLogger(__name__)


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
    manifest = None if (folder / MODEL_NAME).is_file() else read_manifest(folder)
    saved = (read_about(folder)["options"] if manifest is None else manifest.options).get("model", {})
    name = saved.get("name") or ""
    if model is None and names_code(name):
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
    about = read_about(folder)
    config = options.resolve(about["options"], "model")
    if not isinstance(custom, BaseModel) and names_code(config.model.name):
        config = replace(config, arguments=safe_arguments(about.get("arguments") or {}))
    network = build_network(config, world, custom)
    check_file(folder, WEIGHTS_NAME, about.get("weights"))
    _load(network, read_tensors(folder / WEIGHTS_NAME), folder)
    return network, config


def _load(network: BaseModel, weights: dict[str, Tensor], path: Path) -> None:
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} does not fit: {' '.join(str(error).split())[:400]}; use the network, embedding size and "
            "image shape that were trained"
        ) from error


def open_trained(
    options: Options, world: World, custom: Custom | None, checkpoint: OpenedCheckpoint | None = None
) -> tuple[BaseModel, Config, OpenedCheckpoint]:
    """Return the network of a checkpoint, the configuration with its model options, and the checkpoint.

    The network is all that has to be named: schedule and optimizer of the run are not built. `load_head`
    returns the head. custom: a custom network to load the weights into. checkpoint: by default that of
    `checkpoint.load_dir`.
    """
    place = options.checkpoint
    folder = RunFolder(world, place.save_dir, place.upload_dir, place.load_dir, place.download_dir)
    path, manifest = checkpoint or folder.find()
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
    _load(network, load_weights(path), path)
    return network, config, (path, manifest)
