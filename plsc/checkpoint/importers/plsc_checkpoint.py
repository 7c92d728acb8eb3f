"""The weights in a checkpoint of plsc: whole tensors, and class rows that are spread over its files."""

from __future__ import annotations

import json
import os
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from plsc.checkpoint.importers.row_parts import RowParts
from plsc.checkpoint.layout import OFFSETS_KEY, PLACES_KEY, check_checksums, check_files
from plsc.checkpoint.manifest import read_manifest

_HEADS = ("head.", "heads.")


def read_checkpoint_weights(
    path: str | os.PathLike[str], rank: int = 0, ranks: int = 1
) -> tuple[dict[str, RowParts], dict[str, RowParts]]:
    """Return the backbone's tensors by name, and the head's, whose names begin with ``head.``
    or, of several, ``heads.<name>.``.

    This rank's share of the files is compared with their checksums first.

    Raises:
        CheckpointError: no such checkpoint, or it is damaged.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    wanted = {key for key in manifest.tensors if key.startswith(("backbone.", *_HEADS))}
    parts: dict[str, list[tuple[int, Tensor]]] = {key: [] for key in wanted}
    check_checksums(folder, manifest, sorted(manifest.files)[rank::ranks])
    for name in sorted(manifest.files):
        with safe_open(folder / name, framework="pt") as file:
            places = json.loads(file.metadata()[PLACES_KEY])  # as check_files has seen
            for key in wanted.intersection(file.keys()):
                first = min(places[key][OFFSETS_KEY][:1], default=0)
                parts[key].append((first, file.get_tensor(key)))
    joined = {
        key: RowParts(tuple(tensor for _, tensor in sorted(pieces, key=lambda item: item[0])))
        for key, pieces in parts.items()
    }
    backbone = {
        key.removeprefix("backbone."): rows
        for key, rows in joined.items()
        if key.startswith("backbone.")
    }
    return backbone, {key: rows for key, rows in joined.items() if key.startswith(_HEADS)}
