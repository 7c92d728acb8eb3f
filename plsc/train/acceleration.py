"""The options of speed, made to work on a run's backbone."""

from __future__ import annotations

import datetime
import logging

import torch
from torch import nn

from plsc.config import Config
from plsc.errors import OptionError, kind_and_line
from plsc.models import BaseModel
from plsc.models.base_model import evaluating, use_channels_last
from plsc.models.compiled import CompiledNetwork
from plsc.models.dry_run import count_calls, dry_run
from plsc.models.folding import fold_batch_norm
from plsc.parallel.backbone import (
    choose_units,
    match_units,
    shard_network,
    split_again,
    sum_gradients,
)
from plsc.parallel.world import World
from plsc.train.precision import training_mode

logger = logging.getLogger(__name__)
_KEPT_WHOLE = "its parameters stay whole on each rank"


def check_speed(options: Config, ranks: int) -> None:
    """Raise OptionError for options of speed that exclude others."""
    if not options.speed.compile:
        return
    if options.model.sync_batch_norm and ranks > 1:
        raise OptionError(
            "speed.compile cannot be used with model.sync_batch_norm on several ranks: they talk to each "
            "other in every batch norm, where compiled code has to be cut; set_compile(False), or leave the "
            "statistics to each rank"
        )
    if options.parallel.backbone == "sharded" and ranks > 1:
        raise OptionError(
            "speed.compile cannot be used with parallel.backbone 'sharded': compiled code holds parameters "
            "that sharding drops and puts together again; leave one of the two out"
        )
    if options.memory.checkpoint_stages.strip() != "none":
        raise OptionError(
            "speed.compile cannot be used with memory.checkpoint_stages: torch.compile decides by itself "
            "what is computed again; leave one of the two out"
        )
    if options.train.deterministic:
        raise OptionError(
            "speed.compile cannot be used with train.deterministic: what torch.compile makes is not under "
            "that promise; leave one of the two out"
        )


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


def compiled(network: BaseModel, options: Config, world: World, global_batch: int) -> nn.Module:
    """Return what computes a training step of the network: itself, or compiled if `speed.compile` is on."""
    if not options.speed.compile:
        return network
    sizes = batch_sizes(options, world, global_batch)
    return CompiledNetwork(network, sizes, world)


def batch_sizes(options: Config, world: World, global_batch: int) -> set[int]:
    """Return how many images this rank's micro-batches of a full global batch have: one number or two."""
    mine = global_batch // world.size + (world.rank < global_batch % world.size)
    parts = options.train.micro_batches
    return {mine // parts + (part < mine % parts) for part in range(parts)} - {0}


def evaluated(network: BaseModel, options: Config, world: World) -> BaseModel:
    """Return what to evaluate: the network, or one with `speed.fold_batch_norm`, made of its present weights.

    Not a collective: on ranks with equal networks the outcome is alike.
    """
    if not options.speed.fold_batch_norm:
        return network
    folded = fold_batch_norm(network, options.model.image_shape)
    if isinstance(folded, str):
        if folded != network.unfolded_because:  # once, not at each evaluation
            network.unfolded_because = folded
            if world.is_main:
                logger.info(f"speed.fold_batch_norm is passed over for this network: {folded}")
        return network
    return folded


def spread_backbone(
    network: BaseModel, trained: nn.Module, options: Config, world: World
) -> tuple[nn.Module, str]:
    """Return what to call in training, whose backward() leaves the sum of all ranks' gradients; and a note.

    trained: the network, or what computes its training step; the latter only where it is not sharded.

    A sharded network is changed in place: optimizers are built afterwards. The note is for the user, and
    empty where there is nothing to say. A collective.

    Raises:
        OptionError: the network cannot be sharded, or not as `parallel.shard_units` says.
    """
    parallel = options.parallel
    if not will_be_sharded(options, world.size):
        why = "one rank" if world.size == 1 else "one rank a copy"
        is_asked = parallel.backbone == "sharded"
        note = f"{why}: the backbone is not sharded, {_KEPT_WHOLE}" if is_asked else ""
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
    """See that the network computes with its parameters split: on two blank images, on all ranks alike."""
    images = torch.zeros(
        (2, *options.model.image_shape),
        device=world.device,
        dtype=getattr(torch, options.runtime.dtype),
    )
    try:
        with evaluating(network):
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                network(images, None, False)
            split_again(network)
    except (RuntimeError, ValueError, AttributeError, TypeError) as error:
        raise OptionError(
            f"{type(network).__name__} cannot be sharded as it is: "
            f"{kind_and_line(error)}; if a layer's parameters are used while the layer around them does not "
            "run, name the units yourself (parallel.shard_units), or set_backbone_parallel('replicated')"
        ) from error
