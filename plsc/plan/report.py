"""A plan as tables of text."""

from __future__ import annotations

from collections.abc import Iterable

from plsc.plan.backbone import BackbonePlan
from plsc.plan.head import HeadPlan
from plsc.plan.network import Transfer
from plsc.plan.text import count, human, line, table


def render(head: HeadPlan | None, backbone: BackbonePlan | None) -> str:
    """Return what is planned as lines of text."""
    lines: list[str] = []
    if head is not None:
        lines += [*_head(head), "", *_network(head.transfers), ""]
    if backbone is not None:
        lines += [*_backbone(backbone), ""]
    if head is not None and backbone is not None:
        both = head.device_bytes + backbone.device_bytes
        lines += ["Head and backbone, bytes a rank", line("device", both), ""]
    lines += [f"note: {note}" for note in (head.notes if head is not None else ())]
    return "\n".join(lines).rstrip("\n")


def _head(plan: HeadPlan) -> list[str]:
    stored_at = "in CPU memory" if plan.is_offloaded else "on the device"
    passes = "6 B n D, terms kept" if plan.keeps_terms else "8 B n D, terms computed twice"
    moved = "rows that travel" if plan.is_offloaded else "rows read and written"
    lines = [
        f"{plan.classes:,} classes on {count(plan.ranks, 'rank')}, "
        f"{plan.local_classes:,} on the largest; global batch {plan.batch:,}; "
        f"{count(plan.rows_in_play, 'row')} a rank take part in a step",
        "",
        *table(
            f"Stored {stored_at}, bytes a rank", plan.stored, line("a class", plan.bytes_a_class)
        ),
        "",
        *table("On the device in a step, bytes a rank, at most about", plan.step),
        "",
        "Total of the head, bytes a rank",
        line("device", plan.device_bytes),
    ]
    if plan.is_offloaded:
        lines.append(line("CPU memory", plan.host_bytes))
    return [
        *lines,
        "",
        "Arithmetic of a step, a rank",
        _operations(f"products, {passes}", plan.operations),
        line(moved, plan.rows_moved),
    ]


def _operations(name: str, number: int) -> str:
    return f"  {name:<44}{number / 1e12:>12,.4g} TFLOP{number:>26,}"


def _network(transfers: Iterable[Transfer]) -> list[str]:
    rows = [(f"{one.collective} {one.content}", one.payload, one.sent) for one in transfers]
    if not rows:
        return ["Network of a step: none, there is one rank"]
    rows.append(("together", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    return ["Network of a step, bytes: payload, and what a rank sends in a ring"] + [
        f"  {name:<44}{human(payload):>14}{payload:>18,}{human(sent):>14}{sent:>18,}"
        for name, payload, sent in rows
    ]


def _backbone(plan: BackbonePlan) -> list[str]:
    split = "" if plan.parts == 1 else f" in {count(plan.parts, 'micro-batch', 'es')}"
    shards = "" if plan.shards == 1 else f"; a rank keeps 1 of {plan.shards} shards"
    return [
        f"{plan.name}, {plan.numbers:,} parameters, {plan.precision}; "
        f"{count(plan.images, 'image')} a rank{split}{shards}",
        "",
        *table("Stored on the device, bytes a rank", plan.stored),
        "",
        *table("On the device in a step, bytes a rank, at most about", plan.step),
        line("of it, kept for the backward pass", plan.kept),
        "",
        "Total of the backbone, bytes a rank",
        line("device", plan.device_bytes),
        "",
        "Arithmetic of a step, a rank",
        _operations("products, forward and backward", plan.operations),
        line("read and written by the operators", plan.moved),
    ]
