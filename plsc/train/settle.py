"""Settle the options of a run once, and tell of likely mistakes in them."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from plsc.checkpoint import Manifest
from plsc.checkpoint.load import check_files
from plsc.checkpoint.manifest import BACKBONE, CLASS_WEIGHTS
from plsc.checkpoint.tensor_files import shorten
from plsc.config import Config, Options, find_option
from plsc.config.options import CHECKPOINT
from plsc.errors import CheckpointError, OptionError, TrainingInterrupted
from plsc.heads.weights import scale_bytes
from plsc.models import BaseModel, build_model
from plsc.models.base_model import Custom, safe_arguments
from plsc.names import names_code
from plsc.optim.optimizers import sparse_parameters
from plsc.optim.schedule import Schedule
from plsc.parallel.machine import usable_cores
from plsc.train.build import with_margin
from plsc.train.callbacks import Position
from plsc.train.data import OpenedCheckpoint

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
    if not isinstance(model, BaseModel) and names_code(name):
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
    is_foreign, is_wrong = names_code(options.name) or "/" in options.name, False
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


_MOST_CALLS = 2**20  # of a schedule function, to look for a rate above 0


def idle_note(options: Config, made_with: Mapping[str, Any] | None = None) -> str:
    """Return a line that lists options without effect, with the reasons, or an empty string.

    made_with: constructor arguments of a custom network. Options that are set to their default are ignored,
    because `set_mixed_precision` sets many.
    """
    idle: dict[str, str] = {}
    for path in ("model.dropout", "model.neck"):
        mine, usual = options.get(path), find_option(path).default
        is_other = made_with is not None and mine not in (usual, made_with.get(path.removeprefix("model.")))
        if is_other and path in options.explicit:
            idle[path] = "the custom network was constructed with another value"
    idle |= {path: f"{unmet.path} is {options.get(unmet.path)}" for path, unmet in options.without_effect()}
    listed = ", ".join(f"{path} ({reason})" for path, reason in idle.items())
    return f"note: these options have no effect in this run: {listed}" if idle else ""


def batch_note(global_batch: int, num_samples: int | None) -> str:
    """Return a line if a batch is larger than the dataset, else an empty string."""
    if num_samples is None or global_batch <= num_samples:
        return ""
    return (
        f"note: the global batch of {global_batch} images is larger than the dataset of {num_samples}: each "
        f"step uses every image {global_batch / num_samples:.1f} times"
    )


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


def sparse_note(network: nn.Module) -> str:
    """Return a line if there are parameters with sparse gradients, else an empty string."""
    sparse = sparse_parameters(network)
    names = [name for name, parameter in network.named_parameters() if parameter in sparse]
    if not names:
        return ""
    return f"note: {', '.join(names)}: sparse gradients, updated without momentum and weight decay"


def threads_note(options: Config) -> str:
    """Return a line if there are more CPU threads than cores, else an empty string."""
    threads, cores = options.runtime.cpu_threads, usable_cores()
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
