"""The options of how the backbone lies on the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from plsc.option import at_least, declare, of_run, one_of


@dataclass(frozen=True)
class ParallelOptions:
    """The backbone on the ranks. The head's class rows are always split over all of them."""

    backbone: str = of_run(
        "replicated",
        "replicated (each rank has the whole backbone) or sharded (each has a share of its parameters, "
        "gradients and optimizer state, and more is sent)",
        "set_backbone_parallel(way)",
        one_of("replicated", "sharded"),
    )
    shard_size: int = of_run(
        0,
        "ranks that share one copy of a sharded backbone, such as those of a machine; 0: all ranks",
        "set_backbone_shard_size(ranks)",
        at_least(0),
    )
    shard_units: str = declare(
        "auto",
        "modules of a sharded backbone that are put together one at a time: auto, or names separated by "
        "commas in which * stands for one component, such as 'stages.*.*,neck'",
        "set_backbone_shard_units(patterns)",
    )
