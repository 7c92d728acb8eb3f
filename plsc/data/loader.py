"""Load batches from an indexed source, in the order of a plan, ahead of time by threads or processes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace

from plsc.data.batch import Batch, BufferRing, SampleNames, to_input
from plsc.data.cache import CachedSource
from plsc.data.order import BatchPlan
from plsc.data.reader import ReaderLoader
from plsc.data.samples import BatchReader, Recipe, Request
from plsc.data.sources.base import Source
from plsc.data.sources.torch_dataset import TorchDatasetSource
from plsc.data.workers import WorkerProcesses, in_order

__all__ = ["Batch", "ReaderLoader", "SourceLoader", "choose_kind", "to_input"]


class SourceLoader:
    """Yield this rank's batches of an indexed source; ``recipe`` defines how samples become images.

    A sample's randomness depends only on (seed, epoch, sample). Batches therefore do not depend on the
    number of ranks or workers, or on the kind of workers.

    Args:
        kind: ``threads`` decode into reused memory. ``processes`` are for Python code of the user, which
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
        chosen, self.reason = choose_kind(source, recipe)
        self.kind = kind or chosen
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
        """Number of batches per epoch, the same on every rank."""
        return self.plan.steps_per_epoch

    def epoch(self, epoch: int, start_step: int = 0) -> Generator[Batch, None, None]:
        """Yield the batches of an epoch from step ``start_step``. Iterate over one epoch at a time."""
        requests = _requests(self.plan, self.rank, epoch, start_step)
        if self._processes is None:
            return in_order(self._read, requests, self.num_workers)
        return self._named(self._processes.in_order(requests))

    def describe(self) -> str:
        """Return a log message: how images are read, and why."""
        if self.num_workers == 0:
            return "data: images are read between the training steps (num_workers 0)"
        return f"data: {self.num_workers} {self.kind} per rank load images in the background, {self.reason}"

    def _read(self, request: Request, stopped: Callable[[], bool]) -> Batch:
        return self._reader.read(request, self._ring, stopped)

    def _named(self, batches: Iterator[Batch]) -> Generator[Batch, None, None]:
        for batch in batches:
            if isinstance(batch.names, SampleNames):
                batch.names.source = self.source
            yield batch


def _requests(plan: BatchPlan, rank: int, epoch: int, start_step: int) -> Iterator[Request]:
    # Runs in the consumer's process, so that the order of possibly millions of samples is stored only once.
    for step in range(start_step, plan.steps_per_epoch):
        yield plan.draw_epoch(epoch, step), plan.indices(epoch, step, rank)


class _InProcess:
    """The reader in a worker process, with its own memory."""

    def __init__(self, reader: BatchReader, largest_batch: int) -> None:
        self.reader = reader
        self.largest_batch = largest_batch

    def __call__(self, request: Request) -> Batch:
        # New memory for each batch, because its pages move to the other process.
        ring = BufferRing(self.largest_batch, self.reader.recipe.image_shape)
        return self.reader.read(request, ring)


def _is_dataset(source: Source) -> bool:
    inner = source.source if isinstance(source, CachedSource) else source
    return isinstance(inner, TorchDatasetSource)


def choose_kind(source: Source, recipe: Recipe) -> tuple[str, str]:
    """Return ``threads`` or ``processes``, and the reason for the log.

    A transform or Dataset may draw from global random generators, which all threads share.
    """
    if recipe.transform is not None:
        return "processes", "because of your transform"
    if _is_dataset(source):
        return "processes", "because of your Dataset"
    return "threads", "because there is no custom Python code in the data pipeline"
