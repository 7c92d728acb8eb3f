"""The names of the classes in a checkpoint: two whole tensors for each head that has some."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from plsc.checkpoint.check import Checker
from plsc.checkpoint.classes.source import OpenCheckpoint
from plsc.checkpoint.layout import check_files
from plsc.checkpoint.manifest import Manifest
from plsc.checkpoint.roles import CLASS_NAMES, Role
from plsc.data.class_names import ClassNames


def class_name_tensors(names: ClassNames, head: str = "") -> dict[Role, Tensor]:
    """Return the names as a checkpoint has them, by role; head: the name of one of several."""
    text, ends = _roles(head)
    return {text: torch.from_numpy(names.text), ends: torch.from_numpy(names.ends)}


def read_class_names(folder: Path, manifest: Manifest, head: str = "") -> ClassNames | None:
    """Return the names of the classes of a head, None if the checkpoint has none of it.

    Raises CheckpointError if they are damaged. Checksums are not compared.
    """
    keys = [role.key for role in _roles(head)]
    if not manifest.tensors.keys() >= set(keys):
        return None
    check_files(folder, manifest)
    with OpenCheckpoint(folder, manifest) as opened:
        text, ends = (bytearray().join(opened.tensors[key].bytes()) for key in keys)
    types = [manifest.tensors[key].dtype for key in keys]
    names = ClassNames(np.frombuffer(text, np.uint8), np.frombuffer(ends, np.int64))
    is_sound = names.ends[-1:].tolist() == [len(text)] and bool((names.lengths() >= 0).all())
    if types != ["uint8", "int64"] or not is_sound:
        raise Checker(str(folder)).wrong("the names of its classes are damaged")
    return names


def _roles(head: str) -> tuple[Role, Role]:
    return Role(CLASS_NAMES, "bytes", head), Role(CLASS_NAMES, "ends", head)
