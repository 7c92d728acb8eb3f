"""Estimate memory, arithmetic and network traffic of a sharded head.

Plain arithmetic, without importing torch. Notation of docs/life_of_a_step.md: B samples in the global batch,
D embedding size, n class weights (rows) per rank used in a step. All values are for the rank with the most
classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from plsc.errors import OptionError
from plsc.plan.options import PlanOptions

_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
_FLOAT, _INDEX = 4, 8  # bytes of a float32 and of an int64

# Must equal plsc.heads.rules.BLOCK and the tiles of plsc.heads.kernels.choose_backend; a test checks it.
_BLOCK = 256
_TILE_ELEMENTS, _LEAST_TILE, _LARGEST_TILE = 2**20, 256, 16384

# Number of float32 matrices that TorchBackend allocates at once: [tile, D] and [B, tile] for the logits,
# [tile, D] for the update, and [tile, D] for an update with stochastic rounding (its noise is int64).
_LOGIT_PHASE = (3, 4)
_UPDATE_PHASE, _ROUNDED_UPDATE_PHASE = 6, 11
# Number of int64 values per selected row while the classes of a step are sampled.
_DRAW_INDICES = 6


@dataclass(frozen=True)
class Transfer:
    """A collective of a step.

    payload: bytes of the full gathered or reduced tensor. sent: bytes that one rank sends in a ring.
    """

    collective: str
    content: str
    payload: int
    sent: int


def all_gather(content: str, ranks: int, block: int) -> Transfer:
    """Return an all-gather of one block per rank; block: its bytes."""
    return Transfer("all-gather", content, ranks * block, (ranks - 1) * block)


def reduce_scatter(content: str, ranks: int, block: int) -> Transfer:
    """Return a reduce-scatter after which each rank has one summed block; block: its bytes."""
    return Transfer("reduce-scatter", content, ranks * block, (ranks - 1) * block)


def all_reduce(content: str, ranks: int, payload: int) -> Transfer:
    """Return an all-reduce (sum) of a tensor; payload: its bytes."""
    return Transfer("all-reduce", content, payload, 2 * (ranks - 1) * -(-payload // ranks))


@dataclass(frozen=True)
class HeadPlan:
    """The requirements of a head. All sizes are in bytes, on the rank with the most classes.

    Attributes:
        stored: class weights and optimizer states, by their names.
        step: additional device memory during a step, upper bounds for TorchBackend.
        is_offloaded: `stored` is in CPU memory, and `step` includes copies of the selected rows.
        host_copies: the pinned copies of the selected rows in CPU memory.
        keeps_terms: the forward pass keeps exponentials for the update.
        operations: floating point operations of the matrix products per step.
        rows_moved: class weights, states and kept exponentials that a step reads and writes, or with offload
            copies between CPU and device.
    """

    classes: int
    ranks: int
    batch: int
    local_classes: int
    rows_in_play: int
    bytes_per_class: int
    stored: dict[str, int]
    step: dict[str, int]
    is_offloaded: bool
    host_copies: int
    keeps_terms: bool
    operations: int
    rows_moved: int
    transfers: tuple[Transfer, ...]
    notes: tuple[str, ...]

    @property
    def stored_bytes(self) -> int:
        """Class weights and optimizer states."""
        return sum(self.stored.values())

    @property
    def device_bytes(self) -> int:
        """Peak device memory of the head."""
        return sum(self.step.values()) + (0 if self.is_offloaded else self.stored_bytes)

    @property
    def host_bytes(self) -> int:
        """CPU memory for offloaded class weights and states."""
        return self.stored_bytes + self.host_copies if self.is_offloaded else 0


def plan_head(classes: float, **others: Any) -> HeadPlan:
    """Estimate a ShardedHead with a row optimizer and a cosine margin such as arcface.

    others: fields of `PlanOptions`. Raises OptionError for a value out of range.
    """
    asked = PlanOptions(classes, **others)
    ranks, classes, ratio, offload = asked.ranks, int(classes), asked.ratio, asked.offload
    sizes, d, k = asked.batches, asked.embedding, asked.centers
    row = _row_bytes(d, asked.rows, asked.optimizer, asked.state)
    embedding_bytes = _BYTES[asked.embedding_dtype]
    budget = int(asked.keep_bytes)

    b, local = sum(sizes), -(-classes // ranks)  # classes of the first rank, which has the most
    drawn = math.ceil(local * ratio)
    n = max(drawn, min(b, local)) * k  # the classes of the batch are always used
    kept = 2 * n * b
    keeps_terms = 0 < kept <= budget
    stored = {name: local * k * size for name, size in row.items()}

    matrix = b * d * _FLOAT
    step = {
        "embeddings of all ranks": b * d * embedding_bytes + (matrix if embedding_bytes < _FLOAT else 0),
        "normalised embeddings": matrix,
        "class weights of the labels": k * matrix,
        "weighted sum of class weights": matrix,
        "gradient of the embeddings": matrix + max(sizes) * d * _FLOAT,
        "tiles": _tile_bytes(n, b, d, k, is_rounded={asked.rows, asked.state} != {"float32"}),
    }
    if keeps_terms:
        step["kept exponentials"] = kept
    if ratio < 1 or offload:
        step["indices of the sampled classes"] = n * _INDEX * (_DRAW_INDICES if ratio < 1 else 1)
    if offload:
        step |= {f"copy of {name}": n * size for name, size in row.items()}
        host_copies = n * sum(row.values())
        moved = 2 * host_copies
    else:
        host_copies = 0
        # Forward and update read the class weights, the update writes them; states are read and written once.
        moved = n * (row["weight"] + 2 * sum(row.values())) + (2 * kept if keeps_terms else 0)

    notes = []
    if ratio < 1 and min(b, local) > drawn:
        notes.append(
            f"the classes of a batch are always used: up to {min(b, local):,}, more than the {drawn:,} of "
            f"ratio {ratio:g}"
        )
    if 0 < budget < kept:
        notes.append(f"the exponentials need {kept:,} bytes, more than keep_bytes; they are computed twice")
    if offload and ratio == 1:
        notes.append(
            "with ratio 1 every step copies all class weights to the device, so offload saves no memory; use "
            "it with class sampling"
        )
    return HeadPlan(
        classes=classes,
        ranks=ranks,
        batch=b,
        local_classes=local,
        rows_in_play=n,
        bytes_per_class=k * sum(row.values()),
        stored=stored,
        step=step,
        is_offloaded=offload,
        host_copies=host_copies,
        keeps_terms=keeps_terms,
        operations=(6 if keeps_terms else 8) * b * n * d,
        rows_moved=moved,
        transfers=_transfers(sizes, d, embedding_bytes),
        notes=tuple(notes),
    )


def _row_bytes(d: int, rows: str, optimizer: str, state: str) -> dict[str, int]:
    """Return the bytes per row of the weight and of each optimizer state, by name."""
    weight, size = d * _BYTES[rows], _BYTES[state]
    if state == "int8" and optimizer != "sgd":
        raise OptionError(
            f"state is 'int8', which {optimizer} does not support; use float32 or bfloat16, or the optimizer "
            "sgd"
        )
    if optimizer == "adamw":
        return {"weight": weight, "exp_avg": d * size, "exp_avg_sq": d * size, "steps": 4}
    if optimizer == "adagrad":
        return {"weight": weight, "sum_of_squares": size}
    states = {"weight": weight, "momentum_buffer": d * size}
    if state == "int8":
        states["momentum_scale"] = -(-d // _BLOCK) * _FLOAT
    return states


def _tile_bytes(n: int, b: int, d: int, k: int, *, is_rounded: bool) -> int:
    """Return the bytes of TorchBackend's temporary tiles: the maximum of forward and update."""
    rows = min(n, max(1, tile_rows(b) // k) * k)
    logits = _LOGIT_PHASE[0] * d + _LOGIT_PHASE[1] * b
    update = d * (_ROUNDED_UPDATE_PHASE if is_rounded else _UPDATE_PHASE)
    return rows * max(logits, update) * _FLOAT


def tile_rows(batch: int) -> int:
    """Return the class weights per tile of TorchBackend on a CPU, for a global batch size."""
    return max(_LEAST_TILE, min(_LARGEST_TILE, _TILE_ELEMENTS // max(1, batch)))


def _transfers(sizes: list[int], d: int, embedding_bytes: int) -> tuple[Transfer, ...]:
    """Return the collectives of a step; smaller batches are padded to the largest one."""
    ranks, most = len(sizes), max(sizes)
    if ranks == 1:
        return ()
    return (
        all_gather("batch sizes", ranks, _INDEX),
        all_gather("labels", ranks, most * _INDEX),
        all_gather("embeddings", ranks, most * d * embedding_bytes),
        all_reduce("two sums per sample", ranks, 2 * sum(sizes) * _FLOAT),
        reduce_scatter("embedding gradient", ranks, most * d * _FLOAT),
    )
