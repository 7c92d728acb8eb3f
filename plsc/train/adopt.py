"""What a checkpoint decides of a configuration, compared with its tensors before memory is taken for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from plsc.checkpoint import Manifest
from plsc.checkpoint.importers.matching import shorten
from plsc.checkpoint.layout import check_files
from plsc.checkpoint.roles import BACKBONE, CLASS_WEIGHTS, Role
from plsc.config import Config, Options
from plsc.errors import CheckpointError, OptionError
from plsc.models import BaseModel, build_model
from plsc.models.base_model import harmless_arguments

ARGUMENTS_KEY = "model_arguments"  # of the manifest's scalars


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
    check_files(path, manifest)
    _check_head(config, path, manifest)
    # A network that the script chooses is compared when it is loaded.
    if model is None and not any(line.startswith("model.") for line in config.differences):
        _check_network(config, path, manifest)
    return config


def _check_head(config: Config, path: Path, manifest: Manifest) -> None:
    info = manifest.tensors.get(Role(CLASS_WEIGHTS, "weight").key)
    if info is None or len(info.shape) not in (2, 3):
        return
    rows, *centers, size = info.shape
    sizes = {
        "head.class_num": rows,
        "head.sub_centers": centers[0] if centers else 1,
        "model.emb_size": size,
    }
    for option in sorted(config.adopted & sizes.keys()):
        if config.get(option) not in (None, sizes[option]):
            raise CheckpointError(
                f"{path} has {option} {config.get(option)}, but class weights {list(info.shape)}; choose "
                "another checkpoint"
            )


def _check_network(config: Config, path: Path, manifest: Manifest) -> None:
    saved = {one.role.name: one for one in manifest.tensors.values() if one.role.kind == BACKBONE}
    options = config.model
    is_custom, is_wrong = ":" in options.name, False
    state = {}
    try:
        with torch.device("meta"):  # no memory, no time for initial weights
            state = build_model(
                options.name,
                options.emb_size,
                options.image_shape,
                options.dropout,
                config.arguments,
            ).state_dict()
    except (RuntimeError, TypeError):  # sizes beyond torch's
        is_wrong = not is_custom
    except OptionError:  # a constructor may want real numbers
        if not is_custom:
            raise
    wrong = [key for key, one in state.items() if key in saved and saved[key].shape != one.shape]
    if saved and (wrong or is_wrong):
        raise CheckpointError(
            f"{path} has embeddings of {options.emb_size} and images of {list(options.image_shape)}, but "
            f"other sizes of {options.name}{': ' * bool(wrong)}{shorten(wrong)}; choose another checkpoint"
        )
