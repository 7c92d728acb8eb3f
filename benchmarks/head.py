"""Time and memory of a step of the head, compared with other implementations.

    python benchmarks/head.py                                 # C = 1e5 and 1e6, B = 128, D = 512
    python benchmarks/head.py --classes 1e7                   # only ways with sampling
    python benchmarks/head.py --ways 'plain PyTorch, fp32|plsc, fp32, native-avx2'
    python benchmarks/head.py --quick                         # to test the script, 1 to 2 minutes

A step is the forward pass, the gradient of the embeddings, and the update of the class weights; ways.py
describes each way. Time: all ways run in one process and take turns, one step each, for many rounds. Memory:
one process per way, killed after --rival-timeout. Runs on a CUDA device if there is one. To install the other
implementations: pip install pytorch-metric-learning liger-kernel cut-cross-entropy.

Appends to head.jsonl (every measurement) and head.md (the printed text) in the output folder.
"""

from __future__ import annotations

import argparse
import gc
import resource
import signal
import statistics
import sys
import warnings
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import measuring
import torch
from measuring import GIB, HERE, Report, Sample
from torch import Tensor
from ways import BASELINE, BY_NAME, WAYS, Built, Store, Way, use_tf32

ROWS_FIT = 2_000_000  # with more classes, only ways with for_millions
ENOUGH = 20.0  # seconds of steps, after which no further one is needed
_BATCHES = 8  # several, so that no batch is memorised within a run


def measure_apart(
    options: argparse.Namespace,
    way: Way,
    classes: int,
    batch: int,
    report: Report,
    timeout: float | None = None,
) -> Sample | str:
    """Measure the memory of a way in a separate process; return the sample, or why there is none.

    timeout: seconds; None: --rival-timeout, except for plsc.
    """
    reason = way.missing(options.device)
    if reason is not None:
        report.keep(kind="failed", way=way.name, C=classes, B=batch, outcome=reason)
        return reason
    samples, trouble = measuring.run_child(
        [str(HERE / "head.py"), "--measure", way.name, str(classes), str(batch), *passed_on(options)],
        timeout or (None if way.is_ours else options.rival_timeout),
    )
    for sample in samples:
        if sample["kind"] == "memory":
            report.keep(**sample)
            return sample
        trouble = sample["outcome"]
    trouble = trouble or "failed: said nothing"
    report.keep(kind="failed", way=way.name, C=classes, B=batch, outcome=trouble)
    return trouble


def passed_on(options: argparse.Namespace) -> list[str]:
    """Return the options to pass to the processes."""
    passed = ["--dimension", str(options.dimension), "--threads", str(options.threads)]
    passed += ["--device", options.device, "--steps", str(options.steps)]
    if options.memory_limit is not None:
        passed += ["--memory-limit", str(options.memory_limit)]
    return passed


def compare(options: argparse.Namespace, classes: int, batch: int, report: Report) -> None:
    """Measure all ways at one size and print the table."""
    ways = WAYS if options.ways is None else [BY_NAME[name] for name in options.ways]
    if classes > ROWS_FIT:
        ways = [way for way in ways if way.for_millions]
    found = {way.name: measure_apart(options, way, classes, batch, report) for way in ways}
    able = [name for name, result in found.items() if not isinstance(result, str)]
    samples: list[Sample] = []
    trouble: str | None = None
    if able:
        together = ["--take-turns", "|".join(able), str(classes), str(batch), "--rounds", str(options.rounds)]
        samples, trouble = measuring.run_child([str(HERE / "head.py"), *together, *passed_on(options)], None)
    for sample in samples:
        report.keep(**sample)
    failed = {s["way"]: s["outcome"] for s in samples if s["kind"] == "failed"}
    report.print(f"\n### C = {classes:,}, B = {batch}, D = {options.dimension}\n")
    report.header(
        *("way", "loss", "ms per step: median (least to most)", "speed / plain PyTorch"),
        *("bytes per class", "extra GiB", "planned", ""),
    )
    for way in ways:
        result = found[way.name]
        if isinstance(result, str):
            report.row(way.name, way.loss, result, *[""] * 5)
            continue
        is_timed = bool(measuring.times_of(samples, way.name))
        shown = measuring.spread(samples, way.name) if is_timed else failed.get(way.name, trouble or "failed")
        ratio = f"{measuring.speed(samples, way.name, BASELINE):.2f}" if is_timed else ""
        extra, per_class = f"{result['over'] / GIB:.2f}", f"{result['needed'] / classes:,.0f}"
        plan = planned(way, classes, batch, options)
        report.row(way.name, way.loss, shown, ratio, per_class, extra, plan, result["note"])


def planned(way: Way, classes: int, batch: int, options: argparse.Namespace) -> str:
    """Return the GiB beyond class weights and states that a step needs at most, by `plsc plan`."""
    if way.planned is None:
        return ""
    from plsc.plan import plan_head  # here, so that measuring processes do not import it

    size = {"head.class_num": classes, "train.batch_size": batch, "model.emb_size": options.dimension}
    made = plan_head({**size, "runtime.device": options.device, **way.planned})
    return f"{sum(made.step.values()) / GIB:.2f}"


def measure(name: str, classes: int, batch: int, dimension: int, steps: int, device: torch.device) -> None:
    """Run a few steps of one way and print their peak memory and times.

    ready: bytes after a step of the same way with 64 classes, which runs late imports. needed: class weights
    and their states. over: the peak minus ready and needed.
    """
    use_tf32(BY_NAME[name].tf32)
    _timed(_build(name, Store(64, dimension, device)), *next(_batches(64, min(batch, 8), dimension, device)))
    ready = measuring.status("VmRSS")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        ready = torch.cuda.memory_allocated()
    built = _build(name, Store(classes, dimension, device))
    batches = cycle(_batches(classes, batch, dimension, device))
    losses, seconds = [], []
    for index in range(steps + 1):
        taken, loss = _timed(built, *next(batches))
        losses.append(loss)
        if index:  # the first step is a warm-up
            seconds.append(taken)
        if len(seconds) > 1 and sum(seconds) > ENOUGH:
            break
    needed = sum(tensor.nbytes for tensor in built.tensors)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else measuring.status("VmHWM")
    sizes = {"C": classes, "B": batch, "D": dimension}
    found = {"peak": peak, "needed": needed, "over": peak - ready - needed, "losses": losses}
    timed = {"seconds": seconds, "median": statistics.median(seconds), "note": built.note()}
    measuring.print_json("memory", way=name, **sizes, **found, **timed)


def take_turns(
    names: list[str], classes: int, batch: int, dimension: int, rounds: int, device: torch.device
) -> None:
    """Time a step of each way in turn, `rounds` times; a way that fails drops out."""
    store = Store(classes, dimension, device)
    batches = cycle(_batches(classes, batch, dimension, device))
    running: dict[str, Built] = {}

    def step(name: str) -> float | None:
        try:
            use_tf32(BY_NAME[name].tf32)
            if name not in running:
                running[name] = _build(name, store)
                _timed(running[name], *next(batches))
            return _timed(running[name], *next(batches))[0]
        except Exception as error:  # an implementation may raise anything; the others continue
            measuring.print_json("failed", way=name, outcome=measuring.outcome_of(error))
            return None

    able = [name for name in names if step(name) is not None]  # warms up
    failed = set()
    for turn, name in measuring.turns(able, rounds):
        seconds = None if name in failed else step(name)
        if seconds is None:
            failed.add(name)
        else:
            measuring.print_json(
                "time", way=name, C=classes, B=batch, D=dimension, round=turn, seconds=seconds
            )


def limit_memory(gibibytes: float | None) -> None:
    """Limit the memory, so that only this process fails when the machine runs out of it.

    gibibytes: CPU memory in addition to what is mapped now; None: 0.9 of the free memory.
    """
    wanted = 0.9 * free_memory() if gibibytes is None else gibibytes * GIB
    limit = int(wanted + measuring.status("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    Path("/proc/self/oom_score_adj").write_text("1000")


def free_memory() -> int:
    """Return the bytes of the machine that are free."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def _build(name: str, store: Store) -> Built:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return BY_NAME[name].build(store)


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
    with measuring.stopwatch(x.device) as seconds:
        loss = built.step(x, labels)
    if x.grad is None:
        raise RuntimeError("the step left no gradient for the embeddings")
    return seconds[0], float(loss)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("output", nargs="?", type=Path, default=Path("build/benchmarks"), help="folder to write into")
    add("--classes", type=measuring.numbers, default=[10**5, 10**6], help="such as 1e5,1e6 (the default)")
    add("--batch", type=int, default=128)
    add("--dimension", type=int, default=512)
    add("--rounds", type=int, default=15, help="rounds of the timing")
    add("--steps", type=int, default=3, help="steps in the process that measures memory, after a warm-up")
    add("--ways", type=lambda text: text.split("|"), help="only these, such as 'plsc, fp32|plsc, bf16'")
    add("--rival-timeout", type=float, default=300, help="seconds per memory run, except of plsc")
    add("--memory-limit", type=float, help="GiB of CPU memory per process; default: 0.9 of the free memory")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--quick", action="store_true", help="C = 2000, B = 32, 3 rounds, to test the script")
    add("--measure", nargs=3, metavar=("NAME", "C", "B"), help="memory and time of one way, as JSON")
    add("--take-turns", nargs=3, metavar=("NAMES", "C", "B"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.quick:
        options.classes, options.batch, options.rounds = [2000], 32, 3
    unknown = [name for name in options.ways or [] if name not in BY_NAME]
    if unknown:
        parser.error(f"unknown way {unknown[0]!r}; known: {' | '.join(BY_NAME)}")
    return options


def work(options: argparse.Namespace) -> None:
    """Run a process that measures."""
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    if device.type == "cpu":
        limit_memory(options.memory_limit)
    name, classes, batch = options.measure or options.take_turns
    size = (int(float(classes)), int(batch), options.dimension)
    if options.take_turns:
        take_turns(name.split("|"), *size, options.rounds, device)
        return
    try:
        measure(name, *size, options.steps, device)
    except Exception as error:  # the parent prints it as a row
        measuring.print_json("failed", way=name, outcome=measuring.outcome_of(error))


def main() -> None:
    """Run the chosen measurements."""
    options = parse()
    if options.measure or options.take_turns:
        work(options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no child process remains
    report = Report(options.output, "head")
    facts = measuring.machine(options.threads, options.device)
    report.keep(**facts)
    where = facts["gpu"] or f"{facts['processor']}, {facts['cores']} cores, {facts['threads']} threads"
    report.print(f"on {where} ({', '.join(facts['instructions'])}), torch {facts['torch']}, {facts['date']}")
    for classes in options.classes:
        compare(options, classes, options.batch, report)
    report.print(
        "\nExtra: peak minus class weights, optimizer states, and the process after a step with 64 classes; "
        "planned: that of `plsc plan`. "
        "The loss is ArcFace, or plain softmax, which is less work. The last column is the backend."
    )
    broken = {
        s["way"]
        for s in report.samples
        if s["kind"] == "failed" and BY_NAME[s["way"]].is_ours and s["outcome"].startswith("failed")
    }
    if broken:
        sys.exit(f"ways of plsc that failed: {', '.join(sorted(broken))}; see the table")


if __name__ == "__main__":
    main()
