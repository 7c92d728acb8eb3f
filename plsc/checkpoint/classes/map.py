"""The class map of a checkpoint: ``classes.tsv``, with a line ``old<TAB>new`` per remaining class.

The format argument label_map accepts the same file.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Annotated, TypedDict

import numpy as np

from plsc.checkpoint.classes.plan import Plan
from plsc.checkpoint.manifest import FileInfo, read_manifest
from plsc.checkpoint.shard_file import checksum
from plsc.errors import CheckpointError
from plsc.storage.records import read_record

MAP_NAME = "classes.tsv"


class _Renumbering(TypedDict):
    classes_before: Annotated[int, (1, 2**33)]


def write_map(path: Path, plan: Plan) -> FileInfo:
    """Write the file; return its size and CRC-32."""
    size, crc = 0, 0
    with path.open("xb") as file:
        for piece in plan.label_map():
            file.write(piece)
            size, crc = size + len(piece), zlib.crc32(piece, crc)
    return FileInfo(size, crc)


def read_class_map(path: str | os.PathLike[str]) -> np.ndarray:
    """Return the new number of each old class for the last change of a checkpoint, int64 [old classes].

    Dropped classes are -1. ``labels = read_class_map(path)[labels]`` converts labels; remove those of -1.

    Raises:
        CheckpointError: the last change did not renumber classes, or the map is damaged.
    """
    file, manifest = Path(path, MAP_NAME), read_manifest(path)
    last = manifest.lineage[-1] if manifest.lineage else {}
    before = read_record(_Renumbering, last, f"the last change of {path}")["classes_before"]
    try:
        if checksum(file, manifest.files[MAP_NAME].bytes) != manifest.files[MAP_NAME]:
            raise ValueError("its checksum differs from the saved one")
        pairs = np.array(file.read_bytes().split(), dtype=np.int64).reshape(-1, 2)
        numbers = np.full(before, -1, dtype=np.int64)
        numbers[pairs[:, 0]] = pairs[:, 1]
    except (OSError, KeyError, ValueError, IndexError, MemoryError) as error:
        raise CheckpointError(f"{file} is missing or damaged: {error}") from error
    return numbers
