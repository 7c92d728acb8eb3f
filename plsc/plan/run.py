"""The plan of a run, head and backbone, and its text output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from plsc.plan.backbone import BackbonePlan, plan_backbone
from plsc.plan.head import HeadPlan, Transfer, plan_head
from plsc.plan.options import PlanOptions

DEVICE = 80 * 10**9  # bytes of device memory that the plan must fit in
_MANY_RANKS = 2**16
# Changes of `PlanOptions` that reduce the memory of the head, or of the backbone.
_SMALLER_HEAD: tuple[dict[str, Any], ...] = (
    {"rows": "bfloat16", "state": "bfloat16"},
    {"rows": "bfloat16", "optimizer": "adagrad", "state": "float32"},
    {"ratio": 0.1, "offload": True},
)
_SMALLER_BACKBONE: tuple[dict[str, Any], ...] = (
    {"precision": "bfloat16"},
    {"checkpoint": "all"},
    {"micro_batches": 4},
    {"precision": "bfloat16", "checkpoint": "all", "micro_batches": 4},
)


@dataclass(frozen=True)
class Plan:
    """The requirements of a run; head and backbone are None if not requested.

    answer: whether it fits in a device with 80 GB, and otherwise which changes make it fit.
    """

    ranks: int
    head: HeadPlan | None
    backbone: BackbonePlan | None
    answer: str

    @property
    def device_bytes(self) -> int:
        """Peak device memory of head and backbone."""
        return _bytes_of(self.head, self.backbone)

    def render(self) -> str:
        """Return the plan as text: the answer, followed by tables."""
        lines = [self.answer, ""]
        if self.head is not None:
            lines += [*_render_head(self.head), ""]
        if self.backbone is not None:
            lines += [*_render_backbone(self.backbone), ""]
        if self.head is not None and self.backbone is not None:
            lines += ["Head and backbone, bytes per rank", _line("device", self.device_bytes), ""]
        lines += [f"note: {note}" for note in (self.head.notes if self.head is not None else ())]
        return "\n".join(lines).rstrip("\n")


def plan(classes: float | None = None, **others: Any) -> Plan:
    """Estimate the requirements of a run; only a backbone imports torch.

    others: fields of `PlanOptions`. Raises OptionError if neither classes nor a model is given, and for a
    value out of range.
    """
    asked = PlanOptions(classes, **others)
    given = vars(asked)

    def head_with(**changes: Any) -> HeadPlan | None:
        return None if asked.classes is None else plan_head(**{**given, **changes})

    def backbone_with(**changes: Any) -> BackbonePlan | None:
        return None if asked.model is None else plan_backbone(**{**given, **changes})

    head = head_with()  # first, to report errors before torch is imported
    backbone = backbone_with()
    needed = _bytes_of(head, backbone)
    if needed <= DEVICE:
        answer = f"fits in {_gb(DEVICE)}: {_gb(needed)} per rank"
    else:
        is_even = not isinstance(asked.batch, tuple)
        ways = list(_ways_to_fit(head, backbone, head_with, backbone_with, is_even))
        answer = f"does not fit in {_gb(DEVICE)}: {_gb(needed)} per rank; " + (
            f"fits with {' or '.join(ways)}" if ways else "combine more ranks with smaller dtypes"
        )
    return Plan(asked.ranks, head, backbone, answer)


def _ways_to_fit(
    head: HeadPlan | None,
    backbone: BackbonePlan | None,
    head_with: Callable[..., HeadPlan | None],
    backbone_with: Callable[..., BackbonePlan | None],
    is_even: bool,
) -> Iterator[str]:
    """Yield flags, each of which makes head and backbone fit in `DEVICE`.

    is_even: all ranks have the same batch size, so the number of ranks may change.
    """
    if head is not None and _bytes_of(backbone) < DEVICE:
        for changes in _SMALLER_HEAD:
            needed = _bytes_of(head_with(**changes), backbone)
            if needed <= DEVICE:
                yield _flags(changes, needed)
        rest = backbone_with(ranks=2) if head.ranks == 1 else backbone  # the same for any number above 1
        ranks = 2 * head.ranks
        while is_even and ranks <= _MANY_RANKS:
            needed = _bytes_of(head_with(ranks=ranks), rest)
            if needed <= DEVICE:
                yield _flags({"ranks": ranks}, needed)
                break
            ranks *= 2
    if backbone is not None and _bytes_of(head) < DEVICE:
        for changes in _SMALLER_BACKBONE:
            if backbone.images < changes.get("micro_batches", 1):
                continue
            needed = _bytes_of(head, backbone_with(**changes))
            if needed <= DEVICE:
                yield _flags(changes, needed)


def _bytes_of(*plans: HeadPlan | BackbonePlan | None) -> int:
    return sum(one.device_bytes for one in plans if one is not None)


def _flags(changes: Mapping[str, Any], needed: int) -> str:
    flags = (f"--{name}" if value is True else f"--{name} {value}" for name, value in changes.items())
    return f"{' '.join(flags)} ({_gb(needed)})"


def _render_head(plan: HeadPlan) -> list[str]:
    stored_at = "in CPU memory" if plan.is_offloaded else "on the device"
    terms = (
        "6 B n D, exponentials computed once" if plan.keeps_terms else "8 B n D, exponentials computed twice"
    )
    moved = "copied both ways" if plan.is_offloaded else "read and written"
    lines = [
        f"Head: {plan.classes:,} classes; ranks: {plan.ranks:,}; classes per rank: {plan.local_classes:,}; "
        f"global batch: {plan.batch:,}; class weights per rank in a step: {plan.rows_in_play:,}",
        "",
        *_table(f"Stored {stored_at}, bytes per rank", plan.stored),
        _line("per class", plan.bytes_per_class),
        "",
        *_table("During a step on the device, bytes per rank, upper bounds", plan.step),
        "",
        "Total of the head, bytes per rank",
        _line("device", plan.device_bytes),
    ]
    if plan.is_offloaded:
        lines.append(_line("CPU memory", plan.host_bytes))
    return [
        *lines,
        "",
        "Computation per step and rank",
        _operations(f"products, {terms}", plan.operations),
        _line(f"class weights and states {moved}", plan.rows_moved),
        "",
        *_network(plan.transfers),
    ]


def _render_backbone(plan: BackbonePlan) -> list[str]:
    shards = "" if plan.shards == 1 else f"; shards: {plan.shards}"
    return [
        f"Backbone: {plan.name}, {plan.numbers:,} parameters, {plan.precision}; images per "
        f"rank: {plan.images:,}; micro-batches: {plan.parts}{shards}",
        "",
        *_table("Stored on the device, bytes per rank", plan.stored),
        "",
        *_table("During a step on the device, bytes per rank, upper bounds", plan.step),
        _line("of these, kept for the backward pass", plan.kept),
        "",
        "Total of the backbone, bytes per rank",
        _line("device", plan.device_bytes),
        "",
        "Computation per step and rank",
        _operations("products, forward and backward", plan.operations),
        "",
        *_network(plan.transfers),
    ]


def _network(transfers: Iterable[Transfer]) -> list[str]:
    rows = [(f"{one.collective} {one.content}", one.payload, one.sent) for one in transfers]
    if not rows:
        return ["Network traffic per step: none, there is one rank"]
    rows.append(("total", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    return ["Communication per step, bytes: payload, then bytes that each rank sends (ring algorithm)"] + [
        f"  {name:<44}{_human(payload):>14}{payload:>18,}{_human(sent):>14}{sent:>18,}"
        for name, payload, sent in rows
    ]


def _table(title: str, sizes: Mapping[str, int]) -> list[str]:
    rows = [_line(name, size) for name, size in sizes.items()]
    return [title, *rows, _line("total", sum(sizes.values()))]


def _line(name: str, size: int) -> str:
    return f"  {name:<44}{_human(size):>18}{size:>26,}"


def _operations(name: str, number: int) -> str:
    return f"  {name:<44}{number / 1e12:>12,.4g} TFLOP{number:>26,}"


def _human(size: float) -> str:
    """Format bytes in B, KiB, MiB or GiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} B" if unit == "B" else f"{size:,.2f} {unit}"
        size /= 1024
    return f"{size:,.2f} GiB"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.3g} GB"
