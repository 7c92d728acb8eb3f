"""Settle the options of a run once: what was set, what its checkpoint decides, and defaults."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from plsc.checkpoint import Manifest
from plsc.checkpoint.importers.matching import shorten
from plsc.checkpoint.load import check_files
from plsc.checkpoint.manifest import BACKBONE, CLASS_WEIGHTS
from plsc.config import Config, Options
from plsc.config.options import CHECKPOINT
from plsc.errors import CheckpointError, OptionError
from plsc.heads.weights import scale_bytes
from plsc.models import BaseModel, build_model
from plsc.models.base_model import Custom, safe_arguments
from plsc.run.build_heads import with_margin
from plsc.run.classes import OpenedCheckpoint

ARGUMENTS_KEY = "model_arguments"  # of the manifest's scalars
_LARGEST_BATCH = 2**30  # elements in the images of a rank's batch


def settle(
    options: Options, checkpoint: OpenedCheckpoint | None, ranks: int, model: BaseModel | None = None
) -> Config:
    """Return the configuration of a run: what was set, what its checkpoint decides, and defaults.

    What depends on the data (classes, steps and learning rate) is filled in by `build_run`. model: the
    network that the script set, if any. Raises OptionError, and CheckpointError for a damaged checkpoint.
    """
    if checkpoint is None:
        config = options.resolve()
    else:
        path, manifest = checkpoint
        config = adopt(options, path, manifest, model, "run")
        config = _keep_global_batch(config, path, manifest, ranks)
    if number := int(config.train.fast_dev_run):
        step = 0 if checkpoint is None else checkpoint[1].step
        config = config.changed({"train.steps": step + number, "train.limit_val_batches": number})
    return with_margin(config)


def _keep_global_batch(options: Config, path: Path, manifest: Manifest, ranks: int) -> Config:
    """Return the configuration with the checkpoint's global batch size, for any number of ranks.

    A script with the same batch size per rank as before may run on any number of ranks. With another batch
    size per rank, the global batch size must be the same. Raises OptionError if it is not, CheckpointError
    for a damaged manifest.
    """
    saved: int = manifest.scalars.get("global_batch", 0)
    if saved < ranks:
        raise OptionError(
            f"{path} was trained with {saved} images per step, too few for {ranks} ranks; start fewer ranks, "
            "or start from its weights with model.pretrained"
        )
    _check_batch(options, path, saved // ranks)
    train = options.train
    if "train.global_batch_size" in options.explicit and train.global_batch_size != saved:
        raise OptionError(
            f"train.global_batch_size is {train.global_batch_size}, but {path} was trained with {saved} "
            "images per step, which a resumed run must keep; remove the option"
        )
    product = train.batch_size * ranks
    if product == saved:
        return options
    before = manifest.options.get("train", {}).get("batch_size")
    if "train.batch_size" in options.explicit and before != train.batch_size:
        raise OptionError(
            f"train.batch_size {train.batch_size} on {ranks} rank{'s' * (ranks > 1)} is a global batch of "
            f"{product}, but {path} was trained with {saved}, which a resumed run keeps; remove the option"
        )
    kept = replace(
        options.changed({"train.global_batch_size": saved}),
        origins={**options.origins, "train.global_batch_size": CHECKPOINT},
    )
    if ranks == manifest.world_size:
        return kept
    share = f"{saved // ranks}" if saved % ranks == 0 else f"{saved // ranks} or {saved // ranks + 1}"
    line = (
        f"ranks: {ranks} here, {manifest.world_size} in the checkpoint; the global batch size remains "
        f"{saved}, with {share} images per rank"
    )
    return replace(kept, differences=(*kept.differences, line))


def adopt(
    options: Options, path: Path, manifest: Manifest, model: Custom | None, use: Literal["model", "run"]
) -> Config:
    """Return the configuration of a run with the options of a checkpoint.

    use: ``run`` to resume its run, ``model`` to use only its network. model: the network that the script
    set, if any. Raises CheckpointError for a checkpoint that is damaged or inconsistent, or that names code
    which the script does not name.
    """
    config = options.resolve(manifest.options, use)
    name = config.model.name
    if not isinstance(model, BaseModel) and ":" in name:
        arguments = manifest.scalars.get(ARGUMENTS_KEY, {})
        if arguments is None:
            raise CheckpointError(
                f"{path} does not contain the constructor arguments of {name}; call set_model with an "
                "instance of it"
            )
        config = replace(config, arguments=safe_arguments(arguments))
    check_files(path, manifest)
    _check_head(config, path, manifest)
    # A network that the script sets is compared with the checkpoint when the weights are loaded.
    is_chosen = any(line.startswith("model.") for line in config.differences)
    if model is None and not is_chosen and any(one.startswith("model.") for one in config.adopted):
        _check_network(config, path, manifest)
    if use == "model":
        _check_batch(config, path, config.train.test_batch_size)
    return config


def _check_batch(config: Config, path: Path, images: int) -> None:
    """Raise CheckpointError if options from a checkpoint lead to batches of gigabytes per rank."""
    sizes = {"train.batch_size", "train.global_batch_size", "model.image_shape"}
    shape = list(config.model.image_shape)
    if images * math.prod(shape) > _LARGEST_BATCH and config.adopted & sizes:
        raise CheckpointError(
            f"{path} asks for {images} images of shape {shape} per rank and step, more than {_LARGEST_BATCH} "
            f"elements; to use this size, set {' and '.join(sorted(config.adopted & sizes))} here"
        )


def _check_head(config: Config, path: Path, manifest: Manifest) -> None:
    """Raise CheckpointError if the sizes in the options differ from those of the class weights."""
    infos = [
        info
        for info in manifest.tensors.values()
        if (info.role.kind, info.role.name) == (CLASS_WEIGHTS, "weight")
    ]
    shapes = [
        (*info.shape[:-1], info.shape[-1] - scale_bytes(info.dtype))
        for info in infos
        if len(info.shape) in (2, 3)
    ]
    if not shapes and config.head.weights_file is not None:
        return
    sizes = {
        "head.class_num": [rows for rows, *_ in shapes],
        "head.sub_centers": [(*centers, 1)[0] for _, *centers, _ in shapes],
        "model.emb_size": [size for *_, size in shapes],
    }
    for option in sorted(config.adopted & sizes.keys()):
        # Without a head, only the network has an embedding size.
        is_known = bool(shapes) or option != "model.emb_size"
        if is_known and config.get(option) not in (None, *sizes[option]):
            if not shapes:
                raise CheckpointError(
                    f"{path} has no class weights; if they are in files of its run, set head.weights_file "
                    "to their folder, or resume a copy that has them (plsc checkpoint copy)"
                )
            raise CheckpointError(
                f"{path} is damaged: {option} is {config.get(option)}, but its class weights have the shapes "
                f"{', '.join(str(list(shape)) for shape in shapes[:3])}; choose another checkpoint"
            )


def _check_network(config: Config, path: Path, manifest: Manifest) -> None:
    saved = {info.role.name: info for info in manifest.tensors.values() if info.role.kind == BACKBONE}
    options = config.model
    # A custom or third-party network may not work on the meta device.
    is_foreign, is_wrong = ":" in options.name or "/" in options.name, False
    state = {}
    try:
        with torch.device("meta"):  # allocates no memory and skips initialisation
            state = build_model(
                options.name,
                options.emb_size,
                options.image_shape,
                options.dropout,
                options.neck,
                config.arguments,
            ).state_dict()
    except (RuntimeError, TypeError):  # sizes that torch cannot represent
        is_wrong = not is_foreign
    except OptionError:
        if not is_foreign:
            raise
    wrong = [key for key, tensor in state.items() if key not in saved or saved[key].shape != tensor.shape]
    if wrong or is_wrong:
        raise CheckpointError(
            f"{path} is damaged: its tensors do not fit {options.name} with embedding size "
            f"{options.emb_size} and images of {list(options.image_shape)}{': ' * bool(wrong)}"
            f"{shorten(wrong)}; choose another checkpoint"
        )
