"""What a sharded head will need: memory, arithmetic, network.

Plain arithmetic; no tensor is made and torch is not loaded. Notation of docs/life_of_a_step.md: B samples in
the global batch, D embedding size, n rows of a rank that take part in a step. All is of the largest rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from plsc.errors import OptionError
from plsc.plan.options import PlanOptions

_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
_FLOAT, _INDEX = 4, 8  # bytes of a float32, in which sums are kept, and of an int64

# As plsc.heads.rules.BLOCK and the tiles of plsc.heads.softmax.choose_backend; a test compares them.
_BLOCK = 256
_TILE_ELEMENTS, _LEAST_TILE, _LARGEST_TILE = 2**20, 256, 16384

# How many float32 matrices the plain kernels hold at once: [tile, D] and [B, tile] while they make logits,
# [tile, D] while they change rows, and that where something is rounded at random (noise is int64).
_LOGIT_PHASE = (3, 4)
_UPDATE_PHASE, _ROUNDED_UPDATE_PHASE = 6, 11
# How many int64 for each row in play there are while a sample of the classes is drawn.
_DRAW_INDICES = 6


@dataclass(frozen=True)
class Transfer:
    """A collective of a step.

    payload: bytes of the whole tensor, the gathered or the reduced one. sent: bytes that one rank sends
    if the ranks form a ring.
    """

    collective: str
    content: str
    payload: int
    sent: int


def all_gather(content: str, ranks: int, block: int) -> Transfer:
    """Return the transfer after which each rank has the blocks, of so many bytes, of all ranks."""
    return Transfer("all-gather", content, ranks * block, (ranks - 1) * block)


def reduce_scatter(content: str, ranks: int, block: int) -> Transfer:
    """Return the transfer after which each rank has the sum over the ranks of one block."""
    return Transfer("reduce-scatter", content, ranks * block, (ranks - 1) * block)


def all_reduce(content: str, ranks: int, payload: int) -> Transfer:
    """Return the transfer after which each rank has the sum over the ranks of a tensor."""
    return Transfer("all-reduce", content, payload, 2 * (ranks - 1) * -(-payload // ranks))


@dataclass(frozen=True)
class HeadPlan:
    """The needs of a head. All sizes are bytes on the rank with most classes.

    stored: the rows and each state, by the optimizer's names. step: what else is on the device during a
    step, upper bounds for the plain kernels. is_offloaded: `stored` is in CPU memory, and copies of what
    takes part are in `step`. host_copies: those copies, once more, in CPU memory. operations: of the
    matrix products of a step. rows_moved: bytes of rows, states and kept terms that a step reads and
    writes; with offload, that travel.
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
        """Rows and states."""
        return sum(self.stored.values())

    @property
    def device_bytes(self) -> int:
        """What the device must hold for the head."""
        return sum(self.step.values()) + (0 if self.is_offloaded else self.stored_bytes)

    @property
    def host_bytes(self) -> int:
        """What CPU memory must hold for offloaded rows."""
        return self.stored_bytes + self.host_copies if self.is_offloaded else 0


def plan_head(classes: float, **others: Any) -> HeadPlan:
    """Work out what a ShardedHead with a row optimizer needs, for a margin such as arcface.

    others: fields of `PlanOptions`. Raises OptionError for one that is out of range.
    """
    asked = PlanOptions(classes, **others)
    ranks, classes, ratio, offload = asked.ranks, int(classes), asked.ratio, asked.offload
    sizes, d, k = asked.batches, asked.embedding, asked.centers
    row = _row_bytes(d, asked.rows, asked.optimizer, asked.state)
    embedding_bytes = _BYTES[asked.embedding_dtype]
    budget = int(asked.keep_bytes)

    b, local = sum(sizes), -(-classes // ranks)  # no rank has more than the first
    drawn = math.ceil(local * ratio)
    n = max(drawn, min(b, local)) * k  # the classes of the batch always take part
    kept = 2 * n * b
    keeps_terms = 0 < kept <= budget
    stored = {name: local * k * size for name, size in row.items()}

    matrix = b * d * _FLOAT
    step = {
        "embeddings of all ranks": b * d * embedding_bytes + (matrix if embedding_bytes < _FLOAT else 0),
        "embeddings at length 1": matrix,
        "rows of the labels": k * matrix,
        "mixed rows": matrix,
        "gradient of the embeddings": matrix + max(sizes) * d * _FLOAT,
        "tiles": _tile_bytes(n, b, d, k, is_rounded={asked.rows, asked.state} != {"float32"}),
    }
    if keeps_terms:
        step["kept terms"] = kept
    if ratio < 1 or offload:
        step["numbers of the rows in play"] = n * _INDEX * (_DRAW_INDICES if ratio < 1 else 1)
    if offload:
        step |= {f"copy of {name}": n * size for name, size in row.items()}
        host_copies = n * sum(row.values())
        moved = 2 * host_copies
    else:
        host_copies = 0
        # The rows are read by both passes and written once, the states read and written once.
        moved = n * (row["weight"] + 2 * sum(row.values())) + (2 * kept if keeps_terms else 0)

    notes = []
    if ratio < 1 and min(b, local) > drawn:
        notes.append(
            f"the classes of a batch always take part: up to {min(b, local):,} may, more than "
            f"the {drawn:,} of ratio {ratio:g}"
        )
    if 0 < budget < kept:
        notes.append(
            f"the terms of the first pass need {kept:,} bytes, more than keep_bytes; they are computed twice"
        )
    if offload and ratio == 1:
        notes.append(
            "with ratio 1 all rows travel in each step, and the device holds them all; offload is for "
            "sampled classes"
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
    """Return the bytes of one row and of each of its states, by the optimizer's names."""
    weight, size = d * _BYTES[rows], _BYTES[state]
    if state == "int8" and optimizer != "sgd":
        raise OptionError(
            f"state is 'int8', which {optimizer} does not have; expected float32 or bfloat16, or "
            "optimizer sgd"
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
    """Return the most bytes that the plain kernels' tiles need, in a pass or in the update."""
    rows = min(n, max(1, tile_rows(b) // k) * k)
    logits = _LOGIT_PHASE[0] * d + _LOGIT_PHASE[1] * b
    update = d * (_ROUNDED_UPDATE_PHASE if is_rounded else _UPDATE_PHASE)
    return rows * max(logits, update) * _FLOAT


def tile_rows(batch: int) -> int:
    """Return how many rows the plain kernels take at a time, for a global batch."""
    return max(_LEAST_TILE, min(_LARGEST_TILE, _TILE_ELEMENTS // max(1, batch)))


def _transfers(sizes: list[int], d: int, embedding_bytes: int) -> tuple[Transfer, ...]:
    """Return the collectives of a step; equal blocks move, so smaller ones are padded."""
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
