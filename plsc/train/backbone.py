"""The backbone, laid on the ranks as the options say: whole on each, or sharded over them."""

from __future__ import annotations

import datetime

import torch
from torch import nn

from plsc.config import Config
from plsc.errors import OptionError, first_line
from plsc.models import BaseModel
from plsc.models.base_model import evaluating
from plsc.models.dry_run import count_calls
from plsc.parallel.gradients import sum_gradients
from plsc.parallel.sharding import choose_units, match_units, shard_network, split_again
from plsc.parallel.world import World

_KEPT_WHOLE = "its parameters stay whole on each rank"


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
            f"{type(network).__name__} cannot be sharded as it is: {type(error).__name__}: "
            f"{first_line(error)}; if a layer's parameters are used while the layer around them does not "
            "run, name the units yourself (parallel.shard_units), or set_backbone_parallel('replicated')"
        ) from error
