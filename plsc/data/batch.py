"""What a loader yields: the batch, the memory it lies in, and its way to the network's input."""

from __future__ import annotations

import dataclasses
import weakref
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from plsc.errors import DataError

_KEPT = 16  # buffers that wait to be used again; more are given back to the system


@dataclass(frozen=True)
class BadSample:
    """A sample that was left out or replaced: its kind of fault, and a line that names it."""

    kind: str
    text: str

    @classmethod
    def from_error(cls, error: DataError) -> BadSample:
        """Return what an error said, on one line."""
        return cls(error.kind, " ".join(str(error).split()))


@dataclass
class Batch:
    """One rank's part of a global batch; it may be empty (b = 0) when there is too little data.

    ``images`` is [b, C, H, W], uint8 in any memory layout, or float32 that is already normalised.
    ``labels`` is int64 [b]. ``names`` says where each sample came from. ``mirrored``, bool [b], marks images
    that are still to be mirrored, which `to_input` does on the way: None if none is. ``skipped`` bad samples
    were left out; ``problems`` names each that was left out or replaced, and its fault.

    A batch may be kept: its memory is used again only when nothing refers to it any more.
    """

    images: torch.Tensor
    labels: torch.Tensor
    names: Sequence[str]
    skipped: int = 0
    problems: list[BadSample] = field(default_factory=list)
    mirrored: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

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
    """The names of some samples, looked up only when they are used.

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
    result = torch.empty(images.shape, dtype=torch.float32, memory_format=layout)
    half, scale = np.float32(127.5), np.float32(1 / 128)
    flips = [False] * len(images) if mirrored is None else mirrored.tolist()
    for pixels, floats, flip in zip(images.numpy(), result.numpy(), flips, strict=True):
        if flip:
            pixels = pixels[..., ::-1]
        np.subtract(pixels, half, out=floats, dtype=np.float32)
        np.multiply(floats, scale, out=floats)
    return result


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


def copied_aside(batches: Generator[Batch, None, None], device: torch.device) -> Generator[Batch, None, None]:
    """Yield the batches of a generator with their images on a GPU; on a CPU, as they are.

    The copies run in a stream of their own, concurrently with the device's earlier work. So they cost
    nothing where the program is ahead of the device, as it is when nothing waits for losses; in the stream of
    the computation they would begin when the step before has ended. The images must be in page-locked
    memory, else the program waits for each copy. Labels stay where they are: the step looks at them.

    Reads no batch ahead: an error of the reader comes when it would have come, and the position in the data
    is the same. Closing it closes the generator.
    """
    with closing(batches):
        if device.type != "cuda":
            yield from batches
            return
        stream = torch.cuda.Stream(device)
        for batch in batches:
            copied = _copy(batch, device, stream)
            del batch  # page-locked memory is used again once its copy has ended: torch keeps count
            yield copied
            del copied


def _copy(batch: Batch, device: torch.device, stream: torch.cuda.Stream) -> Batch:
    """Return the batch on the device, ready for the current stream."""
    current = torch.cuda.current_stream(device)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.to(device, non_blocking=True)
        # It was allocated in the side stream, and is used in this one: its memory must not be given
        # out again before this one is done with it.
        moved.record_stream(current)
        return moved

    with torch.cuda.stream(stream):
        images = move(batch.images)
        mirrored = None if batch.mirrored is None else move(batch.mirrored)
    current.wait_stream(stream)
    return dataclasses.replace(batch, images=images, mirrored=mirrored)
