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
from plsc.checkpoint.roles import CLASS_NAMES, CLASS_WEIGHTS, Role
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
    weight = manifest.tensors.get(Role(CLASS_WEIGHTS, "weight", head).key)
    infos = [manifest.tensors[key] for key in keys]
    is_sound = [info.dtype for info in infos] == ["uint8", "int64"]
    if is_sound and weight is not None and infos[1].shape == weight.shape[:1]:
        with OpenCheckpoint(folder, manifest) as opened:
            text, ends = (bytearray().join(opened.tensors[key].bytes()) for key in keys)
        names = ClassNames(np.frombuffer(text, np.uint8), np.frombuffer(ends, np.int64))
        is_rising = names.ends.min() >= 0 and names.lengths().min() >= 0
        if is_rising and names.ends[-1] == len(text):
            return names
    raise Checker(str(folder)).wrong("the names of its classes are damaged")


def _roles(head: str) -> tuple[Role, Role]:
    return Role(CLASS_NAMES, "bytes", head), Role(CLASS_NAMES, "ends", head)
