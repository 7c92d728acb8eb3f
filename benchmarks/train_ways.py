"""Ways to run a full training step, compared by benchmarks/train.py: plain PyTorch and plsc.

A way is built once and then runs steps. All ways get the same images and labels in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from ways import LR, MOMENTUM, WEIGHT_DECAY, arcface

from plsc.config import Options
from plsc.data.batch import Batch, copied_in_side_stream
from plsc.heads.weights import initial_rows
from plsc.models import build_model
from plsc.models.layers import use_torch_layers
from plsc.models.precision import autocast
from plsc.parallel.world import World
from plsc.train.callbacks import UserParts
from plsc.train.loop import exchange_status
from plsc.train.run import Run, build_run
from plsc.train.step import Step

BASELINE = "plain PyTorch, fp32"
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


@dataclass(frozen=True)
class TrainWay:
    """A way. autocast: of plain PyTorch, None for float32. options: of plsc, None for plain PyTorch.

    has_head: False for the backbone of plsc alone: forward pass, backward pass and update.
    """

    name: str
    autocast: torch.dtype | None = None
    options: dict[str, Any] | None = field(default=None)
    tf32: bool = False
    has_head: bool = True

    @property
    def is_ours(self) -> bool:
        """Whether this is a way of plsc."""
        return self.options is not None


_BF16 = {"precision.mode": "bfloat16"}
_FP16 = {"precision.mode": "float16"}
_COMPILED = {"speed.compile": True}
_KEPT = {"head.execution": {"keep_mb": 4096.0}}


def ways(device: str) -> list[TrainWay]:
    """Return the ways that a device supports."""
    found = [
        TrainWay(BASELINE),
        TrainWay("plain PyTorch, bf16 autocast", autocast=torch.bfloat16),
        TrainWay("plsc, fp32", options={}),
        TrainWay("plsc, fp32, compiled", options=_COMPILED),
        TrainWay("plsc, bf16", options=_BF16),
        TrainWay("plsc's backbone alone, bf16", options=_BF16, has_head=False),
        TrainWay("plsc, bf16, kept", options={**_BF16, **_KEPT}),
        TrainWay(
            "plsc, bf16, kept, compiled",
            options={**_BF16, **_COMPILED, **_KEPT},
        ),
    ]
    if device == "cuda":
        found += [
            TrainWay("plain PyTorch, tf32", tf32=True),
            TrainWay("plsc, tf32", options={}, tf32=True),
            TrainWay("plsc, fp16", options=_FP16),
            TrainWay("plsc, fp16, compiled", options={**_FP16, **_COMPILED}),
        ]
    return found


@dataclass
class Built:
    """A way, ready to run. step(): run one step and return its loss, a number or a tensor."""

    step: Callable[[], Any]
    close: Callable[[], None] = lambda: None


def build(way: TrainWay, case: Case, world: World) -> Built:
    """Build a way."""
    build_one = _build_ours if way.is_ours else _build_baseline
    return build_one(way, case, world)


def synthetic(case: Case, world: World) -> list[tuple[Tensor, Tensor]]:
    """Return batches: uint8 images [b, C, H, W], channels last as from a decoder, and labels."""
    generator = torch.Generator().manual_seed(world.rank)
    channels, height, width = case.shape
    size = (case.batch, height, width, channels)
    return [
        (
            torch.randint(256, size, dtype=torch.uint8, generator=generator).permute(0, 3, 1, 2),
            torch.randint(case.classes, (case.batch,), generator=generator),
        )
        for _ in range(_BATCHES)
    ]


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


class _Images(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """A dataset of one batch; the benchmark passes the batches itself."""

    def __init__(self, case: Case, ranks: int) -> None:
        self.image = torch.zeros(case.shape, dtype=torch.uint8)
        self.targets = [index % case.classes for index in range(case.batch * ranks)]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.image, self.targets[index]


def _build_ours(way: TrainWay, case: Case, world: World) -> Built:
    options = options_of(way, case, world.device.type)
    reader = _Images(case, world.size) if case.folder is None else None
    run = build_run(options.resolve(), world, UserParts(train_reader=reader))
    run.network.train()
    step = Step(run)
    batches = _batches_of(run) if case.folder else _batches_in_memory(case, world)
    batches = copied_in_side_stream(batches, world.device)  # as in the training loop
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


def _batches_of(run: Run) -> Generator[Batch, None, None]:
    epoch = 0
    while True:
        yield from run.data.loader.epoch(epoch)
        epoch += 1


def _batches_in_memory(case: Case, world: World) -> Generator[Batch, None, None]:
    batches = [Batch(images, labels, [""] * len(labels)) for images, labels in synthetic(case, world)]
    if world.device.type == "cuda":
        batches = [batch.pin_memory() for batch in batches]
    while True:
        yield from batches


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
    if world.size > 1:
        model = DistributedDataParallel(model, process_group=world.backbone_group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    batches = _tensors_from_files(case, world) if case.folder else _tensors_in_memory(case, world)

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

    return Built(make, batches.close)


def _tensors_in_memory(case: Case, world: World) -> Generator[tuple[Tensor, Tensor], None, None]:
    """Yield normalised images from memory, faster than any loader."""
    batches = [
        (images.float().contiguous().sub_(127.5).div_(128), labels)
        for images, labels in synthetic(case, world)
    ]
    if world.device.type == "cuda":
        batches = [(images.pin_memory(), labels.pin_memory()) for images, labels in batches]
    while True:
        yield from batches


def _tensors_from_files(case: Case, world: World) -> Generator[tuple[Tensor, Tensor], None, None]:
    """Yield batches of torchvision's ImageFolder and torch's DataLoader."""
    from torch.utils.data import DataLoader, DistributedSampler
    from torchvision import datasets, transforms

    channels = case.shape[0]
    steps = [transforms.ToTensor(), transforms.Normalize([0.5] * channels, [0.5] * channels)]
    if channels == 1:
        steps.insert(0, transforms.Grayscale())
    dataset = datasets.ImageFolder(
        str(case.folder),
        transforms.Compose([transforms.RandomHorizontalFlip(), *steps]),
    )
    sampler: DistributedSampler[Any] | None = None
    if world.size > 1:
        sampler = DistributedSampler(dataset, world.size, world.rank)
    loader = DataLoader(
        dataset,
        case.batch,
        shuffle=sampler is None,
        sampler=sampler,
        num_workers=case.workers,
        pin_memory=world.device.type == "cuda",
        drop_last=True,
        persistent_workers=case.workers > 0,
    )
    while True:
        yield from loader
