"""What a checkpoint decides of a configuration, and what it may not, before memory is taken for it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from plsc.checkpoint import Manifest
from plsc.checkpoint.importers.matching import shorten
from plsc.checkpoint.load import check_files
from plsc.checkpoint.manifest import BACKBONE, CLASS_WEIGHTS, HEADS_KEY, Checker
from plsc.config import Config, Options, find_option
from plsc.config.data import is_name
from plsc.errors import CheckpointError, OptionError
from plsc.models import BaseModel, build_model
from plsc.models.base_model import safe_arguments
from plsc.train.classes import OpenedCheckpoint
from plsc.train.heads import with_margin

ARGUMENTS_KEY = "model_arguments"  # of the manifest's scalars
_LARGEST_BATCH = 2**30  # numbers in the images of a rank's batch


def resolve_run(
    options: Options,
    checkpoint: OpenedCheckpoint | None,
    ranks: int,
    model: BaseModel | None = None,
) -> Config:
    """Return the configuration of a run; of one that resumes a checkpoint with what that decides.

    model: the network, where the script gives one. Raises OptionError, and CheckpointError for a checkpoint
    that is damaged or of other data.
    """
    if checkpoint is None:
        return with_margin(options.resolve())
    path, manifest = checkpoint
    config = adopt(options, path, manifest, model, "run")
    _check_data_sets(config, path, manifest)
    steps = manifest.scalars.get("steps_per_epoch")
    if config.data.datasets and "train.epoch_steps" not in config.explicit and steps is not None:
        # With other data sets, too: epochs and schedule are unchanged.
        config = config.changed({"train.epoch_steps": find_option("train.epoch_steps").saved(steps)})
    return with_margin(_keep_global_batch(config, path, manifest, ranks))


def _keep_global_batch(options: Config, path: Path, manifest: Manifest, ranks: int) -> Config:
    """Return the configuration whose steps have as many samples as the checkpoint's, on any number of ranks.

    A script that sets the batch per rank that it set before may be started on any number of ranks; one that
    sets another must come to the same product. Raises OptionError for that, CheckpointError for a damaged
    manifest.
    """
    saved = Checker(str(path)).integer(manifest.scalars.get("global_batch"), "the global batch")
    if saved < ranks:
        raise OptionError(
            f"{path} was trained with {saved} images a step, too few for {ranks} ranks; start fewer"
        )
    _check_batch(options, path, saved // ranks)
    train = options.train
    if "train.global_batch_size" in options.explicit and train.global_batch_size != saved:
        raise OptionError(
            f"train.global_batch_size is {train.global_batch_size}, but {path} was trained with {saved} "
            "images a step, which a resumed run keeps; leave it out"
        )
    product = train.batch_size * ranks
    if product == saved:
        return options
    before = manifest.options.get("train", {})
    is_the_same = isinstance(before, dict) and before.get("batch_size") == train.batch_size
    if "train.batch_size" in options.explicit and not is_the_same:
        raise OptionError(
            f"train.batch_size {train.batch_size} on {ranks} rank{'s' * (ranks > 1)} makes {product}, but "
            f"{path} was trained with {saved} images a step, which a resumed run keeps; leave it out"
        )
    kept = replace(
        options.changed({"train.global_batch_size": saved}),
        adopted=options.adopted | {"train.global_batch_size"},
    )
    if ranks == manifest.world_size:
        return kept
    share = f"{saved // ranks}" if saved % ranks == 0 else f"{saved // ranks} or {saved // ranks + 1}"
    line = (
        f"ranks: {ranks} here, {manifest.world_size} in the checkpoint; a step keeps its {saved} images, "
        f"{share} a rank"
    )
    return replace(kept, differences=(*kept.differences, line))


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
        config = replace(config, arguments=safe_arguments(arguments))
    check_files(path, manifest)
    _check_head(config, path, manifest)
    # A network that the script chooses is compared when it is loaded.
    is_chosen = any(line.startswith("model.") for line in config.differences)
    if model is None and not is_chosen and any(one.startswith("model.") for one in config.adopted):
        _check_network(config, path, manifest)
    if use == "model":
        _check_batch(config, path, config.train.test_batch_size)
    return config


def _check_batch(config: Config, path: Path, images: int) -> None:
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


def _check_data_sets(options: Config, path: Path, manifest: Manifest) -> None:
    """Refuse a run over one data set that resumes a checkpoint of several, and the other way round.

    `options`: with those of the checkpoint adopted. Raises CheckpointError.
    """
    saved = saved_heads(path, manifest)
    if saved is None and options.data.datasets:
        raise CheckpointError(
            f"{path} has a single head, this run has one for each of its data sets (data.datasets); to begin "
            "with its network, use set_pretrained instead of set_checkpoint_dir"
        )
    if saved is not None and not options.data.datasets:
        raise CheckpointError(
            f"{path} has a head for each of the data sets {', '.join(saved)}, this run has one data set "
            "(data.dataset_dir); name those to go on with by add_dataset, or begin with its network by "
            "set_pretrained instead of set_checkpoint_dir"
        )


def saved_heads(path: Path, manifest: Manifest) -> dict[str, dict[str, Any]] | None:
    """Return what a checkpoint's scalars tell of its heads by name; None if it has a single one."""
    found = manifest.scalars.get(HEADS_KEY)
    if found is None:
        return None
    check = Checker(str(path))
    heads = check.mapping(found, "the heads")
    if not heads or not all(map(is_name, heads)):
        raise check.wrong("the names of its heads are damaged")
    return {name: check.mapping(value, f"the head {name!r}") for name, value in heads.items()}
