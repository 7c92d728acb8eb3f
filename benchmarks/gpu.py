"""Measurements that need a GPU, in slices of at most nine minutes; benchmarks/gpu.sh runs them.

    python benchmarks/gpu.py 1 build/gpu                  # slice 1
    python benchmarks/gpu.py 1 build/gpu --device cpu     # the same code with small sizes, without a GPU
    python benchmarks/gpu.py computed build/gpu           # the tables of docs/benchmarks/computed.md; no GPU

1  a step of the head, compared with other implementations
2  a training step of ResNet50 in each precision, compiled or not
3  the tests marked gpu
4  1 to N GPUs: weak scaling of a training step
5  as many classes as the GPU holds
6  a training step that reads JPEG files, compared with one on data in memory

float32 is what users have by default: TF32 in convolutions only. Each way of slices 1, 2, 4 and 5 runs in a
separate process. A way that fails, needs too much memory, or finds no time left has a row in the table.
Appends to slice-N.jsonl (every measurement) and slice-N.md (the printed text) in the output folder. Exit code
1: a way of plsc failed.

computed: what a step does on a GPU, counted without one: tests/pretend_gpu.py runs a step of each way on
tensors without values. The bound is the time that a GPU of the data sheet needs at least for the counted
bytes or the counted operations, whichever takes longer. --device cpu: with small sizes.
"""

from __future__ import annotations

import argparse
import math
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from head import free_memory, measure_apart, parse
from measuring import GIB, HERE, Report, Sample, machine, run_child
from ways import BASELINE, BY_NAME

from tests import pretend_gpu

PUBLISHED = ("insightface PartialFC_V2, fp16", "insightface PartialFC_V2, fp16, 0.1")
REWRITTEN = "PartialFC rewritten, fp16"  # where that file is missing
CUT = ("cut-cross-entropy, bf16", "cut-cross-entropy, bf16, all gradients")
CHUNKED = "torch linear_cross_entropy, chunked, bf16"
LIGER = "liger-kernel, bf16"
LOSSES = ("plsc, bf16, softmax", "plsc, bf16, CurricularFace")
OURS = ("plsc, bf16", "plsc, bf16, kept", "plsc, bf16, long tiles")
PRECISE = ("plsc, fp32", "plsc, tf32")
LIGHT = tuple(f"plsc, bf16 rows, Adagrad{ratio}" for ratio in ("", ", 0.1", ", 0.01"))
LEAST_SECONDS = 20.0  # seconds that a measurement needs at least
LONG = 150.0  # seconds for a way of the head; to make and copy 6e7 rows takes a minute
FILL = 0.92  # share of the GPU memory that the plan of slice 5 may use
GOALS = {
    "classes": 6e7,  # on a GPU with 80 GB
    "cut": 1.0,  # time of a head step / that of cut cross-entropy
    "partial": 1.0,  # time of a head step / that of PartialFC
    "half": 2.2,  # speed in 16 bits / speed in float32
    "head": 1.35,  # time of a step with a million classes / that of the backbone alone
    "wait": 0.03,  # share of a step that reads files
}


@dataclass
class Slice:
    """Report, device and deadline of a slice. toy: use small sizes, for a CPU."""

    output: Path
    report: Report
    device: str
    deadline: float
    toy: bool

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.deadline - time.monotonic()

    def child(self, *arguments: object, ranks: int = 0) -> tuple[list[Sample], str | None]:
        """Run a script of this folder in a separate process, or on ranks, if there is time left."""
        if self.left() < LEAST_SECONDS:
            return [], "no time left"
        name, *rest = map(str, arguments)
        launcher = (
            ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
        )
        words = [*launcher, str(HERE / name), *rest, "--device", self.device]
        found, trouble = run_child(words, self.left())
        for sample in found:
            self.report.keep(**sample)
        return found, trouble

    def goal(self, name: str, what: str, value: float, *, at_least: bool = False) -> None:
        """Print a measurement and its goal."""
        goal = GOALS[name]
        is_met = value >= goal if at_least else value <= goal
        self.report.keep(kind="goal", name=name, what=what, value=value, goal=goal, met=is_met)
        aim = f"at {'least' if at_least else 'most'} {goal:g}"
        self.report.print(f"- {what}: {value:.3g} (goal: {aim}) {'met' if is_met else 'NOT met'}")


def run_tests(here: Slice) -> list[str]:
    """Run all tests marked gpu; their outcomes are printed, and written to tests.xml."""
    files = [
        path
        for path in sorted((HERE.parent / "tests").rglob("test_*.py"), reverse=True)  # unit first
        if re.search(r"mark\.gpu|tests\.devices", path.read_text())
    ]
    command = [sys.executable, "-m", "pytest", "-rA", "-m", "gpu", "-p", "no:cacheprovider"]
    command += ["--continue-on-collection-errors", f"--junitxml={here.output.resolve() / 'tests.xml'}"]
    command += ["-o", "timeout=200"]  # one test that hangs must leave time for the others
    done = subprocess.run([*command, *map(str, files)], cwd=HERE.parent)
    here.report.keep(kind="test", code=done.returncode)
    return [] if done.returncode == 0 else [f"pytest ended with {done.returncode}"]


def measure_head(here: Slice) -> list[str]:
    """Compare the head with other implementations at three sizes; what decides comes first."""
    is_published = BY_NAME[PUBLISHED[0]].missing(here.device) != "not installed"
    partial = PUBLISHED if is_published else (*PUBLISHED, REWRITTEN)
    first: tuple[str, ...] = (OURS[0], CUT[0], *partial, CHUNKED, PRECISE[0], BASELINE)
    first += (*LOSSES, CUT[1], "plsc, bf16, 0.1")
    second: tuple[str, ...] = (OURS[0], LOSSES[0], CUT[0], *partial)
    third: tuple[str, ...] = (OURS[0], LOSSES[0], *CUT, CHUNKED, *OURS[1:], LIGER)
    rest: tuple[str, ...] = (*OURS[1:], PRECISE[1], "plain PyTorch, tf32", "plain PyTorch, bf16 autocast")
    sizes = [(1024, 10**6, 512), (768, 10**6, 512), (16_384, 248_320, 2048)]
    if here.toy:
        first, rest = (LOSSES[1], BASELINE, "torch linear_cross_entropy, chunked", *partial), OURS[1:2]
        second, third = (LOSSES[0], PRECISE[1]), (*CUT, LIGER)
        sizes = [(16, 500, 32), (24, 500, 32), (32, 300, 64)]
    failed = []
    for names, size in zip((first, second, rest, third), (*sizes[:2], sizes[0], sizes[2]), strict=True):
        failed += measure_ways(here, names, *size)
    for size in sizes:
        best = fastest(here, (*OURS, *LOSSES[:1]), *size)
        for goal, rivals in (("cut", CUT), ("partial", (PUBLISHED[0], REWRITTEN))):
            for rival in rivals:
                theirs = fastest(here, (rival,), *size)
                if best and theirs:
                    what = f"B = {size[0]:,}: {best['way']}: ratio to {rival}"
                    here.goal(goal, what, best["median"] / theirs["median"])
    return failed


def fastest(here: Slice, names: Sequence[str], batch: int, classes: int, dimension: int) -> Sample | None:
    """Return the measurement of the fastest of these ways at a size, or None."""
    found = [one for name in names for one in of_kind(here, "memory", name, batch, classes)]
    return min(found, key=lambda one: one["median"], default=None)


def options_of(here: Slice, dimension: int, steps: int = 20) -> list[str]:
    """Return the options of head.py for this slice."""
    options = ["--dimension", str(dimension), "--device", here.device]
    return [*options, "--steps", str(2 if here.toy else steps)]


def measure_classes(here: Slice) -> list[str]:
    """Fill the GPU with classes: bfloat16 rows with one number of optimizer state each."""
    batch, dimension = 1024, 512
    if here.toy:
        return measure_ways(here, LIGHT[1:2], 32, 2000, 64)
    classes = most_classes(batch, dimension)
    failed = measure_ways(here, LIGHT, batch, classes, dimension)
    while is_too_much(here, LIGHT[0], batch, classes) and here.left() > LONG:
        classes = classes * 9 // 10
        failed = measure_ways(here, LIGHT, batch, classes, dimension)
    if of_kind(here, "memory", LIGHT[0], batch, classes):
        here.goal("classes", "classes on the card", classes, at_least=True)
    return failed


def is_too_much(here: Slice, way: str, batch: int, classes: int) -> bool:
    """Return whether a way ran out of memory."""
    found = of_kind(here, "failed", way, batch, classes)
    return any(one["outcome"] == "out of memory" for one in found)


def most_classes(batch: int, dimension: int) -> int:
    """Return how many classes the GPU holds according to the plan; rows are created in CPU memory."""
    from plsc.plan import plan_head

    classes = 10**6
    plan = plan_head(
        {
            "head.class_num": classes,
            "head.row_dtype": "bfloat16",
            "head.optimizer": "adagrad",
            "model.emb_size": dimension,
            "train.batch_size": batch,
        }
    )
    _, total = torch.cuda.mem_get_info()
    room = FILL * total - sum(plan.step.values())
    at_start = 0.85 * free_memory() / plan.stored["weight"] * classes
    most = min(room / plan.bytes_per_class, at_start)
    return int(most / 1e6) * 10**6


def measure_ways(here: Slice, names: Sequence[str], batch: int, classes: int, dimension: int) -> list[str]:
    """Measure ways of the head at one size and print a row for each; return the failures."""
    here.report.print(f"\n### The head: C = {classes:,}, B = {batch:,}, D = {dimension:,}\n")
    here.report.header("way", "loss", "ms per step: median (least to most)", "peak GiB", "extra GiB", "")
    failed = []
    arguments = options_of(here, dimension, 4 if classes > 10**7 else 20)
    for name in names:
        way, seconds = BY_NAME[name], min(here.left(), LONG)
        found: Sample | str = "no time left"
        if seconds > LEAST_SECONDS:
            found = measure_apart(parse(arguments), way, classes, batch, here.report, seconds)
        if isinstance(found, str):
            here.report.row(name, way.loss, found, "", "", "")
            if way.is_ours and found not in ("no time left", "needs a GPU", "out of memory"):
                failed.append(f"{name} at C = {classes:,}: {found}")
            if name == LIGHT[0] and is_too_much(here, name, batch, classes):
                break  # the other ranks hold as many
            continue
        ms = [1000 * one for one in found["seconds"]]
        shown = f"{1000 * found['median']:.4g} ({min(ms):.4g} to {max(ms):.4g})"
        sizes = (f"{found[key] / GIB:.2f}" for key in ("peak", "over"))
        here.report.row(name, way.loss, shown, *sizes, found["note"])
    return failed


def measure_steps(here: Slice) -> list[str]:
    """Time a training step in each precision, and with a million classes and the backbone alone."""
    network, few, many = "ResNet50", 10**5, 10**6
    sizes, large = [128, 512, 768], 512
    timing = ["--rounds", 5, "--steps", 10, "--warm-up", 5]
    alone, with_head = "plsc's backbone alone, bf16", ["plsc, bf16", "plsc, bf16, kept"]
    precisions = ["plsc, fp32", "plsc, bf16", "plsc, fp16"]
    baselines = [BASELINE, "plain PyTorch, bf16 autocast"]
    rest = ["plsc, bf16, kept, compiled", "plsc, tf32", "plain PyTorch, tf32"]
    rest += ["plsc, fp16, compiled", "plsc, fp32, compiled"]
    if here.toy:
        network, few, many, sizes, large = "SmallResNet", 200, 200, [8, 12], 12
        timing = ["--rounds", 2, "--steps", 1, "--warm-up", 1, "--threads", 1]
        precisions, with_head, baselines, rest = precisions[:2], [], [], []
    plan = [(name, few, sizes) for name in precisions]
    plan += [(name, many, [large]) for name in (*with_head, alone)]
    plan += [(name, few, sizes) for name in baselines]
    plan += [(name, few, [large]) for name in rest]
    here.report.print(f"\n### A training step of {network}\n")
    here.report.header(
        *("way", "C", "B", "images per second", "ms per step", "speed / plsc, fp32", "peak GiB")
    )
    failed: list[str] = []
    times: dict[tuple[str, int, int], float] = {}
    for name, classes, batches in plan:
        sizes_text = ",".join(map(str, batches))
        found, trouble = here.child("train.py", "--measure", name, network, classes, sizes_text, *timing)
        for one in [*found, *[{"B": sizes_text, "outcome": trouble}] * (trouble is not None)]:
            outcome = one.get("outcome")
            cells = [outcome]
            if outcome is None:
                seconds = statistics.median(one["seconds"])
                times[name, classes, one["B"]] = seconds
                fp32 = times.get(("plsc, fp32", classes, one["B"]), math.nan)
                cells = [f"{one['B'] / seconds:,.0f}", f"{1000 * seconds:.4g}", f"{fp32 / seconds:.2f}"]
                cells.append(f"{one['peak'] / GIB:.2f}")
            elif outcome not in ("out of memory", "no time left") and name.startswith("plsc"):
                failed.append(f"{name}, B = {one['B']}: {outcome}")
            here.report.row(name, f"{classes:,}", one["B"], *cells)
    here.report.print()
    for name, classes, batch in times:
        base = times.get(("plsc, fp32", classes, batch))
        if base and name.startswith(("plsc, bf16", "plsc, fp16")):
            speed = base / times[name, classes, batch]
            here.goal("half", f"{name}, B = {batch}: speed / speed of fp32", speed, at_least=True)
        base = times.get((alone, classes, batch))
        if base and name in ("plsc, bf16", "plsc, bf16, kept"):
            what = f"{name}, C = {classes:,}: time / time of the backbone alone"
            here.goal("head", what, times[name, classes, batch] / base)
    return failed


def measure_ranks(here: Slice) -> list[str]:
    """Time a training step on 1 to N ranks: the work per rank is the same, the communication grows."""
    most = 2 if here.toy else torch.cuda.device_count()
    if most == 1:
        here.report.print("\nThere is one GPU, so nothing to compare.")
        return []
    counts = sorted({2**power for power in range(most.bit_length())} | {most})
    network, classes, batch = "ResNet50", 10**6, 128
    timing = ["--rounds", 5, "--steps", 10, "--warm-up", 5]
    if here.toy:
        counts, network, classes, batch = [most], "SmallResNet", 400, 8
        timing = ["--rounds", 2, "--steps", 1, "--warm-up", 1, "--threads", 1]
    words = ["--measure", "plsc, bf16", network, classes, batch, *timing]
    here.report.print(f"\n### {network} on 1 to {most} ranks: C = {classes:,}, B = {batch} per rank\n")
    here.report.header("ranks", "ms per step: median", "time / that of one rank")
    failed, alone = [], None
    for ranks in counts:
        found, trouble = here.child("train.py", *words, ranks=ranks)
        if trouble is None and "seconds" not in found[0]:
            trouble = found[0]["outcome"]
        if trouble is not None:
            here.report.row(ranks, trouble, "")
            failed += [f"{ranks} ranks: {trouble}"] * (trouble != "no time left")
            continue
        seconds = statistics.median(found[0]["seconds"])
        alone = seconds if ranks == 1 else alone
        here.report.row(ranks, f"{1000 * seconds:.4g}", f"{seconds / alone:.3f}" if alone else "")
    return failed


def measure_loader(here: Slice) -> list[str]:
    """Time steps of ResNet50 on JPEG files and on data in memory, in turn."""
    from data import SHAPE, make_pictures, write_files
    from train import BY_NAME as TRAIN_WAYS
    from train import Case, build, timed

    from plsc.machine import usable_cores
    from plsc.parallel.world import World

    network, batches = "ResNet50", [128, 512]
    images, copies, rounds, steps = 4096, 32, 7, 40
    cores = usable_cores()
    if here.toy:
        network, batches, cores = "SmallResNet", [8], 1
        images, copies, rounds, steps = 40, 2, 2, 2
    way = TRAIN_WAYS["plsc, bf16"]
    world = World.from_environment(here.device)
    with tempfile.TemporaryDirectory(prefix="plsc-gpu-") as name:
        folder = Path(name)
        write_files(folder, make_pictures(images), copies)
        here.report.print(f"\n### {network} on {images * copies:,} JPEG files, {cores} threads\n")
        here.report.header("B", "in memory: images per second", "from files", "data wait")
        for batch in batches:
            case = Case(network, SHAPE, 512, 10_000, batch, workers=cores)
            built = [build(way, one, world) for one in (case, replace(case, folder=folder))]
            for one in built:
                timed(way, one, steps, world)  # warms up
            taken = [[timed(way, one, steps, world) for one in built] for _ in range(rounds)]
            for one in built:
                one.close()
            wait = statistics.median(1 - memory / files for memory, files in taken)
            here.report.keep(kind="files", B=batch, seconds=taken, wait=wait)
            speeds = [batch / statistics.median(column) for column in zip(*taken, strict=True)]
            here.report.row(batch, f"{speeds[0]:,.0f}", f"{speeds[1]:,.0f}", f"{wait:.1%}")
            here.goal("wait", f"B = {batch}: share of a step spent waiting for data", wait)
    return []


def of_kind(here: Slice, kind: str, way: str, batch: int, classes: int) -> list[Sample]:
    """Return the measurements of a way at a size."""
    wanted = {"kind": kind, "way": way, "B": batch, "C": classes}
    return [one for one in here.report.samples if wanted.items() <= one.items()]


# Bytes per second, and operations per second by the dtype of the inputs (dense), from the data sheets.
CHIPS = {
    "A100": (2.039e12, {"float32": 19.5e12, "float16": 312e12, "bfloat16": 312e12}),
    "H100": (3.35e12, {"float32": 67e12, "float16": 989e12, "bfloat16": 989e12}),
    "4090": (1.008e12, {"float32": 82.6e12, "float16": 165.2e12, "bfloat16": 165.2e12}),
}
# Products of [B, C] in Triton kernels: the logits; the logits again and two gradients.
PRODUCTS = {"_cce_lse_forward_kernel": 1, "_cce_backward_kernel": 3}


def compute(here: Slice) -> list[str]:
    """Print what a step of each way does on a GPU, without one."""
    if reason := pretend_gpu.unavailable():
        return [reason]
    head = pretend_gpu.Case("", batch=1024, classes=10**6)
    large = replace(head, batch=16_384, classes=248_320, dimension=2048)
    step = pretend_gpu.Case("", network="ResNet50", batch=512)
    heads = ["plsc, bf16", "plsc, fp32", "plsc, bf16, 0.1", *LOSSES, BASELINE, "plain PyTorch, bf16 autocast"]
    heads += [*PUBLISHED, REWRITTEN, CUT[1], CHUNKED, LIGER]
    steps = ["plsc, fp32", "plsc, bf16", "plsc, fp16", BASELINE, "plain PyTorch, bf16 autocast"]
    if here.toy:
        head, large = replace(head, batch=128, classes=5000), replace(head, batch=256, classes=3000)
        step = replace(step, network="SmallResNet", batch=16, classes=1000)
        heads, steps = ["plsc, bf16", BASELINE, REWRITTEN, CUT[1]], steps[:2]
    others = [way for way in heads if way in ("plsc, bf16", LOSSES[0], CUT[1], LIGER)]
    with tempfile.TemporaryDirectory() as folder:
        for base, ways in ((head, heads), (large, others), (step, steps)):
            what = f"A step of {base.network or 'the head'}: C = {base.classes:,}, B = {base.batch:,}"
            here.report.print(f"\n## {what}, D = {base.dimension:,}\n")
            here.report.header(
                *("", "launches", "waits", "GB", "TFLOP"), *(f"bound, ms: {chip}" for chip in CHIPS)
            )
            missing = {} if base.network else {way: BY_NAME[way].missing("cuda") for way in ways}
            able = [replace(base, name=way, way=way) for way in ways if missing.get(way) is None]
            reports = pretend_gpu.run_cases(able, Path(folder))
            for case in able:
                here.report.row(*computed_row(case, reports[case.name]))
            for way in ways:
                if missing.get(way):
                    here.report.row(way, missing[way], *[""] * (3 + len(CHIPS)))
    return []


def computed_row(case: pretend_gpu.Case, report: pretend_gpu.Report) -> list[str]:
    """Return the cells of a way: counts, and the least milliseconds of a step on each chip."""
    if report.error:
        return [case.way, report.error.strip().splitlines()[-1][:80], *[""] * (3 + len(CHIPS))]
    flops: dict[str, float] = dict(report.flops)
    product = 2 * case.batch * case.classes * case.dimension
    for kernel, count in PRODUCTS.items():
        flops["bfloat16"] = flops.get("bfloat16", 0) + count * report.launches[kernel] * product
    moved, bounds = sum(report.bytes.values()), []
    for bandwidth, rates in CHIPS.values():
        products = sum(count / rates[dtype] for dtype, count in flops.items())
        bounds.append(f"{1000 * max(products, moved / bandwidth):.3g}")
    waits, launches = report.waits.total() + report.blocking.total(), report.launches.total()
    counts = [f"{launches:,}", str(waits), f"{report.gigabytes:,.1f}", f"{sum(flops.values()) / 1e12:.2f}"]
    return [case.way, *counts, *bounds]


SLICES: dict[str, Callable[[Slice], list[str]]] = {
    "1": measure_head,
    "2": measure_steps,
    "3": run_tests,
    "4": measure_ranks,
    "5": measure_classes,
    "6": measure_loader,
    "computed": compute,
}


def main() -> None:
    """Run a slice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("slice", choices=SLICES)
    parser.add_argument("output", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--seconds", type=float, default=500, help="after which no measurement starts")
    given = parser.parse_args()
    if given.device == "cuda" and given.slice != "computed" and not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device; use --device cpu for small sizes")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no child process remains
    report = Report(given.output, f"slice-{given.slice}")
    facts = machine(torch.get_num_threads(), given.device if given.slice != "computed" else "cpu")
    report.keep(**facts)
    where = facts["gpu"] or facts["processor"]
    report.print(f"\n## Slice {given.slice} on {where}, torch {facts['torch']}, {facts['date']}")
    deadline = time.monotonic() + given.seconds
    failed = SLICES[given.slice](Slice(given.output, report, given.device, deadline, given.device == "cpu"))
    report.keep(kind="end", failed=failed)
    if failed:
        sys.exit(f"slice {given.slice}: {len(failed)} failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
