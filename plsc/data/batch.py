"""A batch: its memory, flip and transform, its conversion to the network's input; and the bad samples.

Random numbers depend only on (seed, epoch, sample, operation).
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plsc.data.decode import check_normalised
from plsc.data.order import splitmix64_of
from plsc.errors import DataError, naming, printable
from plsc.inputs import Input, map_tensors
from plsc.seeds import hash_key
from plsc.storage.regular import open_regular, read_regular

LIST_NAME = "bad_samples.txt"
MAX_LISTED = 100_000  # lines; further bad samples are only counted
_UNREADABLE_LIST = 64 * 2**20


@dataclass(frozen=True)
class BadSample:
    """A sample that was skipped: kind of fault, and a message that names it."""

    kind: str
    text: str

    @classmethod
    def from_error(cls, error: DataError) -> BadSample:
        """Return an error's kind, and its message on one line."""
        return cls(error.kind, " ".join(str(error).split()))


@dataclass
class Batch:
    """One rank's part of a global batch; it may be empty (b = 0) when there is too little data.

    Attributes:
        images: [b, C, H, W], uint8 in any memory layout, or float32, already normalised. With `is_input`,
            the network's input, which is not an image.
        labels: int64 [b].
        names: where each sample came from.
        mirrored: bool [b], images that `to_input` mirrors; None if none.
        problems: the bad samples that were left out.
        is_input: whether the network gets `images` unchanged.
        all_labels: labels of the global batch, if the ranks exchanged them.
    """

    images: Any
    labels: torch.Tensor
    names: Sequence[str]
    problems: list[BadSample] = field(default_factory=list)
    mirrored: torch.Tensor | None = None
    is_input: bool = False
    all_labels: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def input(
        self, device: torch.device | str, layout: torch.memory_format = torch.contiguous_format
    ) -> Input:
        """Return the network's input on ``device``: float32 [b, C, H, W], normalised, if it is an image."""
        if self.is_input:
            return map_tensors(lambda one: one.to(device, non_blocking=True), self.images)
        return to_input(self.images, device, self.mirrored, layout)

    def final_images(self) -> Input:
        """Return a copy of the images, with pending mirroring applied, or of other input."""
        if self.mirrored is None:
            return map_tensors(torch.Tensor.clone, self.images)
        return torch.where(self.mirrored[:, None, None, None], self.images.flip(-1), self.images)

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory (called by torch's DataLoader)."""
        self.images = map_tensors(torch.Tensor.pin_memory, self.images)
        self.labels = self.labels.pin_memory()
        return self


class SampleNames(Sequence[str]):
    """The names of some samples, looked up on use.

    A copy in another process has no source, because it would be too large to send with each batch.
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
        return SampleNames, (self.samples,)


def to_input(
    images: torch.Tensor,
    device: torch.device | str,
    mirrored: torch.Tensor | None = None,
    layout: torch.memory_format = torch.contiguous_format,
) -> torch.Tensor:
    """Return float32 images [b, C, H, W] on ``device``: (x - 127.5) / 128 for uint8; floats are unchanged.

    Images are copied to the device as uint8 and converted there.

    Args:
        mirrored: bool [b], which images to mirror.
        layout: memory format of the result; preserve_format means contiguous_format. Neither costs more, as
            decoded images are channels last and have to be rewritten anyway.
    """
    if layout == torch.preserve_format:
        layout = torch.contiguous_format
    moved = images.to(device, non_blocking=True)
    if mirrored is not None:
        chosen = mirrored.to(device, non_blocking=True)[:, None, None, None]
        moved = torch.where(chosen, moved.flip(-1), moved)
    floats = moved.to(torch.float32, memory_format=layout)
    return floats if images.dtype != torch.uint8 else floats.sub_(127.5).div_(128.0)


def new_images(count: int, image_shape: tuple[int, int, int], pin: bool) -> tuple[np.ndarray, torch.Tensor]:
    """Return writable pixels for ``count`` images, uint8 [n, H, W, C], and the same memory as [n, C, H, W].

    The tensor has the memory format channels_last.

    Args:
        image_shape: (C, H, W).
        pin: use page-locked memory from torch's cache, which waits for running copies to the device.
    """
    channels, height, width = image_shape
    images = torch.empty((count, height, width, channels), dtype=torch.uint8, pin_memory=pin)
    return images.numpy(), images.permute(0, 3, 1, 2)


def copied_in_side_stream(
    batches: Generator[Batch, None, None], device: torch.device
) -> Generator[Batch, None, None]:
    """Yield the batches of a generator with their images copied to a GPU; on a CPU, unchanged.

    The copies run in a separate CUDA stream, concurrently with the device's earlier work. In the compute
    stream they would start only after the previous step. The images must be in page-locked memory, or each
    copy blocks. Labels stay on the CPU, where the training step reads them.

    No batch is read ahead, so errors of the reader and the position in the data are unchanged. Closing the
    iterator closes the generator.
    """
    with closing(batches):
        if device.type != "cuda":
            yield from batches
            return
        stream = torch.cuda.Stream(device)
        for batch in batches:
            copied = _copy(batch, device, stream)
            del batch  # torch reuses page-locked memory once its copy has ended
            yield copied
            del copied


def _copy(batch: Batch, device: torch.device, stream: torch.cuda.Stream) -> Batch:
    current = torch.cuda.current_stream(device)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.to(device, non_blocking=True)
        # It was allocated in the side stream and is used in the current one: record that, so that its memory
        # is not reused too early.
        moved.record_stream(current)
        return moved

    with torch.cuda.stream(stream):
        images = map_tensors(move, batch.images)
        mirrored = None if batch.mirrored is None else move(batch.mirrored)
    current.wait_stream(stream)
    return dataclasses.replace(batch, images=images, mirrored=mirrored)


# The flip of training images, and the transform of the user.


class Operation(IntEnum):
    """Operations that draw random numbers. The numbers are part of the seed; never change or reuse them."""

    TRANSFORM = 0
    FLIP = 1
    READ = 2


@lru_cache(maxsize=16)
def _epoch_key(seed: int, epoch: int) -> int:
    return hash_key(seed, epoch)


def are_mirrored(seed: int, epoch: int, samples: np.ndarray) -> np.ndarray:
    """Return which of `samples`, int64 [n], the flip mirrors in an epoch: bool [n]; half of them.

    Those for which the highest bit of ``hash_key(seed, epoch, sample, Operation.FLIP)`` is 0.
    """
    keys = splitmix64_of(samples.astype(np.uint64) ^ np.uint64(_epoch_key(seed, epoch)))
    return splitmix64_of(keys ^ np.uint64(Operation.FLIP)) < np.uint64(2**63)


Transform = Callable[[torch.Tensor], Any]
"""``f(tensor [C, H, W]) -> tensor``, as in torchvision.transforms.v2."""


def apply_transform(
    transform: Transform, pixels: np.ndarray, *, seed: int, epoch: int, sample: int
) -> torch.Tensor:
    """Run a user's transform with torch, ``random`` and numpy seeded for this sample.

    pixels: [H, W, C], uint8 or float. The result [C, H, W] must have the same size, and be uint8 or float
    (taken as normalised). Raises DataError otherwise, and for exceptions of the transform.
    """
    key = hash_key(seed, epoch, sample, Operation.TRANSFORM)
    with IsolatedRandom(key).active():
        try:
            result = transform(torch.from_numpy(np.array(pixels.transpose(2, 0, 1), order="C")))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())
            raise DataError(
                f"the transform raised {type(error).__name__}: {text} ({where.filename}:{where.lineno})"
            ) from error
    return _checked(result, (pixels.shape[2], *pixels.shape[:2]))


def _checked(result: Any, shape: tuple[int, ...]) -> torch.Tensor:
    found = tuple(getattr(result, "shape", ())), getattr(result, "dtype", None)
    is_tensor = isinstance(result, torch.Tensor) and (
        result.dtype == torch.uint8 or result.is_floating_point()
    )
    if not is_tensor or found[0] != shape:
        kind = type(result).__name__
        raise DataError(f"the transform must return a tensor {shape} of uint8 or floats, not {kind} {found}")
    result = result.as_subclass(torch.Tensor)  # torchvision returns a subclass
    if result.dtype == torch.uint8:
        return result
    with naming(str, "the result of the transform"):
        check_normalised(result)
    return result.float()


class IsolatedRandom:
    """A private random state for ``random``, ``numpy.random`` and torch's CPU generator.

    Inside ``active()`` the three global generators continue this state, seeded from ``key``; afterwards they
    are restored. User code that calls ``random.shuffle`` is then reproducible, and dropout in the main
    process is not affected.
    """

    def __init__(self, key: int) -> None:
        self._python = random.Random(key).getstate()
        self._numpy = np.random.RandomState(key % 2**32).get_state()
        self._torch = torch.Generator().manual_seed(key).get_state()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Install the private state; restore the global one at the end, also after an exception."""
        outer = random.getstate(), np.random.get_state(), torch.get_rng_state()
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        try:
            yield
        finally:
            self._python = random.getstate()
            self._numpy = np.random.get_state()
            self._torch = torch.get_rng_state()
            random.setstate(outer[0])
            np.random.set_state(outer[1])
            torch.set_rng_state(outer[2])


# The list of bad samples.


class BadSampleList:
    """The file ``bad_samples.txt``: one line ``kind<tab>name: reason`` per bad sample, without duplicates.

    An existing file is continued, so that a resumed run does not list a sample twice.
    """

    def __init__(self, folder: Path, name: str = LIST_NAME) -> None:
        self.path = folder / name
        self.counts: Counter[str] = Counter()
        self._seen: set[int] = set()
        with contextlib.suppress(OSError):
            before = read_regular(self.path, _UNREADABLE_LIST, self.path.parent)
            for line in before.decode(errors="replace").splitlines():
                self._seen.add(hash(line))
                self.counts[printable(line.split("\t", 1)[0])[:40]] += 1

    def add(self, problems: list[BadSample]) -> None:
        """Append new entries."""
        lines = []
        for problem in problems:
            line = f"{problem.kind}\t{problem.text}"
            if hash(line) in self._seen:
                continue
            self.counts[problem.kind] += 1
            if len(self._seen) < MAX_LISTED:
                self._seen.add(hash(line))
                lines.append(line + "\n")
        if not lines:
            return
        with open_regular(self.path, mode="ab") as file:
            file.write("".join(lines).encode())

    def summary(self) -> str:
        """Return a summary such as ``3 undecodable, 1 missing``; empty if there are none."""
        return ", ".join(f"{count} {kind}" for kind, count in self.counts.most_common())
