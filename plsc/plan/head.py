"""What a sharded head will need: memory, arithmetic, network.

Plain arithmetic; no tensor is made and torch is not loaded. Notation of docs/head.md: B samples in the
global batch, D embedding size, n rows of a rank that take part in a step. A rank means the largest one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from plsc.errors import OptionError
from plsc.parallel.shard import class_range
from plsc.plan.checks import batch_sizes, one_of, whole
from plsc.plan.network import Transfer, head_transfers

_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
_OPTIMIZERS = ("sgd", "adamw", "adagrad")
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
    bytes_a_class: int
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

    @property
    def payload(self) -> int:
        """Bytes of all collectives of a step."""
        return sum(transfer.payload for transfer in self.transfers)

    @property
    def sent(self) -> int:
        """Bytes that a rank sends in a step, in rings."""
        return sum(transfer.sent for transfer in self.transfers)


def plan_head(
    classes: float,
    *,
    ranks: int = 1,
    embedding: int = 512,
    batch: int | Sequence[int] = 128,
    ratio: float = 1.0,
    rows: str = "float32",
    optimizer: str = "sgd",
    state: str = "float32",
    centers: int = 1,
    offload: bool = False,
    keep_bytes: float = 0,
    embedding_dtype: str = "float32",
) -> HeadPlan:
    """Work out what a ShardedHead with a row optimizer needs, for a margin such as arcface.

    See `plsc.plan.ARGUMENTS` for their meanings; classes may be a whole float. batch may be the sizes of
    all ranks. Raises OptionError for what is out of range.
    """
    if not 0 < ratio <= 1:
        raise OptionError(f"ratio is {ratio}; expected a share of the classes in (0, 1]")
    ranks = whole("ranks", ranks, 1)
    head = _Head(
        classes=whole("classes", classes, 1),
        sizes=batch_sizes(batch, ranks),
        d=whole("embedding", embedding, 1),
        k=whole("centers", centers, 1),
        ratio=ratio,
        rows=one_of("rows", rows, ("float32", "bfloat16")),
        optimizer=one_of("optimizer", optimizer, _OPTIMIZERS),
        state=one_of("state", state, tuple(_BYTES)),
        embedding_bytes=_BYTES[one_of("embedding_dtype", embedding_dtype, ("float32", "bfloat16"))],
        offload=offload,
        budget=whole("keep_bytes", keep_bytes, 0),
    )
    if state == "int8" and optimizer != "sgd":
        raise OptionError(
            f"state is 'int8', which {optimizer} does not have; expected float32 or bfloat16, or "
            "optimizer sgd"
        )
    return head.plan()


@dataclass(frozen=True)
class _Head:
    """A head's settings, checked. sizes: samples of each rank; d: embedding size; k: rows a class."""

    classes: int
    sizes: list[int]
    d: int
    k: int
    ratio: float
    rows: str
    optimizer: str
    state: str
    embedding_bytes: int
    offload: bool
    budget: int

    def plan(self) -> HeadPlan:
        step = self.step()
        travelling = self.n * self.bytes_a_row if self.offload else 0
        return HeadPlan(
            classes=self.classes,
            ranks=len(self.sizes),
            batch=self.b,
            local_classes=self.local,
            rows_in_play=self.n,
            bytes_a_class=self.k * self.bytes_a_row,
            stored=self.stored(),
            step=step,
            is_offloaded=self.offload,
            host_copies=travelling,
            keeps_terms=self.keeps,
            operations=(6 if self.keeps else 8) * self.b * self.n * self.d,
            rows_moved=2 * travelling if self.offload else self.rows_moved(),
            transfers=head_transfers(self.sizes, self.d, self.embedding_bytes),
            notes=self.notes(),
        )

    @property
    def b(self) -> int:
        """Samples of the global batch."""
        return sum(self.sizes)

    @property
    def local(self) -> int:
        """Classes of the first rank; no rank has more."""
        start, stop = class_range(self.classes, 0, len(self.sizes))
        return stop - start

    @property
    def drawn(self) -> int:
        """Classes of the sample that each step draws."""
        return math.ceil(self.local * self.ratio)

    @property
    def n(self) -> int:
        """Rows in play; the classes of the batch always are."""
        return max(self.drawn, min(self.b, self.local)) * self.k

    @property
    def states(self) -> dict[str, int]:
        """Bytes of a row's states."""
        size = _BYTES[self.state]
        if self.optimizer == "adamw":
            return {"exp_avg": self.d * size, "exp_avg_sq": self.d * size, "steps": 4}
        if self.optimizer == "adagrad":
            return {"sum_of_squares": size}
        if self.state == "int8":
            blocks = -(-self.d // _BLOCK)
            return {"momentum_buffer": self.d, "momentum_scale": blocks * _FLOAT}
        return {"momentum_buffer": self.d * size}

    @property
    def weight(self) -> int:
        """Bytes of a row."""
        return self.d * _BYTES[self.rows]

    @property
    def bytes_a_row(self) -> int:
        """Bytes of a row and its states."""
        return self.weight + sum(self.states.values())

    @property
    def kept(self) -> int:
        """Bytes of the terms that the first pass could leave."""
        return self.n * self.b * 2

    @property
    def keeps(self) -> bool:
        """Whether it leaves them."""
        return 0 < self.kept <= self.budget

    def stored(self) -> dict[str, int]:
        sizes = {"weight": self.weight, **self.states}
        return {name: self.local * self.k * size for name, size in sizes.items()}

    def step(self) -> dict[str, int]:
        matrix = self.b * self.d * _FLOAT
        copy = matrix if self.embedding_bytes != _FLOAT else 0
        step = {
            "embeddings of all ranks": self.b * self.d * self.embedding_bytes + copy,
            "embeddings at length 1": matrix,
            "rows of the labels": self.b * self.k * self.d * _FLOAT,
            "mixed rows": matrix,
            "gradient of the embeddings": matrix + max(self.sizes) * self.d * _FLOAT,
            "tiles": self.tiles(),
        }
        if self.keeps:
            step["kept terms"] = self.kept
        if self.ratio < 1 or self.offload:
            indices = _DRAW_INDICES if self.ratio < 1 else 1
            step["numbers of the rows in play"] = self.n * _INDEX * indices
        if self.offload:
            step["copy of weight"] = self.n * self.weight
            step |= {f"copy of {name}": self.n * size for name, size in self.states.items()}
        return step

    def tiles(self) -> int:
        rows = min(self.n, max(1, tile_rows(self.b) // self.k) * self.k)
        logits = rows * (_LOGIT_PHASE[0] * self.d + _LOGIT_PHASE[1] * self.b)
        is_rounded = {self.rows, self.state} != {"float32"}
        update = rows * self.d * (_ROUNDED_UPDATE_PHASE if is_rounded else _UPDATE_PHASE)
        return max(logits, update) * _FLOAT

    def rows_moved(self) -> int:
        # The rows are read by both passes and written once, the states read and written once.
        moved = self.n * (3 * self.weight + 2 * sum(self.states.values()))
        return moved + (2 * self.kept if self.keeps else 0)

    def notes(self) -> tuple[str, ...]:
        notes = []
        if self.ratio < 1 and min(self.b, self.local) > self.drawn:
            notes.append(
                f"the classes of a batch always take part: up to {min(self.b, self.local):,} may, more than "
                f"the {self.drawn:,} of ratio {self.ratio:g}"
            )
        if self.budget and self.kept > self.budget:
            notes.append(
                f"the terms of the first pass need {self.kept:,} bytes, more than keep_bytes; they are "
                "computed twice"
            )
        if self.offload and self.ratio == 1:
            notes.append(
                "with ratio 1 all rows travel in each step, and the device holds them all; offload is for "
                "sampled classes"
            )
        return tuple(notes)


def tile_rows(batch: int) -> int:
    """Return how many rows the plain kernels take at a time, for a global batch."""
    return max(_LEAST_TILE, min(_LARGEST_TILE, _TILE_ELEMENTS // max(1, batch)))
