"""One way to measure: alternatives take turns in one run, and a table has the median of each round's ratio.

Every measurement is a sample, written at once as a line of JSON, so that none is lost if the process is
killed. A timing has the kind "time", and `way`, `round` and `seconds`.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from plsc import Entry

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # this checkout's plsc, and tests
GIB = 2**30
Sample = dict[str, Any]


def turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield the number of the round and whose turn it is; the order changes from round to round."""
    for turn in range(rounds):
        for name in rotated(names, turn):
            yield turn, name


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """Return the order of a round."""
    first = turn % max(1, len(names))
    return [*names[first:], *names[:first]]


def times_of(samples: list[Sample], way: str) -> dict[int, float]:
    """Return the seconds of a way by round."""
    return {s["round"]: s["seconds"] for s in samples if s["kind"] == "time" and s["way"] == way}


def speed(samples: list[Sample], way: str, rival: str) -> float:
    """Return how many times as fast as the rival a way is: the median of the rounds that both have."""
    mine, theirs = times_of(samples, way), times_of(samples, rival)
    return statistics.median([theirs[turn] / mine[turn] for turn in mine if turn in theirs] or [float("nan")])


def spread(samples: list[Sample], way: str) -> str:
    """Return the median, least and most milliseconds of a way."""
    ms = [1000 * seconds for seconds in times_of(samples, way).values()]
    return f"{statistics.median(ms):.4g} ({min(ms):.4g} to {max(ms):.4g})"


class Report:
    """Append samples to NAME.jsonl in a folder, and the printed text to NAME.md."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.samples: list[Sample] = []
        self._raw = (folder / f"{name}.jsonl").open("a")
        self._text = (folder / f"{name}.md").open("a")

    def keep(self, **sample: Any) -> None:
        """Add a sample."""
        self.samples.append(sample)
        self._raw.write(json.dumps(sample) + "\n")
        self._raw.flush()

    def print(self, line: str = "") -> None:
        """Print a line and append it to the Markdown file."""
        print(line, flush=True)
        self._text.write(line + "\n")
        self._text.flush()

    def header(self, *names: str) -> None:
        """Print the head of a table."""
        self.row(*names)
        self.print("|---" * len(names) + "|")

    def row(self, *cells: object) -> None:
        """Print a row of a table."""
        self.print(f"| {' | '.join(map(str, cells))} |")


def print_json(kind: str, **facts: object) -> None:
    """Print a sample, in a process that another one has started."""
    print(json.dumps({"kind": kind, **facts}) + "\n", end="", flush=True)  # at once: ranks share the output


def read_lines(path: Path) -> list[Sample]:
    """Return the samples of a file; none if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def machine(threads: int, device: str) -> Sample:
    """Return hardware and versions, without the host name."""
    facts: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    known = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return {
        "kind": "machine",
        "date": datetime.date.today().isoformat(),
        "processor": facts.get("model name", platform.machine()),
        "instructions": [flag for flag in known if flag in facts.get("flags", "").split()],
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "torch": torch.__version__,
    }


def run_child(
    arguments: list[str], timeout: float | None, **environment: str
) -> tuple[list[Sample], str | None]:
    """Run a script in a separate process; return its samples and, if it failed, the reason."""
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]  # this checkout's plsc
    child = subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that its children can be ended with it
    )
    trouble = None
    try:
        text, errors = child.communicate(timeout=timeout)
        if child.returncode == -signal.SIGKILL:
            trouble = "killed (out of memory?)"
        elif child.returncode:
            last = (errors.strip().splitlines() or ["?"])[-1]
            trouble = "out of memory" if is_out_of_memory(last) else f"failed: {last[:120]}"
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        text, _ = child.communicate()
        trouble = f"over {timeout:g} s"
    except BaseException:  # this process was asked to end
        os.killpg(child.pid, signal.SIGKILL)
        raise
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")], trouble


def torchrun(ranks: int) -> list[str]:
    """Return the arguments of Python that run a script on several ranks."""
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


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


def status(field: str, process: int | str = "self") -> int:
    """Return a field of /proc/PROCESS/status in bytes; 0 if the process has ended."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


@contextlib.contextmanager
def stopwatch(device: torch.device) -> Iterator[list[float]]:
    """Append the seconds of the block; on a GPU, those that it needs for the work in the block."""
    found: list[float] = []
    if device.type != "cuda":
        began = time.perf_counter()
        yield found
        found.append(time.perf_counter() - began)
        return
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    yield found
    end.record()
    torch.cuda.synchronize()
    found.append(start.elapsed_time(end) / 1000)


def numbers(text: str) -> list[int]:
    """Return the integers of a list such as 1e5,1e6."""
    return [int(float(part)) for part in text.split(",")]


def glyph_entry(run: Path, seed: int = 1, epochs: int = 3) -> Entry:
    """Return an entry with the settings of demo/train_glyphs.py, in one process. run: of its checkpoints."""
    from plsc import Entry  # here, so that processes which measure plain PyTorch do not import it

    ins = Entry()
    ins.set_flip(False)
    ins.set_num_workers(0)
    ins.set_model_name("SmallResNet")
    ins.set_image_shape((1, 32, 32))
    ins.set_emb_size(128)
    ins.set_dropout(0.0)
    ins.set_global_batch_size(128)
    ins.set_train_epochs(epochs)
    ins.set_lr(0.1)
    ins.set_seed(seed)
    ins.set_log_period(100)
    ins.set_test_batch_size(500)
    ins.set_max_last_checkpoint_num(1)
    ins.set_model_save_dir(str(run))
    return ins
