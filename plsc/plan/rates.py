"""How fast a machine computes, reads and sends: given, or of a data sheet."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plsc.errors import OptionError
from plsc.plan.checks import above_zero, one_of


@dataclass(frozen=True)
class Node:
    """The peak rates of a vendor's data sheets, which no program reaches.

    products: FLOP/s of dense products, by type; memory, node_network, network: bytes/s of the device's
    memory, and in one direction from a device to the others of its node and to other nodes.
    """

    name: str
    products: Mapping[str, float]
    memory: float
    node_network: float
    network: float
    devices: int = 8


# NVIDIA's data sheets of A100 80 GB SXM and H100 SXM, without sparsity and without TF32; NVLink's 600 and
# 900 GB/s are those of both directions. DGX A100: a 200 Gb/s adapter for each GPU; DGX H100: 400 Gb/s.
NODES = {
    "a100": Node(
        "DGX A100",
        {"float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12},
        memory=2039e9,
        node_network=300e9,
        network=25e9,
    ),
    "h100": Node(
        "DGX H100",
        {"float32": 67e12, "bfloat16": 989e12, "float16": 989e12},
        memory=3350e9,
        node_network=450e9,
        network=50e9,
    ),
}


@dataclass(frozen=True)
class Rates:
    """What is reached, in FLOP/s, bytes/s and seconds; None: not known.

    product: of the head's products; backbone: of the backbone's. copy: of the memory that holds the rows,
    with offload of the way to the device; memory: of the device's. network, node_network: what a rank sends
    beyond its node, and within it (None: as network), where there are `devices`. latency: of a message.
    """

    product: float | None = None
    backbone: float | None = None
    copy: float | None = None
    memory: float | None = None
    network: float | None = None
    node_network: float | None = None
    devices: int = 1
    latency: float = 0.0
    origin: str = "at the rates given"

    def network_of(self, ranks: int) -> float | None:
        """Return what a rank sends in a ring of so many, whose slowest link counts."""
        if ranks <= self.devices and self.node_network is not None:
            return self.node_network
        return self.network


def choose_rates(
    *,
    node: str | None = None,
    reached: float = 0.5,
    precision: str = "float32",
    offload: bool = False,
    product_rate: float | None = None,
    backbone_rate: float | None = None,
    copy_rate: float | None = None,
    memory_rate: float | None = None,
    network_rate: float | None = None,
    latency: float = 10.0,
) -> Rates:
    """Return the rates that are given, and for the others a share `reached` of a node's data sheet.

    product_rate, backbone_rate: TFLOP/s; copy_rate, memory_rate, network_rate: GB/s; latency: microseconds.
    A rate of the backbone's that is missing is that of the head. Raises OptionError for what is out of range.
    """
    product = _scaled("product_rate", product_rate, 1e12)
    backbone = _scaled("backbone_rate", backbone_rate, 1e12)
    copy = _scaled("copy_rate", copy_rate, 1e9)
    memory = _scaled("memory_rate", memory_rate, 1e9)
    given: dict[str, Any] = {
        "product": product,
        "backbone": backbone or product,
        "copy": copy,
        "memory": memory or (None if offload else copy),
        "network": _scaled("network_rate", network_rate, 1e9),
    }
    if not 0 <= latency < 1e9:
        raise OptionError(f"latency is {latency}; expected microseconds, 0 or more")
    if not 0 < reached <= 1:
        raise OptionError(f"reached is {reached}; expected a share of the peak rates in (0, 1]")
    rates = Rates(**given, latency=latency * 1e-6)
    return rates if node is None else _completed(rates, node, reached, precision, offload)


def _completed(rates: Rates, node: str, reached: float, precision: str, offload: bool) -> Rates:
    """Return the rates with those that are missing from a node's data sheet."""
    peak = NODES[one_of("node", node, NODES)]
    named = [
        name
        for name in ("product", "backbone", "copy", "memory", "network")
        if getattr(rates, name)
    ]
    given = f", but for what is given ({', '.join(named)})" if named else ""
    product = reached * peak.products[precision]
    memory = reached * peak.memory
    return dataclasses.replace(
        rates,
        product=rates.product or product,
        backbone=rates.backbone or product,
        copy=rates.copy
        or (None if offload else memory),  # of the way to the device it says nothing
        memory=rates.memory or memory,
        network=rates.network or reached * peak.network,
        node_network=None if rates.network else reached * peak.node_network,
        devices=peak.devices,
        origin=f"at {reached:.0%} of the data sheet's rates of a {peak.name}{given}, an assumption",
    )


def _scaled(name: str, rate: float | None, unit: float) -> float | None:
    checked = above_zero(name, rate)
    return None if checked is None else checked * unit
