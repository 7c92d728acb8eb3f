"""Time and memory of saving, loading and resharding 2 GB of head state, compared with other methods.

python benchmarks/checkpoint.py results/                    5 rounds of a minute each (needs 8 GB of disk)
python benchmarks/checkpoint.py results/ --rounds 1 --add   one more round, added to the samples
python benchmarks/checkpoint.py results/ --quick            16 MB, 2 rounds, to test the script

Two gloo ranks hold weight and momentum of a million classes. In each round every way saves, then loads its
checkpoint on 2, 3 and 1 ranks; the order changes from round to round. A save ends with fsync; loads read from
the page cache. Each measurement uses new processes. Their memory is sampled every few milliseconds: anonymous
and shared pages of all ranks in addition to the state. Mapped pages of files are counted separately. Writes
samples.jsonl and results.md.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "benchmarks")]
os.environ.update(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")  # torch reads these when it is imported

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.tensor import DTensor, Shard  # noqa: E402

from plsc.checkpoint import (  # noqa: E402
    Manifest,
    ShardedTensor,
    Snapshot,
    load_tensors,
    save_checkpoint,
)
from plsc.checkpoint.manifest import BACKBONE, CLASS_OPTIMIZER, CLASS_WEIGHTS, HeadInfo, Role  # noqa: E402
from plsc.machine import BackgroundThread  # noqa: E402
from plsc.parallel.collectives import class_range, class_ranges  # noqa: E402
from plsc.parallel.world import World  # noqa: E402

Sample = dict[str, Any]
Action = Callable[[Snapshot, Path, World], float]  # returns the seconds that training was blocked
_READY, _DONE = 1, 2
_BLOCK = 4096  # rows filled or compared at once


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
            for first in range(0, len(local), _BLOCK):
                part = local[first : first + _BLOCK]
                part.copy_(_rows_at(role.key, start + first, len(part), dimension))
        tensors[role] = ShardedTensor(local, rows, start)
    ranges = class_ranges(rows, world.size)
    manifest = Manifest("0", 1, 0, 1, world.size, dimension, {"": HeadInfo(rows, ranges)})
    return Snapshot(tensors, manifest)


def _whole(state: Snapshot) -> dict[str, Tensor]:
    return {role.key: one for role, one in state.tensors.items() if isinstance(one, Tensor)}


def _parts(state: Snapshot) -> dict[str, ShardedTensor]:
    found = state.tensors.items()
    return {role.key: one for role, one in found if isinstance(one, ShardedTensor)}


def check_state(state: Snapshot) -> None:
    """Raise ValueError unless the loaded rows are equal to the saved ones."""
    for key, part in _parts(state).items():
        for first in range(0, len(part.local), _BLOCK):
            block = part.local[first : first + _BLOCK]
            expected = _rows_at(key, part.start + first, len(block), block.shape[1])
            if not torch.equal(block, expected):
                raise ValueError(f"{key} differs after loading near {part.start + first}")


def _rows_at(key: str, first: int, count: int, dimension: int) -> Tensor:
    rows = torch.arange(first, first + count)[:, None] * 131
    columns = torch.arange(dimension) * 7 + len(key)
    return ((rows + columns) % 65_521).float()


def _save_ours(state: Snapshot, folder: Path, world: World) -> float:
    began = time.perf_counter()
    _write_ours(state, folder, world)
    return time.perf_counter() - began


def _write_ours(state: Snapshot, folder: Path, world: World) -> None:
    save_checkpoint(folder.parent, folder.name, state, world)


def _save_ours_asynchronously(state: Snapshot, folder: Path, world: World) -> float:
    began = time.perf_counter()
    copy = state.copy_to_host()
    thread = BackgroundThread("save")
    future = thread.submit(lambda: _write_ours(copy, folder, world.in_background(world.save_group)))
    waited = time.perf_counter() - began
    future.result()
    thread.close()
    return waited


def _load_ours(state: Snapshot, folder: Path, world: World) -> float:
    began = time.perf_counter()
    load_tensors(folder, state.tensors, world)
    return time.perf_counter() - began


def _save_gathered(state: Snapshot, folder: Path, world: World) -> float:
    """Gather all rows on rank 0 and write them with torch.save."""
    began = time.perf_counter()
    whole = _whole(state)
    for key, part in _parts(state).items():
        if world.rank:
            dist.send(part.local, 0)
            continue
        whole[key] = torch.empty(part.shape)
        whole[key][: len(part.local)] = part.local
        for rank in range(1, world.size):
            start, stop = class_range(part.rows, rank, world.size)
            dist.recv(whole[key][start:stop], rank)
    if world.is_main:
        folder.mkdir()
        with (folder / "state.pt").open("wb") as file:
            torch.save(whole, file)
            file.flush()
            os.fsync(file.fileno())
    world.barrier()
    return time.perf_counter() - began


def _load_gathered(state: Snapshot, folder: Path, world: World) -> float:
    """Read everything on rank 0 with torch.load and scatter the rows."""
    began = time.perf_counter()
    whole = torch.load(folder / "state.pt", weights_only=True) if world.is_main else {}
    for key, part in _parts(state).items():
        if world.rank:
            dist.recv(part.local, 0)
            continue
        part.local.copy_(whole[key][: len(part.local)])
        for rank in range(1, world.size):
            start, stop = class_range(part.rows, rank, world.size)
            dist.send(whole[key][start:stop], rank)
    for key, tensor in _whole(state).items():
        if world.is_main:
            tensor.copy_(whole[key])
        if world.size > 1:
            dist.broadcast(tensor, 0)
    world.barrier()
    return time.perf_counter() - began


def _state_dict(state: Snapshot, world: World) -> dict[str, Any]:
    """Return a state dict for torch.distributed.checkpoint: tensors, and DTensors for sharded ones."""
    content: dict[str, Any] = dict(_whole(state))
    for key, part in _parts(state).items():
        content[key] = part.local
        if world.head_group is not None:
            mesh = DeviceMesh.from_group(world.head_group, "cpu")
            shape, strides = torch.Size(part.shape), (part.shape[1], 1)
            content[key] = DTensor.from_local(
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


OURS, TORCH, DCP = "plsc", "gather + torch.save", "torch.distributed.checkpoint"
SAVES = (
    Way(OURS, _save_ours),
    Way(TORCH, _save_gathered),
    Way(DCP, _save_dcp),
    Way(f"{OURS}, asynchronous", _save_ours_asynchronously),
    Way(f"{DCP}, asynchronous", _save_dcp_asynchronously),
)
LOADS = (
    Way(OURS, _load_ours, OURS),
    Way("torch.load + scatter", _load_gathered, TORCH),
    Way(DCP, _load_dcp, DCP),
)


def main() -> int:
    """Measure all ways in turn and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", type=Path, help="folder for the results and the checkpoints")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--classes", type=int, default=1_000_000)
    parser.add_argument("--dimension", type=int, default=256)
    parser.add_argument("--quick", action="store_true", help="8,000 classes, 2 rounds")
    parser.add_argument("--add", action="store_true", help="add a round to the existing samples")
    given = parser.parse_args()
    if given.quick:
        given.classes, given.rounds = 8_000, min(given.rounds, 2)
    given.results.mkdir(parents=True, exist_ok=True)
    path = given.results / "samples.jsonl"
    if not given.add:
        path.unlink(missing_ok=True)
    earlier = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    first = 1 + max((sample["round"] for sample in earlier), default=-1)
    for turn in range(first, first + given.rounds):
        work = Path(tempfile.mkdtemp(dir=given.results))
        for sample in measure_round(turn, work, given.classes, given.dimension):
            sample = {"round": turn, "classes": given.classes, "D": given.dimension, **sample}
            earlier.append(sample)
            print(json.dumps(sample), flush=True)
            with path.open("a") as file:
                file.write(json.dumps(sample) + "\n")
        shutil.rmtree(work)
    table = render(earlier)
    (given.results / "results.md").write_text(table)
    print(table)
    return 0


def measure_round(turn: int, work: Path, classes: int, dimension: int) -> Iterator[Sample]:
    """Save with every way, then load on other numbers of ranks."""
    for way in _rotated(SAVES, turn):
        folder = work / way.name.replace(" ", "-")
        sample = measure(way, 2, folder, classes, dimension)
        yield {"op": "save", "way": way.name, "ranks": 2, **sample}
        if way.name not in (OURS, TORCH, DCP):
            shutil.rmtree(folder)
    for ranks in (2, 3, 1):
        for way in _rotated(LOADS, turn):
            assert way.reads is not None
            folder = work / way.reads.replace(" ", "-")
            sample = measure(way, ranks, folder, classes, dimension)
            yield {"op": "load", "way": way.name, "ranks": ranks, **sample}


def _rotated(ways: tuple[Way, ...], turn: int) -> tuple[Way, ...]:
    return ways[turn % len(ways) :] + ways[: turn % len(ways)]


def measure(way: Way, ranks: int, folder: Path, classes: int, dimension: int) -> Sample:
    """Save or load once in new processes; return the times of the slowest rank and the memory.

    waited: seconds that training would be blocked; seconds: until everything is done; cpu: CPU seconds of all
    ranks. peak: bytes allocated by all ranks together; on_one_rank: maximum of one rank; mapped: pages of
    files.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    board = mmap.mmap(-1, 4096)  # shared: a byte per rank, and one that starts them
    pids, answers = [], []
    for rank in range(ranks):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(read_end)
            _run_rank(way, rank, ranks, port, board, write_end, folder, classes, dimension)
        os.close(write_end)
        pids.append(pid)
        answers.append(read_end)
    memory = _watch(pids, board)
    texts = []
    for answer in answers:
        with os.fdopen(answer) as file:
            texts.append(file.read())
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(statuses):
        raise SystemExit(f"{way.name} on {ranks} ranks failed; see above")
    times = [json.loads(text) for text in texts]
    slowest = {key: max(one[key] for one in times) for key in ("waited", "seconds")}
    return {**slowest, "cpu": sum(one["cpu"] for one in times), **memory}


def _run_rank(
    way: Way,
    rank: int,
    ranks: int,
    port: int,
    board: mmap.mmap,
    answer: int,
    folder: Path,
    classes: int,
    dimension: int,
) -> None:
    """Run one rank, first with a small state to import everything, and end the process."""
    status = 1
    try:
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks)
        )
        world = World.from_environment("cpu")
        is_load = way.reads is not None
        _warm_up(way, folder, world)
        state = make_state(classes, dimension, world, fill=not is_load)
        world.barrier()
        board[rank] = _READY
        while not board[ranks]:
            time.sleep(0.001)
        began, worked = time.perf_counter(), time.process_time()
        waited = way.act(state, folder, world)
        seconds, cpu = time.perf_counter() - began, time.process_time() - worked
        board[rank] = _DONE
        if is_load:
            check_state(state)
        with os.fdopen(answer, "w") as file:
            json.dump({"waited": waited, "seconds": seconds, "cpu": cpu}, file)
        world.close()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _warm_up(way: Way, folder: Path, world: World) -> None:
    """Save or load 64 classes; a load needs a save before."""
    small = folder.with_name(f"warm-{os.getppid()}-{folder.name}")
    state = make_state(64, 8, world, fill=True)
    save = way if way.reads is None else next(one for one in SAVES if one.name == way.reads)
    if save.name != DCP or world.size > 1:
        save.act(state, small, world)
        if way is not save:
            way.act(state, small, world)
    world.barrier()
    if world.is_main:
        shutil.rmtree(small, ignore_errors=True)
    world.barrier()


def _watch(pids: list[int], board: mmap.mmap) -> dict[str, int]:
    """Return the peak memory of the processes in addition to what they had when they were ready."""
    count = len(pids)
    while any(board[rank] != _READY for rank in range(count)):
        if not all(Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z" for pid in pids):
            raise SystemExit("a rank failed before it started; see above")
        time.sleep(0.005)
    before = [_resident(pid) for pid in pids]
    board[count] = 1
    peak = alone = mapped = 0
    while any(board[rank] != _DONE for rank in range(count)):
        now = [_resident(pid) for pid in pids]
        more = [one[0] - earlier[0] for one, earlier in zip(now, before, strict=True)]
        files = sum(one[1] - earlier[1] for one, earlier in zip(now, before, strict=True))
        peak, alone = max(peak, sum(more)), max(alone, *more)
        mapped = max(mapped, files)
        if any(Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] == "Z" for pid in pids):
            break  # it has failed, as its status shows
        time.sleep(0.004)
    return {"peak": peak, "on_one_rank": alone, "mapped": mapped}


def _resident(pid: int) -> tuple[int, int]:
    """Return the resident bytes of a process: anonymous and shared pages, and mapped files."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.startswith("Rss"):
            found[name] = 1024 * int(value.split()[0])
    if not found:
        return 0, 0  # the process has ended
    return found["RssAnon"] + found["RssShmem"], found["RssFile"]


def render(samples: list[Sample]) -> str:
    """Return the tables: medians, and the median of each round's ratio to plsc."""
    classes, dimension = samples[0]["classes"], samples[0]["D"]
    size = 8 * classes * dimension
    lines = [f"{size / 1e9:.2f} GB of rows and momentum, {_rounds(samples)} rounds", ""]
    for op, ranks in (("save", 2), ("load", 2), ("load", 3), ("load", 1)):
        chosen = [one for one in samples if (one["op"], one["ranks"]) == (op, ranks)]
        title = "save on 2 ranks" if op == "save" else f"load on {ranks}, saved by 2"
        lines += [
            f"| {title} | training blocked, s | total, s (least to most) | / plsc | CPU, s "
            "| memory beyond the state, GB | on one rank, GB |",
            "|---|---|---|---|---|---|---|",
        ]
        for way in dict.fromkeys(one["way"] for one in sorted(chosen, key=lambda one: one["way"])):
            lines.append(_row(way, chosen))
        lines.append("")
    return "\n".join(lines)


def _rounds(samples: list[Sample]) -> int:
    return len({sample["round"] for sample in samples})


def _row(way: str, samples: list[Sample]) -> str:
    mine = [one for one in samples if one["way"] == way]
    rival = f"{OURS}, asynchronous" if "asynchronous" in way else OURS
    ours = {one["round"]: one["seconds"] for one in samples if one["way"] == rival}
    seconds = sorted(one["seconds"] for one in mine)
    ratio = statistics.median(one["seconds"] / ours[one["round"]] for one in mine)
    middle = {
        key: statistics.median(one[key] for one in mine) for key in ("waited", "cpu", "peak", "on_one_rank")
    }
    return (
        f"| {way} | {middle['waited']:.2f} | {statistics.median(seconds):.2f} ({seconds[0]:.2f} to "
        f"{seconds[-1]:.2f}) | {ratio:.2f} | {middle['cpu']:.2f} | {middle['peak'] / 1e9:.2f} | "
        f"{middle['on_one_rank'] / 1e9:.2f} |"
    )


if __name__ == "__main__":
    sys.exit(main())
