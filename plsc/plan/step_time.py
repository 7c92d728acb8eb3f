"""A model of a step's time: computation, bytes, network. What it assumes stands in docs/scaling.md."""

from __future__ import annotations

from dataclasses import dataclass

from plsc.plan.backbone import BackbonePlan
from plsc.plan.head import HeadPlan
from plsc.plan.network import total_seconds
from plsc.plan.rates import Rates

COMPUTED = ("backbone", "head's products", "head's rows", "head's samples", "optimizer")
SENT = ("head's network", "gradients' sums")


@dataclass(frozen=True)
class StepTime:
    """The estimated seconds of a step on so many ranks, part by part; images: of all ranks.

    parts: see `COMPUTED` and `SENT`; what is hidden behind another part is not in it. hidden: seconds of
    network that computation hides.
    """

    ranks: int
    images: int
    parts: dict[str, float]
    hidden: float

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())

    @property
    def images_a_second(self) -> float:
        """Images of all ranks."""
        return self.images / self.total

    @property
    def efficiency(self) -> float:
        """The share of the step in which a rank computes: 1 if the network took no time."""
        return sum(self.parts.get(name, 0.0) for name in COMPUTED) / self.total

    @property
    def dominant(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=self.parts.__getitem__)


def step_time(
    rates: Rates, head: HeadPlan | None, backbone: BackbonePlan | None, ranks: int, images: int
) -> StepTime | None:
    """Return the estimate for a step of `images` of all ranks; None if a rate that it needs is not known."""
    network = rates.network_of(ranks)
    if ranks > 1 and network is None:
        return None
    parts: dict[str, float] = {}
    hidden = 0.0
    if backbone is not None:
        if rates.backbone is None or rates.memory is None:
            return None
        forward, backward = backbone.seconds(rates.backbone, rates.memory)
        parts["backbone"] = backbone.parts * (forward + backward)
        parts["optimizer"] = backbone.update_bytes / rates.memory
        if ranks > 1 and network is not None:
            shown, hidden = _sum_seconds(backbone, rates, network, ranks, forward, backward)
            parts["gradients' sums"] = shown
    if head is not None:
        if rates.product is None or rates.copy is None:
            return None
        # The passes read rows and multiply at once: the longer of the two counts.
        products, rows = head.operations / rates.product, head.rows_moved / rates.copy
        parts["head's products" if products >= rows else "head's rows"] = max(products, rows)
        parts["head's samples"] = head.samples_moved / (rates.memory or rates.copy)
        if ranks > 1 and network is not None:
            parts["head's network"] = total_seconds(head.transfers, ranks, network, rates.latency)
    return StepTime(ranks, images, parts, hidden)


def _sum_seconds(
    backbone: BackbonePlan,
    rates: Rates,
    network: float,
    ranks: int,
    forward: float,
    backward: float,
) -> tuple[float, float]:
    """Return the seconds of the gradients' sums that are waited for, and those that are hidden.

    The last part's backward pass hides all but the last bucket. Of a sharded backbone also the forward pass.
    """
    transfers = backbone.transfers(ranks)
    whole = total_seconds(transfers, ranks, network, rates.latency)
    behind = backward + (forward if backbone.shards > 1 else 0.0)
    last = transfers[-1].seconds(ranks, network, rates.latency) if transfers else 0.0
    hidden = min(max(0.0, whole - last), behind)
    return whole - hidden, hidden
