"""Make batches of an indexed source: read, decode, transform; ahead of time, by threads or processes."""

from __future__ import annotations

import copy
import errno
import gc
import logging
import multiprocessing
import os
import shutil
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from multiprocessing.queues import Queue
from typing import Any, TypeVar

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from plsc.data.batch import (
    BadSample,
    Batch,
    IsolatedRandom,
    Operation,
    SampleNames,
    Transform,
    apply_transform,
    are_mirrored,
    new_images,
)
from plsc.data.decode import Image, ImageShape, decode_into
from plsc.data.order import BatchPlan
from plsc.data.sources.base import CachedSource, Source, TorchDatasetSource
from plsc.errors import DataError, add_note, naming, refusing
from plsc.seeds import hash_key
from plsc.values import Input, as_input, stack_inputs

logger = logging.getLogger(__name__)

Request = tuple[int, np.ndarray]
"""The epoch, and the sample indices of one batch."""
Sample = tuple[Image, int]
"""An image and its label."""
Asked = TypeVar("Asked")
Result = TypeVar("Result")

AHEAD_PER_THREAD = 2
THREAD_NAME = "plsc-data"
SECONDS_TO_WARNING, SECONDS_TO_ERROR = 60, 1800  # without a result of a worker process
_SHARED_MEMORY = "/dev/shm"  # where torch passes tensors between processes

_END = object()


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


# Work ahead of time, in order.


class Stopped(Exception):
    """The consumer was closed; the result is not needed."""


def in_order(
    work: Callable[[Asked, Callable[[], bool]], Result], requests: Iterable[Asked], threads: int
) -> Generator[Result, None, None]:
    """Yield ``work(request, stopped)`` for each request, in order, computed ahead by ``threads`` threads.

    At most twice as many results as threads are prefetched. Requests are drawn in the caller's thread.
    Exceptions of ``work`` are raised in place of its result. When the iterator is closed or fails, waiting
    requests are dropped and it waits for the threads to end: ``work`` should call ``stopped()`` regularly
    and raise Stopped. With 0 threads the caller's thread does the work.
    """
    stop = threading.Event()
    if threads == 0:
        for request in requests:
            yield work(request, stop.is_set)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix=THREAD_NAME)
    waiting: deque[Future[Result]] = deque()
    coming = iter(requests)

    def ask(count: int) -> None:
        for request in islice(coming, count):
            waiting.append(pool.submit(work, request, stop.is_set))

    def take() -> Result:  # a function, so that no variable of the generator refers to a batch
        future = waiting.popleft()
        ask(1)
        return future.result()

    try:
        ask(AHEAD_PER_THREAD * threads)
        while waiting:
            yield take()
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


class WorkerProcesses:
    """Run ``work(request)`` in ``num_workers`` processes that live as long as this object.

    ``work`` is copied into the processes. Its DataErrors are raised unchanged. With 0 workers the caller's
    process does the work.
    """

    def __init__(self, work: Callable[[Any], Any], num_workers: int, pin_memory: bool = False) -> None:
        self._requests = _Requests()
        options = {"sampler": self._requests, "persistent_workers": num_workers > 0}
        self._loader = _loader(_Work(work), num_workers, pin_memory, None, **options)

    def in_order(self, requests: Iterable[Any]) -> Generator[Any, None, None]:
        """Yield the results in the order of the requests, which are drawn in this process."""
        self._requests.coming = requests
        yield from _results_of(self._loader)


def run_in_process(
    results: Callable[[], Iterator[Any]], pin_memory: bool = False
) -> Generator[Any, None, None]:
    """Yield what the generator ``results()`` yields in a forked process, a few items ahead.

    Only the yielded items need to be picklable, because the process is forked.
    """
    yield from _results_of(_loader(_Stream(results), 1, pin_memory, "fork", prefetch_factor=4))


def _loader(
    dataset: Dataset[Any], num_workers: int, pin_memory: bool, method: str | None, **options: Any
) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=num_workers,
        timeout=min(5, SECONDS_TO_WARNING) if num_workers else 0,  # as torch polls for dead workers
        pin_memory=pin_memory,
        worker_init_fn=_start_worker,
        multiprocessing_context=_context(method) if num_workers else None,
        generator=torch.Generator().manual_seed(0),  # a separate one: the global one is used by dropout
        **options,
    )


class _Results(Queue):
    """A queue that sends an error in place of a result that cannot be sent."""

    def _on_queue_feeder_error(self, error: Exception, item: Any) -> None:
        if get_worker_info() is None or not isinstance(item, tuple):
            super()._on_queue_feeder_error(error, item)  # type: ignore[misc]
            return
        number, result = item  # as torch's worker puts them
        failure: Any = ExceptionWrapper((type(error), error, error.__traceback__), "in a data worker process")
        if isinstance(result, ExceptionWrapper):  # of a type that cannot be pickled
            result.exc_type, failure = RuntimeError, result
        if os.strerror(errno.ENOSPC) in str(error):
            free = shutil.disk_usage(_SHARED_MEMORY).free
            failure = DataError(
                f"{_SHARED_MEMORY} has only {free / 1e6:,.1f} MB free, less than a batch; enlarge it, as by "
                "docker run --shm-size=8g, or lower data.num_workers"
            )
        self.put((number, failure))


def _context(method: str | None = None) -> Any:
    """Return multiprocessing's context of a start method (None: the default), with `_Results` as queues."""
    context: Any = copy.copy(multiprocessing.get_context(method))
    context.Queue = partial(_Results, ctx=context)
    return context


class _Requests(Sampler[Any]):
    coming: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        yield from self.coming


class _Work(Dataset[Any]):
    """The work as a dataset whose indices are requests.

    A DataError is returned, not raised, because torch wraps exceptions of a worker in a long traceback.
    """

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.work = work

    def __getitem__(self, request: Any) -> Any:
        try:
            return self.work(request)
        except DataError as error:
            return DataError(str(error), kind=error.kind)


class _Stream(IterableDataset[Any]):
    def __init__(self, results: Callable[[], Iterator[Any]]) -> None:
        self.results = results

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self.results()
        except DataError as error:
            yield DataError(str(error), kind=error.kind)


def _results_of(loader: DataLoader[Any]) -> Iterator[Any]:
    try:
        # The start methods spawn and forkserver (the default from Python 3.14) pickle the work.
        advice = "set data.num_workers to 0, or define functions at the top level of a module"
        with refusing("cannot start data worker processes", advice), _starting_workers():
            results = iter(loader)
        while (result := _next_of(results)) is not _END:
            if isinstance(result, DataError):
                raise result
            yield result
    except Exception as error:
        _end_workers(loader)
        # A broken connection; messages of exceptions in the dataset begin with "Caught".
        is_broken = isinstance(error, EOFError | OSError) and not str(error).startswith("Caught ")
        is_dead = isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker")
        if not is_dead and not (is_broken and loader.num_workers):
            raise
        reason = str(error).split("\n", 1)[0] or "it closed its connection"
        remedy, method = "if memory ran out, lower num_workers", multiprocessing.get_start_method()
        if method != "fork":  # a worker imports the script
            remedy += f'; with the start method {method}, a script needs if __name__ == "__main__":'
        raise DataError(f"a data worker process died ({reason}); {remedy}") from error


def _next_of(results: Any) -> Any:
    """Return the next result, or _END. Raises DataError if the workers send none for too long."""
    silent = 0
    while True:
        try:
            return next(results, _END)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader timed out"):
                raise
        silent += int(results._timeout)
        message = f"no data for {silent} s from the data worker processes {[w.pid for w in results._workers]}"
        if silent >= SECONDS_TO_ERROR:
            raise DataError(f"{message}; use smaller batches, or no worker (data.num_workers 0)")
        if silent % SECONDS_TO_WARNING == 0:
            logger.warning(message)


def _end_workers(loader: DataLoader[Any]) -> None:
    """End persistent workers now.

    An exception may keep them in a reference cycle. The garbage collector then deletes their queues first, so
    that they never receive the request to end, and waits five seconds for each.
    """
    iterator, loader._iterator = loader._iterator, None
    if iterator is not None and hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


def _as_it_is(result: Any) -> Any:
    return result


def _start_worker(worker: int) -> None:
    # Ctrl-C, SIGHUP and torchrun's SIGTERM reach the process group, but only the main process handles them. A
    # worker ends when the main process requests it, or by torch's watchdog when the main process is gone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_main_process_asks, daemon=True).start()
    torch.set_num_threads(1)


def _end_when_main_process_asks() -> None:
    main = multiprocessing.parent_process()  # not os.getppid(): a forkserver is between them
    while main is not None and signal.sigwaitinfo({signal.SIGTERM}).si_pid != main.pid:
        pass
    os._exit(0)


@contextmanager
def _starting_workers() -> Iterator[None]:
    """Block signals while workers start, hide garbage from them, and remove torch's SIGCHLD handler.

    A forked worker must not collect garbage of the main process: destructors of libraries, such as that of an
    onnxruntime session, wait for threads that do not exist after a fork.

    Workers inherit the blocked signals, so that none ends a worker before `_start_worker` has run; the main
    process receives them afterwards. torch's handler would raise anywhere in the program, such as during a
    save, when a worker dies. Waiting for the next batch also detects that, within seconds.
    """
    before = signal.getsignal(signal.SIGCHLD)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGCHLD, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
