"""Estimate memory, arithmetic and network traffic of a backbone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plsc.config import Options
from plsc.errors import OptionError
from plsc.names import OPTIMIZERS
from plsc.plan.head import Transfer, all_gather, all_reduce, reduce_scatter
from plsc.plan.options import MODES, PlanOptions


@dataclass(frozen=True)
class BackbonePlan:
    """The requirements of a backbone per rank. All sizes are in bytes.

    Attributes:
        images: images per step and rank, computed in `parts` micro-batches.
        numbers: number of parameters.
        stored: persistent memory, gradients included.
        step: additional memory during a step, upper bounds.
        kept: the part of `step` that the forward pass keeps for the backward pass.
        operations: floating point operations of the matrix products per step, forward and backward.
        transfers: the collectives for gradients (and parameters, if sharded).
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
        """Peak device memory of the backbone."""
        return sum(self.stored.values()) + sum(self.step.values())


def plan_backbone(model: str, **others: Any) -> BackbonePlan:
    """Estimate a training step of a network, by its name; imports torch, but reads no data.

    others: fields of `PlanOptions`. Raises OptionError for a value out of range, and for a network that
    cannot be created or run with these options.
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
        raise OptionError(f"micro_batches is {parts}; expected at most the batch size per rank, {images}")
    if ":" in optimizer:
        raise OptionError(
            f"backbone_optimizer is {optimizer!r}; a factory is not supported here: use the one of "
            f"{', '.join(OPTIMIZERS)} with the most similar states"
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
        optimizer=lambda parameters: build_optimizer(
            options.optim, [{"params": parameters}], DEFAULT_RATE, torch.device("cpu")
        ),
    )
    step = {"activations, peak": found.peak}
    if shards > 1:
        # The current block, the next one, and all parameters outside of blocks, each with gradients.
        gathered = min(found.parameters, found.outside_blocks + 2 * found.largest_block)
        step["gathered parameters and their gradients"] = 2 * gathered
    return BackbonePlan(
        name=model,
        images=images,
        parts=parts,
        precision=mode,
        numbers=found.numbers,
        stored={
            "parameters": -(-found.parameters // shards),
            "gradients": -(-found.trained // shards),
            f"{optimizer} states": -(-found.state // shards),
            "buffers": found.buffers,
        },
        step=step,
        kept=found.kept,
        operations=parts * found.operations,
        shards=shards,
        transfers=_transfers(ranks, found.trained, shards),
    )


def _transfers(ranks: int, gradients: int, shards: int) -> tuple[Transfer, ...]:
    """Return the collectives of a step for gradients of this size in bytes.

    shards: number of ranks that share one copy of the parameters (FSDP). With more than one, parameters are
    gathered for forward and backward, and gradients are reduce-scattered and summed over the copies.
    """
    if ranks == 1:
        return ()
    if shards == 1:
        return (all_reduce("backbone gradients", ranks, gradients),)
    block = -(-gradients // shards)
    found = [
        all_gather("parameters, forward", shards, block),
        all_gather("parameters, backward", shards, block),
        reduce_scatter("backbone gradients", shards, block),
    ]
    if ranks > shards:
        found.append(all_reduce("backbone gradients", ranks // shards, block))
    return tuple(found)
