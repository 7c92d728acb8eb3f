"""Settle the options of a run once, and tell of likely mistakes in them."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from plsc.checkpoint import Manifest
from plsc.checkpoint.load import check_files
from plsc.checkpoint.manifest import BACKBONE, CLASS_WEIGHTS, OpenedCheckpoint
from plsc.checkpoint.tensor_files import shorten
from plsc.config import Config, Options
from plsc.config.options import CHECKPOINT
from plsc.errors import CheckpointError, OptionError, TrainingInterrupted
from plsc.heads.margins import margin_arguments
from plsc.heads.weights import scale_bytes
from plsc.machine import usable_cores
from plsc.models import BaseModel, build_model
from plsc.models.base_model import Custom, safe_arguments
from plsc.names import names_code
from plsc.optim import Schedule
from plsc.train.callbacks import Position

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
        saved: int = manifest.scalars.get("global_batch", 0)
        if saved < ranks:
            raise OptionError(
                f"{path} was trained with {saved} images per step, too few for {ranks} ranks; start fewer "
                "ranks, or start from its weights with model.pretrained"
            )
        _check_batch(path, saved // ranks, config.model.image_shape, config.adopted)
        train, explicit = config.train, config.explicit
        asked = [train.global_batch_size] if "train.global_batch_size" in explicit else []
        before = manifest.options.get("train", {}).get("batch_size")
        if "train.batch_size" in explicit and before != train.batch_size:
            asked.append(train.batch_size * ranks)  # the same one as before may run on any number of ranks
        if other := [total for total in asked if total != saved]:
            raise OptionError(
                f"the global batch is {other[0]}, but {path} was trained with {saved} images per step, which "
                "a resumed run must keep; remove train.batch_size and train.global_batch_size"
            )
        if train.batch_size * ranks != saved:
            config = replace(
                config.changed({"train.global_batch_size": saved}),
                origins={**config.origins, "train.global_batch_size": CHECKPOINT},
                differences=(*config.differences, *_ranks_line(ranks, manifest.world_size, saved)),
            )
    if number := int(config.train.fast_dev_run):
        step = 0 if checkpoint is None else checkpoint[1].step
        config = config.changed({"train.steps": step + number, "train.limit_val_batches": number})
    margin = margin_arguments(config.head.loss_type.removeprefix("dist_")).get("margin")
    if config.head.margin is None and margin is not None:
        config = config.changed({"head.margin": margin.default})
    return config


def _ranks_line(ranks: int, before: int, saved: int) -> list[str]:
    """Return a line about another number of ranks; saved: the global batch size."""
    share = f"{saved // ranks}" if saved % ranks == 0 else f"{saved // ranks} or {saved // ranks + 1}"
    line = (
        f"ranks: {ranks} here, {before} in the checkpoint; the global batch size remains {saved}, with "
        f"{share} images per rank"
    )
    return [] if ranks == before else [line]


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
    if not isinstance(model, BaseModel) and names_code(name):
        arguments = manifest.scalars.get(ARGUMENTS_KEY, {})
        if arguments is None:
            raise CheckpointError(
                f"{path} does not contain the constructor arguments of {name}; call set_model with an "
                "instance of it"
            )
        config = replace(config, arguments=safe_arguments(arguments))
    check_files(path, manifest)
    sizes = ("head.class_num", "head.sub_centers", "model.emb_size")
    adopted = {option: config.get(option) for option in sizes if option in config.adopted}
    _check_head(path, manifest, adopted, are_in_files=config.head.weights_file is not None)
    # A network that the script sets is compared with the checkpoint when the weights are loaded.
    is_chosen = any(line.startswith("model.") for line in config.differences)
    if model is None and not is_chosen and any(option.startswith("model.") for option in config.adopted):
        own = config.model
        build = partial(build_model, name, own.emb_size, own.image_shape, own.dropout, own.neck)
        _check_network(path, manifest, name, lambda: build(config.arguments))
    if use == "model":
        _check_batch(path, config.train.test_batch_size, config.model.image_shape, config.adopted)
    return config


def _check_batch(path: Path, images: int, shape: Sequence[int], adopted: frozenset[str]) -> None:
    """Raise CheckpointError if options from a checkpoint lead to batches of gigabytes per rank."""
    sizes = adopted & {"train.batch_size", "train.global_batch_size", "model.image_shape"}
    if images * math.prod(shape) > _LARGEST_BATCH and sizes:
        raise CheckpointError(
            f"{path} asks for {images} images of shape {list(shape)} per rank and step, more than "
            f"{_LARGEST_BATCH} elements; to use this size, set {' and '.join(sorted(sizes))} here"
        )


def _check_head(path: Path, manifest: Manifest, adopted: Mapping[str, Any], are_in_files: bool) -> None:
    """Raise CheckpointError if the sizes in the options differ from those of the class weights.

    adopted: the sizes that come from the checkpoint. are_in_files: the class weights may be outside of it.
    """
    weights = [
        info
        for info in manifest.tensors.values()
        if (info.role.kind, info.role.name) == (CLASS_WEIGHTS, "weight") and len(info.shape) in (2, 3)
    ]
    if not weights and are_in_files:
        return
    shapes = [(*info.shape[:-1], info.shape[-1] - scale_bytes(info.dtype)) for info in weights]
    sizes = {
        "head.class_num": [rows for rows, *_ in shapes],
        "head.sub_centers": [(*centers, 1)[0] for _, *centers, _ in shapes],
        "model.emb_size": [size for *_, size in shapes],
    }
    for option, value in sorted(adopted.items()):
        # Without a head, only the network has an embedding size.
        is_known = bool(shapes) or option != "model.emb_size"
        if is_known and value not in (None, *sizes[option]):
            if not shapes:
                raise CheckpointError(
                    f"{path} has no class weights; if they are in files of its run, set head.weights_file "
                    "to their folder, or resume a copy that has them (plsc checkpoint copy)"
                )
            raise CheckpointError(
                f"{path} is damaged: {option} is {value}, but its class weights have the shapes "
                f"{', '.join(str(list(shape)) for shape in shapes[:3])}; choose another checkpoint"
            )


def _check_network(path: Path, manifest: Manifest, name: str, build: Callable[[], BaseModel]) -> None:
    """Raise CheckpointError if the tensors of a checkpoint do not fit the network of its options."""
    saved = {info.role.name: info for info in manifest.tensors.values() if info.role.kind == BACKBONE}
    # A custom or third-party network may not work on the meta device.
    is_foreign, is_wrong = ":" in name or "/" in name, False
    state = {}
    try:
        with torch.device("meta"):  # allocates no memory and skips initialisation
            state = build().state_dict()
    except (RuntimeError, TypeError):  # sizes that torch cannot represent
        is_wrong = not is_foreign
    except OptionError:
        if not is_foreign:
            raise
    wrong = [key for key, tensor in state.items() if key not in saved or saved[key].shape != tensor.shape]
    if wrong or is_wrong:
        raise CheckpointError(
            f"{path} is damaged: its tensors do not fit {name} with the sizes in its options"
            f"{': ' * bool(wrong)}{shorten(wrong)}; choose another checkpoint"
        )


_MOST_CALLS = 2**20  # of a schedule function, to look for a rate above 0


def warmup_note(warmup_steps: int, total_steps: int | None) -> str:
    """Return a line if the warm-up may not be shorter than the run, else an empty string."""
    if total_steps is None:
        return (
            f"note: the length of the reader is unknown, so the warm-up takes {warmup_steps} steps, however "
            "short the run is, and the default learning rate is constant after it; set data.train_image_num"
        )
    if warmup_steps < max(2, total_steps):
        return ""
    return (
        f"note: the warm-up takes {warmup_steps} steps and the run {total_steps}, so the learning rate "
        f"increases until the end; use a shorter warm-up, such as optim.warmup_steps {total_steps // 10}"
    )


def frozen_note(network: nn.Module) -> str:
    """Return a line if the network has no trainable parameters, else an empty string."""
    if any(parameter.requires_grad for parameter in network.parameters()):
        return ""
    return f"note: {type(network).__name__} has no trainable parameters; only the head is trained"


def idle_parameters(network: nn.Module) -> str:
    """Return a warning if trainable parameters have no gradient, else an empty string."""
    trained = [(name, p.grad is None) for name, p in network.named_parameters() if p.requires_grad]
    idle = [name for name, is_idle in trained if is_idle]
    if not idle:
        return ""
    return (
        f"{len(idle)} of {len(trained)} trainable parameters have no gradient and are not trained, such as "
        f"{idle[0]}: the output of the network is detached, or does not use them"
    )


def threads_note(threads: int) -> str:
    """Return a line if there are more CPU threads than cores, else an empty string."""
    cores = usable_cores()
    if threads <= cores:
        return ""
    return (
        f"note: runtime.cpu_threads is {threads}, but this process may use only {cores} "
        "core(s); too many threads can make a step many times slower"
    )


def epoch_warning(position: Position, expected: int | None) -> str | None:
    """Return a warning if an epoch ends after another number of steps than expected, else None."""
    if expected is None or position.step_in_epoch == expected:
        return None
    return (
        f"epoch {position.epoch + 1} had {position.step_in_epoch} steps, but {expected} were expected; "
        "correct data.train_image_num: warm-up, log lines and resuming depend on it"
    )


def nothing_left(step: int, epoch: int) -> str:
    """Return a line for a resumed run that has no steps left."""
    return (
        f"nothing left to train: the run has finished {step} steps and {epoch} epochs; to continue, increase "
        "train.epochs or train.steps"
    )


def zero_rate(rate: Schedule, position: Position, total_steps: int | None, is_custom: bool) -> str:
    """Return a warning if the learning rate is 0 in all steps that are left, else an empty string."""
    step, first = position.step, position.updates
    # A named schedule that has reached 0 stays there; a function is called for each step.
    left = (total_steps or 0) - step if is_custom else 1
    if not 0 < left <= _MOST_CALLS or any(rate.factor(update) for update in range(first, first + left)):
        return ""
    return (
        f"the learning rate is 0 from step {step + 1} to the end of the run, so no step is made; increase "
        "the steps of the schedule, or choose another one"
    )


def interrupted(number: int, step: int, checkpoint: Path | None, missing: str = "") -> TrainingInterrupted:
    """Return the error after a signal; checkpoint: the saved state, missing: what is not saved, if any."""
    where = "" if missing else "nothing had been trained, so nothing was saved"
    if checkpoint is not None:
        where = f"the state was saved to {checkpoint}; resume with checkpoint.load_dir {checkpoint}"
    parts = (f"stopped by {signal.Signals(number).name} after step {step}", where, missing)
    return TrainingInterrupted("; ".join(filter(None, parts)), number)
