"""Code of the measuring processes: the memory of one way, or the times of several ways in turn.

Each result is printed at once as a line of JSON, so that none is lost if the process is killed.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import resource
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor
from ways import BY_NAME, Built, Store, use_tf32

ENOUGH = 20.0  # seconds of steps, after which no further one is needed
_BATCHES = 8  # several, so that no batch is memorised within a run


def print_json(kind: str, **facts: object) -> None:
    """Print a value as a line of JSON."""
    print(json.dumps({"kind": kind, **facts}), flush=True)


def limit_memory(gibibytes: float | None) -> None:
    """Limit the memory, so that only this process fails when the machine runs out of it.

    gibibytes: CPU memory in addition to what is mapped now; None: 0.9 of the free memory.
    """
    wanted = 0.9 * free_memory() if gibibytes is None else gibibytes * 2**30
    mapped = status("VmData")
    limit = int(wanted + mapped)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    Path("/proc/self/oom_score_adj").write_text("1000")


def free_memory() -> int:
    """Return the bytes that are free for this process, on the machine and in its control group."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    group = Path("/sys/fs/cgroup")
    try:
        most = (group / "memory.max").read_text().strip()
        if most != "max":
            free = min(free, int(most) - int((group / "memory.current").read_text()))
    except OSError:
        pass  # no control groups, or version 1 of them
    return free


def measure(name: str, classes: int, batch: int, dimension: int, steps: int, device: torch.device) -> None:
    """Run a few steps of one way and print their peak memory and times.

    imported: bytes after `import torch`; ready: after a step of the same way with 64 classes, which runs late
    imports; needed: class weights and their states; over: the peak minus ready and needed.
    """
    use_tf32(BY_NAME[name].tf32)
    on_gpu = device.type == "cuda"
    imported = 0 if on_gpu else status("VmRSS")
    _start_small(name, batch, dimension, device)
    ready = status("VmRSS")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        ready = torch.cuda.memory_allocated()
    built = _build(name, Store(classes, dimension, device))
    batches = list(_batches(classes, batch, dimension, device))
    losses, seconds = [], []
    for index in range(steps + 1):
        taken, loss = _timed(built, *batches[index % _BATCHES])
        losses.append(loss)
        if index:  # the first step is a warm-up
            seconds.append(taken)
        if len(seconds) > 1 and sum(seconds) > ENOUGH:
            break
    needed = sum(tensor.nbytes for tensor in built.tensors)
    peak = torch.cuda.max_memory_allocated() if on_gpu else status("VmHWM")
    print_json(
        "memory",
        way=name,
        C=classes,
        B=batch,
        D=dimension,
        peak=peak,
        imported=imported,
        ready=ready,
        needed=needed,
        over=peak - ready - needed,
        losses=losses,
        seconds=seconds,
        median=statistics.median(seconds),
        note=built.note(),
    )


def take_turns(
    names: list[str], classes: int, batch: int, dimension: int, rounds: int, device: torch.device
) -> None:
    """Time a step of each way in turn, `rounds` times; the order changes from round to round."""
    store = Store(classes, dimension, device)
    batches = cycle(list(_batches(classes, batch, dimension, device)))
    running: dict[str, Built] = {}
    for name in names:
        try:
            use_tf32(BY_NAME[name].tf32)
            built = _build(name, store)
            for _ in range(2):
                _timed(built, *next(batches))
        except Exception as error:
            print_json("failed", way=name, outcome=outcome_of(error))
            continue
        running[name] = built
    for turn in range(rounds):
        x, labels = next(batches)
        order = list(running)
        first = turn % max(1, len(order))
        for name in order[first:] + order[:first]:
            use_tf32(BY_NAME[name].tf32)
            try:
                seconds, _ = _timed(running[name], x, labels)
            except Exception as error:  # an implementation may raise anything; the others continue
                print_json("failed", way=name, outcome=outcome_of(error))
                del running[name]
                continue
            print_json("time", way=name, C=classes, B=batch, D=dimension, round=turn, seconds=seconds)


def measure_rates(batch: int, dimension: int, device: torch.device) -> None:
    """Print the FLOP/s of matrix products with the shapes of the head, and the bytes/s of a copy."""
    rates = {}
    on_gpu = device.type == "cuda"
    for name in ("float32", "tf32", "bfloat16") if on_gpu else ("float32", "bfloat16"):
        use_tf32(name == "tf32")
        dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
        x = torch.randn(batch, dimension, device=device, dtype=dtype)
        w = torch.randn(65536 if on_gpu else 16384, dimension, device=device, dtype=dtype)
        seconds = seconds_of(functools.partial(torch.matmul, x, w.T), device)
        rates[name] = 2 * batch * len(w) * dimension / seconds
    source = torch.ones(2**27, device=device)  # 512 MiB
    target = torch.empty_like(source)
    copied = 2 * source.nbytes  # read and written
    rates["copy"] = copied / seconds_of(lambda: target.copy_(source), device)
    print_json("rates", **rates)


def seconds_of(act: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a call: 15 measurements after three warm-ups; on a GPU, of ten calls each."""
    taken = []
    for _ in range(18):
        if device.type == "cuda":
            with cuda_seconds() as seconds:
                for _ in range(10):
                    act()
            taken.append(seconds[0] / 10)
        else:
            began = time.perf_counter()
            act()
            taken.append(time.perf_counter() - began)
    return statistics.median(taken[3:])


@contextlib.contextmanager
def cuda_seconds() -> Iterator[list[float]]:
    """Append the seconds that the GPU needs for the work in the block."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    found: list[float] = []
    torch.cuda.synchronize()
    start.record()
    yield found
    end.record()
    torch.cuda.synchronize()
    found.append(start.elapsed_time(end) / 1000)


@contextlib.contextmanager
def utilisation(device: torch.device) -> Iterator[list[int]]:
    """Append the utilisation of the GPU in percent, ten times per second; needs pynvml."""
    found: list[int] = []
    ended = threading.Event()

    def look() -> None:
        with contextlib.suppress(Exception):  # no pynvml, or no driver
            while not ended.wait(0.1):
                found.append(torch.cuda.utilization(device))

    watch = threading.Thread(target=look, daemon=True)
    if device.type == "cuda":
        watch.start()
    try:
        yield found
    finally:
        ended.set()


def is_out_of_memory(text: str) -> bool:
    """Return whether an error means out of memory; threads that cannot start count."""
    wanted = ("allocate memory", "not enough memory", "out of memory", "no memory", "new thread")
    return any(part in text.lower() for part in wanted)


def outcome_of(error: BaseException) -> str:
    """Return the table entry of a way that failed."""
    text = str(error)
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or is_out_of_memory(text):
        return "out of memory"
    return f"failed: {type(error).__name__}: {(text.splitlines() or [''])[0][:100]}"


def _build(name: str, store: Store) -> Built:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return BY_NAME[name].build(store)


def _start_small(name: str, batch: int, dimension: int, device: torch.device) -> None:
    """Run a step with few classes, for late imports."""
    built = _build(name, Store(64, dimension, device))
    _timed(built, *next(_batches(64, min(batch, 8), dimension, device)))


def _batches(
    classes: int, batch: int, dimension: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(_BATCHES):
        x = torch.randn(batch, dimension, generator=generator)
        labels = torch.randint(classes, (batch,), generator=generator)
        yield x.to(device).requires_grad_(), labels.to(device)


def _timed(built: Built, x: Tensor, labels: Tensor) -> tuple[float, float]:
    """Run a step; return its seconds and its loss."""
    x.grad = None
    gc.collect()
    if x.is_cuda:
        with cuda_seconds() as found:
            loss = built.step(x, labels)
        seconds = found[0]
    else:
        began = time.perf_counter()
        loss = built.step(x, labels)
        seconds = time.perf_counter() - began
    if x.grad is None:
        raise RuntimeError("the step left no gradient for the embeddings")
    return seconds, float(loss)


def status(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; measure memory on Linux, not {os.name}")
