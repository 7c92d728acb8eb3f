"""Time and memory of saving, loading and resharding 2 GB of head state, compared with torch's checkpoints.

    python benchmarks/checkpoint.py build/checkpoint            # 5 rounds of a minute each; 8 GB of disk
    python benchmarks/checkpoint.py build/checkpoint --quick    # 16 MB, to test the script

Two gloo ranks hold weight and momentum of a million classes. In each round every way saves, then loads its
checkpoint on 2, 3 and 1 ranks. A save ends with fsync; loads read from the page cache. Each measurement uses
new processes. Their memory is sampled every few milliseconds: anonymous and shared pages of all ranks in
addition to the state. Appends to checkpoint.jsonl and checkpoint.md.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from measuring import (
    Report,
    Sample,
    machine,
    print_json,
    rotated,
    run_child,
    speed,
    status,
    times_of,
    torchrun,
)
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from plsc.checkpoint import Manifest, ShardedTensor, Snapshot, load_tensors, save_checkpoint
from plsc.checkpoint.manifest import BACKBONE, CLASS_OPTIMIZER, CLASS_WEIGHTS, HeadInfo, Role
from plsc.machine import BackgroundThread
from plsc.parallel.world import World, class_range, class_ranges

Action = Callable[[Snapshot, Path, World], float]  # returns the seconds that training was blocked
CLASSES, QUICK_CLASSES, DIMENSION = 1_000_000, 8_000, 256


@dataclass(frozen=True)
class Way:
    """One way. reads: the way whose files it loads."""

    name: str
    act: Action
    reads: str | None = None


def make_state(rows: int, dimension: int, world: World, *, fill: bool) -> Snapshot:
    """Return weight and momentum, float32 [rows, dimension], and a replicated tensor of 1 MB."""
    start, stop = class_range(rows, world.rank, world.size)
    tensors: dict[Role, Tensor | ShardedTensor] = {Role(BACKBONE, "w"): torch.ones(262_144)}
    weight = Role(CLASS_WEIGHTS, "weight")
    for role in (weight, Role(CLASS_OPTIMIZER, "momentum", weight.key)):
        local = torch.empty(stop - start, dimension).fill_(-1)  # touches every page
        if fill:
            local.copy_(_rows_at(role.key, start, stop, dimension))
        tensors[role] = ShardedTensor(local, rows, start)
    ranges = class_ranges(rows, world.size)
    manifest = Manifest("0", 1, 0, 1, world.size, dimension, {"": HeadInfo(rows, ranges)})
    return Snapshot(tensors, manifest)


def check_state(state: Snapshot) -> None:
    """Raise ValueError unless the loaded rows are equal to the saved ones."""
    for role, part in state.tensors.items():
        if isinstance(part, ShardedTensor):
            stop = part.start + len(part.local)
            if not torch.equal(part.local, _rows_at(role.key, part.start, stop, DIMENSION)):
                raise ValueError(f"{role.key} differs after loading")


def _rows_at(key: str, start: int, stop: int, dimension: int) -> Tensor:
    rows = torch.arange(start, stop, dtype=torch.int32)[:, None] * 131
    columns = torch.arange(dimension, dtype=torch.int32) * 7 + len(key)
    return ((rows + columns) % 65_521).float()


def _save_ours(state: Snapshot, folder: Path, world: World) -> float:
    began = time.perf_counter()
    copy = state.copy_to_host()
    thread = BackgroundThread("save")
    background = world.in_background(world.save_group)
    future = thread.submit(lambda: save_checkpoint(folder.parent, folder.name, copy, background))
    waited = time.perf_counter() - began
    future.result()
    thread.close()
    return waited


def _load_ours(state: Snapshot, folder: Path, world: World) -> float:
    began = time.perf_counter()
    load_tensors(folder, state.tensors, world)
    return time.perf_counter() - began


def _state_dict(state: Snapshot, world: World) -> dict[str, Any]:
    """Return a state dict for torch.distributed.checkpoint: tensors, and DTensors for sharded ones."""
    content: dict[str, Any] = {}
    for role, part in state.tensors.items():
        content[role.key] = part if isinstance(part, Tensor) else part.local
        if isinstance(part, ShardedTensor) and world.head_group is not None:
            mesh = DeviceMesh.from_group(world.head_group, "cpu")
            shape, strides = torch.Size(part.shape), (part.shape[1], 1)
            content[role.key] = DTensor.from_local(
                part.local, mesh, [Shard(0)], run_check=False, shape=shape, stride=strides
            )
    return content


def _save_dcp(state: Snapshot, folder: Path, world: World) -> float:
    began = time.perf_counter()
    content = _state_dict(state, world)
    dcp.save(content, checkpoint_id=folder, process_group=world.control_group)
    return time.perf_counter() - began


def _save_dcp_asynchronously(state: Snapshot, folder: Path, world: World) -> float:
    began = time.perf_counter()
    content = _state_dict(state, world)
    future = dcp.async_save(content, checkpoint_id=folder, process_group=world.save_group)
    waited = time.perf_counter() - began
    assert isinstance(future, Future)  # a result of another type is only for staging
    future.result()
    return waited


def _load_dcp(state: Snapshot, folder: Path, world: World) -> float:
    began = time.perf_counter()
    content = _state_dict(state, world)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process is one process
        dcp.load(
            content,
            checkpoint_id=folder,
            process_group=world.control_group,
            no_dist=world.size == 1,
        )
    return time.perf_counter() - began


OURS, DCP = "plsc", "torch.distributed.checkpoint"
SAVES = {
    way.name: way
    for way in (
        Way(OURS, _save_ours),
        Way(DCP, _save_dcp),
        Way(f"{DCP}, async_save", _save_dcp_asynchronously),
    )
}
LOADS = {way.name: way for way in (Way(OURS, _load_ours, OURS), Way(DCP, _load_dcp, DCP))}

ACTS = (("save", SAVES, 2), ("load", LOADS, 2), ("load", LOADS, 3), ("load", LOADS, 1))


def main() -> None:
    """Measure all ways in turn and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for the results and the checkpoints")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="8,000 classes")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        act, name, classes = options.rank
        run_rank(act, name, options.folder, int(classes))
        return
    report = Report(options.folder, "checkpoint")
    report.keep(**machine(1, "cpu"))
    classes = QUICK_CLASSES if options.quick else CLASSES
    for turn in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=options.folder) as work:
            for act, ways, ranks in ACTS:
                for name in rotated(list(ways), turn):
                    way = ways[name]
                    sample = measure(way, ranks, Path(work) / (way.reads or name).replace(" ", "-"), classes)
                    report.keep(kind="time", act=act, way=name, ranks=ranks, round=turn, **sample)
    print_tables(report)


def print_tables(report: Report) -> None:
    """Print a table for each act and number of ranks."""
    for act, ways, ranks in ACTS:
        report.print()
        report.header(
            *(f"{act} on {ranks}", "training waits, s", "total, s", f"speed / {DCP}"),
            *("CPU, s", "memory beyond the state, GB"),
        )
        chosen = [one for one in report.samples if (one.get("act"), one.get("ranks")) == (act, ranks)]
        for name in ways:
            mine = [one for one in chosen if one["way"] == name]
            waited, cpu, peak = (
                statistics.median(one[key] for one in mine) for key in ("waited", "cpu", "peak")
            )
            total = statistics.median(times_of(chosen, name).values())
            report.row(
                *(name, f"{waited:.2f}", f"{total:.2f}", f"{speed(chosen, name, DCP):.2f}"),
                *(f"{cpu:.2f}", f"{peak / 1e9:.2f}"),
            )


def measure(way: Way, ranks: int, folder: Path, classes: int) -> Sample:
    """Save or load once in new processes; return the times of the slowest rank and the memory.

    waited: seconds that training would be blocked; seconds: until everything is done; cpu: CPU seconds of all
    ranks. peak: bytes allocated by all ranks together, in addition to the state.
    """
    act = "load" if way.reads else "save"
    words = [*torchrun(ranks), __file__, str(folder), "--rank", act, way.name, str(classes)]
    found, trouble = run_child(words, None, OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")
    if trouble is not None:
        raise SystemExit(f"{way.name} on {ranks} ranks: {trouble}")
    slowest = {key: max(one[key] for one in found) for key in ("waited", "seconds")}
    return {**slowest, **{key: sum(one[key] for one in found) for key in ("cpu", "peak")}}


def run_rank(act: str, name: str, folder: Path, classes: int) -> None:
    """Run one rank, first with a small state to import everything, and print its figures."""
    way = (LOADS if act == "load" else SAVES)[name]
    world = World.from_environment("cpu")
    _warm_up(way, folder, world)
    state = make_state(classes, DIMENSION, world, fill=act == "save")
    world.barrier()
    before, worked, began = resident(), time.process_time(), time.perf_counter()
    with watch_memory() as peak:
        waited = way.act(state, folder, world)
        seconds, cpu = time.perf_counter() - began, time.process_time() - worked
    if act == "load":
        check_state(state)
    print_json("rank", waited=waited, seconds=seconds, cpu=cpu, peak=max(peak) - before)
    world.close()


def resident() -> int:
    """Return the bytes of anonymous and shared pages of this process; those of files can be dropped."""
    return status("RssAnon") + status("RssShmem")


@contextlib.contextmanager
def watch_memory() -> Iterator[list[int]]:
    """Append the resident memory every few milliseconds, and at the end."""
    found: list[int] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.004):
            found.append(resident())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()
        found.append(resident())


def _warm_up(way: Way, folder: Path, world: World) -> None:
    """Save or load 64 classes; a load needs a save before."""
    small = folder.with_name(f"warm-{folder.name}")
    state = make_state(64, 8, world, fill=True)
    save = way if way.reads is None else SAVES[way.reads]
    if OURS in save.name or world.size > 1:
        save.act(state, small, world)
        if way is not save:
            way.act(state, small, world)
    world.barrier()
    if world.is_main:
        shutil.rmtree(small, ignore_errors=True)
    world.barrier()


if __name__ == "__main__":
    main()
