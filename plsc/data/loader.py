"""Batches from an indexed source, in the order of a plan, made ahead by threads or by processes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace

from plsc.data.batch import Batch, BufferRing, NamesOf, to_input
from plsc.data.cache import CachedSource
from plsc.data.mixture import MixturePlan
from plsc.data.order import BatchPlan
from plsc.data.reader import ReaderLoader
from plsc.data.samples import BatchReader, Recipe, Request
from plsc.data.sources.base import Source
from plsc.data.sources.torch_dataset import TorchDatasetSource
from plsc.data.workers import WorkerProcesses, in_order
from plsc.errors import OptionError

__all__ = ["Batch", "ReaderLoader", "SourceLoader", "choose_kind", "to_input"]


class SourceLoader:
    """Yields this rank's batches of an indexed source; ``recipe`` says how a sample becomes an image.

    A sample's randomness depends on (seed, epoch, sample) alone, so the number of ranks, threads and
    processes, and the kind of loader, do not change a batch.

    ``kind``: ``threads`` decode into memory that is used again; ``processes`` are for Python code of the
    user's, which would wait for itself in threads; ``auto`` chooses, as `choose_kind`. ``num_workers`` of
    them work ahead, by a bounded number of batches; with 0 the caller does the work. Threads live as long as
    the iterator of an epoch, processes as long as the loader.
    """

    def __init__(
        self,
        source: Source,
        plan: BatchPlan | MixturePlan,
        rank: int,
        recipe: Recipe,
        *,
        kind: str = "auto",
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.source = source
        self.kind, self.reason = choose_kind(kind, source, recipe, num_workers)
        self.num_workers = num_workers
        shares_generators = self.kind == "threads" and num_workers > 0
        draws = _is_dataset(source) and not shares_generators
        reader = BatchReader(source, replace(recipe, seed_reading=draws))
        self._ring = BufferRing(plan.largest_batch, recipe.image_shape, pin_memory)
        self._reader = reader
        self._processes: WorkerProcesses | None = None
        if self.kind == "processes":
            work = _InProcess(reader, plan.largest_batch)
            self._processes = WorkerProcesses(work, num_workers, pin_memory)

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches in an epoch, the same on every rank."""
        return self.plan.steps_per_epoch

    def epoch(self, epoch: int, start_step: int = 0) -> Generator[Batch, None, None]:
        """Yield the batches of the steps ``start_step``.. of an epoch; one epoch at a time."""
        requests = _requests(self.plan, self.rank, epoch, start_step)
        if self._processes is None:
            return in_order(self._read, requests, self.num_workers)
        return self._named(self._processes.in_order(requests))

    def describe(self) -> str:
        """Return a line for the user: what reads the images, and why."""
        if self.num_workers == 0:
            return "data: images are read between the steps (num_workers 0)"
        what = self.kind if self.num_workers > 1 else {"threads": "thread"}.get(self.kind, "process")
        return f"data: {self.num_workers} {what} a rank read ahead, {self.reason}"

    def _read(self, request: Request, stopped: Callable[[], bool]) -> Batch:
        return self._reader.read(request, self._ring, stopped)

    def _named(self, batches: Iterator[Batch]) -> Generator[Batch, None, None]:
        for batch in batches:
            if isinstance(batch.names, NamesOf):
                batch.names.source = self.source
            yield batch


def _requests(plan: BatchPlan | MixturePlan, rank: int, epoch: int, start_step: int) -> Iterator[Request]:
    # In the consumer's thread and process: the order of (maybe) millions of samples exists once.
    for step in range(start_step, plan.steps_per_epoch):
        yield plan.draw_epoch(epoch, step), plan.indices(epoch, step, rank)


class _InProcess:
    """The reader in a worker process, with memory of its own."""

    def __init__(self, reader: BatchReader, largest_batch: int) -> None:
        self.reader = reader
        self.largest_batch = largest_batch

    def __call__(self, request: Request) -> Batch:
        # Fresh memory for each batch: its pages move to the other process.
        ring = BufferRing(self.largest_batch, self.reader.recipe.image_shape)
        return self.reader.read(request, ring)


def _is_dataset(source: Source) -> bool:
    """Whether samples come from a user's Dataset, be it through a cache."""
    inner = source.source if isinstance(source, CachedSource) else source
    return isinstance(inner, TorchDatasetSource)


def choose_kind(asked: str, source: Source, recipe: Recipe, num_workers: int) -> tuple[str, str]:
    """Return ``threads`` or ``processes`` and the reason, for a line to the user.

    Raises OptionError for threads where a user's transform draws random numbers: from torch's generators,
    which all threads of a process share, the training's, too.
    """
    if asked == "threads" and recipe.transform is not None and num_workers:
        raise OptionError(
            "data.loader is 'threads', but a transform of your own draws from Python's and torch's global "
            "generators, which threads share; use 'processes', or set_num_workers(0)"
        )
    if asked != "auto":
        return asked, "as set_loader asks"
    if recipe.transform is not None:
        return "processes", "for the transform of your own"
    if _is_dataset(source):
        return "processes", "for the Dataset of your own"
    return "threads", "as nothing of your own is in Python"
