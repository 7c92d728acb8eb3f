"""Make batches of an indexed source: read, decode, transform; ahead of time, by threads or processes.

Samples may be cached in memory or on a local disk, up to a limit, as they are first read. Entries are never
evicted: every epoch reads every sample once in a new order, so all are equally useful.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from plsc.data.augment import IsolatedRandom, Operation, Transform, apply_transform, are_mirrored
from plsc.data.batch import BadSample, Batch, SampleNames, new_images
from plsc.data.decode import Image, ImageShape, decode_into
from plsc.data.order import BatchPlan
from plsc.data.sources.base import Source, TorchDatasetSource
from plsc.data.workers import Stopped, WorkerProcesses, in_order
from plsc.errors import DataError, add_note, naming
from plsc.seeds import hash_key
from plsc.values import Input, as_input, stack_inputs

Request = tuple[int, np.ndarray]
"""The epoch, and the sample indices of one batch."""
Sample = tuple[Image, int]
"""An image and its label."""


@dataclass(frozen=True)
class Recipe:
    """How samples become images of a batch.

    Attributes:
        bad_images: ``stop`` or ``skip``.
        class_num: samples with labels outside 0..class_num - 1 are bad; None disables the check.
        seed_reading: seed the global generators for each sample, for a source that draws from them. Not in
            threads, which share these generators.
        example: the `BaseModel.example_input` of a network that takes no images; None: images.
    """

    image_shape: ImageShape
    seed: int
    flip: bool = True
    transform: Transform | None = None
    bad_images: str = "stop"
    class_num: int | None = None
    seed_reading: bool = False
    example: Input | None = None


class SourceLoader:
    """Yield this rank's batches of an indexed source; ``recipe`` defines how samples become images.

    A sample's randomness depends only on (seed, epoch, sample). Batches therefore do not depend on the
    number of ranks or workers, or on the kind of workers.

    Args:
        kind: ``threads`` decode into the batch. ``processes`` are for Python code of the user, which
            threads cannot run in parallel. None: see `choose_kind`.
        num_workers: number of threads or processes. They prefetch a limited number of batches. With 0 the
            caller reads the batches.

    Threads live as long as the iterator of an epoch, processes as long as the loader.
    """

    def __init__(
        self,
        source: Source,
        plan: BatchPlan,
        rank: int,
        recipe: Recipe,
        *,
        kind: str | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.source = source
        self.kind = kind or choose_kind(source, recipe)
        self.num_workers = num_workers
        shares_generators = self.kind == "threads" and num_workers > 0
        draws = _is_dataset(source) and not shares_generators
        in_processes = self.kind == "processes"  # which pin the memory when it has arrived
        self._reader = BatchReader(
            source, replace(recipe, seed_reading=draws), pin_memory and not in_processes
        )
        self._processes: WorkerProcesses | None = None
        if in_processes:
            self._processes = WorkerProcesses(self._reader.read, num_workers, pin_memory)

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches per epoch, the same on every rank."""
        return self.plan.steps_per_epoch

    def epoch(self, epoch: int, start_step: int = 0) -> Generator[Batch, None, None]:
        """Yield the batches of an epoch from step ``start_step``. Iterate over one epoch at a time."""
        # Drawn in this process, so that the order of possibly millions of samples is stored only once.
        requests = (
            (self.plan.draw_epoch(epoch, step), self.plan.indices(epoch, step, self.rank))
            for step in range(start_step, self.plan.steps_per_epoch)
        )
        if self._processes is None:
            return in_order(self._reader.read, requests, self.num_workers)
        return self._named(self._processes.in_order(requests))

    def _named(self, batches: Iterator[Batch]) -> Generator[Batch, None, None]:
        for batch in batches:
            if isinstance(batch.names, SampleNames):
                batch.names.source = self.source
            yield batch


def _is_dataset(source: Source) -> bool:
    inner = source.source if isinstance(source, CachedSource) else source
    return isinstance(inner, TorchDatasetSource)


def choose_kind(source: Source, recipe: Recipe) -> str:
    """Return ``processes`` for a transform or Dataset of the user, otherwise ``threads``.

    The user's code may draw from global random generators, which all threads share.
    """
    return "processes" if recipe.transform is not None or _is_dataset(source) else "threads"


# A batch.


class BatchReader:
    """Make batches. Thread-safe; a copy works in another process."""

    def __init__(self, source: Source, recipe: Recipe, pin: bool = False) -> None:
        self.source = source
        self.recipe = recipe
        self.pin = pin

    def read(self, request: Request, stopped: Callable[[], bool] = lambda: False) -> Batch:
        """Return the batch of a request.

        Raises:
            DataError: names the sample; for a bad sample if ``bad_images`` is ``stop``, and for an error of
                the transform.
            Stopped: ``stopped()`` returned True.
        """
        epoch, indices = request
        example = self.recipe.example
        count = len(indices) if example is None else 0
        slots, images = new_images(count, self.recipe.image_shape, self.pin)
        batch = Batch(images, torch.empty(0, dtype=torch.int64), [], is_input=example is not None)
        labels: list[int] = []
        used: list[int] = []
        floats: list[Any] = []  # float images, or samples that are not images
        samples: Iterator[Sample | DataError] = (self._read_one(index, epoch) for index in indices.tolist())
        read_many = getattr(self.source, "read_many", None)
        if read_many is not None and not self.recipe.seed_reading:
            samples = read_many(indices)
        for index, sample in zip(indices.tolist(), samples, strict=False):
            if stopped():
                raise Stopped
            filled = len(used)
            out = slots[filled] if example is None else slots
            try:
                label, image = self._decoded(index, sample, out)
            except DataError as error:
                if self.recipe.bad_images == "stop":
                    is_training = self.recipe.class_num is not None
                    hint = "; to leave such samples out, set data.bad_images to skip" * is_training
                    raise DataError(f"{error}{hint}", kind=error.kind) from None
                batch.problems.append(BadSample.from_error(error))
                continue
            if example is None and self.recipe.transform is not None:
                image = self._transformed(self.recipe.transform, index, epoch, out, image)
            if image is not None:
                floats.append(image)
            if filled and len(floats) not in (0, filled + 1):
                raise DataError(f"{self.source.name(index)}: the batch has uint8 and float32 images")
            used.append(index)
            labels.append(label)
        if example is not None:
            batch.images = stack_inputs(floats, example)
        else:
            batch.images = torch.stack(floats) if floats else images[: len(used)]
            if self.recipe.flip:
                mirrored = are_mirrored(self.recipe.seed, epoch, np.array(used, np.int64))
                batch.mirrored = torch.from_numpy(mirrored) if mirrored.any() else None
        batch.labels = torch.tensor(labels, dtype=torch.int64)
        batch.names = SampleNames(used, self.source)
        return batch

    def _decoded(self, index: int, sample: Sample | DataError, out: np.ndarray) -> tuple[int, Any]:
        """Return (label, image if it is float or no image); DataError for a bad sample."""
        if isinstance(sample, DataError):
            raise sample
        data, label = sample
        recipe = self.recipe
        with naming(self.source.name, index):
            if recipe.class_num is not None and not 0 <= label < recipe.class_num:
                raise DataError(f"label {label} is outside 0..{recipe.class_num - 1}", kind="label")
            if recipe.example is None:
                return label, decode_into(data, out)
            return label, as_input(data, recipe.example)

    def _transformed(
        self, transform: Transform, index: int, epoch: int, out: np.ndarray, image: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Transform the pixels in ``out`` or the float image, without the flip; return a float image."""
        pixels = out if image is None else image.numpy().transpose(1, 2, 0)
        with naming(self.source.name, index):  # an error in the transform, not in the image: never skipped
            result = apply_transform(transform, pixels, seed=self.recipe.seed, epoch=epoch, sample=index)
        if result.dtype != torch.uint8:
            return result
        np.copyto(out, result.permute(1, 2, 0).numpy())
        return None

    def _read_one(self, index: int, epoch: int) -> Sample | DataError:
        try:
            if not self.recipe.seed_reading:
                return self.source[index]
            with IsolatedRandom(hash_key(self.recipe.seed, epoch, index, Operation.READ)).active():
                return self.source[index]
        except DataError as error:
            return error
        except Exception as error:  # a bug in the source: keep the traceback
            add_note(error, f"while reading {self.source.name(index)}")
            raise


# The cache.


class SampleCache:
    """Cache bytes by sample index in an unnamed file, which disappears when the process ends for any reason.

    It is in `folder`, or with None in memory. It takes at most `limit` bytes, and 16 bytes of memory per
    sample. When the disk is full, no more samples are added. Thread-safe.
    """

    def __init__(self, folder: Path | None, limit: int, num_samples: int) -> None:
        if folder is None:
            self._file: IO[bytes] = os.fdopen(os.memfd_create("plsc-cache"), "w+b")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it lives as long as this
        self.limit = limit
        self.used = 0
        # Zero pages take no memory until they are written to.
        self._ends = np.zeros(num_samples, dtype=np.int64)  # 0: not cached
        self._lengths = np.zeros(num_samples, dtype=np.int64)
        self._lock = threading.Lock()

    def get(self, index: int) -> bytes | None:
        """Return the bytes, or None if they are not cached."""
        end = int(self._ends[index])
        if not end:
            return None
        length = int(self._lengths[index])
        try:
            data = os.pread(self._file.fileno(), length, end - length)
        except OSError:
            return None
        return data if len(data) == length else None

    def put(self, index: int, data: bytes) -> None:
        """Cache the bytes if the limit and the disk allow it."""
        with self._lock:
            if self._ends[index] or self.used + len(data) > self.limit:
                return
            start = self.used
            self.used += len(data)
        try:
            written = os.pwrite(self._file.fileno(), data, start)
        except OSError:
            written = -1
        if written != len(data):
            self.limit = 0
            return
        self._lengths[index] = len(data)
        self._ends[index] = start + len(data)  # written last: from now on `get` finds the entry


class CachedSource:
    """A source that reads each image from `source` once, while the cache has room.

    With ``decoded`` the cache holds pixels at the network's size, otherwise encoded bytes. Images that are
    neither encoded nor uint8 after decoding are not cached.
    """

    def __init__(self, source: Source, cache: SampleCache, image_shape: ImageShape, decoded: bool) -> None:
        self.source = source
        self.cache = cache
        self._labels = source.labels()
        self._decoded = decoded
        channels, height, width = image_shape
        self._size = (height, width, channels)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Image, int]:
        kept = self.cache.get(index)
        if kept is not None:
            label = int(self._labels[index])
            if not self._decoded:
                return kept, label
            return np.frombuffer(kept, dtype=np.uint8).reshape(self._size), label
        image, label = self.source[index]
        if self._decoded:
            image = self._decode(image, index)
        if isinstance(image, bytes):
            self.cache.put(index, image)
        return image, label

    def name(self, index: int) -> str:
        """Return the name of a sample in the source."""
        return self.source.name(index)

    def labels(self) -> np.ndarray:
        """Return all labels, int64 [N]."""
        return self._labels

    def _decode(self, image: Image, index: int) -> Image:
        pixels = np.empty(self._size, dtype=np.uint8)
        with naming(self.name, index):
            floats = decode_into(image, pixels)
        if floats is not None:
            return floats
        self.cache.put(index, pixels.tobytes())
        return pixels
