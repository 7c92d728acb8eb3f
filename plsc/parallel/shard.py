"""Which classes live on which rank: one rule, in one place."""

from __future__ import annotations


def class_range(class_num: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return ``(start, stop)``, the classes that ``rank`` of ``ranks`` owns; it may be empty.

    Rank r owns [min(C, r k), min(C, (r + 1) k)) with k = ceil(C / R). That is exactly the split of
    DTensor's ``Shard(0)``, so a shard can be wrapped as a DTensor without moving a row.
    """
    rows = -(-class_num // ranks)
    return min(class_num, rank * rows), min(class_num, (rank + 1) * rows)


def class_ranges(class_num: int, ranks: int) -> list[tuple[int, int]]:
    """Return the range of every rank, in rank order."""
    return [class_range(class_num, rank, ranks) for rank in range(ranks)]
