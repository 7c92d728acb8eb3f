"""What a run asks of a network's parameters and buffers, apart from their values."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from plsc.errors import OptionError

_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


def prepare_tensors(network: nn.Module) -> None:
    """Give each buffer memory of its own, in place, where numbers share it (`Tensor.expand`).

    Such a buffer can be read, but not loaded or put back. Raises OptionError for complex tensors: a network
    is cast to the run's type, which has no imaginary part, and checkpoints hold none.
    """
    for name, tensor in itertools.chain(network.named_parameters(), network.named_buffers()):
        if tensor.is_complex():
            raise OptionError(
                f"{name} of {type(network).__name__} is {str(tensor.dtype).removeprefix('torch.')}; expected "
                "real numbers: keep the two parts in a last dimension of 2 (torch.view_as_real) and make "
                "complex ones of them where they are used (torch.view_as_complex)"
            )
    for module in network.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and _overlaps(buffer):
                module._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)


def refuse_sparse_gradients(network: nn.Module) -> None:
    """Raise OptionError for a layer whose gradients are sparse: named optimizers want dense ones."""
    for name, module in network.named_modules():
        if isinstance(module, _LOOKUPS) and module.sparse:
            raise OptionError(
                f"the layer {name} of {type(network).__name__} gives sparse gradients, which the optimizers "
                "by name do not take; make it with sparse=False, or give an optimizer of your own "
                "(set_optimizer)"
            )


def _overlaps(tensor: torch.Tensor) -> bool:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in sizes)
