"""Work done ahead, in order: by threads, or by processes (torch's DataLoader, its deaths looked after)."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from plsc.errors import DataError

Request = TypeVar("Request")
Result = TypeVar("Result")

AHEAD_PER_THREAD = 2
THREAD_NAME = "plsc-data"


class Stopped(Exception):
    """The consumer is closed; the result is not needed."""


def in_order(
    work: Callable[[Request, Callable[[], bool]], Result],
    requests: Iterable[Request],
    threads: int,
) -> Generator[Result, None, None]:
    """Yield ``work(request, stopped)`` of each request, in order, computed ahead by ``threads`` threads.

    Twice as many results as threads are made ahead, at most; requests are taken in the caller's thread.
    What work raises comes out where its result would. When the iterator is closed or fails, what waits
    is dropped, and the threads have ended before it returns: work asks ``stopped()`` now and then and
    raises Stopped. With 0 threads the caller's does the work.
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

    def take() -> Result:  # a function, so that no variable of the generator holds a batch
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
    """``num_workers`` processes that live as long as this and call ``work(request)``.

    ``work`` is copied into them. What it raises as DataError is raised here as it is. With 0 workers the
    caller's process does the work.
    """

    def __init__(self, work: Callable[[Any], Any], num_workers: int, pin_memory: bool = False) -> None:
        self._requests = _Requests()
        self._loader: DataLoader[Any] = DataLoader(
            _Work(work),
            batch_size=None,
            sampler=self._requests,
            collate_fn=_as_it_is,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=pin_memory,
            worker_init_fn=_start_worker,
            # Its own: else each epoch takes a number from the generator that dropout draws from.
            generator=torch.Generator().manual_seed(0),
        )

    def in_order(self, requests: Iterable[Any]) -> Generator[Any, None, None]:
        """Yield the results in the order of the requests, which are taken in this process."""
        self._requests.coming = requests
        yield from _results_of(self._loader)


def run_in_process(
    results: Callable[[], Iterator[Any]], pin_memory: bool = False
) -> Generator[Any, None, None]:
    """Yield what the generator ``results()`` yields in a forked process, a few items ahead.

    The process is forked, so nothing of ``results`` need be picklable but what it yields.
    """
    yield from _results_of(
        DataLoader(
            _Stream(results),
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=1,
            prefetch_factor=4,
            pin_memory=pin_memory,
            worker_init_fn=_start_worker,
            multiprocessing_context="fork",
            generator=torch.Generator().manual_seed(0),
        )
    )


class _Requests(Sampler[Any]):
    """The requests of one epoch; it runs in the main process."""

    coming: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        yield from self.coming


class _Work(Dataset[Any]):
    """The work, as a dataset whose indices are requests.

    A DataError is returned and not raised: torch wraps what a worker raises into a long traceback.
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
        with _starting_workers():
            results = iter(loader)
        for result in results:
            if isinstance(result, DataError):
                raise result
            yield result
    except Exception as error:
        _end_workers(loader)
        if not _is_death_of_worker(error, loader.num_workers):
            raise
        reason = str(error).split("\n", 1)[0] or "it closed its connection"
        raise DataError(
            f"a data worker process died ({reason}); if memory ran out, lower num_workers"
        ) from error


def _end_workers(loader: DataLoader[Any]) -> None:
    """End persistent workers now.

    An exception may keep them in a cycle. When the garbage collector ends them, it takes their queues first,
    so that they never hear of it, and waits five seconds for each.
    """
    iterator, loader._iterator = loader._iterator, None
    if iterator is not None and hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


def _is_death_of_worker(error: Exception, num_workers: int) -> bool:
    if isinstance(error, RuntimeError):
        return str(error).startswith("DataLoader worker")
    # A broken connection; what the dataset itself raised in a worker begins with "Caught".
    is_broken = isinstance(error, (EOFError, OSError))
    return is_broken and num_workers > 0 and not str(error).startswith("Caught ")


def _as_it_is(result: Any) -> Any:
    return result


def _start_worker(worker: int) -> None:
    # Ctrl-C and torchrun's SIGTERM reach the whole process group. The main process decides what they
    # mean; a worker ends on its request, or by torch's watchdog when the main process is gone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_main_process_asks, daemon=True).start()
    torch.set_num_threads(1)


def _end_when_main_process_asks() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


@contextmanager
def _starting_workers() -> Iterator[None]:
    """Keep signals out while workers start, and torch's SIGCHLD handler out for good.

    A worker inherits the blocked signals, so that none ends it before `_start_worker` has run; the main
    process gets them afterwards. torch's handler would raise anywhere in the program (in the middle of a
    save, say) when a worker dies; waiting for the next batch finds that out, too, within seconds.
    """
    before = signal.getsignal(signal.SIGCHLD)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGCHLD, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
