"""Time and memory of full training steps, compared with plain PyTorch.

    python benchmarks/train.py                          # the demo network and ResNet18, C = 1e4 and 1e5
    python benchmarks/train.py --networks ResNet18 --classes 1e5 --compile
    python benchmarks/train.py --files                  # read images from JPEG files
    python benchmarks/train.py --memory                 # peak memory, one process per way
    torchrun --nproc-per-node 2 benchmarks/train.py     # several ranks: plain PyTorch uses DDP
    python benchmarks/train.py --quick                  # to test the script

Plain PyTorch is a loop with the same network of torch's layers, a replicated ArcFace head, autograd,
torch.optim.SGD, DDP for several ranks, and no compiler. Its synthetic images are already normalised; those of
plsc are uint8, as from a decoder. All ways run in one process and take turns for many rounds; the table has
the median of each round's ratio to plain PyTorch in fp32. Model FLOPs: convolutions and products of the
network, forward and backward, and 6 B C D for the head. The peak is --peak, or the measured rate of a large
product in bfloat16 (fp32 for ways in fp32).

Writes train.jsonl (every measurement) and train.md (the printed text) in the output folder.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from head import Report, machine, numbers, run_child
from loader import make_pictures
from measuring import outcome_of, print_json, status, utilisation
from torch import nn
from train_ways import BASELINE, Built, Case, TrainWay, build, ways
from ways import use_tf32

from plsc.models import build_model
from plsc.parallel.world import World

HERE = Path(__file__).resolve().parent
GIB = 2**30
# name: image shape, embedding size, batch on a CPU
NETWORKS = {"SmallResNet": ((1, 32, 32), 128, 128), "ResNet18": ((3, 112, 112), 512, 64)}
LARGE = ((3, 112, 112), 512, 128)
Sample = dict[str, Any]
Clock = Callable[[], float]


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
    """Return the floating-point operations of the head alone."""
    return 6.0 * case.batch * case.classes * case.emb_size


def measured_peak(dtype: torch.dtype, device: torch.device, clock: Clock) -> float:
    """Return the operations per second of a large product, the best of several."""
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
    """Return the function that measures time."""
    return time.process_time if options.processor_time else time.perf_counter


def synchronise(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(way: TrainWay, built: Built, steps: int, world: World, clock: Clock) -> float:
    """Return the mean seconds of several steps; all ranks start together."""
    use_tf32(way.tf32)
    synchronise(world.device)
    world.barrier()
    start = clock()
    for _ in range(steps):
        built.step()
    synchronise(world.device)
    return (clock() - start) / steps


def steps_at_once(case: Case, options: argparse.Namespace) -> int:
    """Return the number of steps that are timed together."""
    return options.steps or (1 if case.shape[1] > 64 else 4)


def dtype_of(way: TrainWay) -> torch.dtype:
    """Return the data type of the products of a way."""
    return torch.bfloat16 if "bf16" in way.name or "fp16" in way.name else torch.float32


def compare(case: Case, options: argparse.Namespace, world: World, report: Report) -> None:
    """Measure all ways of one case in turn and print the table."""
    chosen = [way for way in ways(world.device.type) if is_wanted(way, options)]
    report.print(
        f"\n### {case.network} at {case.shape[1]} x {case.shape[2]}, C = {case.classes:,}, B = {case.batch} "
        f"on {world.size} rank{'s' * (world.size > 1)}, "
        f"{'JPEG files' if case.folder else 'synthetic images'}\n"
    )
    built: dict[str, Built] = {}
    for way in chosen:
        use_tf32(way.tf32)
        built[way.name] = build(way, case, world)
        for _ in range(options.warm_up):
            built[way.name].step()
    clock = clock_of(options)
    times: dict[str, list[float]] = {way.name: [] for way in chosen}
    steps = steps_at_once(case, options)
    for turn in range(options.rounds):
        first = turn % len(chosen)
        for way in chosen[first:] + chosen[:first]:
            seconds = timed(way, built[way.name], steps, world, clock)
            times[way.name].append(seconds)
            report.keep(kind="time", way=way.name, round=turn, seconds=seconds, **facts(case, world))
    for one in built.values():
        one.close()
    print_table(case, chosen, times, options, world, report)


def facts(case: Case, world: World) -> Sample:
    """Return the facts that identify a measurement."""
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
    report.keep(kind="peak", float32=peaks[torch.float32], bfloat16=peaks[torch.bfloat16])
    report.print(
        f"{flops / 1e9:,.1f} GFLOP per step; peak {peaks[torch.float32] / 1e12:.2f} TFLOP/s in fp32, "
        f"{peaks[torch.bfloat16] / 1e12:.2f} in bf16.\n"
    )
    report.print(
        "| way | images per second | ms per step: median (least to most) | speed / plain PyTorch | "
        "share of the peak |"
    )
    report.print("|---|---|---|---|---|")
    for way in chosen:
        mine = times[way.name]
        middle = statistics.median(mine)
        ratio = statistics.median(other / own for other, own in zip(times[BASELINE], mine, strict=True))
        peak = peaks[dtype_of(way)]
        done = flops if way.has_head else flops - of_head
        report.print(
            f"| {way.name} | {case.batch * world.size / middle:,.1f} | {1000 * middle:,.4g} "
            f"({1000 * min(mine):,.4g} to {1000 * max(mine):,.4g}) | {ratio:.2f} | "
            f"{done / middle / peak:.0%} |"
        )


def is_wanted(way: TrainWay, options: argparse.Namespace) -> bool:
    """Return whether a way was chosen; the baseline always is."""
    if way.name == BASELINE:
        return True
    if options.ways:
        return way.name in options.ways
    return options.compile or "compiled" not in way.name


def memory(case: Case, options: argparse.Namespace, world: World, report: Report) -> None:
    """Print the peak memory of each way, measured in separate processes."""
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
            *("--device", world.device.type, "--warm-up", "1", "--rounds", "1", "--steps", "1"),
        ]
        found, trouble = run_child(arguments, None)
        if not found or found[0]["kind"] == "failed":
            report.print(f"| {way.name} | {found[0]['outcome'] if found else trouble} | |")
            continue
        report.keep(**found[0])
        report.print(f"| {way.name} | {found[0]['peak'] / GIB:.2f} | {found[0]['over'] / GIB:.2f} |")


def measure(name: str, cases: list[Case], options: argparse.Namespace, world: World) -> None:
    """Run steps of one way in each case; rank 0 prints times and peak memory as a line of JSON per case."""
    way = next(one for one in ways(world.device.type) if one.name == name)
    use_tf32(way.tf32)
    for case in cases:
        try:
            kind, found = "step", measured_steps(way, case, options, world)
        except Exception as error:
            kind, found = "failed", {"outcome": outcome_of(error)}
        if world.is_main:
            print_json(kind, way=name, **facts(case, world), **found)
        gc.collect()
        torch.cuda.empty_cache()


def measured_steps(way: TrainWay, case: Case, options: argparse.Namespace, world: World) -> dict[str, Any]:
    """Return the seconds of each round, the peak memory, and the utilisation of the device."""
    device, clock = world.device, clock_of(options)
    on_gpu = device.type == "cuda"
    before = status("VmRSS")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    built = build(way, case, world)
    for _ in range(options.warm_up):
        built.step()
    with utilisation(device) as busy:
        steps = steps_at_once(case, options)
        seconds = [timed(way, built, steps, world, clock) for _ in range(options.rounds)]
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else status("VmHWM")
    built.close()
    flops = model_flops(case) - (0 if way.has_head else head_flops(case))
    reached = flops / statistics.median(seconds)
    return {
        "seconds": seconds,
        "peak": peak,
        "over": peak - before,
        "of_peak": reached / (1e12 * (options.peak or 0) or measured_peak(dtype_of(way), device, clock)),
        "busy": statistics.median(busy) if busy else None,
    }


def write_images(folder: Path, shape: tuple[int, int, int], count: int, copies: int = 1) -> None:
    """Write JPEG files in one folder per class; each image under several names."""
    for index, data in enumerate(make_pictures(count, shape)):
        place = folder / f"{index % 100:03d}"
        place.mkdir(exist_ok=True)
        (place / f"{index}.jpg").write_bytes(data)
        for copy in range(1, copies):
            os.link(place / f"{index}.jpg", place / f"{index}-{copy}.jpg")


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("output", nargs="?", type=Path, default=Path("build/benchmarks"), help="folder to write to")
    add("--networks", type=lambda text: text.split(","), default=list(NETWORKS))
    add("--classes", type=numbers, default=[10**4, 10**5], help="such as 1e4,1e5 (the default)")
    add("--batch", type=numbers, default=None, help="images per rank, such as 128,512")
    add("--rounds", type=int, default=7)
    add("--steps", type=int, default=None, help="steps per round; default: 1, or 4 for a small network")
    add("--warm-up", type=int, default=2, help="steps of each way before the first round")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--ways", type=lambda text: text.split("|"), help="only these and plain PyTorch")
    add("--compile", action="store_true", help="also the compiled ways")
    add("--files", action="store_true", help="read JPEG files instead of synthetic images")
    add("--images", type=int, default=4096, help="how many JPEG files")
    add("--workers", type=int, default=2, help="worker processes")
    add("--memory", action="store_true", help="measure memory instead of time")
    add("--peak", type=float, default=None, help="TFLOP/s of the device, for the utilisation")
    add("--quick", action="store_true")
    add(
        "--processor-time",
        action="store_true",
        help="measure the CPU time of all threads instead of the wall-clock time; with --threads 1, other "
        "programs on the machine do not change it",
    )
    add("--measure", nargs=4, metavar=("WAY", "NETWORK", "CLASSES", "BATCHES"))
    return parser.parse_args()


def case_of(network: str, classes: int, batch: int | None, options: argparse.Namespace) -> Case:
    """Return the case to train."""
    shape, emb_size, usual = NETWORKS.get(network, LARGE)
    return Case(network, shape, emb_size, classes, batch or usual, workers=options.workers)


def work(options: argparse.Namespace, world: World) -> None:
    """Run the chosen measurements."""
    if options.measure:
        way, network, classes, batches = options.measure
        sizes = [(int(classes), batch) for batch in numbers(batches)]
        measure(way, [case_of(network, *size, options) for size in sizes], options, world)
        return
    if options.quick:
        options.networks, options.classes, options.batch = ["SmallResNet"], [1000], [16]
        options.rounds, options.steps, options.images = 2, 1, 64
    report = Report(options.output, "train", world.is_main)
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
    """Run the benchmark."""
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
