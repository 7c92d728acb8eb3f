"""What autograd is given to keep for a backward pass."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def kept_bytes(network: nn.Module, images: Tensor, known: Iterable[Tensor]) -> tuple[int, Tensor]:
    """Return the bytes that a forward pass leaves for the backward pass, and its output.

    known: tensors that are there anyhow, which do not count.
    """
    own = {tensor.untyped_storage()._cdata for tensor in known}
    found = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            found[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = network(images)
    return sum(storage.nbytes() for storage in found.values()), output
