"""The weights in a checkpoint of plsc: whole tensors, and class rows that are spread over its files."""

from __future__ import annotations

import os

from plsc.checkpoint.importers.row_parts import RowParts
from plsc.checkpoint.load import read_parts
from plsc.checkpoint.roles import BACKBONE, CLASS_WEIGHTS, STATISTICS


def read_checkpoint_weights(
    path: str | os.PathLike[str], rank: int = 0, ranks: int = 1
) -> tuple[dict[str, RowParts], dict[str, RowParts]]:
    """Return the backbone's tensors by name, and those of the heads by checkpoint key; as `read_parts`."""
    found = read_parts(path, (BACKBONE, CLASS_WEIGHTS, STATISTICS), rank, ranks)
    rows = {role: RowParts(tuple(parts)) for role, parts in found.items()}
    backbone = {role.name: one for role, one in rows.items() if role.kind == BACKBONE}
    return backbone, {role.key: one for role, one in rows.items() if role.kind != BACKBONE}
