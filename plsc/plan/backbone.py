"""What a backbone will need: memory, arithmetic, network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plsc.config import Options
from plsc.config.optim import OPTIMIZERS
from plsc.errors import OptionError
from plsc.plan.head import Transfer, all_gather, all_reduce, reduce_scatter
from plsc.plan.options import MODES, PlanOptions


@dataclass(frozen=True)
class BackbonePlan:
    """The needs of a backbone on a rank. All sizes are bytes.

    images: of a rank's step, computed in `parts` one after another; numbers: how many the parameters are.
    stored: what stays between the steps, gradients included. step: what else is there, at most. kept: of it,
    what the forward pass leaves for the backward pass. operations: of the products of a step, forward and
    backward. transfers: the collectives that sum the gradients over the ranks.
    """

    name: str
    images: int
    parts: int
    precision: str
    numbers: int
    stored: dict[str, int]
    step: dict[str, int]
    kept: int
    operations: int
    shards: int
    transfers: tuple[Transfer, ...]

    @property
    def device_bytes(self) -> int:
        """What the device must hold for the backbone."""
        return sum(self.stored.values()) + sum(self.step.values())


def plan_backbone(model: str, **others: Any) -> BackbonePlan:
    """Count a training step of a network by its name (torch is loaded, no data are).

    others: fields of `PlanOptions`. Raises OptionError for one that is out of range, and for a network that
    cannot be made or run so.
    """
    import torch

    from plsc.config.optim import DEFAULT_RATE
    from plsc.models import build_model
    from plsc.optim.optimizers import build_optimizer
    from plsc.plan.measure import measure

    asked = PlanOptions(model=model, **others)
    mode = MODES.get(asked.precision, asked.precision)
    ranks, shards, image = asked.ranks, asked.backbone_shards, asked.image
    parts, images = asked.micro_batches, max(asked.batches)
    optimizer = asked.backbone_optimizer
    if ranks % shards:
        raise OptionError(f"backbone_shards is {shards}; expected a divisor of the {ranks} ranks")
    if parts > images:
        raise OptionError(f"micro_batches is {parts}, but a rank has a batch of {images}")
    if ":" in optimizer:
        raise OptionError(
            f"backbone_optimizer is {optimizer!r}; a factory cannot be planned: name the "
            f"one of {', '.join(OPTIMIZERS)} whose states are most like its own"
        )
    shape = (3, image, image) if isinstance(image, int) else image
    options = Options()
    options.set("model.image_shape", shape)
    options.set("optim.optimizer", optimizer)
    found = measure(
        lambda: build_model(model, asked.embedding, shape, options.model.dropout, options.model.neck),
        shape,
        -(-images // parts),
        dtype=None if mode == "float32" else getattr(torch, mode),
        checkpoint=asked.checkpoint,
        every=asked.checkpoint_every,
        optimizer=lambda parameters: build_optimizer(
            options.optim, [{"params": parameters}], DEFAULT_RATE, torch.device("cpu")
        ),
    )
    step = {"activations at their peak": found.peak}
    if shards > 1:
        # The block at work and the next one, and what is in none, with the gradients of all.
        gathered = min(found.parameters, found.outside_blocks + 2 * found.largest_block)
        step["gathered parameters and their gradients"] = 2 * gathered
    elif ranks > 1:
        step["buckets of gradients"] = found.trained
    return BackbonePlan(
        name=model,
        images=images,
        parts=parts,
        precision=mode,
        numbers=found.numbers,
        stored={
            "parameters": -(-found.parameters // shards),
            "gradients": -(-found.trained // shards),
            f"states of {optimizer}": -(-found.state // shards),
            "buffers": found.buffers,
        },
        step=step,
        kept=found.kept,
        operations=parts * found.operations,
        shards=shards,
        transfers=_transfers(ranks, found.trained, shards),
    )


def _transfers(ranks: int, gradients: int, shards: int) -> tuple[Transfer, ...]:
    """Return the collectives that sum gradients of so many bytes.

    shards: of how many ranks each has a part of the parameters (FSDP): these are gathered for forward and
    backward, the gradients scattered, and summed over the copies.
    """
    if ranks == 1:
        return ()
    if shards == 1:
        return (all_reduce("backbone's gradients", ranks, gradients),)
    block = -(-gradients // shards)
    found = [
        all_gather("parameters, forward", shards, block),
        all_gather("parameters, backward", shards, block),
        reduce_scatter("backbone's gradients", shards, block),
    ]
    if ranks > shards:
        found.append(all_reduce("backbone's gradients", ranks // shards, block))
    return tuple(found)
