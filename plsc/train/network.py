"""The backbone of a run: built, given its precision and layout, compiled or split over the ranks."""

from __future__ import annotations

import datetime
import logging
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from plsc.config import Config
from plsc.config.model import read_initializations
from plsc.errors import OptionError, kind_and_line
from plsc.models import BaseModel, build_model, check_model
from plsc.models.autocast import PrecisionLists, apply_lists, autocast
from plsc.models.base_model import evaluating, unwrap, use_channels_last
from plsc.models.checkpointing import checkpoint_activations
from plsc.models.compiled import CompiledNetwork
from plsc.models.dropout import SampleNumbers, use_sample_dropout
from plsc.models.dry_run import count_calls, dry_run
from plsc.models.folding import fold_batch_norm
from plsc.models.parameters import copy_expanded_buffers, freeze, initialise_by_rule, unfreeze
from plsc.models.sync_batch_norm import synchronise_batch_norm
from plsc.optim.optimizers import Assignment, assign_parameters
from plsc.parallel.backbone import (
    choose_units,
    is_sharded,
    match_units,
    reshard,
    shard_network,
    sum_gradients,
)
from plsc.parallel.world import World

logger = logging.getLogger(__name__)


def check_network_options(options: Config, ranks: int) -> None:
    """Raise OptionError for options of speed and precision that exclude others."""
    precision = options.precision
    if precision.mode != "float32" and options.runtime.dtype == "float64":
        raise OptionError(
            f"precision.mode is {precision.mode}, but runtime.dtype is float64, which is for checks "
            "in full precision; leave one of the two out"
        )
    excluded = (
        (
            options.model.sync_batch_norm and ranks > 1,
            "model.sync_batch_norm on several ranks: compiled code would have to be cut at every batch norm",
        ),
        (
            options.parallel.backbone == "sharded" and ranks > 1,
            "parallel.backbone 'sharded': compiled code holds the parameters that sharding frees",
        ),
        (
            options.memory.checkpoint_stages.strip() != "none",
            "memory.checkpoint_stages: torch.compile itself decides what is computed again",
        ),
        (
            options.train.deterministic,
            "train.deterministic: torch.compile does not promise the same results",
        ),
        (
            precision.white_list or precision.black_list,
            "precision.white_list and black_list: compiled code does not call the modules that they name",
        ),
    )
    for is_set, why in excluded if options.speed.compile else ():
        if is_set:
            raise OptionError(f"speed.compile cannot be used with {why}; leave one of the two out")


def build_trained_network(
    options: Config, world: World, custom: BaseModel | None
) -> tuple[BaseModel, Assignment, SampleNumbers]:
    """Return the backbone as it is trained, its groups of parameters, and its dropout's sample numbers."""
    # What is split comes to its device in parts, see `spread_backbone`.
    is_split = will_be_sharded(options, world.size)
    place = torch.device("cpu") if is_split else world.device
    network = build_network(options, world, custom, place)
    unwrap(network)  # what an earlier run left on a network of the user's
    unfreeze(network)
    lists = look_up_lists(network, options)
    rules = read_initializations(options.model.initialization)
    initialise_by_rule(network, rules, options.train.seed)
    # By names and types of the plain network: what follows replaces modules.
    assignment = assign_parameters(network, options.optim)
    if options.model.sync_batch_norm:
        synchronise_batch_norm(network, world.backbone_group, world.device)
    freeze(network, assignment.frozen)
    samples = use_sample_dropout(network)
    use_lists(network, lists, options, world.device)
    checkpoint_activations(network, options.memory.checkpoint_stages, options.memory.checkpoint_every)
    return network, assignment, samples


def build_network(
    options: Config, world: World, custom: BaseModel | None, place: torch.device | None = None
) -> BaseModel:
    """Return the backbone, one of the user's checked with a dry run; its weights follow the seed.

    place: where it is put; by default on the rank's device, where it will compute.
    """
    torch.manual_seed(options.train.seed)
    if custom is not None and is_sharded(custom):
        raise OptionError(
            f"this {type(custom).__name__} was sharded over the ranks by an earlier run of this process; "
            "make a new one (set_model)"
        )
    model = custom
    if model is None:
        model = build_model(
            options.model.name,
            options.model.emb_size,
            options.model.image_shape,
            dropout=options.model.dropout,
            neck=options.model.neck,
            arguments=options.arguments,
        )
    # Those of plsc fit, and adapted ones were run once.
    if custom is not None or ":" in options.model.name:
        check_model(model, options.model.image_shape, options.model.emb_size)
    copy_expanded_buffers(model)
    model = model.to(place or world.device, getattr(torch, options.runtime.dtype))
    lay_out(model, options, world.device)
    return model


def look_up_lists(network: nn.Module, options: Config) -> PrecisionLists:
    """Return what the names in the lists of the options mean; OptionError for one that means nothing."""
    precision = options.precision
    return PrecisionLists.resolve(network, precision.white_list, precision.black_list)


def use_lists(network: nn.Module, lists: PrecisionLists, options: Config, device: torch.device) -> None:
    """Let a network compute as its lists say, if it computes in 16 bits at all."""
    mode = training_mode(options, device)
    if mode != "float32":
        apply_lists(network, lists, getattr(torch, mode), device)


def training_mode(options: Config, device: torch.device) -> str:
    """Return 'float32', 'float16' or 'bfloat16': a CPU has no use for float16, and gets bfloat16."""
    mode = options.precision.mode
    return "bfloat16" if mode == "float16" and device.type == "cpu" else mode


def mode_note(options: Config, device: torch.device) -> str:
    """Return what the user should know of the mode before training begins."""
    mode = options.precision.mode
    used = training_mode(options, device)
    if used == mode:
        return ""
    scaling = "" if options.precision.loss_scaling == "always" else ", without loss scaling"
    return f"note: precision.mode is {mode}, which is for GPUs: this CPU computes in {used}{scaling}"


def evaluation_context(options: Config, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a network is evaluated."""
    follows = options.precision.evaluation == "training"
    return autocast(training_mode(options, device) if follows else "float32", device)


def lay_out(network: BaseModel, options: Config, device: torch.device) -> None:
    """Let a network keep its images channels last, if `speed.channels_last` says so, in place.

    With auto a network that does not stand it (one that asks for a `view` of its feature maps) stays as it
    was. Raises OptionError if the option is on and the network does not stand it.
    """
    mode = options.speed.channels_last
    if mode == "off" or (mode == "auto" and not _pays(network, options, device)):
        return
    # FSDP takes no parameters of another layout than torch's usual one.
    use_channels_last(network, weights=options.parallel.backbone == "replicated")
    try:
        dry_run(network, options.model.image_shape)
    except OptionError as error:
        network.input_layout = torch.preserve_format
        network.to(memory_format=torch.contiguous_format)
        if mode == "on":
            raise OptionError(
                f"speed.channels_last is on, but {error}; in the network's code, reshape or flatten works "
                "where view does not; or set_channels_last('off')"
            ) from error


def _pays(network: nn.Module, options: Config, device: torch.device) -> bool:
    """Whether the layout is faster: measured on a CPU, for 16 bits on a GPU as its makers say."""
    if options.runtime.dtype == "float64":
        return False
    if not any(isinstance(module, nn.Conv2d) for module in network.modules()):
        return False
    return device.type == "cpu" or training_mode(options, device) != "float32"


def batch_sizes(options: Config, world: World, global_batch: int) -> set[int]:
    """Return how many images this rank's micro-batches of a full global batch have: one number or two."""
    mine = global_batch // world.size + (world.rank < global_batch % world.size)
    parts = options.train.micro_batches
    return {mine // parts + (part < mine % parts) for part in range(parts)} - {0}


def evaluated(network: BaseModel, options: Config, world: World) -> BaseModel:
    """Return what to evaluate: the network, or one with `speed.fold_batch_norm`, made of its present weights.

    Not a collective: on ranks with equal networks the outcome is the same.
    """
    if not options.speed.fold_batch_norm:
        return network
    folded = fold_batch_norm(network, options.model.image_shape)
    if isinstance(folded, str):
        if folded != network.folding_failure:  # once, not at each evaluation
            network.folding_failure = folded
            if world.is_main:
                logger.info(f"speed.fold_batch_norm is passed over for this network: {folded}")
        return network
    return folded


def spread_backbone(
    network: BaseModel, options: Config, world: World, global_batch: int
) -> tuple[nn.Module, str]:
    """Return what to call in training, and a note on sharding; a collective.

    Its backward() leaves the sum of all ranks' gradients. With `speed.compile` it is compiled. A sharded
    network is changed in place, so optimizers are built afterwards. The note is for the user, or empty.

    Raises OptionError for a network that cannot be sharded, or not as `parallel.shard_units` says.
    """
    parallel = options.parallel
    if not will_be_sharded(options, world.size):
        trained: nn.Module = network
        if options.speed.compile:
            sizes = batch_sizes(options, world, global_batch)
            trained = CompiledNetwork(network, sizes, world)
        note = ""
        if parallel.backbone == "sharded":
            why = "one rank" if world.size == 1 else "one rank a copy"
            note = f"{why}: the backbone is not sharded, its parameters stay whole on each rank"
        return sum_gradients(trained, world, options.speed.bucket_mb), note
    size = shard_size(options, world.size)
    calls = count_calls(network, options.model.image_shape)
    patterns = [part.strip() for part in parallel.shard_units.split(",") if part.strip()]
    is_auto = patterns in ([], ["auto"])
    units = choose_units(network, calls) if is_auto else match_units(network, patterns, calls)
    shard_network(network, units, world, size, datetime.timedelta(seconds=options.runtime.timeout))
    _try_sharded(network, options, world)
    groups = f", {world.size // size} groups of {size}" if size < world.size else ""
    return network, f"the backbone is sharded over {size} ranks{groups}, in {len(units) + 1} units"


def will_be_sharded(options: Config, ranks: int) -> bool:
    """Whether `spread_backbone` splits the network, which is then made on the CPU: it must fit there."""
    return options.parallel.backbone == "sharded" and shard_size(options, ranks) > 1


def shard_size(options: Config, ranks: int) -> int:
    """Return how many ranks share a copy of a sharded backbone. Raises OptionError if it does not fit."""
    size = options.parallel.shard_size or ranks
    if ranks % size == 0:
        return size
    if "parallel.shard_size" in options.explicit:
        raise OptionError(
            f"parallel.shard_size is {size}, which does not divide the {ranks} ranks; choose a divisor of "
            f"{ranks}, or 0 for all of them"
        )
    return ranks  # it came from a run on other ranks


def _try_sharded(network: BaseModel, options: Config, world: World) -> None:
    """See that the network computes with its parameters split: on two blank images; a collective."""
    images = torch.zeros(
        (2, *options.model.image_shape),
        device=world.device,
        dtype=getattr(torch, options.runtime.dtype),
    )
    try:
        with evaluating(network):
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                network(images, None, False)
            reshard(network)
    except (RuntimeError, ValueError, AttributeError, TypeError) as error:
        raise OptionError(
            f"{type(network).__name__} cannot be sharded as it is: "
            f"{kind_and_line(error)}; if a layer's parameters are used while the layer around them does not "
            "run, name the units yourself (parallel.shard_units), or set_backbone_parallel('replicated')"
        ) from error
