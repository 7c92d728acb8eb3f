"""What a checkpoint decides of a configuration, compared with its tensors before memory is taken for it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from plsc.checkpoint import Manifest
from plsc.checkpoint.importers.matching import shorten
from plsc.checkpoint.layout import check_files
from plsc.checkpoint.roles import BACKBONE, CLASS_WEIGHTS
from plsc.config import Config, Options
from plsc.errors import CheckpointError, OptionError
from plsc.models import BaseModel, build_model
from plsc.models.adapted import TIMM, TORCHVISION
from plsc.models.base_model import harmless_arguments

ARGUMENTS_KEY = "model_arguments"  # of the manifest's scalars
_LARGEST_BATCH = 2**30  # numbers in the images of a rank's batch


def adopt(
    options: Options,
    path: Path,
    manifest: Manifest,
    model: BaseModel | None,
    use: Literal["model", "run"],
) -> Config:
    """Return the configuration of a run that uses a checkpoint, or its network.

    model: the network, where the script gives one. Raises CheckpointError for a checkpoint that is damaged,
    that contradicts itself, or that names code which the script does not name.
    """
    config = options.resolve(manifest.options, use)
    name = config.model.name
    if model is None and ":" in name:
        arguments = manifest.scalars.get(ARGUMENTS_KEY, {})
        if arguments is None:
            raise CheckpointError(
                f"{path} could not keep the arguments that {name} was made with; call set_model with an "
                "instance of it"
            )
        config = replace(config, arguments=harmless_arguments(arguments))
    is_other = any(line.startswith("model.name:") for line in config.differences)
    if model is None and not is_other and name.startswith((TORCHVISION, TIMM)):
        _check_neck(name, path, manifest)
    check_files(path, manifest)
    _check_head(config, path, manifest)
    # A network that the script chooses is compared when it is loaded.
    is_chosen = any(line.startswith("model.") for line in config.differences)
    if model is None and not is_chosen and any(one.startswith("model.") for one in config.adopted):
        _check_network(config, path, manifest)
    if use == "model":
        check_batch(config, path, config.train.test_batch_size)
    return config


def check_batch(config: Config, path: Path, images: int) -> None:
    """Raise CheckpointError if a checkpoint decides on batches per rank that take gigabytes."""
    sizes = {"train.batch_size", "train.global_batch_size", "model.image_shape"}
    shape = list(config.model.image_shape)
    if images * math.prod(shape) > _LARGEST_BATCH and config.adopted & sizes:
        raise CheckpointError(
            f"{path} has images of {shape}, {images} per rank and step, more than {_LARGEST_BATCH} numbers; "
            f"if that is what you want, set {' and '.join(sorted(config.adopted & sizes))}"
        )


def _check_head(config: Config, path: Path, manifest: Manifest) -> None:
    """Compare the sizes with the class weights, of several heads with those of any."""
    infos = [
        info
        for info in manifest.tensors.values()
        if (info.role.kind, info.role.name) == (CLASS_WEIGHTS, "weight")
    ]
    shapes = [info.shape for info in infos if len(info.shape) in (2, 3)]
    sizes = {
        "head.class_num": [rows for rows, *_ in shapes],
        "head.sub_centers": [(*centers, 1)[0] for _, *centers, _ in shapes],
        "model.emb_size": [size for *_, size in shapes],
    }
    for option in sorted(config.adopted & sizes.keys()):
        # Without a head the network alone has an embedding size.
        is_known = bool(shapes) or option != "model.emb_size"
        if is_known and config.get(option) not in (None, *sizes[option]):
            raise CheckpointError(
                f"{path} has {option} {config.get(option)}, but class weights "
                f"{', '.join(str(list(shape)) for shape in shapes[:3]) or 'none'}; choose another checkpoint"
            )


def _check_neck(network: str, path: Path, manifest: Manifest) -> None:
    names = [info.role.name for info in manifest.tensors.values() if info.role.kind == BACKBONE]
    if names and not any(name.startswith("neck.") for name in names):
        raise CheckpointError(
            f"{path} was written before networks of torchvision and timm had a neck, so it lacks that of "
            f"{network}; train again from its weights, set_pretrained({str(path)!r})"
        )


def _check_network(config: Config, path: Path, manifest: Manifest) -> None:
    saved = {one.role.name: one for one in manifest.tensors.values() if one.role.kind == BACKBONE}
    options = config.model
    # Of a user's or of another package: it may not compute without numbers.
    is_foreign, is_wrong = ":" in options.name or "/" in options.name, False
    state = {}
    try:
        with torch.device("meta"):  # no memory, no time for initial weights
            state = build_model(
                options.name,
                options.emb_size,
                options.image_shape,
                options.dropout,
                options.neck,
                config.arguments,
            ).state_dict()
    except (RuntimeError, TypeError):  # sizes beyond torch's
        is_wrong = not is_foreign
    except OptionError:
        if not is_foreign:
            raise
    wrong = [key for key, one in state.items() if key not in saved or saved[key].shape != one.shape]
    if wrong or is_wrong:
        raise CheckpointError(
            f"{path} has embeddings of {options.emb_size} and images of {list(options.image_shape)}, but "
            f"other sizes of {options.name}{': ' * bool(wrong)}{shorten(wrong)}; choose another checkpoint"
        )
