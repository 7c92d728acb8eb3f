"""The class map of a checkpoint: ``classes.tsv``, with a line ``old<TAB>new`` per remaining class.

The format argument label_map accepts the same file.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np

from plsc.checkpoint.classes.plan import Plan
from plsc.checkpoint.load import MAP_NAME
from plsc.checkpoint.manifest import FileInfo, read_manifest
from plsc.errors import CheckpointError
from plsc.storage.regular import open_regular

_LARGEST = 2**36  # bytes
_MOST_CLASSES = 2**33


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
    folder = Path(path)
    manifest = read_manifest(folder)
    last = manifest.lineage[-1] if manifest.lineage else {}
    if not isinstance(last.get("map"), dict):
        raise CheckpointError(f"{folder} has no {MAP_NAME}: its last change did not renumber classes")
    before, size = last.get("classes_before"), last["map"].get("bytes")
    file = folder / MAP_NAME
    if not file.exists():
        raise CheckpointError(
            f"{file} is missing; copy it from the checkpoint in which the classes were changed"
        )
    try:
        if not (isinstance(before, int) and 0 < before <= _MOST_CLASSES):
            raise ValueError
        if type(size) is not int or size > _LARGEST:
            raise ValueError
        with open_regular(file, folder, size) as stream:
            data = stream.read()
        pairs = np.array(data.split(), dtype=np.int64).reshape(-1, 2)
        if zlib.crc32(data) != last["map"].get("crc32") or len(pairs) > before:
            raise ValueError
        numbers = np.full(before, -1, dtype=np.int64)
        numbers[pairs[:, 0]] = pairs[:, 1]
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, IndexError, MemoryError) as error:
        raise CheckpointError(f"{file} is damaged: it differs from what was saved") from error
    return numbers
