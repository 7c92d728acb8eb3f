"""Compute results ahead of time and in order, in threads or in processes (torch's DataLoader)."""

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
from functools import partial
from itertools import islice
from multiprocessing.queues import Queue
from typing import Any, TypeVar

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from plsc.errors import DataError, refusing

logger = logging.getLogger(__name__)
Request = TypeVar("Request")
Result = TypeVar("Result")

AHEAD_PER_THREAD = 2
THREAD_NAME = "plsc-data"
SECONDS_TO_WARNING, SECONDS_TO_ERROR = 60, 1800  # without a result of a worker process
_SHARED_MEMORY = "/dev/shm"  # where torch passes tensors between processes

_END = object()


class Stopped(Exception):
    """The consumer was closed; the result is not needed."""


def in_order(
    work: Callable[[Request, Callable[[], bool]], Result], requests: Iterable[Request], threads: int
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
