"""The story of a run: settle the options, open its folder, build its parts, restore them, train."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from plsc.checkpoint import Manifest, Retention
from plsc.checkpoint.load import check_files, missing_weights
from plsc.checkpoint.manifest import BACKBONE, CLASS_WEIGHTS, OpenedCheckpoint
from plsc.checkpoint.tensor_files import shorten
from plsc.checkpoint.weights_file import WeightsFile, opened_at
from plsc.config import Config, Options
from plsc.config.option import name_and_arguments, names_code
from plsc.config.options import CHECKPOINT
from plsc.config.train import DEFAULT_RATE, REFERENCE_BATCH, listed_names
from plsc.errors import CheckpointError, OptionError, suggest
from plsc.heads import ShardedHead
from plsc.heads.kernels import choose_backend
from plsc.heads.margins import margin_arguments
from plsc.heads.weights import scale_bytes
from plsc.models import BaseModel, build_model
from plsc.models.base_model import Custom, safe_arguments
from plsc.parallel.world import World
from plsc.train.build import (
    build_scaler,
    build_schedule,
    build_trained_head,
    build_trained_network,
    build_updates,
    check_combinations,
    distribute_backbone,
    open_targets,
    training_mode,
    with_rate,
)
from plsc.train.callbacks import Callback, Callbacks, Length, Logger, Position, Run, UserParts
from plsc.train.data import open_training_data
from plsc.train.folder import RunFolder
from plsc.train.log import Logging, Progress
from plsc.train.loop import Trainer, TrainResult
from plsc.train.restore import restore, start_from_pretrained
from plsc.train.saving import ARGUMENTS_KEY, Saver, seed_generators
from plsc.train.step import BAD_BATCH_NAME
from plsc.train.watch import GradientNorm, LayerTable, Profile, WeightAverage
from plsc.values import split_sizes

_LARGE_ON_CPU = 10**7  # parameters of a network
_LARGEST_BATCH = 2**30  # elements in the images of a rank's batch


def run_training(options: Options, world: World, user: UserParts) -> TrainResult:
    """Train from scratch, from the weights of `model.pretrained`, or resume `checkpoint.load_dir`."""
    # Where to save, and the checkpoint to resume, if any.
    place = options.checkpoint
    folder = RunFolder(world, place.save_dir, place.upload_dir, place.load_dir, place.download_dir)
    folder.choose(place.new_version)
    # What the script has set, what the checkpoint decides, and defaults: from here on frozen.
    config = settle(options, folder.checkpoint, world.size, user.model)
    # Network, data, head, and what updates them.
    run = build_run(config, world, user, folder.checkpoint)
    is_trial = bool(config.train.fast_dev_run)  # saves nothing
    with folder.temporary(BAD_BATCH_NAME) if is_trial else nullcontext(), folder.locked(config.train.epochs):
        add_output(run, folder, None if is_trial else user.loggers)
        file = run.head.file  # of class weights that are not in memory
        with opened_at(file, world, folder.checkpoint) if isinstance(file, WeightsFile) else nullcontext():
            lines, warm_start = [f"differs from the checkpoint: {line}" for line in config.differences], None
            if folder.checkpoint is not None:
                lines += [f"differs from the checkpoint: {line}" for line in restore(run, *folder.checkpoint)]
            else:
                if config.model.pretrained is not None:
                    warm_start = start_from_pretrained(run, config.model.pretrained)
                    lines += warm_start.lines()
                seed_generators(world, config.train.seed)
            for line in [*describe_run(run, folder.checkpoint), *lines]:
                world.log(line)
            return Trainer(run, None if is_trial else Saver(run, folder), warm_start).train()


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
        if saved < ranks:  # 0: an imported checkpoint
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
            )
    if number := int(config.train.fast_dev_run):
        step = 0 if checkpoint is None else checkpoint[1].step
        config = config.changed({"train.steps": step + number, "train.limit_val_batches": number})
    margin = margin_arguments(config.head.loss_type.removeprefix("dist_")).get("margin")
    if config.head.margin is None and margin is not None:
        config = config.changed({"head.margin": margin.default})
    return config


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
                raise missing_weights(path, manifest)
            raise CheckpointError(
                f"{path} is damaged: {option} is {value}, but its class weights have the shapes "
                f"{[*map(list, shapes[:3])]}; choose another checkpoint"
            )


def _check_network(path: Path, manifest: Manifest, name: str, build: Callable[[], BaseModel]) -> None:
    """Raise CheckpointError if the tensors of a checkpoint do not fit the network of its options."""
    saved = {info.role.name: info for info in manifest.tensors.values() if info.role.kind == BACKBONE}
    # A custom or third-party network may not work on the meta device.
    is_foreign, is_wrong = names_code(name) or "/" in name, False
    state = {}
    try:
        with torch.device("meta"):  # allocates no memory and skips initialisation
            state = build().state_dict()
    except (RuntimeError, TypeError, OptionError):  # sizes that torch cannot represent
        is_wrong = not is_foreign
    wrong = [key for key, tensor in state.items() if key not in saved or saved[key].shape != tensor.shape]
    if wrong or is_wrong:
        raise CheckpointError(
            f"{path} is damaged: its tensors do not fit {name} with the sizes in its options"
            f"{': ' * bool(wrong)}{shorten(wrong)}; choose another checkpoint"
        )


def build_run(
    options: Config, world: World, user: UserParts, checkpoint: OpenedCheckpoint | None = None
) -> Run:
    """Build everything that training needs. Raises OptionError, DataError or CheckpointError.

    checkpoint: the checkpoint to resume; classes with names get their numbers from it.
    """
    check_combinations(options, world.size, any(callback.layers for callback in user.callbacks))
    if options.train.deterministic:
        _use_deterministic_algorithms(world.device)
    # The named or custom network; its parameters are assigned to groups, some are frozen.
    network, assignment, samples = build_trained_network(options, world, user.model, user.initializations)
    if world.device.type == "cuda" and network.example_input is None:
        # Images have few shapes: time cuDNN's algorithms for each, unless runs have to be equal.
        torch.backends.cudnn.benchmark = not options.train.deterministic
    global_batch = options.train.global_batch_size or options.train.batch_size * world.size
    # A source, the order of its samples, and a loader whose workers read, decode and augment them.
    data = open_training_data(
        options,
        world,
        user.train_reader,
        user.train_transform,
        global_batch,
        checkpoint,
        network.example_input,
    )
    limit, classes = options.train.limit_val_batches, (data.class_num, data.class_names)
    is_tested = options.train.with_test
    targets = open_targets(options, world, user.test_reader, limit, classes) if is_tested else []
    length = Length.of(data.loader.steps_per_epoch, checkpoint)
    total_steps = options.train.steps or length.until(options.train.epochs)
    options = with_rate(options, global_batch, total_steps)
    # For example a plsc.heads.ShardedHead and its RowSGD.
    counts = None if options.head.class_margins is None else data.count_images()
    head, rows = build_trained_head(options, data.class_num, world, counts)
    # DDP with summed instead of averaged gradients; the network itself on a single rank.
    # A smaller last batch is not compiled: each size takes minutes.
    local = split_sizes(global_batch, world.size)[world.rank]
    sizes = {*split_sizes(local, options.train.micro_batches)} - {0} if options.speed.compile else set()
    trained_network = distribute_backbone(network, world, sizes)
    # A torch.optim optimizer for the backbone; the row optimizer gets its learning rate here too.
    optimizer, base_rate = build_updates(options, network, assignment, head, rows, user.optimizer)
    optim = options.optim
    rate = build_schedule(
        optim.schedule, base_rate, optim.warmup_steps, total_steps, length.until, user.schedule
    )
    mode = training_mode(options.precision.mode, world.device)
    evaluated = [f"{target.name} {metric}" for target in targets for metric in target.METRICS]
    saved = options.checkpoint
    return Run(
        options=options,
        world=world,
        network=network,
        trained_network=trained_network,
        head=head,
        optimizer=optimizer,
        rows=rows,
        position=Position(),
        total_steps=total_steps,
        mode=mode,
        scaler=build_scaler(options.precision.scaling_arguments, mode),
        rate=rate,
        data=data,
        targets=targets,
        samples=samples,
        settings=[dict(values) for values in (vars(optimizer), *optimizer.param_groups)],
        notes=list(filter(None, (*data.notes, slow_note(network, world.device), options.idle_note()))),
        is_custom=user.model is not None or names_code(options.model.name),
        length=length,
        global_batch=global_batch,
        retention=_retention(saved.keep_last, saved.save_top_k, saved.monitor, evaluated),
        callbacks=Callbacks(user.callbacks, network),
    )


def _use_deterministic_algorithms(device: torch.device) -> None:
    torch.use_deterministic_algorithms(True)
    # Otherwise torch writes NaN into all memory that it allocates, 16 GB per step of a large head.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.type == "cuda":  # without it, torch rejects matrix products on CUDA
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _retention(keep_last: int, top_k: int, monitor: str | None, evaluated: Sequence[str]) -> Retention:
    """Return which checkpoints to keep. Raises OptionError for a metric that the run does not measure.

    monitor: None for the first of `evaluated`, the metrics of the run's evaluations; without any, the loss.
    """
    known = [*evaluated, "loss"]
    metric = known[0] if monitor is None else monitor
    if metric not in known:
        raise OptionError(
            f"checkpoint.monitor is {metric!r}, which this run does not measure; {suggest(metric, known)}"
        )
    return Retention(keep_last, top_k, metric)


def add_output(run: Run, folder: RunFolder, loggers: Sequence[Logger] | None) -> None:
    """Add the callbacks of the options to a run, which write its metrics and warn about problems.

    loggers: the user's, in addition to those of `train.loggers`; None: write no metrics.
    """
    train, run.folder = run.options.train, folder.path
    decay = run.options.optim.ema_decay
    callbacks: list[Callback] = [
        *([WeightAverage(run.network, decay, run.world.backbone_group)] if decay else []),
        *run.callbacks.all,
        Progress(None if train.steps else train.epochs),
        *(CALLBACKS[name]() for name in listed_names(train.callbacks)),
    ]
    run.world.log(folder.note)
    if loggers is not None:
        callbacks.append(Logging(listed_names(train.loggers), loggers))
    else:
        run.world.log("train.fast_dev_run: a few batches of training and evaluation; nothing is saved")
    run.callbacks = Callbacks(callbacks, run.network)


CALLBACKS: dict[str, Callable[[], Callback]] = {
    "gradient_norm": GradientNorm,
    "check_shape": partial(LayerTable, with_content=False),
    "check_content": partial(LayerTable, with_content=True),
    "profile": Profile,
}


def describe_run(run: Run, checkpoint: OpenedCheckpoint | None) -> list[str]:
    """Return the log lines that are printed before training."""
    parameters = sum(p.numel() for p in run.network.parameters())
    frozen = sum(p.numel() for p in run.network.parameters() if not p.requires_grad)
    samples = run.data.num_samples
    images = "images from a reader" if samples is None else f"{samples:,} images"
    network = type(run.network).__name__ if run.is_custom else run.options.model.name
    head, kernels = run.head, ""
    if isinstance(head, ShardedHead):
        how = head.execution
        assert isinstance(how.products, torch.dtype)
        backend = choose_backend(how.kernels, run.world.device, head.weight.dtype, how.products, None, 1)
        kernels = f", kernels {backend.describe()}"
    text = (
        f"training {network} ({parameters:,} parameters{f', {frozen:,} frozen' * bool(frozen)}), "
        f"loss {run.options.head.loss_type}, "
        f"{head.class_num:,} classes, {images}, "
        f"{run.world.size} rank{'s' * (run.world.size > 1)} on {run.world.device.type}, "
        f"{run.mode}{kernels}"
    )
    resumed = []
    if checkpoint is not None:
        folder, manifest = checkpoint
        resumed.append(f"resuming from {folder} at step {run.position.step}")
        rest = run.rate.factor(run.position.updates)
        if rest == 0 or (rest < 0.01 and manifest.lineage and not manifest.run_id):  # classes were changed
            resumed.append(
                "note: the rest of the schedule has less than a hundredth of its learning rate; "
                f"--model.pretrained {folder} begins a new one from these weights"
            )
    return [text, *resumed, _rates(run), *run.notes]


def slow_note(network: nn.Module, device: torch.device) -> str:
    """Return a line if each step of a network takes long on a CPU, else an empty string."""
    total = sum(parameter.numel() for parameter in network.parameters())
    if device.type != "cpu" or total < _LARGE_ON_CPU:
        return ""
    return (
        f"note: a step of {total / 1e6:,.0f} million parameters takes long on a CPU; to try, set model.name "
        "to SmallResNet"
    )


def _rates(run: Run) -> str:
    """Return a line with the learning rate and its origin, the schedule, warm-ups and automatic scales."""
    options = run.options
    if names_code(options.optim.optimizer):
        source = "from the optimizer factory"
    elif "optim.lr" in options.explicit:
        source = "optim.lr"
    elif "optim.lr" in options.adopted:
        source = "from the checkpoint"
    else:
        source = f"default: {DEFAULT_RATE:g} x global batch {run.global_batch} / {REFERENCE_BATCH}"
    parts = [
        f"learning rate {run.rate.base:.4g} ({source})",
        f"schedule {name_and_arguments(options.optim.schedule)[0]}",
        f"warm-up {run.rate.warmup_steps} step{'s' * (run.rate.warmup_steps != 1)}",
    ]
    if options.head.margin_warmup_steps:
        parts.append(f"margin warm-up {options.head.margin_warmup_steps} steps")
    if run.head.margin.is_auto_scale:
        parts.append(f"scale {run.head.margin.scale:.4g} (auto, {run.head.class_num:,} classes)")
    return ", ".join(parts)
