"""A state dict from a file: wrappers taken off, prefixes stripped."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from plsc.checkpoint.importers.tensor_files import read_tensors
from plsc.errors import CheckpointError

# Under which names people keep the network's state dict among other things.
_WRAPPERS = ("state_dict", "state_dict_backbone", "model", "backbone", "model_state_dict", "net")
# What DDP, torch.compile and classes around a network put before every name.
_PREFIXES = ("module.", "_orig_mod.", "model.", "network.")
_BACKBONE, _HEAD = "backbone.", "head."


def read_state_dict(
    path: str | os.PathLike[str], follow_links: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the backbone's tensors by name, and those of the class rows.

    The latter are named ``head.``, and then the former ``backbone.``, as in checkpoints of ours: where there
    is no such prefix, a head is a layer of the network (of many vision transformers, the last).

    Raises:
        CheckpointError: no such file, a damaged or malicious one, or no tensors in it.
    """
    state = strip(unwrap(read_tensors(path, follow_links)))
    if not state:
        raise CheckpointError(
            f"{path} holds no state dict: expected tensors by name, perhaps under "
            f"{', '.join(_WRAPPERS)}"
        )
    inside = {name: tensor for name, tensor in state.items() if name.startswith(_BACKBONE)}
    if not inside:
        return state, {}
    head = {name: tensor for name, tensor in state.items() if name.startswith(_HEAD)}
    return strip({name.removeprefix(_BACKBONE): t for name, t in inside.items()}), head


def unwrap(value: Any) -> dict[str, Tensor]:
    """Return the tensors by name, wherever among the usual wrappers they are; empty if nowhere."""
    for _ in range(4):
        if not isinstance(value, Mapping):
            return {}
        inner = [value[name] for name in _WRAPPERS if isinstance(value.get(name), Mapping)]
        if not inner:
            break
        value = inner[0]
    return {name: t for name, t in value.items() if isinstance(t, Tensor) and type(name) is str}


def strip(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict without a prefix that all of its names share."""
    for prefix in _PREFIXES * 2:
        if state and all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return state
