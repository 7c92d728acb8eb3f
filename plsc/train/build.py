"""Build the network, the head and their updates from the options: each part gets plain arguments."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plsc import optim as updates
from plsc.checkpoint import Manifest, ShardedTensor, load_tensors
from plsc.checkpoint.load import missing_weights
from plsc.checkpoint.manifest import CLASS_WEIGHTS, Role
from plsc.checkpoint.weights_file import WeightsFile, rank_folder
from plsc.config import Config, Options, find_option
from plsc.config.data_and_model import ExecutionArguments, sample_ratios
from plsc.config.option import name_and_arguments, names_code, read_arguments
from plsc.config.train import (
    CLIP_NORM,
    CLIPPED_STEP,
    DEFAULT_RATE,
    REFERENCE_BATCH,
    WARMUP_SHARE,
    WARMUP_STEPS,
    WARMUP_STEPS_OF_UNKNOWN_LENGTH,
    AutoMixedPrecisionLists,
    ScalingArguments,
    ScheduleArguments,
    check_named_arguments,
    listed_names,
    read_parameter_groups,
)
from plsc.data.class_names import ClassNames
from plsc.errors import CheckpointError, OptionError, refusing
from plsc.heads import (
    ROW_OPTIMIZERS,
    Execution,
    Head,
    RowOptimizer,
    Sampling,
    ShardedHead,
    build_head,
    build_margin,
)
from plsc.heads.margins import Margin, margin_arguments, margins_of_counts
from plsc.heads.weights import scale_bytes
from plsc.models import BaseModel, build_model, check_model
from plsc.models.base_model import (
    Custom,
    Initialization,
    choose_memory_format,
    copy_expanded_buffers,
    freeze,
    initialise_by_rule,
    unfreeze,
    unwrap,
)
from plsc.models.precision import LossScaler, apply_lists
from plsc.models.recomputation import CompiledNetwork, recompute_activations
from plsc.names import load_function
from plsc.optim import Assignment, Factory, Schedule, ScheduleFunction, Shape, assign_parameters
from plsc.parallel.backbone import SampleNumbers, sum_gradients, synchronise_batch_norm, use_sample_dropout
from plsc.parallel.world import World, class_range
from plsc.storage.disk import open_regular
from plsc.train.targets import DEFAULT_TARGET, HeldOutSet, Target, TestReader, load_targets, open_held_out

logger = logging.getLogger(__name__)


def check_combinations(options: Config, ranks: int, watches_layers: bool = False) -> None:
    """Raise OptionError for options that contradict each other.

    watches_layers: whether a callback of the user reads outputs of layers.
    """
    options.check_needs()
    optim, train, place, explicit = options.optim, options.train, options.checkpoint, options.explicit
    own_tables = {"check_shape", "check_content"} & {*listed_names(train.callbacks)}
    without_compile = {
        # Every batch norm would break the graph.
        "model.sync_batch_norm on several ranks": options.model.sync_batch_norm and ranks > 1,
        # torch.compile decides itself what is recomputed, and does not guarantee equal results.
        "memory.recompute": options.memory.recompute != "none",
        "train.deterministic": train.deterministic,
        # Compiled code does not call the layers, nor the modules in the lists.
        "callbacks that read layers, such as check_shape": own_tables or watches_layers,
        "precision.lists": options.precision.lists,
    }
    is_compiled = options.speed.compile
    pairs = {f"speed.compile and {one}": is_compiled and is_set for one, is_set in without_compile.items()}
    # "last" may find no checkpoint.
    is_resumed = place.load_dir not in (None, "last") or place.download_dir is not None
    pairs["model.pretrained and a checkpoint to resume"] = is_resumed and "model.pretrained" in explicit
    has_class_margins = options.head.class_margins is not None
    pairs["head.margin and head.class_margins"] = has_class_margins and "head.margin" in explicit
    loss = options.head.loss_type.removeprefix("dist_")
    pairs[f"{loss} and head.class_margins"] = has_class_margins and "margin" not in margin_arguments(loss)
    total, product = train.global_batch_size, train.batch_size * ranks
    if total is not None:
        of_total = f"train.global_batch_size {total}"
        # A run may resume on another number of ranks.
        is_kept = "train.global_batch_size" in options.adopted or "train.batch_size" not in explicit
        by_batch_size = f"{of_total} and train.batch_size {train.batch_size} (a global batch of {product})"
        pairs[by_batch_size] = total != product and not is_kept
        pairs[f"{of_total} and {ranks} ranks (expected at least {ranks})"] = total < ranks
    for both, are_set in pairs.items():
        if are_set:
            raise OptionError(f"{both} exclude each other; change one of them")
    margin_of(options)
    is_custom = names_code(optim.optimizer)
    if not is_custom and (expected := check_named_arguments(optim.optimizer_arguments or {})):
        raise OptionError(f"optim.optimizer_arguments of {optim.optimizer}: expected {expected}")
    takes = () if is_custom else updates.OPTIMIZERS[optim.optimizer.lower()].takes
    for group in read_parameter_groups(optim.groups):
        # Settings that are also options of the run: torch validates only an optimizer's defaults.
        for name in group.arguments.keys() & set(takes):
            find_option(f"optim.{name}").checked(group.arguments[name])


def build_trained_network(
    options: Config, world: World, custom: BaseModel | None, rules: Sequence[Initialization] = ()
) -> tuple[BaseModel, Assignment, SampleNumbers]:
    """Return the backbone for training, its parameter groups, and the sample numbers for dropout."""
    network = build_network(options, world, custom)
    unwrap(network)  # remove changes that an earlier run made to a custom network
    unfreeze(network)
    initialise_by_rule(network, rules, options.train.seed)
    # Patterns match names and types of the plain network: the next lines replace modules.
    optim = options.optim
    assignment = assign_parameters(
        network,
        [
            (group.pattern, None if group.frozen else group.settings)
            for group in read_parameter_groups(optim.groups)
        ],
        optim.freeze,
        optimizer=optim.optimizer,
    )
    if options.model.sync_batch_norm:
        synchronise_batch_norm(network, world.backbone_group, world.device)
    freeze(network, assignment.frozen)
    samples = use_sample_dropout(network)
    apply_precision(network, options, world.device)
    if options.memory.recompute == "all":
        recompute_activations(network)
    return network, assignment, samples


def build_network(options: Config, world: World, custom: Custom | None) -> BaseModel:
    """Return the backbone, with weights from the seed; a custom one is checked in a dry run."""
    torch.manual_seed(options.train.seed)
    if isinstance(custom, BaseModel):
        model = custom
    else:
        model = build_model(
            custom or options.model.name,
            options.model.emb_size,
            options.model.image_shape,
            dropout=options.model.dropout,
            neck=options.model.neck,
            arguments=options.arguments,
        )
    # Built-in networks need no check, and adapted ones were checked when they were built.
    if custom is not None or names_code(options.model.name):
        check_model(model, options.model.image_shape, options.model.emb_size)
    copy_expanded_buffers(model)
    device = world.device
    # Module.to() would also convert complex tensors, and drop their imaginary part.
    model._apply(lambda tensor: tensor.to(device, torch.float32 if tensor.is_floating_point() else None))
    mode = training_mode(options.precision.mode, device)
    choose_memory_format(model, options.model.image_shape, device, in_16_bits=mode != "float32")
    return model


def open_targets(
    options: Config,
    world: World,
    test_reader: TestReader | None,
    limit: int | float = 1.0,
    classes: tuple[int, ClassNames | None] | None = None,
) -> list[Target | HeldOutSet]:
    """Return the pair files and lists of `data.val_targets`, and the held-out set of `data.val_dir`.

    If the first is None: lfw.bin, if it exists. limit: of the batches of each. classes: number and names of
    those of the head; None: no held-out set.
    """
    data, batch = options.data, options.train.test_batch_size * world.size
    how: Any = {"landmarks": data.landmarks, "is_strict": data.bad_images == "stop"}
    folder, names = Path(data.dataset_dir), data.val_targets
    if test_reader is not None:
        names = names or DEFAULT_TARGET
    elif folder.is_file():
        folder = folder.parent  # such as the folder of train.rec
    if names is None and (folder / f"{DEFAULT_TARGET}.bin").exists():
        names = DEFAULT_TARGET
    targets: list[Target | HeldOutSet] = []
    if names:
        targets += load_targets(names, folder, batch, limit, test_reader, allowed=data.allowed, **how)
    if classes is not None and data.val_dir is not None:
        held_out = open_held_out(
            data.val_dir, *classes, world, batch, limit, format_arguments=data.format_arguments, **how
        )
        if held_out.name in [target.name for target in targets]:
            raise OptionError(f"a pair file is named {held_out.name!r}, as are the results on data.val_dir")
        targets.append(held_out)
    return targets


def distribute_backbone(network: BaseModel, world: World, compiled_sizes: Collection[int] = ()) -> nn.Module:
    """Return the network wrapped for training: its backward() sums the gradients of all ranks; a collective.

    compiled_sizes: compile it for micro-batches of these sizes, if there are any.
    """
    trained: nn.Module = network
    if compiled_sizes:
        trained = CompiledNetwork(network, compiled_sizes)
        if world.is_main:
            logger.info("compiling the network: the first step may take minutes")
    return sum_gradients(trained, world)


def training_mode(mode: str, device: torch.device) -> str:
    """Return `precision.mode`, or bfloat16 instead of float16 on a CPU."""
    return "bfloat16" if mode == "float16" and device.type == "cpu" else mode


def build_scaler(arguments: Mapping[str, Any] | None, mode: str) -> LossScaler | None:
    """Return the loss scaler of a run in float16, from `precision.scaling_arguments`; None in other modes."""
    if mode != "float16":
        return None
    return LossScaler(*astuple(read_arguments(ScalingArguments, arguments, "precision.scaling_arguments")))


def apply_precision(network: nn.Module, options: Config, device: torch.device) -> None:
    """Apply `precision.lists` to a network in place; see `apply_lists`."""
    if options.precision.lists is None:
        return
    lists = read_arguments(AutoMixedPrecisionLists, options.precision.lists, "precision.lists")
    mode = training_mode(options.precision.mode, device)
    apply_lists(network, lists.custom_white_list or (), lists.custom_black_list or (), mode, device)


def margin_of(options: Config) -> Margin:
    """Return the margin of the loss type. Raises OptionError for a set option that the loss does not use."""
    head = options.head
    name = head.loss_type.removeprefix("dist_")
    has = margin_arguments(name)
    arguments = dict(head.loss_arguments or {})
    if "head.scale" in options.explicit or "scale" in has:
        arguments["scale"] = head.scale  # its default here differs from that of the margin classes
    if head.margin is not None and ("head.margin" in options.explicit or "margin" in has):
        arguments["margin"] = head.margin
    return build_margin(name, **arguments)


def _class_margins(wanted: Mapping[str, Any], counts: Tensor | None) -> Tensor:
    """Return the margins of `head.class_margins` [C]; counts: images per class [C], None if unknown."""
    if "file" in wanted:
        with (
            refusing(f"cannot read {wanted['file']}", "expected a .npy file with one margin per class"),
            open_regular(wanted["file"]) as file,
        ):
            return torch.from_numpy(np.lib.format.read_array(file, allow_pickle=False))
    if counts is None:
        raise OptionError(
            "head.class_margins has a, but the images per class of a generator reader are unknown; set file"
        )
    return margins_of_counts(counts, **wanted)


def build_trained_head(
    options: Config, class_num: int, world: World, counts: Tensor | None = None
) -> tuple[Head, RowOptimizer | None]:
    """Return the head on its device, and the optimizer of its class weights if they are sharded.

    counts: images per class, int64 [C], for `head.class_margins`; None if unknown. `build_updates` sets the
    learning rate of class weights.
    """
    head, optim = options.head, options.optim
    margin = margin_of(options)
    if head.class_margins is not None:
        margin.set_class_margins(_class_margins(head.class_margins, counts), counts)
    file = None
    if head.weights_file is not None:
        classes = range(*class_range(class_num, world.rank, world.size))
        folder = rank_folder(head.weights_file, world.rank)
        file = WeightsFile(folder, classes, options.model.emb_size, options.train.seed)
    built = build_head(
        head.loss_type,
        class_num,
        options.model.emb_size,
        margin=margin,
        centers=head.sub_centers,
        sampling=Sampling(sample_ratios(head.sample_ratio), head.hard_share, in_pages=file is not None),
        execution=execution_of(head.execution, options.precision.mode),
        row_dtype=getattr(torch, head.row_dtype),
        offload=head.offload,
        file=file,
        on_nonfinite="pass",  # the training loop checks the loss, and names the images
        seed=options.train.seed,
        group=world.head_group,
    ).to(world.device)
    if not isinstance(built, ShardedHead):
        return built, None
    decay = optim.weight_decay if head.weight_decay is None else head.weight_decay
    settings: dict[str, Any] = {"weight_decay": decay}
    if head.optimizer == "sgd":
        is_sgd = optim.optimizer.lower() == "sgd"
        nesterov = is_sgd and (optim.optimizer_arguments or {}).get("nesterov", False)
        settings |= {"momentum": optim.momentum, "nesterov": nesterov}
    return built, ROW_OPTIMIZERS[head.optimizer](built, state_dtype=head.state_dtype, **settings)


def execution_of(arguments: Mapping[str, Any] | None, mode: str) -> Execution:
    """Return how a sharded head computes: `head.execution`, with products by the precision mode."""
    own = read_arguments(ExecutionArguments, arguments, "head.execution")
    by_mode = "float32" if mode == "float32" else "bfloat16"
    products = by_mode if own.products == "auto" else own.products
    return Execution(products, int(own.keep_mb * 2**20), kernels=own.kernels)


def load_head(path: Path, manifest: Manifest, world: World) -> Head:
    """Return the head of a checkpoint for `Head.topk`, sharded over any number of ranks; a collective.

    It has the class weights, loss type, margin and scale of the checkpoint, but no optimizer. Raises
    CheckpointError if it is damaged, or if there are no class weights.
    """
    weight = manifest.tensors.get(Role(CLASS_WEIGHTS, "weight").key)
    if weight is None:
        raise missing_weights(path, manifest)
    if len(weight.shape) not in (2, 3):
        raise CheckpointError(f"{path}: its class weights are damaged")
    wanted = Options()
    wanted.set("head.class_margins", None)  # only for training; may name a file
    options = wanted.resolve({"head": manifest.options.get("head")})  # other options may name code
    class_num, *centers, emb_size = weight.shape
    head = build_head(
        f"dist_{options.head.loss_type.removeprefix('dist_')}",
        class_num,
        emb_size - scale_bytes(weight.dtype),
        margin=margin_of(options),
        centers=centers[0] if centers else 1,
        row_dtype=weight.dtype,
        group=world.head_group,
    ).to(world.device)
    tensors = {
        Role(CLASS_WEIGHTS, part): ShardedTensor(parameter.detach(), class_num, head.class_range[0])
        for part, parameter in head.named_parameters()
    }
    load_tensors(path, tensors, world)
    return head


def with_rate(options: Config, global_batch: int, total_steps: int | None) -> Config:
    """Return the configuration with resolved schedule, learning rate, warm-up and clipping, for checkpoints.

    total_steps: None if unknown.
    """
    optim, warmup = options.optim, options.optim.warmup_steps
    schedule = optim.schedule
    if total_steps is None and "optim.schedule" not in options.explicit | options.adopted:
        schedule = "constant"
    name, arguments = _schedule_of(schedule)
    if warmup is None:
        ends = [end for end in (total_steps, arguments.steps) if end is not None]
        # A custom schedule includes its warm-up.
        warmup = 0 if names_code(name) else default_warmup(min(ends, default=None))
    rate = optim.lr or DEFAULT_RATE * global_batch / REFERENCE_BATCH
    clip_norm = min(CLIP_NORM, CLIPPED_STEP / rate) if optim.clip_norm is None else optim.clip_norm
    return options.changed(
        {
            "optim.schedule": schedule,
            "optim.warmup_steps": warmup,
            "optim.lr": rate,
            "optim.clip_norm": clip_norm,
        }
    )


def default_warmup(total_steps: int | None) -> int:
    """Return the default number of warm-up steps; total_steps: None if the length of the run is unknown."""
    if total_steps is None:
        return WARMUP_STEPS_OF_UNKNOWN_LENGTH
    return min(WARMUP_STEPS, int(WARMUP_SHARE * total_steps))


def build_updates(
    options: Config,
    network: BaseModel,
    assignment: Assignment,
    head: Head,
    rows: RowOptimizer | None,
    factory: Factory | None,
) -> tuple[torch.optim.Optimizer, float]:
    """Return the optimizer of the network and of a replicated head, and its full learning rate.

    Also sets the full learning rate of the sharded class weights. factory: replaces `optim.optimizer`.
    """
    optim, base, named = options.optim, options.optim.lr, dict(network.named_parameters())
    assert base is not None  # see with_rate
    groups: list[dict[str, Any]] = [
        {"params": [named[name] for name in names], **own} for names, own in assignment.groups if names
    ]
    if rows is None:
        own = {} if options.head.lr_factor == 1 else {updates.LR_FACTOR: options.head.lr_factor}
        if options.head.weight_decay is not None:
            own["weight_decay"] = options.head.weight_decay
        groups.append({"params": [*head.parameters()], **own})
    if not groups:  # the network is frozen, and class weights have their own optimizer
        groups.append({"params": []})
    for group in rows.param_groups if rows is not None else ():
        group[updates.FULL_RATE] = base * options.head.lr_factor
    arguments = optim.optimizer_arguments or {}
    if not names_code(optim.optimizer):
        optimizer = updates.build_optimizer(
            optim.optimizer,
            groups,
            base,
            momentum=optim.momentum,
            weight_decay=optim.weight_decay,
            arguments=arguments,
        )
        return optimizer, base
    if factory is None:
        factory = load_function(optim.optimizer, "optim.optimizer")
    optimizer = updates.build_custom(factory, optim.optimizer, groups, arguments)
    return optimizer, float(optimizer.defaults.get("lr", optimizer.param_groups[0]["lr"]))


def build_schedule(
    schedule: str | Mapping[str, Any],
    base: float,
    warmup: int | str | None,
    total_steps: int | None,
    until: Callable[[int], int | None],
    function: ScheduleFunction | None,
) -> Schedule:
    """Return the learning rate as a function of the updates; base: the full learning rate.

    schedule, warmup: `optim.schedule` and `optim.warmup_steps`. total_steps: None if the length of a
    generator reader is unknown. until: `Length.until`, for a warm-up in epochs. function: replaces a custom
    schedule. Raises OptionError if an unknown number of steps is needed.
    """
    warmup_steps = until(int(warmup.removesuffix("ep"))) if isinstance(warmup, str) else warmup or 0
    name, arguments = _schedule_of(schedule)
    last = arguments.steps or total_steps
    if warmup_steps is None or (last is None and name in ("cosine", "polynomial")):
        raise OptionError(
            f"optim.warmup_steps is {warmup!r}, optim.schedule {name}, but the steps of a "
            "generator reader are unknown; set data.train_image_num or train.steps, or both options in steps"
        )
    if names_code(name):
        return Schedule(base, _custom_shape(name, total_steps, function), warmup_steps)
    if name == "constant":
        return Schedule(base, updates.constant, warmup_steps)
    if name == "step":
        return Schedule(base, updates.steps_down(arguments.boundaries, arguments.factor), warmup_steps)
    assert last is not None
    if arguments.steps and arguments.steps <= warmup_steps:
        raise OptionError(
            f"the schedule ends after {arguments.steps} steps, but the warm-up already takes {warmup_steps} "
            f"steps; expected more than {warmup_steps}"
        )
    end = arguments.end_factor
    if name == "cosine":
        return Schedule(base, updates.cosine(warmup_steps, last, end), warmup_steps)
    return Schedule(base, updates.polynomial(warmup_steps, last, arguments.power, end), warmup_steps)


def _schedule_of(value: str | Mapping[str, Any]) -> tuple[str, ScheduleArguments]:
    """Return the name of the schedule of `optim.schedule`, and its arguments."""
    name, arguments = name_and_arguments(value)
    return name, ScheduleArguments(**arguments)


def _custom_shape(name: str, total_steps: int | None, function: ScheduleFunction | None) -> Shape:
    if function is None:
        function = load_function(name, "optim.schedule")
    try:
        arguments = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some functions written in C have no signature
        arguments = []
    known = {"total_steps": total_steps} if "total_steps" in arguments else {}
    shape = updates.custom(lambda step: function(step, **known), name)
    if shape(0) != shape(0):  # also reports errors in the function before training
        raise OptionError(
            f"the schedule {name} returned two factors for step 0; it must depend only on the step"
        )
    return shape
