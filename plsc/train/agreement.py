"""What the ranks tell each other before a step, in one small collective."""

from __future__ import annotations

from dataclasses import dataclass

from plsc.data.batch import Batch
from plsc.parallel.world import World


@dataclass(frozen=True)
class Agreement:
    """The same on all ranks.

    signal: the number of one that told any rank to stop, 0 for none; has_ended: some rank's reader has no
    more batches; is_saving: some rank still writes a checkpoint; sizes: how many images each rank has in
    this step, None where a label is out of range (the head looks for it, and says which).
    """

    signal: int
    has_ended: bool
    is_saving: bool
    sizes: list[int] | None


def agree(
    world: World, batch: Batch | None, class_num: int, signal: int = 0, is_saving: bool = False
) -> Agreement:
    """Return what the ranks agree on; the arguments are this rank's. A collective.

    batch: None where the reader has ended.
    """
    labels = None if batch is None else batch.labels
    is_wrong = labels is not None and bool(((labels < 0) | (labels >= class_num)).any())
    told = world.gather_numbers(
        signal,
        int(labels is None),
        int(is_saving),
        0 if labels is None else len(labels),
        int(is_wrong),
    )
    signals, ended, saving, sizes, wrong = zip(*told, strict=True)
    return Agreement(
        max(signals), any(ended), any(saving), None if any(wrong) else [int(size) for size in sizes]
    )
