"""What a loader yields, and how it becomes the network's input."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from plsc.data.bad_samples import BadSample


@dataclass
class Batch:
    """One rank's part of a global batch; it may be empty (b = 0) when there is too little data.

    ``images`` is [b, C, H, W], uint8 in any memory layout, or float32 that is already normalised.
    ``labels`` is int64 [b]. ``names`` says where each sample came from. ``mirrored``, bool [b], marks images
    that are still to be mirrored, which `to_input` does on the way: None if none is. ``skipped`` bad samples
    were left out; ``problems`` names each that was left out or replaced, and its fault. ``seconds`` is how
    long it took to make, ``cpu_seconds`` how long its maker computed for that.

    A batch may be kept: its memory is used again only when nothing refers to it any more.
    """

    images: torch.Tensor
    labels: torch.Tensor
    names: Sequence[str]
    skipped: int = 0
    problems: list[BadSample] = field(default_factory=list)
    mirrored: torch.Tensor | None = None
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.labels)

    def timed(self, began: float, computed: float) -> Batch:
        """Note how long it took since `time.perf_counter` and `time.thread_time` gave these; return it."""
        self.seconds = time.perf_counter() - began
        self.cpu_seconds = time.thread_time() - computed
        return self

    def input(
        self,
        device: torch.device | str,
        layout: torch.memory_format = torch.contiguous_format,
    ) -> torch.Tensor:
        """Return the network's input: float32 [b, C, H, W] on ``device``, normalised, in a memory format."""
        return to_input(self.images, device, self.mirrored, layout)

    def final_images(self) -> torch.Tensor:
        """Return a copy of the images, mirrored where that is still to be done."""
        if self.mirrored is None:
            return self.images.clone()
        return torch.where(self.mirrored[:, None, None, None], self.images.flip(-1), self.images)

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory (called by torch's DataLoader)."""
        self.images = self.images.pin_memory()
        self.labels = self.labels.pin_memory()
        return self


class NamesOf(Sequence[str]):
    """The names of some samples, looked up when they are asked for: as a rule nobody asks.

    A copy in another process has lost the source, which would be too much to send with each batch.
    """

    def __init__(self, samples: list[int], source: Any = None) -> None:
        self.samples = samples
        self.source = source

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, position: Any) -> Any:
        chosen = self.samples[position]
        if isinstance(chosen, list):
            return [self.source.name(sample) for sample in chosen]
        return self.source.name(chosen)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(tuple(self.samples))

    def __reduce__(self) -> tuple[Any, ...]:
        return NamesOf, (self.samples,)


def to_input(
    images: torch.Tensor,
    device: torch.device | str,
    mirrored: torch.Tensor | None = None,
    layout: torch.memory_format = torch.contiguous_format,
) -> torch.Tensor:
    """Return float32 images [b, C, H, W] on ``device``: (x - 127.5) / 128 of uint8, floats untouched.

    Bytes travel to the device as they are, and become floats there. mirrored: bool [b], of uint8 images that
    are to be mirrored. layout: of the result in memory; it costs nothing more, as decoded images are
    channels last and have to be written anew anyhow. preserve_format stands for contiguous_format.
    """
    if layout == torch.preserve_format:
        layout = torch.contiguous_format
    if images.dtype == torch.uint8 and torch.device(device).type == "cpu" and not images.is_cuda:
        return _normalised_on_cpu(images, mirrored, layout)
    moved = images.to(device, non_blocking=True)
    if images.dtype != torch.uint8:
        return moved.to(torch.float32, memory_format=layout)
    if mirrored is not None:
        chosen = mirrored.to(device, non_blocking=True)[:, None, None, None]
        moved = torch.where(chosen, moved.flip(-1), moved)
    floats = moved.to(torch.float32, memory_format=layout)
    return floats.sub_(127.5).div_(128.0)


def _normalised_on_cpu(
    images: torch.Tensor, mirrored: torch.Tensor | None, layout: torch.memory_format
) -> torch.Tensor:
    """Image by image: what is written for one is still in the cache when it is scaled."""
    if images.ndim < 2:
        return images.float().sub_(127.5).div_(128.0)
    result = torch.empty(images.shape, dtype=torch.float32, memory_format=layout)
    half, scale = np.float32(127.5), np.float32(1 / 128)
    flips = [False] * len(images) if mirrored is None else mirrored.tolist()
    for pixels, floats, flip in zip(images.numpy(), result.numpy(), flips, strict=True):
        if flip:
            pixels = pixels[..., ::-1]
        np.subtract(pixels, half, out=floats, dtype=np.float32)
        np.multiply(floats, scale, out=floats)
    return result
