"""The trained network of a checkpoint, or of a folder of `Entry.convert_for_prediction`."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plsc.checkpoint import Manifest, load_weights, read_manifest
from plsc.checkpoint.manifest import OpenedCheckpoint
from plsc.checkpoint.remote import fetch
from plsc.checkpoint.tensor_files import read_tensors
from plsc.config import Config, Options
from plsc.config.option import importable, names_code
from plsc.errors import CheckpointError, refusing
from plsc.evaluate.embed import EvaluatedNetwork
from plsc.export.folder import MODEL_NAME, WEIGHTS_NAME, check_file, read_about, trained_on_aligned
from plsc.models import BaseModel
from plsc.models.base_model import Custom, safe_arguments
from plsc.names import name_of
from plsc.parallel.world import World
from plsc.storage.urls import is_url
from plsc.train.build import apply_precision, build_network
from plsc.train.folder import RunFolder
from plsc.train.run import adopt

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """The network of a checkpoint, and the configuration that it is used with."""

    network: BaseModel
    config: Config
    world: World
    path: Path
    manifest: Manifest

    @property
    def checkpoint(self) -> OpenedCheckpoint:
        """The folder of the checkpoint, and its manifest."""
        return self.path, self.manifest

    @property
    def evaluated(self) -> EvaluatedNetwork:
        """The network as the configuration has it evaluated."""
        config = self.config
        shape, batch_size = config.model.image_shape, config.train.test_batch_size
        workers, flip = config.data.num_workers, config.data.flip
        return EvaluatedNetwork(self.network, self.world, shape, batch_size, workers, flip)

    def embed(self, images: Any, name: str, flip: bool | None = None) -> np.ndarray:
        """Return the embeddings of images, float32 [N, D], on every rank; flip: by default `data.flip`."""
        return self.evaluated.embed(images, name, flip)


def find_model(place: str | os.PathLike[str], world: World | None = None) -> tuple[Path, bool]:
    """Return the folder of a checkpoint (downloaded from a URL) or export, and whether it is an export."""
    url = os.fspath(place)
    folder = fetch(url, world or World.single("cpu")) if is_url(url) else Path(url)
    return folder, (folder / MODEL_NAME).is_file()


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
        folder, is_export = find_model(checkpoint, world)
        if not is_export:
            return load_trained(folder, model, world).network.eval()
        about, options = read_about(folder), Options()
        named, custom = _chosen(model, about["options"], folder)
        options.set_together(named)
        config = options.resolve(about["options"], "model")
        if not isinstance(custom, BaseModel) and names_code(config.model.name):
            config = replace(config, arguments=safe_arguments(about.get("arguments") or {}))
        with refusing(f"the network of {folder} cannot be built"):  # its sizes are a stranger's
            network = build_network(config, world, custom)
        check_file(folder, WEIGHTS_NAME, about.get("weights"))
        _load(network, read_tensors(folder / WEIGHTS_NAME), folder)
        return network.eval()


def load_trained(folder: Path, model: Custom | str | None, world: World) -> Trained:
    """Return the network of a checkpoint with the default options; model: as of `load_network`."""
    manifest, options = read_manifest(folder), Options()
    named, custom = _chosen(model, manifest.options, folder)
    options.set_together(named)
    return open_trained(options, world, custom, (folder, manifest))


def _chosen(model: Custom | str | None, saved: Any, path: Path) -> tuple[dict[str, Any], Custom | None]:
    """Return the options and the network that `model` chooses; CheckpointError if it must name code."""
    if model is None:
        name = saved.get("model", {}).get("name")
        if names_code(name):
            raise CheckpointError(
                f"{path} was saved with the custom network {name!r:.160}, and no code is taken from a "
                f"checkpoint; name its class as the model, {importable(name)!r:.160} (--model.name)"
            )
        return {}, None
    if isinstance(model, str):
        return {"model.name": model}, None
    return {"model.name": name_of(type(model) if isinstance(model, BaseModel) else model)}, model


def open_trained(
    options: Options, world: World, custom: Custom | None, checkpoint: OpenedCheckpoint | None = None
) -> Trained:
    """Return the network of a checkpoint; the configuration has its model options.

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
    apply_precision(network, config, world.device)
    _load(network, load_weights(path), path)
    return Trained(network, config, world, path, manifest)


def _load(network: BaseModel, weights: dict[str, Tensor], path: Path) -> None:
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} does not fit: {' '.join(str(error).split())[:400]}; use the network, embedding size and "
            "image shape that were trained"
        ) from error
