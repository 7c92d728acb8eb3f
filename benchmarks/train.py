"""Time and memory of full training steps, compared with plain PyTorch.

    python benchmarks/train.py                          # the demo network and ResNet18, C = 1e4 and 1e5
    python benchmarks/train.py --networks ResNet18 --classes 1e5 --compile
    python benchmarks/train.py --files                  # read images from JPEG files
    python benchmarks/train.py --memory --networks ResNet18 --classes 1e3 --batch 16   # one process per way
    python benchmarks/train.py --quick                  # to test the script

Plain PyTorch is a loop with the same network of torch's layers, a replicated ArcFace head, autograd,
torch.optim.SGD, and no compiler. Its synthetic images are already normalised; those of
plsc are uint8, as from a decoder. All ways run in one process, get the same images and labels in the same
order, and take turns for many rounds.

--memory: also the ways that save memory. The peak is that of the process in addition to its memory after a
step of a small network, which runs late imports; next to it is the estimate of `plsc plan`.

Appends to train.jsonl (every measurement) and train.md (the printed text) in the output folder.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from itertools import count, cycle
from pathlib import Path
from typing import Any

import measuring
import torch
from data import IMAGES, QUICK_IMAGES, make_pictures, torch_loader, write_files
from measuring import HERE, Report, Sample
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from ways import BASELINE, LR, MOMENTUM, WEIGHT_DECAY, arcface, use_tf32

from plsc.config import Options
from plsc.data.batch import Batch, copied_in_side_stream
from plsc.heads.weights import initial_rows
from plsc.models import build_model
from plsc.models.precision import autocast
from plsc.models.resnet import use_torch_layers
from plsc.parallel.world import World
from plsc.plan import plan
from plsc.train.callbacks import UserParts
from plsc.train.loop import exchange_status
from plsc.train.run import Run, build_run
from plsc.train.step import Step

# name: image shape, embedding size, batch on a CPU
NETWORKS = {"SmallResNet": ((1, 32, 32), 128, 128), "ResNet18": ((3, 112, 112), 512, 64)}
LARGE = ((3, 112, 112), 512, 128)
_BATCHES = 4  # different batches, used in turn


@dataclass(frozen=True)
class Case:
    """A training problem: the name of a network, the image shape, and the number of classes.

    batch: images per rank. folder: of real images, one folder per class; None: synthetic ones in memory.
    """

    network: str
    shape: tuple[int, int, int]
    emb_size: int
    classes: int
    batch: int
    folder: Path | None = None
    workers: int = 2

    def facts(self, world: World) -> Sample:
        """Return the facts that identify a measurement."""
        size = {"network": self.network, "C": self.classes, "B": self.batch}
        return {**size, "ranks": world.size, "files": self.folder is not None}


@dataclass(frozen=True)
class TrainWay:
    """A way. autocast: of plain PyTorch, None for float32. options: of plsc, None for plain PyTorch.

    has_head: False for the backbone of plsc alone: forward pass, backward pass and update.
    """

    name: str
    autocast: torch.dtype | None = None
    options: dict[str, Any] | None = None
    tf32: bool = False
    has_head: bool = True


_BF16 = {"precision.mode": "bfloat16"}
_FP16 = {"precision.mode": "float16"}
_COMPILED = {"speed.compile": True}
_KEPT = {"head.execution": {"keep_mb": 4096.0}}
_RECOMPUTED, _PARTS = {"memory.recompute": "all"}, {"train.micro_batches": 4}
WAYS = (
    TrainWay(BASELINE),
    TrainWay("plain PyTorch, bf16 autocast", autocast=torch.bfloat16),
    TrainWay("plsc, fp32", options={}),
    TrainWay("plsc, bf16", options=_BF16),
    TrainWay("plsc's backbone alone, bf16", options=_BF16, has_head=False),
    TrainWay("plsc, bf16, kept", options={**_BF16, **_KEPT}),
)
COMPILED = (
    TrainWay("plsc, fp32, compiled", options=_COMPILED),
    TrainWay("plsc, bf16, kept, compiled", options={**_BF16, **_COMPILED, **_KEPT}),
)
ON_GPU = (
    TrainWay("plain PyTorch, tf32", tf32=True),
    TrainWay("plsc, tf32", options={}, tf32=True),
    TrainWay("plsc, fp16", options=_FP16),
    TrainWay("plsc, fp16, compiled", options={**_FP16, **_COMPILED}),
)
SAVING = (
    TrainWay("plsc, recompute all blocks", options=_RECOMPUTED),
    TrainWay("plsc, 4 micro-batches", options=_PARTS),
    TrainWay("plsc, bf16, 4 micro-batches, recompute all blocks", options={**_BF16, **_PARTS, **_RECOMPUTED}),
)
BY_NAME = {way.name: way for way in (*WAYS, *COMPILED, *ON_GPU, *SAVING)}


@dataclass
class Built:
    """A way, ready to run. step(): run one step and return its loss, a number or a tensor."""

    step: Callable[[], Any]
    close: Callable[[], None] = lambda: None


def build(way: TrainWay, case: Case, world: World) -> Built:
    """Build a way."""
    build_one = _build_baseline if way.options is None else _build_ours
    return build_one(way, case, world)


def synthetic(case: Case, world: World) -> list[Batch]:
    """Return batches of uint8 images [b, C, H, W], channels last as from a decoder."""
    generator = torch.Generator().manual_seed(world.rank)
    channels, height, width = case.shape
    batches = []
    for _ in range(_BATCHES):
        pixels = torch.randint(
            256, (case.batch, height, width, channels), dtype=torch.uint8, generator=generator
        )
        labels = torch.randint(case.classes, (case.batch,), generator=generator)
        batches.append(Batch(pixels.permute(0, 3, 1, 2), labels, [""] * case.batch))
    return [batch.pin_memory() for batch in batches] if world.device.type == "cuda" else batches


def options_of(way: TrainWay, case: Case, device: str) -> Options:
    """Return the options of a way of plsc."""
    options = Options()
    values: dict[str, Any] = {
        "runtime.device": device,
        "model.name": case.network,
        "model.image_shape": case.shape,
        "model.emb_size": case.emb_size,
        "model.dropout": 0.0,
        "head.class_num": case.classes,
        "train.batch_size": case.batch,
        "train.with_test": False,
        "train.epochs": 1_000_000,
        "data.num_workers": case.workers,
        "optim.momentum": MOMENTUM,
        "optim.weight_decay": WEIGHT_DECAY,
        "optim.lr": LR,
        "optim.warmup_steps": 0,
        "optim.clip_norm": 0.0,
        "optim.schedule": "constant",
        **(way.options or {}),
    }
    if case.folder is not None:
        values["data.dataset_dir"] = str(case.folder)
    for path, value in values.items():
        options.set(path, value)
    return options


def _build_ours(way: TrainWay, case: Case, world: World) -> Built:
    options = options_of(way, case, world.device.type)
    reader = None
    if case.folder is None:  # only its length counts, as the batches are made here
        images = torch.zeros(case.batch * world.size, *case.shape, dtype=torch.uint8)
        reader = TensorDataset(images, torch.zeros(len(images), dtype=torch.int64))
    run = build_run(options.resolve(), world, UserParts(train_reader=reader))
    run.network.train()
    step = Step(run)
    # As in the training loop.
    batches = copied_in_side_stream(_batches_of(run, case, world), world.device)
    if not way.has_head:
        return Built(lambda: _backbone_step(run, next(batches)), batches.close)

    def make() -> Any:
        batch = next(batches)
        sizes = exchange_status(world, batch, case.classes).sizes  # as in the training loop
        made = step.make(batch, sizes, False)
        run.position.advance(made.is_skipped)
        step.losses.read(False)
        return made.output.mean_loss

    return Built(make, batches.close)


def _backbone_step(run: Run, batch: Batch) -> Tensor:
    """Run a step of the network like `Step`, with a constant gradient instead of a head."""
    images = batch.input(run.world.device, run.network.input_layout)
    run.optimizer.zero_grad(set_to_none=True)
    with autocast(run.mode, run.world.device):
        embeddings = run.trained_network(images, None, True)
    embeddings.float().backward(torch.full_like(embeddings, 1e-3, dtype=torch.float32))
    run.optimizer.step()
    return embeddings.detach()


def _batches_of(run: Run, case: Case, world: World) -> Generator[Batch, None, None]:
    if case.folder is None:
        yield from cycle(synthetic(case, world))
    for epoch in count():
        yield from run.data.loader.epoch(epoch)


class _Baseline(nn.Module):
    """A network and a replicated ArcFace head, as in the paper, with autograd."""

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        network = build_model(case.network, case.emb_size, case.shape, dropout=0.0)
        use_torch_layers(network)
        self.network = network.to(device)
        self.weight = nn.Parameter(initial_rows(0, 0, case.classes, case.emb_size).to(device))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss."""
        return arcface(self.network(images).float(), self.weight, labels)


def _build_baseline(way: TrainWay, case: Case, world: World) -> Built:
    device = world.device
    model: nn.Module = _Baseline(case, device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    batches = _tensors_of(case, world)

    def make() -> float:
        images, labels = next(batches)
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        optimizer.zero_grad()
        with torch.autocast(device.type, way.autocast, enabled=way.autocast is not None):
            loss = model(images, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return Built(make)


def _tensors_of(case: Case, world: World) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield normalised images: of torch's DataLoader, or from memory, faster than any loader."""
    on_gpu = world.device.type == "cuda"
    if case.folder is not None:
        how = {"shuffle": True, "pin_memory": on_gpu, "drop_last": True}
        loader = torch_loader(case.folder, case.shape[0], case.batch, case.workers, **how)
        while True:
            yield from loader
    batches = synthetic(case, world)
    floats = [batch.images.float().contiguous().sub_(127.5).div_(128) for batch in batches]
    pinned = [images.pin_memory() if on_gpu else images for images in floats]
    yield from cycle([(images, batch.labels) for images, batch in zip(pinned, batches, strict=True)])


def timed(way: TrainWay, built: Built, steps: int, world: World) -> float:
    """Return the mean seconds of several steps; all ranks start together."""
    use_tf32(way.tf32)
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(world.device)
    world.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        built.step()
    if on_gpu:
        torch.cuda.synchronize(world.device)
    return (time.perf_counter() - start) / steps


def warmed_up(way: TrainWay, case: Case, options: argparse.Namespace, world: World) -> Built:
    """Build a way and run its first steps."""
    use_tf32(way.tf32)
    built = build(way, case, world)
    for _ in range(options.warm_up):
        built.step()
    return built


def steps_at_once(case: Case, options: argparse.Namespace) -> int:
    """Return the number of steps that are timed together."""
    return options.steps or (1 if case.shape[1] > 64 else 4)


def chosen_ways(options: argparse.Namespace, device: str) -> list[str]:
    """Return the names of the ways that were asked for; the baseline is always among them."""
    if options.ways:
        return list(dict.fromkeys([BASELINE, *options.ways]))
    ways = [*WAYS, *COMPILED * options.compile, *ON_GPU * (device == "cuda"), *SAVING * options.memory]
    return [way.name for way in ways if options.compile or "compiled" not in way.name]


def compare(case: Case, options: argparse.Namespace, world: World, report: Report) -> None:
    """Measure all ways of one case in turn and print the table."""
    names = chosen_ways(options, world.device.type)
    report.print(
        f"\n### {case.network} at {case.shape[1]} x {case.shape[2]}, C = {case.classes:,}, B = {case.batch}, "
        f"{'JPEG files' if case.folder else 'synthetic images'}\n"
    )
    built = {name: warmed_up(BY_NAME[name], case, options, world) for name in names}
    first = len(report.samples)
    for turn, name in measuring.turns(names, options.rounds):
        seconds = timed(BY_NAME[name], built[name], steps_at_once(case, options), world)
        report.keep(kind="time", way=name, round=turn, seconds=seconds, **case.facts(world))
    for one in built.values():
        one.close()
    samples = report.samples[first:]
    report.header("way", "images per second", "ms per step: median (least to most)", "speed / plain PyTorch")
    for name in names:
        rate = case.batch / statistics.median(measuring.times_of(samples, name).values())
        report.row(
            name,
            f"{rate:,.1f}",
            measuring.spread(samples, name),
            f"{measuring.speed(samples, name, BASELINE):.2f}",
        )


def compare_memory(case: Case, options: argparse.Namespace, world: World, report: Report) -> None:
    """Print the peak memory of each way, measured in separate processes."""
    report.print(f"\n### Memory: {case.network}, C = {case.classes:,}, B = {case.batch}\n")
    report.header("way", "needed MiB", "/ plsc, fp32", "plan MiB", "plan / needed")
    plain = None
    for name in chosen_ways(options, world.device.type):
        words = ["--measure", name, case.network, str(case.classes), str(case.batch)]
        words += ["--threads", str(options.threads), "--device", world.device.type]
        words += ["--warm-up", "1", "--rounds", "1", "--steps", "1"]
        # Large blocks are returned to the system at once, so that the peak is that of tensors.
        found, trouble = measuring.run_child(
            [str(HERE / "train.py"), *words], None, MALLOC_MMAP_THRESHOLD_=str(2**20)
        )
        if not found or found[0]["kind"] == "failed":
            report.row(name, found[0]["outcome"] if found else trouble, "", "", "")
            continue
        report.keep(**{**found[0], "kind": "memory"})
        needed, way = found[0]["over"], BY_NAME[name]
        plain = needed if name == "plsc, fp32" else plain
        planned = None
        if way.options is not None and way.has_head:
            planned = plan(options_of(way, case, "cpu").values).device_bytes
        report.row(
            *(name, f"{needed / 2**20:,.0f}", f"{needed / plain:.2f}" if plain else ""),
            *(("", "") if planned is None else (f"{planned / 2**20:,.0f}", f"{planned / needed:.2f}")),
        )


def measure(way: TrainWay, cases: list[Case], options: argparse.Namespace, world: World) -> None:
    """Run steps of one way in each case; rank 0 prints times and peak memory as a line of JSON per case."""
    for case in cases:
        try:
            kind, found = "step", measured_steps(way, case, options, world)
        except Exception as error:
            kind, found = "failed", {"outcome": measuring.outcome_of(error)}
        if world.is_main:
            measuring.print_json(kind, way=way.name, **case.facts(world), **found)
        gc.collect()
        torch.cuda.empty_cache()


def measured_steps(way: TrainWay, case: Case, options: argparse.Namespace, world: World) -> dict[str, Any]:
    """Return the seconds of each round and the peak memory."""
    device = world.device
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    else:
        small = replace(case, network="SmallResNet", shape=(case.shape[0], 32, 32), classes=64, batch=8)
        warmed_up(way, small, options, world).close()
    before = torch.cuda.memory_allocated(device) if on_gpu else measuring.status("VmRSS")
    built = warmed_up(way, case, options, world)
    steps = steps_at_once(case, options)
    seconds = [timed(way, built, steps, world) for _ in range(options.rounds)]
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else measuring.status("VmHWM")
    built.close()
    return {"seconds": seconds, "peak": peak, "over": peak - before}


def with_files(case: Case, options: argparse.Namespace, world: World, report: Report) -> None:
    """Compare on JPEG files in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="plsc-train-") as folder:
        write_files(Path(folder), make_pictures(QUICK_IMAGES if options.quick else IMAGES, case.shape))
        compare(replace(case, folder=Path(folder)), options, world, report)


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("output", nargs="?", type=Path, default=Path("build/benchmarks"), help="folder to write to")
    add("--networks", type=lambda text: text.split(","), default=list(NETWORKS))
    add("--classes", type=measuring.numbers, default=[10**4, 10**5], help="such as 1e4,1e5 (the default)")
    add("--batch", type=int, help="images per rank")
    add("--rounds", type=int, default=7)
    add("--steps", type=int, help="steps per round; default: 1, or 4 for a small network")
    add("--warm-up", type=int, default=2, help="steps of each way before the first round")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--ways", type=lambda text: text.split("|"), help="only these and plain PyTorch")
    add("--compile", action="store_true", help="also the compiled ways")
    add("--files", action="store_true", help="read JPEG files instead of synthetic images")
    add("--workers", type=int, default=2, help="worker processes that read files")
    add("--memory", action="store_true", help="measure memory instead of time")
    add("--quick", action="store_true")
    add("--measure", nargs=4, metavar=("WAY", "NETWORK", "CLASSES", "BATCHES"), help="one way, as JSON")
    options = parser.parse_args()
    if options.quick:
        options.networks, options.classes, options.batch = ["SmallResNet"], [1000], 16
        options.rounds, options.steps = 2, 1
    return options


def case_of(network: str, classes: int, batch: int | None, options: argparse.Namespace) -> Case:
    """Return the case to train."""
    shape, emb_size, usual = NETWORKS.get(network, LARGE)
    return Case(network, shape, emb_size, classes, batch or usual, workers=options.workers)


def work(options: argparse.Namespace, world: World) -> None:
    """Run the chosen measurements."""
    if options.measure:
        way, network, classes, batches = options.measure
        cases = [case_of(network, int(classes), batch, options) for batch in measuring.numbers(batches)]
        measure(BY_NAME[way], cases, options, world)
        return
    report = Report(options.output, "train")
    report.keep(**measuring.machine(options.threads, world.device.type))
    act = compare_memory if options.memory else with_files if options.files else compare
    for network in options.networks:
        for classes in options.classes:
            act(case_of(network, classes, options.batch, options), options, world, report)


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
