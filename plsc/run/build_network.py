"""Build the backbone of a run: precision, memory layout, compilation, and distribution over the ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from plsc.config import Config
from plsc.config.option import read_arguments
from plsc.config.runtime import AutoMixedPrecisionLists
from plsc.config.train import listed_names
from plsc.errors import OptionError
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
from plsc.optim.optimizers import Assignment, assign_parameters
from plsc.parallel.backbone import sum_gradients
from plsc.parallel.world import World

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
    if custom is not None or ":" in options.model.name:
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
