"""What a sharded head will need, worked out before it is started: memory, arithmetic, network.

Plain arithmetic; no tensor is made and torch is not loaded. Notation of docs/head.md: B samples in the
global batch, D embedding size, n rows of a rank that take part in a step. A rank means the largest one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plsc.errors import OptionError
from plsc.parallel.shard import class_range

_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
_OPTIMIZERS = ("sgd", "adamw", "adagrad")
_FLOAT, _INDEX = 4, 8  # bytes of a float32, in which sums are kept, and of an int64

# As plsc.heads.rounding.BLOCK and the tiles of plsc.heads.engines.choose_passes; a test compares them.
_BLOCK = 256
_TILE_ELEMENTS, _LEAST_TILE, _LARGEST_TILE = 2**20, 256, 16384

# How many float32 matrices the plain kernels hold at once: [tile, D] and [B, tile] while they make logits,
# [tile, D] while they change rows, and that where something is rounded at random (noise is int64).
_LOGIT_PHASE = (3, 4)
_UPDATE_PHASE, _ROUNDED_UPDATE_PHASE = 6, 11
# How many int64 for each row in play there are while a sample of the classes is drawn.
_DRAW_INDICES = 6


@dataclass(frozen=True)
class Argument:
    """An argument of `plan`, as a flag of the command line. option: the same one of a run, another name."""

    name: str
    kind: Any
    default: Any
    meaning: str
    option: str | None = None


ARGUMENTS = (
    Argument(
        "classes",
        float,
        None,
        "number of classes, all ranks together; 1e8 is fine",
        "head.class_num",
    ),
    Argument("ranks", int, 1, "number of ranks"),
    Argument("embedding", int, 512, "embedding size", "model.emb_size"),
    Argument("batch", int, 128, "samples a rank", "train.batch_size"),
    Argument(
        "ratio",
        float,
        1.0,
        "share of a rank's classes that take part in a step, in (0, 1]",
        "head.sample_ratio",
    ),
    Argument(
        "rows", str, "float32", "type of the class rows: float32 or bfloat16", "head.row_dtype"
    ),
    Argument(
        "optimizer",
        str,
        "sgd",
        "of the class rows: sgd (with momentum), adamw or adagrad",
        "head.optimizer",
    ),
    Argument(
        "state",
        str,
        "float32",
        "type of its state: float32, bfloat16, or int8 (sgd only)",
        "head.state_dtype",
    ),
    Argument("centers", int, 1, "rows a class (sub-centres)", "head.sub_centers"),
    Argument("offload", bool, False, "rows and states stay in CPU memory", "head.offload"),
    Argument(
        "keep_bytes",
        float,
        0,
        "bytes in which the first pass may leave terms for the second (head.keep_mb is in MiB)",
    ),
    Argument("embedding_dtype", str, "float32", "type the network gives: float32 or bfloat16"),
    Argument("product_rate", float, None, "TFLOP/s of the products, for an estimate of the time"),
    Argument(
        "copy_rate",
        float,
        None,
        "GB/s, for an estimate of the time: of the memory that holds the rows; with offload, between "
        "the CPU's memory and the device",
    ),
)


@dataclass(frozen=True)
class Transfer:
    """One collective of a step.

    payload: bytes of the whole tensor, the gathered or the reduced one. sent: bytes that one rank sends
    when the ranks form a ring.
    """

    collective: str
    content: str
    payload: int
    sent: int


@dataclass(frozen=True)
class Plan:
    """The needs of a head. All sizes are bytes on the rank with most classes.

    stored: the rows and each state, by the optimizer's names. step: what else is on the device during a
    step, upper bounds for the plain kernels. is_offloaded: `stored` is in CPU memory, and copies of what
    takes part are in `step`. host_copies: those copies, once more, in CPU memory. operations: of the
    matrix products of a step. rows_moved: bytes of rows, states and kept terms that a step reads and
    writes; with offload, that travel. product_seconds, copy_seconds: estimates; None without a rate.
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
    product_seconds: float | None
    copy_seconds: float | None
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

    def render(self) -> str:
        """Return the plan as a table of text."""
        stored_at = "in CPU memory" if self.is_offloaded else "on the device"
        lines = [
            f"{self.classes:,} classes on {_count(self.ranks, 'rank')}, "
            f"{self.local_classes:,} on the largest; global batch {self.batch:,}; "
            f"{_count(self.rows_in_play, 'row')} a rank take part in a step",
            "",
            f"Stored {stored_at}, bytes a rank",
            *(_line(name, size) for name, size in self.stored.items()),
            _line("together", self.stored_bytes),
            _line("a class", self.bytes_a_class),
            "",
            "On the device in a step, bytes a rank, at most about",
            *(_line(name, size) for name, size in self.step.items()),
            _line("together", sum(self.step.values())),
            "",
            "Total of the head, bytes a rank",
            _line("device", self.device_bytes),
        ]
        if self.is_offloaded:
            lines.append(_line("CPU memory", self.host_bytes))
        passes = "6 B n D, terms kept" if self.keeps_terms else "8 B n D, terms computed twice"
        lines += [
            "",
            "Arithmetic of a step, a rank",
            f"  {'products, ' + passes:<44}{self.operations / 1e12:>12,.4g} TFLOP"
            f"{self.operations:>26,}",
            _line(
                "rows that travel" if self.is_offloaded else "rows read and written",
                self.rows_moved,
            ),
            "",
            *self._render_network(),
            *self._render_time(),
        ]
        if self.notes:
            lines += ["", *(f"note: {note}" for note in self.notes)]
        return "\n".join(lines)

    def _render_network(self) -> list[str]:
        if not self.transfers:
            return ["Network of a step: none, there is one rank"]
        lines = ["Network of a step, bytes: payload, and what a rank sends in a ring"]
        lines += [
            f"  {f'{t.collective} {t.content}':<44}{_human(t.payload):>14}{t.payload:>18,}"
            f"{_human(t.sent):>14}{t.sent:>18,}"
            for t in self.transfers
        ]
        return [
            *lines,
            f"  {'together':<44}{_human(self.payload):>14}{self.payload:>18,}"
            f"{_human(self.sent):>14}{self.sent:>18,}",
        ]

    def _render_time(self) -> list[str]:
        parts = {
            "products": self.product_seconds,
            "rows": self.copy_seconds,
        }
        known = {name: seconds for name, seconds in parts.items() if seconds is not None}
        if not known:
            return []
        lines = [
            "",
            "ESTIMATE of the head's time a step, at the rates given; no network, no backbone",
        ]
        lines += [f"  {name:<44}{_duration(seconds):>14}" for name, seconds in known.items()]
        if len(known) == 2:
            low, high = max(known.values()), sum(known.values())
            span = f"{_duration(low)} if they overlap, {_duration(high)} if not"
            lines.append(f"  {'together':<44}{span}")
        return lines


def plan(
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
    product_rate: float | None = None,
    copy_rate: float | None = None,
) -> Plan:
    """Work out what a ShardedHead with a row optimizer needs, for a margin such as arcface.

    See `ARGUMENTS` for their meanings; classes may be a whole float. batch may be the sizes of all ranks.
    Raises OptionError for what is out of range.
    """
    count = _whole("classes", classes, 1)
    ranks = _whole("ranks", ranks, 1)
    d, k = _whole("embedding", embedding, 1), _whole("centers", centers, 1)
    budget = _whole("keep_bytes", keep_bytes, 0)
    sizes = _batch_sizes(batch, ranks)
    if not 0 < ratio <= 1:
        raise OptionError(f"ratio is {ratio}; expected a share of the classes in (0, 1]")
    row_bytes = _BYTES[_one_of("rows", rows, ("float32", "bfloat16"))]
    embedding_bytes = _BYTES[_one_of("embedding_dtype", embedding_dtype, ("float32", "bfloat16"))]
    _one_of("optimizer", optimizer, _OPTIMIZERS)
    _one_of("state", state, tuple(_BYTES))
    if state == "int8" and optimizer != "sgd":
        raise OptionError(
            f"state is 'int8', which {optimizer} does not have; expected float32 or bfloat16, or "
            "optimizer sgd"
        )
    for name, rate in (("product_rate", product_rate), ("copy_rate", copy_rate)):
        if rate is not None and not 0 < rate < math.inf:
            raise OptionError(f"{name} is {rate}; expected a number above 0")

    start, stop = class_range(count, 0, ranks)  # no rank has more
    local = stop - start
    b, most = sum(sizes), max(sizes)
    drawn = math.ceil(local * ratio)
    in_play = max(drawn, min(b, local))  # the classes of the batch always take part
    n = in_play * k
    states = _state_bytes_a_row(optimizer, state, d)
    stored = {"weight": local * k * d * row_bytes}
    stored |= {name: local * k * size for name, size in states.items()}
    state_bytes = sum(states.values())
    kept = n * b * 2
    keeps = 0 < kept <= budget

    matrix = b * d * _FLOAT
    copy = matrix if embedding_bytes != _FLOAT else 0
    step = {
        "embeddings of all ranks": b * d * embedding_bytes + copy,
        "embeddings at length 1": matrix,
        "rows of the labels": b * k * d * _FLOAT,
        "mixed rows": matrix,
        "gradient of the embeddings": matrix + most * d * _FLOAT,
        "tiles": _tile_bytes(b, n, d, k, is_rounded={rows, state} != {"float32"}),
    }
    if keeps:
        step["kept terms"] = kept
    if ratio < 1 or offload:
        step["numbers of the rows in play"] = n * _INDEX * (_DRAW_INDICES if ratio < 1 else 1)
    travelling = 0
    if offload:
        step["copy of weight"] = n * d * row_bytes
        step |= {f"copy of {name}": n * size for name, size in states.items()}
        travelling = n * (d * row_bytes + state_bytes)
    operations = (6 if keeps else 8) * b * n * d
    moved = 2 * travelling
    if not offload:
        # The rows are read by both passes and written once, the states read and written once.
        moved = n * (3 * d * row_bytes + 2 * state_bytes) + (2 * kept if keeps else 0)
    return Plan(
        classes=count,
        ranks=ranks,
        batch=b,
        local_classes=local,
        rows_in_play=n,
        bytes_a_class=k * (d * row_bytes + state_bytes),
        stored=stored,
        step=step,
        is_offloaded=offload,
        host_copies=travelling,
        keeps_terms=keeps,
        operations=operations,
        rows_moved=moved,
        transfers=_transfers(sizes, d, embedding_bytes),
        product_seconds=None if product_rate is None else operations / (product_rate * 1e12),
        copy_seconds=None if copy_rate is None else moved / (copy_rate * 1e9),
        notes=_notes(b, local, drawn, budget, kept, ratio, offload),
    )


def _transfers(sizes: list[int], d: int, embedding_bytes: int) -> tuple[Transfer, ...]:
    """Return the collectives of forward and backward; equal blocks move, so smaller ones are padded."""
    ranks, b, most = len(sizes), sum(sizes), max(sizes)
    if ranks == 1:
        return ()

    def gather(content: str, block: int) -> Transfer:
        return Transfer("all-gather", content, ranks * block, (ranks - 1) * block)

    numbers = 2 * b * _FLOAT
    block = most * d * _FLOAT
    return (
        gather("batch sizes", _INDEX),
        gather("labels", most * _INDEX),
        gather("embeddings", most * d * embedding_bytes),
        Transfer(
            "all-reduce", "two sums a sample", numbers, 2 * (ranks - 1) * -(-numbers // ranks)
        ),
        Transfer("reduce-scatter", "embedding gradient", ranks * block, (ranks - 1) * block),
    )


def _state_bytes_a_row(optimizer: str, state: str, d: int) -> dict[str, int]:
    size = _BYTES[state]
    if optimizer == "adamw":
        return {"exp_avg": d * size, "exp_avg_sq": d * size, "steps": 4}
    if optimizer == "adagrad":
        return {"sum_of_squares": size}
    if state == "int8":
        return {"momentum_buffer": d, "momentum_scale": -(-d // _BLOCK) * _FLOAT}
    return {"momentum_buffer": d * size}


def tile_rows(batch: int) -> int:
    """Return how many rows the plain kernels take at a time, for a global batch."""
    return max(_LEAST_TILE, min(_LARGEST_TILE, _TILE_ELEMENTS // max(1, batch)))


def _tile_bytes(b: int, n: int, d: int, k: int, is_rounded: bool) -> int:
    rows = min(n, max(1, tile_rows(b) // k) * k)
    logits = rows * (_LOGIT_PHASE[0] * d + _LOGIT_PHASE[1] * b)
    update = rows * d * (_ROUNDED_UPDATE_PHASE if is_rounded else _UPDATE_PHASE)
    return max(logits, update) * _FLOAT


def _notes(
    b: int, local: int, drawn: int, budget: int, kept: int, ratio: float, offload: bool
) -> tuple[str, ...]:
    notes = []
    if ratio < 1 and min(b, local) > drawn:
        notes.append(
            f"the classes of a batch always take part: up to {min(b, local):,} may, more than the "
            f"{drawn:,} of ratio {ratio:g}"
        )
    if budget and kept > budget:
        notes.append(
            f"the terms of the first pass need {kept:,} bytes, more than keep_bytes; they are computed twice"
        )
    if offload and ratio == 1:
        notes.append(
            "with ratio 1 all rows travel in each step, and the device holds them all; offload is for "
            "sampled classes"
        )
    return tuple(notes)


def _batch_sizes(batch: int | Sequence[int], ranks: int) -> list[int]:
    if not isinstance(batch, Sequence):
        return [_whole("batch", batch, 1)] * ranks
    sizes = [_whole("batch", size, 0) for size in batch]
    if len(sizes) != ranks or sum(sizes) == 0:
        raise OptionError(
            f"batch is {list(batch)}; expected one size for each of {_count(ranks, 'rank')}, not all 0"
        )
    return sizes


def _whole(name: str, value: float, low: int) -> int:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value != int(value) or value < low:
        raise OptionError(f"{name} is {value!r}; expected a whole number, {low} or more")
    return int(value)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise OptionError(f"{name} is {value!r}; expected one of {', '.join(known)}")
    return value


def _line(name: str, size: int) -> str:
    return f"  {name:<44}{_human(size):>18}{size:>26,}"


def _human(size: float) -> str:
    """Return bytes in the unit in which they are a short number."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} B" if unit == "B" else f"{size:,.2f} {unit}"
        size /= 1024
    return f"{size:,.2f} GiB"


def _duration(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1000:,.2f} ms"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
