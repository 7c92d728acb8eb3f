"""torch.compile for training."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from plsc.inputs import Input, first_tensor
from plsc.storage.urls import cache_folder


class CompiledNetwork(nn.Module):
    """A network that is compiled for training batches, and uncompiled for everything else.

    Use `network` for evaluation and saving: it holds the parameters and buffers. Random numbers equal those
    of the uncompiled network.

    Args:
        network: called as ``network(images, labels, is_train)``.
        sizes: the batch sizes to compile for on this rank. Other sizes, such as a smaller last batch, use the
            uncompiled network, because each size takes minutes to compile.
        backend: of torch.compile.
    """

    def __init__(
        self, network: nn.Module, sizes: Collection[int], backend: str | Callable[..., Any] = "inductor"
    ) -> None:
        super().__init__()
        self.network = network
        self._sizes = frozenset(sizes)
        # By default inductor runs what it finds in a folder of /tmp that any user could have created.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder("inductor")))
        # Only inductor has its own random numbers.
        options: Any = {"fallback_random": True} if backend == "inductor" else None
        compiled = torch.compile(network, dynamic=False, backend=backend, options=options)
        # A closure, because a submodule would register every parameter a second time.
        self._compiled: Callable[..., Tensor] = lambda *inputs: compiled(*inputs)

    def forward(self, input: Input, *others: Any) -> Tensor:
        """Return the embeddings [b, D] of the images [b, C, H, W]."""
        is_compiled = self.network.training and len(first_tensor(input)) in self._sizes
        return (self._compiled if is_compiled else self.network)(input, *others)
