"""Times whole training steps, ours beside the textbook's, and measures their memory.

    python benchmarks/train.py                          # the demo network and ResNet18, C = 1e4 and 1e5
    python benchmarks/train.py --networks ResNet18 --classes 1e5 --compile
    python benchmarks/train.py --files                  # images are read from JPEG files
    python benchmarks/train.py --memory                 # peak memory, a process each
    python benchmarks/train.py --device cuda --networks ResNet50 --classes 1e5,1e6 --batch 128,512 --compile
    torchrun --nproc-per-node 2 benchmarks/train.py     # over ranks: the textbook with DDP
    python benchmarks/train.py --quick                  # a smoke test

The textbook is a plain PyTorch loop: the same network of torch's layers, a dense ArcFace head under autograd,
torch.optim.SGD, DDP over several ranks, no compiler. Its synthetic images are normalised already; ours are
bytes, as a decoder leaves them. All ways run in one process and make steps in turn, many rounds; the ratio
to the textbook in fp32 is taken round by round. Model FLOPs are those of the network's
convolutions and products, forward and backward, and 6 B C D of the head; the peak is --peak, or a large
product in bfloat16 (fp32 for ways in fp32) as torch does it here.

Writes into the output folder: train.jsonl (every measurement), train.md (what is printed).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from head import machine, numbers, run_child
from PIL import Image
from torch import nn
from train_ways import TEXTBOOK, Built, Case, TrainWay, build, ways

from plsc.models import build_model
from plsc.parallel.world import World

HERE = Path(__file__).resolve().parent
GIB = 2**30
# name: image shape, embedding size, batch on a CPU
NETWORKS = {"SmallResNet": ((1, 32, 32), 128, 128), "ResNet18": ((3, 112, 112), 512, 64)}
LARGE = ((3, 112, 112), 512, 128)
Sample = dict[str, Any]
Clock = Callable[[], float]


class Report:
    """Measurements as lines of JSON and the text about them, written by rank 0 as they come."""

    def __init__(self, folder: Path, is_main: bool) -> None:
        self._is_main = is_main
        if is_main:
            folder.mkdir(parents=True, exist_ok=True)
            self._raw = (folder / "train.jsonl").open("a")
            self._text = (folder / "train.md").open("a")

    def keep(self, kind: str, **facts: Any) -> None:
        """Write a measurement down."""
        if self._is_main:
            self._raw.write(json.dumps({"kind": kind, **facts}) + "\n")
            self._raw.flush()

    def print(self, line: str = "") -> None:
        """Print a line, and write it down."""
        if self._is_main:
            print(line, flush=True)
            self._text.write(line + "\n")
            self._text.flush()


def model_flops(case: Case) -> float:
    """Return the floating-point operations of a step on one rank's batch, forward and backward."""
    network = build_model(case.network, case.emb_size, case.shape, dropout=0.0).eval()
    products = 0

    def count(layer: nn.Module, _: Any, output: torch.Tensor) -> None:
        nonlocal products
        if isinstance(layer, nn.Conv2d):
            products += output[0].numel() * layer.weight[0].numel()
        elif isinstance(layer, nn.Linear):
            products += layer.weight.numel()

    for module in network.modules():
        module.register_forward_hook(count)
    with torch.no_grad():
        network(torch.zeros(1, *case.shape))
    return 6.0 * case.batch * products + head_flops(case)


def head_flops(case: Case) -> float:
    """Return those of the head alone."""
    return 6.0 * case.batch * case.classes * case.emb_size


def measured_peak(dtype: torch.dtype, device: torch.device, clock: Clock) -> float:
    """Return the operations a second of a large product, the best of some."""
    size = 8192 if device.type == "cuda" else 2048
    a = torch.randn(size, size, device=device).to(dtype)
    best = 0.0
    for _ in range(6):
        synchronise(device)
        start = clock()
        a @ a
        synchronise(device)
        best = max(best, 2 * size**3 / (clock() - start))
    return best


def clock_of(options: argparse.Namespace) -> Clock:
    """Return the clock to measure by."""
    return time.process_time if options.processor_time else time.perf_counter


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def use_tf32(way: TrainWay) -> None:
    """Allow or forbid tf32 products, for the way that is next."""
    torch.backends.cuda.matmul.allow_tf32 = way.tf32
    torch.backends.cudnn.allow_tf32 = way.tf32


def timed(way: TrainWay, built: Built, steps: int, world: World, clock: Clock) -> float:
    """Return the seconds of a step, the mean of some; all ranks begin together."""
    use_tf32(way)
    synchronise(world.device)
    world.barrier()
    start = clock()
    for _ in range(steps):
        built.step()
    synchronise(world.device)
    return (clock() - start) / steps


def compare(case: Case, options: argparse.Namespace, world: World, report: Report) -> None:
    """Measure all ways of one case in turn, and print the table."""
    chosen = [way for way in ways(world.device.type) if is_wanted(way, options)]
    report.print(
        f"\n### {case.network} at {case.shape[1]} x {case.shape[2]}, C = {case.classes:,}, B = {case.batch} "
        f"on {world.size} rank{'s' * (world.size > 1)}, "
        f"{'JPEG files' if case.folder else 'synthetic images'}\n"
    )
    built: dict[str, Built] = {}
    for way in chosen:
        use_tf32(way)
        built[way.name] = build(way, case, world)
        for _ in range(options.warm_up):
            built[way.name].step()
    clock = clock_of(options)
    times: dict[str, list[float]] = {way.name: [] for way in chosen}
    steps = options.steps or (1 if case.shape[1] > 64 else 4)
    for turn in range(options.rounds):
        first = turn % len(chosen)
        for way in chosen[first:] + chosen[:first]:
            seconds = timed(way, built[way.name], steps, world, clock)
            times[way.name].append(seconds)
            report.keep("time", way=way.name, round=turn, seconds=seconds, **facts(case, world))
    for one in built.values():
        one.close()
    print_table(case, chosen, times, options, world, report)


def facts(case: Case, world: World) -> Sample:
    """Return what a measurement belongs to."""
    return {
        "network": case.network,
        "C": case.classes,
        "B": case.batch,
        "ranks": world.size,
        "files": case.folder is not None,
    }


def print_table(
    case: Case,
    chosen: list[TrainWay],
    times: dict[str, list[float]],
    options: argparse.Namespace,
    world: World,
    report: Report,
) -> None:
    """Print a row for each way."""
    flops = model_flops(case)
    of_head = head_flops(case)
    clock = clock_of(options)
    peaks = {
        dtype: options.peak * 1e12 if options.peak else measured_peak(dtype, world.device, clock)
        for dtype in (torch.float32, torch.bfloat16)
    }
    report.keep("peak", float32=peaks[torch.float32], bfloat16=peaks[torch.bfloat16])
    report.print(
        f"{flops / 1e9:,.1f} GFLOP a step; peak {peaks[torch.float32] / 1e12:.2f} TFLOP/s in fp32, "
        f"{peaks[torch.bfloat16] / 1e12:.2f} in bf16.\n"
    )
    report.print(
        "| way | images a second | ms a step: median (least to most) | times the textbook's speed | "
        "of the peak |"
    )
    report.print("|---|---|---|---|---|")
    for way in chosen:
        mine = times[way.name]
        middle = statistics.median(mine)
        ratio = statistics.median(
            other / own for other, own in zip(times[TEXTBOOK], mine, strict=True)
        )
        is_half = "bf16" in way.name or "fp16" in way.name
        peak = peaks[torch.bfloat16 if is_half else torch.float32]
        done = flops if way.has_head else flops - of_head
        report.print(
            f"| {way.name} | {case.batch * world.size / middle:,.1f} | {1000 * middle:,.4g} "
            f"({1000 * min(mine):,.4g} to {1000 * max(mine):,.4g}) | {ratio:.2f} | "
            f"{done / middle / peak:.0%} |"
        )


def is_wanted(way: TrainWay, options: argparse.Namespace) -> bool:
    """Whether a way is among those asked for; the textbook always is."""
    if way.name == TEXTBOOK:
        return True
    if options.ways:
        return way.name in options.ways
    return options.compile or "compiled" not in way.name


def memory(case: Case, options: argparse.Namespace, world: World, report: Report) -> None:
    """Print the peak memory of each way in a process of its own."""
    report.print(f"\n### Memory: {case.network}, C = {case.classes:,}, B = {case.batch}\n")
    report.print("| way | peak GiB | over the start, GiB |")
    report.print("|---|---|---|")
    for way in ways(world.device.type):
        if not is_wanted(way, options):
            continue
        arguments = [str(HERE / "train.py"), "--measure", way.name, case.network, str(case.classes)]
        arguments += [
            str(case.batch),
            "--threads",
            str(options.threads),
            "--device",
            world.device.type,
        ]
        found, trouble = run_child(arguments, None)
        if not found:
            report.print(f"| {way.name} | {trouble} | |")
            continue
        report.keep("memory", **found[0])
        report.print(
            f"| {way.name} | {found[0]['peak'] / GIB:.2f} | {found[0]['over'] / GIB:.2f} |"
        )


def measure(name: str, case: Case, world: World) -> None:
    """Make two steps of one way and print the peak memory as a line of JSON."""
    way = next(one for one in ways(world.device.type) if one.name == name)
    before = status("VmRSS")
    use_tf32(way)
    built = build(way, case, world)
    for _ in range(2):
        built.step()
    peak = status("VmHWM")
    if world.device.type == "cuda":
        before, peak = 0, torch.cuda.max_memory_allocated()
    built.close()
    print(json.dumps({"way": name, "peak": peak, "over": peak - before, **facts(case, world)}))


def status(field: str) -> int:
    """Return bytes from a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def write_images(folder: Path, shape: tuple[int, int, int], count: int) -> None:
    """Write JPEG files in folders, one a class, as many of each as there are."""
    random = np.random.default_rng(0)
    channels, height, width = shape
    for index in range(count):
        place = folder / f"{index % 100:03d}"
        place.mkdir(exist_ok=True)
        coarse = random.integers(0, 256, (8, 8, channels), dtype=np.uint8)
        image = Image.fromarray(coarse if channels == 3 else coarse[..., 0])
        image.resize((width, height), Image.Resampling.BICUBIC).save(place / f"{index}.jpg")


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("output", nargs="?", type=Path, default=Path("build/benchmarks"), help="folder to write to")
    add("--networks", type=lambda text: text.split(","), default=list(NETWORKS))
    add("--classes", type=numbers, default=[10**4, 10**5], help="as in 1e4,1e5 (the default)")
    add("--batch", type=numbers, default=None, help="images of a rank, as in 128,512")
    add("--rounds", type=int, default=7)
    add("--steps", type=int, default=None, help="at once; 1, or 4 of a small network")
    add("--warm-up", type=int, default=2, help="steps of each way before the first round")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--ways", type=lambda text: text.split("|"), help="only these, and the textbook")
    add("--compile", action="store_true", help="the compiled ways, too")
    add("--files", action="store_true", help="read JPEG files instead of synthetic images")
    add("--images", type=int, default=4096, help="how many JPEG files")
    add("--workers", type=int, default=2, help="that read the files")
    add("--memory", action="store_true", help="measure memory instead of time")
    add("--peak", type=float, default=None, help="TFLOP/s of the device, for the utilisation")
    add("--quick", action="store_true")
    add(
        "--processor-time",
        action="store_true",
        help="count the time on processors, of all threads, instead of the clock's: with --threads 1 it is "
        "what the step takes on an idle core, also where others use the machine",
    )
    add("--measure", nargs=4, metavar=("WAY", "NETWORK", "CLASSES", "BATCH"))
    return parser.parse_args()


def case_of(network: str, classes: int, batch: int | None, options: argparse.Namespace) -> Case:
    """Return what is trained."""
    shape, emb_size, usual = NETWORKS.get(network, LARGE)
    return Case(network, shape, emb_size, classes, batch or usual, workers=options.workers)


def work(options: argparse.Namespace, world: World) -> None:
    """Do what is asked for."""
    if options.measure:
        way, network, classes, batch = options.measure
        measure(way, case_of(network, int(classes), int(batch), options), world)
        return
    if options.quick:
        options.networks, options.classes, options.batch = ["SmallResNet"], [1000], [16]
        options.rounds, options.steps, options.images = 2, 1, 64
    report = Report(options.output, world.is_main)
    report.keep(**machine(options.threads, world.device.type))
    for network in options.networks:
        for classes in options.classes:
            for batch in options.batch or [None]:
                case = case_of(network, classes, batch, options)
                if options.memory:
                    memory(case, options, world, report)
                elif options.files:
                    with_files(case, options, world, report)
                else:
                    compare(case, options, world, report)


def with_files(case: Case, options: argparse.Namespace, world: World, report: Report) -> None:
    """Compare on JPEG files in a temporary folder, which rank 0 writes."""
    folder = Path(tempfile.mkdtemp(prefix="plsc-train-")) if world.is_main else None
    try:
        if folder is not None:
            write_images(folder, case.shape, options.images)
        shared = Path(world.broadcast_object(None if folder is None else str(folder)))
        real = Case(**{**vars(case), "folder": shared})
        compare(real, options, world, report)
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Run it."""
    options = parse()
    torch.set_num_threads(options.threads)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    world = World.from_environment(options.device)
    try:
        work(options, world)
    finally:
        world.close()


if __name__ == "__main__":
    main()
