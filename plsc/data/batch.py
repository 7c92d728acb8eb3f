"""What a loader yields, and how it becomes the network's input."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class Batch:
    """One rank's part of a global batch; it may be empty (b = 0) when there is too little data.

    ``images`` is [b, C, H, W], uint8, or float32 that is already normalised. ``labels`` is int64 [b].
    ``names`` says where each sample came from. ``skipped`` bad images were left out; ``problems``
    names each of them and its fault.
    """

    images: torch.Tensor
    labels: torch.Tensor
    names: list[str]
    skipped: int = 0
    problems: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.labels)

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory (called by torch's DataLoader)."""
        self.images = self.images.pin_memory()
        self.labels = self.labels.pin_memory()
        return self


def to_input(images: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return float32 images on ``device``: (x - 127.5) / 128 of uint8, floats untouched."""
    moved = images.to(device, non_blocking=True)
    if images.dtype == torch.uint8:
        return moved.float().sub_(127.5).div_(128.0)
    return moved.float()
