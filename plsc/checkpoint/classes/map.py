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
from plsc.checkpoint.load import MAP_NAME
from plsc.checkpoint.manifest import FileInfo, read_manifest
from plsc.errors import CheckpointError
from plsc.storage.records import read_record
from plsc.storage.regular import open_regular


class _File(TypedDict):
    bytes: Annotated[int, (0, 2**36)]
    crc32: int


class _Renumbering(TypedDict):
    classes_before: Annotated[int, (1, 2**33)]
    map: _File


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
    file, lineage = folder / MAP_NAME, read_manifest(folder).lineage
    last = read_record(
        _Renumbering, lineage[-1] if lineage else {}, f"{folder} has no {MAP_NAME}, or its last change"
    )
    try:
        with open_regular(file, folder, last["map"]["bytes"]) as stream:
            data = stream.read()
        pairs = np.array(data.split(), dtype=np.int64).reshape(-1, 2)
        if zlib.crc32(data) != last["map"]["crc32"] or len(pairs) > last["classes_before"]:
            raise ValueError
        numbers = np.full(last["classes_before"], -1, dtype=np.int64)
        numbers[pairs[:, 0]] = pairs[:, 1]
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, IndexError, MemoryError) as error:
        raise CheckpointError(f"{file} is damaged: it differs from what was saved") from error
    return numbers
