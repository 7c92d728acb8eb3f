"""Copies between a GPU and host memory that do not stop the computation."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

_PIECE = 2**26  # bytes


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the device; a copy from the CPU to a GPU is asynchronous."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        # A copy from pageable memory would wait for all kernels in the queue.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Arriving:
    """A tensor whose values arrive in page-locked memory; a tensor on the CPU is there already."""

    def __init__(self, tensor: Tensor) -> None:
        self._values, self._arrived = tensor, None
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> Tensor:
        """Wait for the values and return them, on the CPU."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values


def host_copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return copies in pageable memory.

    Those from a GPU come through page-locked pieces: while one arrives, the one before it is moved on.
    """
    copies: list[Tensor] = []
    coming: deque[tuple[Tensor, Arriving]] = deque()

    def move() -> None:
        target, piece = coming.popleft()
        target.copy_(piece.read())

    for tensor in tensors:
        # No huge pages: where the kernel has to create them first, the copy takes twice as long.
        copies.append(torch.empty(tensor.shape, dtype=tensor.dtype))
        if not tensor.is_cuda:
            copies[-1].copy_(tensor)
            continue
        count = max(1, _PIECE // tensor.element_size())
        parts = copies[-1].view(-1).split(count), tensor.contiguous().view(-1).split(count)
        for target, piece in zip(*parts, strict=True):
            coming.append((target, Arriving(piece)))
            if len(coming) > 2:
                move()
    while coming:
        move()
    return copies
