"""Build the network, the head and their updates from the options: each part gets plain arguments."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plsc.checkpoint import Manifest, ShardedTensor, load_tensors
from plsc.checkpoint.load import missing_weights
from plsc.checkpoint.manifest import CLASS_WEIGHTS, Role
from plsc.checkpoint.weights_file import WeightsFile, rank_folder
from plsc.config import Config, Options, find_option
from plsc.config.head import ExecutionArguments, sample_ratios
from plsc.config.optim import (
    CLIP_NORM,
    CLIPPED_STEP,
    DEFAULT_RATE,
    REFERENCE_BATCH,
    WARMUP_SHARE,
    WARMUP_STEPS,
    WARMUP_STEPS_OF_UNKNOWN_LENGTH,
    ParameterGroup,
    ScheduleArguments,
    read_parameter_groups,
)
from plsc.config.option import load_function, name_and_arguments, read_arguments
from plsc.config.runtime import AutoMixedPrecisionLists
from plsc.config.train import listed_names
from plsc.errors import CheckpointError, OptionError, refusing
from plsc.heads import (
    MARGINS,
    ROW_OPTIMIZERS,
    Execution,
    Head,
    RowOptimizer,
    Sampling,
    ShardedHead,
    build_head,
    build_margin,
)
from plsc.heads.margins import Margin, margins_of_counts
from plsc.heads.weights import scale_bytes
from plsc.models import BaseModel, build_model, check_model
from plsc.models.autocast import PrecisionLists, apply_lists
from plsc.models.base_model import Custom, unwrap, use_channels_last
from plsc.models.compiled import CompiledNetwork
from plsc.models.dropout import SampleNumbers, use_sample_dropout
from plsc.models.dry_run import dry_run, never_used
from plsc.models.parameters import (
    Initialization,
    copy_expanded_buffers,
    freeze,
    initialise_by_rule,
    unfreeze,
)
from plsc.models.recomputation import recompute_activations
from plsc.models.sync_batch_norm import synchronise_batch_norm
from plsc.names import names_code
from plsc.optim import schedule as shapes
from plsc.optim.optimizers import (
    FULL_RATE,
    LR_FACTOR,
    OPTIMIZERS,
    Assignment,
    Factory,
    assign_parameters,
    build_custom,
    build_optimizer,
)
from plsc.optim.schedule import Schedule, ScheduleFunction, Shape
from plsc.parallel.backbone import sum_gradients
from plsc.parallel.collectives import class_range
from plsc.parallel.world import World
from plsc.storage.regular import open_regular

logger = logging.getLogger(__name__)


def check_network_options(options: Config, ranks: int) -> None:
    """Raise OptionError for options of speed and precision that cannot be combined."""
    precision = options.precision
    excluded = (
        (
            options.model.sync_batch_norm and ranks > 1,
            "model.sync_batch_norm on several ranks: every batch norm would break the compiled graph",
        ),
        (
            options.memory.recompute.strip() != "none",
            "memory.recompute: torch.compile decides itself what is recomputed",
        ),
        (options.train.deterministic, "train.deterministic: torch.compile does not guarantee equal results"),
        (
            {"check_shape", "check_content"} & set(listed_names(options.train.callbacks)),
            "train.callbacks check_shape or check_content: compiled code does not call the layers",
        ),
        (
            precision.lists,
            "precision.lists: compiled code does not call the modules that they name",
        ),
    )
    for is_set, why in excluded if options.speed.compile else ():
        if is_set:
            raise OptionError(f"speed.compile cannot be used with {why}; remove one of the two options")


def build_trained_network(
    options: Config, world: World, custom: BaseModel | None, rules: Sequence[Initialization] = ()
) -> tuple[BaseModel, Assignment, SampleNumbers]:
    """Return the backbone for training, its parameter groups, and the sample numbers for dropout."""
    network = build_network(options, world, custom)
    unwrap(network)  # remove changes that an earlier run made to a custom network
    unfreeze(network)
    lists = look_up_lists(network, options)
    initialise_by_rule(network, rules, options.train.seed)
    # Patterns match names and types of the plain network: the next lines replace modules.
    assignment = assign_parameters(network, options.optim)
    if options.model.sync_batch_norm:
        synchronise_batch_norm(network, world.backbone_group, world.device)
    freeze(network, assignment.frozen)
    samples = use_sample_dropout(network)
    use_lists(network, lists, options, world.device)
    recompute_activations(network, options.memory.recompute)
    return network, assignment, samples


def build_network(
    options: Config, world: World, custom: Custom | None, place: torch.device | None = None
) -> BaseModel:
    """Return the backbone, with weights from the seed; a custom one is checked in a dry run.

    place: device of the parameters, by default that of the rank.
    """
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
    device = place or world.device
    # Module.to() would also convert complex tensors, and drop their imaginary part.
    model._apply(lambda tensor: tensor.to(device, torch.float32 if tensor.is_floating_point() else None))
    set_memory_format(model, options, world.device)
    return model


def look_up_lists(network: nn.Module, options: Config) -> PrecisionLists:
    """Resolve the names in the precision lists. Raises OptionError for a name that matches nothing."""
    lists = read_arguments(AutoMixedPrecisionLists, options.precision.lists, "precision.lists")
    return PrecisionLists.resolve(network, lists.custom_white_list or (), lists.custom_black_list or ())


def use_lists(network: nn.Module, lists: PrecisionLists, options: Config, device: torch.device) -> None:
    """Apply the precision lists to a network that computes in 16 bits."""
    mode = training_mode(options, device)
    if mode != "float32":
        apply_lists(network, lists, getattr(torch, mode), device)


def training_mode(options: Config, device: torch.device) -> str:
    """Return 'float32', 'float16' or 'bfloat16'; a CPU uses bfloat16 instead of float16."""
    mode = options.precision.mode
    return "bfloat16" if mode == "float16" and device.type == "cpu" else mode


def mode_note(options: Config, device: torch.device) -> str:
    """Return a log line if the device uses another precision than the options, else an empty string."""
    mode = options.precision.mode
    used = training_mode(options, device)
    if used == mode:
        return ""
    return f"note: precision.mode {mode} is only for GPUs: this CPU uses {used}, without loss scaling"


def set_memory_format(network: BaseModel, options: Config, device: torch.device) -> None:
    """Switch a network to channels last in place if it is faster, and if the network supports it.

    A network that calls `view` on feature maps does not.
    """
    if not _pays(network, options, device):
        return
    use_channels_last(network)
    try:
        dry_run(network, options.model.image_shape)
    except OptionError:
        network.input_layout = torch.preserve_format
        network.to(memory_format=torch.contiguous_format)


def _pays(network: nn.Module, options: Config, device: torch.device) -> bool:
    """Return whether channels last is faster: on CPUs, and on GPUs in 16 bits."""
    if getattr(network, "example_input", None) is not None:
        return False
    if not any(isinstance(module, nn.Conv2d) for module in network.modules()):
        return False
    return device.type == "cpu" or training_mode(options, device) != "float32"


def batch_sizes(options: Config, world: World, global_batch: int) -> set[int]:
    """Return the sizes of this rank's micro-batches of a full global batch: one or two numbers."""
    mine = global_batch // world.size + (world.rank < global_batch % world.size)
    parts = options.train.micro_batches
    return {mine // parts + (part < mine % parts) for part in range(parts)} - {0}


def distribute_backbone(network: BaseModel, options: Config, world: World, global_batch: int) -> nn.Module:
    """Return the network wrapped for training: its backward() sums the gradients of all ranks; a collective.

    With `speed.compile` it is compiled.
    """
    trained: nn.Module = network
    if options.speed.compile:
        sizes = batch_sizes(options, world, global_batch)
        trained = CompiledNetwork(network, sizes)
        if world.is_main:
            logger.info("compiling the network: the first step may take minutes")
    names = never_used(network, options.model.image_shape) if world.size > 1 else []
    idle = [network.get_parameter(name) for name in world.broadcast_object(names)]
    return sum_gradients(trained, world, never_used=idle)


def margin_arguments(name: str) -> Mapping[str, inspect.Parameter]:
    """Return the arguments of a margin's constructor."""
    return inspect.signature(MARGINS[name].__init__).parameters


def margin_of(options: Config) -> Margin:
    """Return the margin of the loss type. Raises OptionError for a set option that the loss does not use."""
    head = options.head
    name = head.loss_type.removeprefix("dist_")
    has = margin_arguments(name)
    if head.class_margins is not None and "margin" not in has:
        raise OptionError(f"head.class_margins is set, but {name} has no single margin; use another loss")
    if head.class_margins is not None and "head.margin" in options.explicit:
        raise OptionError("head.margin and head.class_margins are both set; remove one of them")
    given = dict(head.loss_arguments or {})
    if "head.scale" in options.explicit or "scale" in has:
        given["scale"] = head.scale  # its default here differs from that of the margin classes
    if head.margin is not None and ("head.margin" in options.explicit or "margin" in has):
        given["margin"] = head.margin
    try:
        return build_margin(name, **given)
    except OptionError as error:
        chosen = [
            path for path in ("head.loss_arguments", "head.margin", "head.scale") if path in options.explicit
        ]
        raise OptionError(
            f"{error} (set: {', '.join(['head.loss_type ' + head.loss_type, *chosen])})"
        ) from error


def sampling_of(options: Config) -> Sampling | None:
    """Return how classes are sampled in each step; None for a head that is not sharded."""
    head = options.head
    if not head.loss_type.startswith("dist_"):
        return None
    ratios = sample_ratios(head.sample_ratio)
    return Sampling(ratios, head.hard_share, in_pages=head.weights_file is not None)


def with_margin(options: Config) -> Config:
    """Return the configuration with the default margin of the loss if none is set."""
    margin = margin_arguments(options.head.loss_type.removeprefix("dist_")).get("margin")
    if options.head.margin is not None or margin is None:
        return options
    return options.changed({"head.margin": margin.default})


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

    counts: images per class, int64 [C], for `head.class_margins`; None if unknown.
    """
    head = options.head
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
        sampling=sampling_of(options),
        execution=execution_of(options),
        row_dtype=getattr(torch, head.row_dtype),
        offload=head.offload,
        file=file,
        on_nonfinite="pass",  # the training loop checks the loss, and names the images
        seed=options.train.seed,
        group=world.head_group,
    ).to(world.device)
    return built, _row_optimizer(options, built) if isinstance(built, ShardedHead) else None


def load_head(path: Path, manifest: Manifest, world: World) -> Head:
    """Return the head of a checkpoint for `Head.topk`, sharded over any number of ranks; a collective.

    It has the class weights, loss type, margin and scale of the checkpoint, but no optimizer. Raises
    CheckpointError if it is damaged, or if there are no class weights or several heads.
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


def execution_of(options: Config) -> Execution:
    """Return how a sharded head computes."""
    own = read_arguments(ExecutionArguments, options.head.execution, "head.execution")
    by_mode = "float32" if options.precision.mode == "float32" else "bfloat16"
    products = by_mode if own.products == "auto" else own.products
    return Execution(products, int(own.keep_mb * 2**20), kernels=own.kernels)


def _row_optimizer(options: Config, head: ShardedHead) -> RowOptimizer:
    """Return the optimizer of sharded class weights; `build_updates` sets its learning rate."""
    optim = options.optim
    decay = options.head.weight_decay
    settings: dict[str, Any] = {"weight_decay": optim.weight_decay if decay is None else decay}
    if options.head.optimizer == "sgd":
        nesterov = optim.optimizer.lower() == "sgd" and (optim.optimizer_arguments or {}).get(
            "nesterov", False
        )
        settings |= {"momentum": optim.momentum, "nesterov": nesterov}
    return ROW_OPTIMIZERS[options.head.optimizer](head, state_dtype=options.head.state_dtype, **settings)


def check_optim(options: Config) -> None:
    """Raise OptionError for contradicting options of optimizer and schedule."""
    optim = options.optim
    schedule, falling = schedule_of(options)
    if schedule == "exponential" and not falling.end_factor:
        raise OptionError(
            "end_factor of the exponential schedule is 0, which it never reaches; set a positive value"
        )
    is_custom = names_code(optim.optimizer)
    takes = () if is_custom else OPTIMIZERS[optim.optimizer.lower()].takes
    for group in read_parameter_groups(optim.groups):
        _check_group(group, takes)


def schedule_of(options: Config) -> tuple[str, ScheduleArguments]:
    """Return the name of the schedule, and its arguments."""
    name, arguments = name_and_arguments(options.optim.schedule)
    return name, ScheduleArguments(**arguments)


def _check_group(group: ParameterGroup, takes: Collection[str]) -> None:
    """Validate settings that are also options of the run: torch validates only an optimizer's defaults."""
    for name in group.arguments.keys() & set(takes):
        try:
            find_option(f"optim.{name}").checked(group.arguments[name])
        except OptionError as error:
            raise OptionError(f"parameter group {group.pattern!r}: {error}") from error


def default_rate(global_batch: int) -> float:
    """Return the default learning rate."""
    return DEFAULT_RATE * global_batch / REFERENCE_BATCH


def default_warmup(total_steps: int | None) -> int:
    """Return the default number of warm-up steps; total_steps: None if the length of the run is unknown."""
    if total_steps is None:
        return WARMUP_STEPS_OF_UNKNOWN_LENGTH
    return min(WARMUP_STEPS, int(WARMUP_SHARE * total_steps))


def with_rate(options: Config, global_batch: int, total_steps: int | None) -> Config:
    """Return the configuration with resolved schedule, learning rate, warm-up and clipping, for checkpoints.

    total_steps: None if unknown.
    """
    options = options.changed({"optim.schedule": _schedule(options, total_steps)})
    optim, warmup = options.optim, options.optim.warmup_steps
    if warmup is None:
        ends = [end for end in (total_steps, schedule_of(options)[1].steps) if end is not None]
        # A custom schedule includes its warm-up.
        warmup = 0 if names_code(optim.schedule) else default_warmup(min(ends, default=None))
    rate = optim.lr or default_rate(global_batch)
    values = {"optim.warmup_steps": warmup, "optim.lr": rate}
    if optim.clip_norm is None:
        values["optim.clip_norm"] = min(CLIP_NORM, CLIPPED_STEP / rate)
    return options.changed(values)


def _schedule(options: Config, total_steps: int | None) -> str | dict[str, Any]:
    """Return `optim.schedule`; the default depends on the length of the run."""
    optim, explicit = options.optim, options.explicit
    if "optim.schedule" in explicit | options.adopted:
        return optim.schedule
    return "constant" if total_steps is None else optim.schedule


def build_updates(
    options: Config,
    named: Mapping[str, nn.Parameter],
    assignment: Assignment,
    head: Head,
    rows: RowOptimizer | None,
    device: torch.device,
    factory: Factory | None,
) -> tuple[torch.optim.Optimizer, float]:
    """Return the optimizer of the network and of a replicated head, and its full learning rate.

    Also sets the full learning rate of the sharded class weights. named: the network's parameters by the
    names in `assignment`. factory: replaces `optim.optimizer`.
    """
    optim, base = options.optim, options.optim.lr
    assert base is not None  # see with_rate
    groups: list[dict[str, Any]] = [
        {"params": [named[name] for name in names], **own} for names, own in assignment.groups if names
    ]
    if rows is None:
        groups.append({"params": [*head.parameters()], **_settings_of_dense_head(options)})
    if not groups:  # the network is frozen, and class weights have their own optimizer
        groups.append({"params": []})
    for group in rows.param_groups if rows is not None else ():
        group[FULL_RATE] = base * options.head.lr_factor
    if not names_code(optim.optimizer):
        return build_optimizer(optim, groups, base, device), base
    if factory is None:
        factory = load_function(optim.optimizer, "optim.optimizer", "set_optimizer")
    optimizer = build_custom(factory, optim.optimizer, groups, optim.optimizer_arguments or {})
    return optimizer, float(optimizer.defaults.get("lr", optimizer.param_groups[0]["lr"]))


def _settings_of_dense_head(options: Config) -> dict[str, Any]:
    own: dict[str, Any] = {}
    if options.head.lr_factor != 1:
        own[LR_FACTOR] = options.head.lr_factor
    if options.head.weight_decay is not None:
        own["weight_decay"] = options.head.weight_decay
    return own


def build_schedule(
    options: Config,
    base: float,
    total_steps: int | None,
    until: Callable[[int], int | None],
    function: ScheduleFunction | None,
) -> Schedule:
    """Return the schedule of the learning rate; base: the full learning rate.

    total_steps: None if the length of a generator reader is unknown. until: `Length.until`, for a warm-up in
    epochs. function: replaces `optim.schedule`. Raises OptionError if the schedule needs an unknown number
    of steps.
    """
    optim = options.optim
    warmup = optim.warmup_steps or 0
    if isinstance(warmup, str):
        steps = until(int(warmup.removesuffix("ep")))
        if steps is None:
            raise OptionError(
                f"optim.warmup_steps is {warmup!r}, but the length of an epoch is unknown for a generator "
                "reader; set data.train_image_num, or optim.warmup_steps to a number of steps"
            )
        warmup = steps
    name, given = schedule_of(options)
    if names_code(name):
        return Schedule(base, _custom_shape(name, total_steps, function), warmup)
    if name == "constant":
        return Schedule(base, shapes.constant, warmup)
    if name in ("step", "multi_step"):
        shape = shapes.steps_down(given.boundaries, given.factor)
        return Schedule(base, shape, warmup)
    last = given.steps or total_steps
    if last is None:
        raise OptionError(
            f"optim.schedule {name!r} needs the number of steps, which is unknown for a generator "
            "reader; set its argument steps, train.steps or data.train_image_num"
        )
    if given.steps and given.steps <= warmup:
        raise OptionError(
            f"the schedule ends after {given.steps} steps, but the warm-up already takes {warmup} steps; "
            f"expected more than {warmup}"
        )
    end = given.end_factor
    falling = {
        "cosine": lambda: shapes.cosine(warmup, last, end, given.cycles),
        "exponential": lambda: shapes.exponential(warmup, last, end),
        "polynomial": lambda: shapes.polynomial(warmup, last, given.power, end),
    }
    return Schedule(base, falling[name](), warmup)


def _custom_shape(name: str, total_steps: int | None, function: ScheduleFunction | None) -> Shape:
    if function is None:
        function = load_function(name, "optim.schedule", "set_lr_schedule")
    try:
        arguments = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some functions written in C have no signature
        arguments = []
    given = {"total_steps": total_steps} if "total_steps" in arguments else {}
    shape = shapes.custom(lambda step: function(step, **given), name)
    if shape(0) != shape(0):  # also reports errors in the function before training
        raise OptionError(
            f"the schedule {name} returned two factors for step 0; it must depend only on the step"
        )
    return shape
