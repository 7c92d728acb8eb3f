"""Memory for batches that is used again: fresh pages for each batch would cost as much as a flip."""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import torch

_KEPT = 16  # buffers that wait to be used again; more are given back to the system


class BufferRing:
    """Hands out uint8 batches, and takes a buffer again once nobody holds its tensor any more.

    A batch is never overwritten while somebody has it, or a view of it: who keeps batches makes the ring
    allocate more. So there is nothing to give back, and nothing to copy. It may be used by several threads.

    batch: the most images of a batch; image_shape: (C, H, W). With ``pin`` the memory is page-locked and
    comes from torch's own cache of such memory, which waits for copies to the device that still run.
    """

    def __init__(self, batch: int, image_shape: tuple[int, int, int], pin: bool = False) -> None:
        channels, height, width = image_shape
        self._shape = (batch, height, width, channels)
        self._pin = pin
        self._free: deque[np.ndarray] = deque(maxlen=_KEPT)
        self._lent: dict[int, weakref.ref[np.ndarray]] = {}

    def take(self, count: int) -> tuple[np.ndarray, torch.Tensor]:
        """Return the pixels of ``count`` images to write to, [n, H, W, C], and the same as [n, C, H, W].

        The tensor is a view of the same memory, in the layout that torch calls channels_last.
        """
        if self._pin:
            images = torch.empty((count, *self._shape[1:]), dtype=torch.uint8, pin_memory=True)
            return images.numpy(), images.permute(0, 3, 1, 2)
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = np.empty(self._shape, dtype=np.uint8)
        # The tensor's storage holds this very view, so the view lives as long as any tensor on it.
        pixels = buffer[:count]
        self._lend(buffer, pixels)
        return pixels, torch.from_numpy(pixels).permute(0, 3, 1, 2)

    def _lend(self, buffer: np.ndarray, pixels: np.ndarray) -> None:
        key, lent, free = id(buffer), self._lent, self._free

        def take_back(_: weakref.ref[np.ndarray]) -> None:
            lent.pop(key, None)
            free.append(buffer)

        lent[key] = weakref.ref(pixels, take_back)
