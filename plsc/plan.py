"""Estimate the memory of a training run before it starts, from its options.

Class weights, parameters, gradients and optimizer states are counted on the real classes of plsc and torch,
so they are exact. Temporary tensors of the head are computed as upper bounds. Activations are measured on
fake tensors, which have shapes but no data: without the device, the data, or much time.

Notation of docs/life_of_a_step.md: B samples in the global batch, embeddings of size D, n class weights per
rank used in a step.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from plsc.config import Config, Options
from plsc.config.data_and_model import sample_ratios
from plsc.config.option import names_code
from plsc.config.train import DEFAULT_RATE
from plsc.errors import OptionError, PlscError, kind_and_line
from plsc.heads import ROW_OPTIMIZERS, RowOptimizer, ShardedHead, build_margin
from plsc.heads.sampling import KEPT_BYTES, LIST_BYTES
from plsc.heads.softmax import tile_size
from plsc.models import build_model
from plsc.models.recomputation import recompute_activations
from plsc.models.resnet import use_torch_layers
from plsc.optim import ExpectedStates, build_optimizer
from plsc.storage.store import format_bytes
from plsc.values import Input, map_tensors

_MOST_CLASSES = 10**12
_FLOAT, _INDEX = 4, 8  # bytes of a float32 and an int64
# Number of float matrices that TorchBackend, the backend that needs most, allocates at once: [tile, D] and
# [B, tile] for the logits; [tile, D] for the update, and for one with stochastic rounding (int64 noise).
_LOGITS = (3, 4)
_UPDATE, _ROUNDED_UPDATE = 6, 11
_DEVICE = "on the device"
_DRAW_INDICES = 6  # int64 values per selected row while the classes of a step are sampled


@dataclass(frozen=True)
class PartPlan:
    """The memory of head or backbone in bytes, on the rank that needs most.

    Attributes:
        title: what is planned.
        stored: persistent tensors, by name.
        step: additional device memory during a step, by name.
        place: where `stored` is.
    """

    title: str
    stored: dict[str, int]
    step: dict[str, int]
    place: str = field(default=_DEVICE, kw_only=True)

    @property
    def stored_bytes(self) -> int:
        """All persistent tensors."""
        return sum(self.stored.values())

    @property
    def device_bytes(self) -> int:
        """Peak device memory."""
        return sum(self.step.values()) + (self.stored_bytes if self.place == _DEVICE else 0)

    def render(self) -> str:
        """Return a table of the sizes."""
        lines = [self.title, f"  stored {self.place}", *map(_row, self.stored.items())]
        lines += ["  additional during a step, at most", *map(_row, self.step.items())]
        return "\n".join([*lines, f"  total on the device{format_bytes(self.device_bytes):>36}"])


def _row(item: tuple[str, int]) -> str:
    return f"    {item[0]:<42}{format_bytes(item[1]):>11}"


@dataclass(frozen=True)
class HeadPlan(PartPlan):
    """The plan of a head.

    Attributes:
        bytes_per_class: class weights and their optimizer state.
    """

    bytes_per_class: int


@dataclass(frozen=True)
class Plan:
    """The plan of a run. All sizes are in bytes per rank.

    Attributes:
        device_limit: memory of a device.
        most_classes: number of classes that fit, at most; 0: none.
    """

    head: HeadPlan
    backbone: PartPlan
    device_limit: int
    most_classes: int

    @property
    def device_bytes(self) -> int:
        """Peak device memory of head and backbone."""
        return self.head.device_bytes + self.backbone.device_bytes

    @property
    def fits(self) -> bool:
        """Whether the run fits in the memory of the device."""
        return self.device_bytes <= self.device_limit

    def render(self) -> str:
        """Return the plan as text: whether the run fits, how many classes would, and the sizes."""
        needed, limit = format_bytes(self.device_bytes), format_bytes(self.device_limit)
        # Three digits, rounded down.
        most = self.most_classes - self.most_classes % 10 ** max(0, len(str(self.most_classes)) - 3)
        return "\n".join(
            [
                f"{'fits' if self.fits else 'does not fit'}: {needed} of {limit} per rank; "
                f"at most {most:,} classes fit",
                "",
                self.head.render(),
                "",
                self.backbone.render(),
            ]
        )


def plan(options: Mapping[str, Any], ranks: int | None = None, device_gb: float = 80.0) -> Plan:
    """Estimate the memory of a training run with a sharded head.

    Args:
        options: values by path, such as ``{"head.class_num": 10**6}``, or ``entry.options.values``.
        ranks: number of ranks; None: `runtime.world_size`, else 1.
        device_gb: memory of a device in GB (10^9 bytes).

    Raises:
        OptionError: an invalid option, a replicated head, or a network that does not run on fake tensors.
    """
    ranks = ranks or _config_of(options).runtime.world_size or 1
    limit = int(device_gb * 1e9)
    head, backbone = plan_head(options, ranks), _plan_backbone(options, ranks)
    return Plan(head, backbone, limit, _most_classes(options, ranks, limit - backbone.device_bytes))


def _config_of(options: Mapping[str, Any]) -> Config:
    made = Options()
    made.set_together(options)
    config = made.resolve()
    config.check_needs()
    is_sharded = config.head.loss_type.startswith("dist_")
    if config.head.class_num is None or not is_sharded or names_code(config.optim.optimizer):
        raise OptionError(
            "a plan reads neither data nor your code: it needs head.class_num, a sharded head (a loss "
            "dist_...), and an optimizer of torch"
        )
    return config


def _most_classes(options: Mapping[str, Any], ranks: int, room: int) -> int:
    """Return the number of classes whose head fits in `room` bytes per rank."""
    low, high = 0, _MOST_CLASSES
    while low < high:
        middle = (low + high + 1) // 2
        fits = plan_head({**options, "head.class_num": middle}, ranks).device_bytes <= room
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def plan_head(options: Mapping[str, Any], ranks: int | None = None) -> HeadPlan:
    """Estimate the memory and the work of a sharded head alone; arguments and errors as of `plan`."""
    config = _config_of(options)
    ranks = ranks or config.runtime.world_size or 1
    head, d, k = config.head, config.model.emb_size, config.head.sub_centers
    assert head.class_num is not None
    b = config.train.global_batch_size or config.train.batch_size * ranks
    b_local = -(-b // ranks)
    local = -(-head.class_num // ranks)  # classes of the first rank, which has the most
    settings: dict[str, Any] = {"momentum": config.optim.momentum} if head.optimizer == "sgd" else {}
    margin = build_margin(head.loss_type.removeprefix("dist_"))
    small = ShardedHead(1, d, margin, centers=k, row_dtype=head.row_dtype)
    rows = ROW_OPTIMIZERS[head.optimizer](small, state_dtype=head.state_dtype, **settings)
    per_class = _bytes_per_class(small, rows)
    ratio = max(sample_ratios(head.sample_ratio).values())
    n = max(math.ceil(local * ratio), min(b, local)) * k  # the classes of the batch are included
    kept = 2 * n * b
    if kept > max((head.execution or {}).get("keep_mb", 0) * 2**20, KEPT_BYTES if head.hard_share else 0):
        kept = 0
    lists = {"lists of hard negatives": LIST_BYTES} if head.hard_share else {}

    matrix = b * d * _FLOAT
    device = torch.device("cpu" if config.runtime.device == "cpu" else "cuda")
    tile = min(n, max(1, tile_size(device, b, d) // k) * k)
    update = _UPDATE if {head.row_dtype, head.state_dtype} == {"float32"} else _ROUNDED_UPDATE
    step = {
        "embeddings of all ranks": matrix + (matrix // 2 if config.precision.mode != "float32" else 0),
        "normalised embeddings": matrix,
        "class weights of the labels": k * matrix,
        "weighted sum of class weights": matrix,
        "gradient of the embeddings": matrix + b_local * d * _FLOAT,
        "tiles": tile * max(_LOGITS[0] * d + _LOGITS[1] * b, update * d) * _FLOAT,
    }
    if kept:
        step["kept softmax terms"] = kept
    is_copied = head.offload or head.weights_file is not None
    if ratio < 1 or is_copied:
        step["indices of the sampled classes"] = n * _INDEX * (_DRAW_INDICES if ratio < 1 else 1)
    if is_copied:
        step |= {f"copy of {name}": n // k * size for name, size in per_class.items()}
    return HeadPlan(
        f"Head: {head.class_num:,} classes; ranks: {ranks:,}; per rank: {local:,}; global batch: {b:,}",
        {name: local * size for name, size in (per_class | lists).items()},
        step,
        bytes_per_class=sum((per_class | lists).values()),
        place="in CPU memory" if head.offload else _DEVICE if head.weights_file is None else "in a file",
    )


def _bytes_per_class(head: ShardedHead, rows: RowOptimizer) -> dict[str, int]:
    """Return the bytes of the weights of a class and of their optimizer states; head: of one class."""
    sizes: dict[str, int] = {}
    for name, parameter in head.named_parameters():
        for key, tensor in {name: parameter, **rows.state[parameter]}.items():
            sizes[key] = sizes.get(key, 0) + tensor.nbytes
    return sizes


def _plan_backbone(options: Mapping[str, Any], ranks: int) -> PartPlan:
    config = _config_of(options)
    optim, model, mode = config.optim, config.model, config.precision.mode
    parts, total = config.train.micro_batches, config.train.global_batch_size
    images = config.train.batch_size if total is None else -(-total // ranks)
    make = functools.partial(
        build_model, model.name, model.emb_size, model.image_shape, model.dropout, model.neck
    )
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        network = _build_fake(make, fake)
        if config.memory.recompute == "all":
            recompute_activations(network)
        batch = -(-images // parts)
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        step = {"activations": _measure_activations(network, model.image_shape, mode, fake, batch)}
        optimizer = build_optimizer(
            optim.optimizer,
            [{"params": trained}],
            DEFAULT_RATE,
            momentum=optim.momentum,
            weight_decay=optim.weight_decay,
            arguments=optim.optimizer_arguments,
        )
        states = _count_states(trained, ExpectedStates(optimizer))
    except PlscError:
        raise
    except Exception as error:  # networks may raise anything
        raise OptionError(
            f"the network cannot be planned, because it fails with fake tensors: {kind_and_line(error)[:200]}"
        ) from error
    stored = {
        "parameters": sum(parameter.nbytes for parameter in network.parameters()),
        "gradients": sum(parameter.nbytes for parameter in trained),
        f"{optim.optimizer} states": states,
        "buffers": sum(buffer.nbytes for buffer in network.buffers()),
    }
    if optim.ema_decay:
        stored["moving average"] = stored["parameters"] + stored["buffers"]
    title = f"Backbone: {model.name}, {mode}; images per rank: {images:,}; micro-batches: {parts:,}"
    return PartPlan(title, stored, step)


def _build_fake(make: Callable[[], nn.Module], fake: FakeTensorMode) -> nn.Module:
    """Return the network for training, with fake parameters and buffers."""
    try:
        with fake:
            network = make().train()
    except PlscError:  # a constructor may need real values
        with FakeCopyMode(fake):
            network = copy.deepcopy(make().train())
    use_torch_layers(network)
    return network


def _measure_activations(
    network: nn.Module, image_shape: tuple[int, ...], mode: str, fake: FakeTensorMode, batch: int
) -> int:
    """Return the peak memory of forward and backward pass, without parameters, gradients and buffers."""
    with fake, torch.random.fork_rng(devices=[]):
        for parameter in network.parameters():
            parameter.requires_grad_(True)  # MemTracker fails on a frozen one, as in IResNet
            parameter.grad = torch.zeros_like(parameter)
        tracker = MemTracker()
        tracker.track_external(network)
        with tracker:
            before = _total(tracker, "current")
            example: Input | None = getattr(network, "example_input", None)
            sample = torch.empty(0, *image_shape) if example is None else example
            images = map_tensors(lambda part: part.new_zeros(batch, *part.shape[1:]), sample)
            with nullcontext() if mode == "float32" else torch.autocast("cpu", getattr(torch, mode)):
                embeddings = network(images)
            embeddings.float().backward(torch.ones_like(embeddings, dtype=torch.float32))
    return _total(tracker, "peak") - before


def _total(tracker: MemTracker, moment: str) -> int:
    return sum(int(device["Total"]) for device in tracker.get_tracker_snapshot(moment).values())


def _count_states(parameters: Iterable[nn.Parameter], states: ExpectedStates) -> int:
    """Return the bytes of the optimizer states of a network's parameters."""
    infos = [info for one in parameters for info in (states.of(one) or {}).values() if info]
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in infos)
