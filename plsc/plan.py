"""Estimate the memory of a training run before it starts, from its options.

Class weights, parameters, gradients and optimizer states are counted on the real classes of plsc and torch,
so they are exact. Temporary tensors of the head are computed as upper bounds. Activations are measured on
fake tensors, which have shapes but no data: without the device, the data, or much time.

Notation of docs/life_of_a_step.md: B samples in the global batch, embeddings of size D, n class weights per
rank used in a step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from plsc.config import Config, Options
from plsc.config.head import sample_ratios
from plsc.config.optim import DEFAULT_RATE
from plsc.errors import OptionError, PlscError, kind_and_line
from plsc.heads import ROW_OPTIMIZERS, ShardedHead, build_margin
from plsc.heads.sampling import KEPT_BYTES, LIST_BYTES
from plsc.heads.softmax import tile_size
from plsc.inputs import Input, map_tensors
from plsc.models import build_model
from plsc.models.layers import use_torch_layers
from plsc.models.recomputation import recompute_activations
from plsc.names import names_code
from plsc.optim.optimizers import ExpectedStates, build_optimizer
from plsc.storage.store import format_bytes

_MOST_CLASSES, _MOST_RANKS = 10**12, 2**16
_FLOAT, _INDEX = 4, 8  # bytes of a float32 and an int64
# Number of float matrices that TorchBackend, the backend that needs most, allocates at once: [tile, D] and
# [B, tile] for the logits; [tile, D] for the update, and for one with stochastic rounding (int64 noise).
_LOGITS = (3, 4)
_UPDATE, _ROUNDED_UPDATE = 6, 11
_DEVICE = "on the device"
_DRAW_INDICES = 6  # int64 values per selected row while the classes of a step are sampled

# Changes of options that reduce memory; those that make a run fit are suggested.
_SMALLER_BACKBONE = {
    "precision.mode": "bfloat16",
    "memory.recompute": "all",
    "train.micro_batches": 4,
}
_SMALLER: tuple[dict[str, Any], ...] = (
    {"head.row_dtype": "bfloat16", "head.state_dtype": "bfloat16"},
    {"head.row_dtype": "bfloat16", "head.state_dtype": "float32", "head.optimizer": "adagrad"},
    {"head.row_dtype": "int8", "head.state_dtype": "float32", "head.optimizer": "adagrad"},
    {"head.sample_ratio": 0.1, "head.offload": True},
    {
        "head.row_dtype": "int8",
        "head.state_dtype": "float32",
        "head.optimizer": "adagrad",
        "head.sample_ratio": 0.01,
        "head.weights_file": "FOLDER",
    },
    *({path: value} for path, value in _SMALLER_BACKBONE.items()),
    _SMALLER_BACKBONE,
)


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
        operations: floating-point operations of the matrix products per step and rank.
        rows_moved: bytes of class weights, states and cached softmax terms that a step reads and writes, or
            with offload copies between CPU and device.
    """

    bytes_per_class: int
    operations: int
    rows_moved: int


@dataclass(frozen=True)
class Plan:
    """The plan of a run. All sizes are in bytes per rank.

    Attributes:
        device_limit: memory of a device.
        most_classes: number of classes that fit, at most; 0: none.
        smaller: if the run does not fit: flags that make it fit, and its memory with them.
    """

    head: HeadPlan
    backbone: PartPlan
    device_limit: int
    most_classes: int
    smaller: dict[str, int]

    @property
    def device_bytes(self) -> int:
        """Peak device memory of head and backbone."""
        return self.head.device_bytes + self.backbone.device_bytes

    @property
    def fits(self) -> bool:
        """Whether the run fits in the memory of the device."""
        return self.device_bytes <= self.device_limit

    def render(self) -> str:
        """Return the plan as text: whether the run fits, what would fit, and the sizes."""
        needed, limit = format_bytes(self.device_bytes), format_bytes(self.device_limit)
        # Three digits, rounded down.
        most = self.most_classes - self.most_classes % 10 ** max(0, len(str(self.most_classes)) - 3)
        return "\n".join(
            [
                f"{'fits' if self.fits else 'does not fit'}: {needed} of {limit} per rank; "
                f"at most {most:,} classes fit",
                *(f"fits with {flags}: {format_bytes(size)}" for flags, size in self.smaller.items()),
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
    config = _config_of(options)
    ranks = ranks or config.runtime.world_size or 1
    limit = int(device_gb * 1e9)
    head, backbone = _plan_head(config, ranks), _plan_backbone(config, ranks)
    room = limit - backbone.device_bytes
    smaller = {} if head.device_bytes <= room else dict(_what_fits(config, ranks, backbone, limit))
    return Plan(head, backbone, limit, _most_classes(config, ranks, room), smaller)


def plan_head(options: Mapping[str, Any], ranks: int | None = None) -> HeadPlan:
    """Estimate the memory and the work of a sharded head alone; arguments and errors as of `plan`."""
    config = _config_of(options)
    return _plan_head(config, ranks or config.runtime.world_size or 1)


def _config_of(options: Mapping[str, Any]) -> Config:
    made = Options()
    made.set_together(options)
    config = made.resolve()
    config.check_needs()
    loss_type = config.head.loss_type
    if config.head.class_num is None:
        raise OptionError("head.class_num is not set, and a plan reads no data; set it")
    if not loss_type.startswith("dist_"):
        raise OptionError(
            f"head.loss_type is {loss_type}; a plan supports only sharded heads (a loss dist_...)"
        )
    return config


def _what_fits(config: Config, ranks: int, backbone: PartPlan, limit: int) -> Iterator[tuple[str, int]]:
    """Yield flags that make head and backbone fit, with the memory then needed."""
    more = 2 * ranks
    while more <= _MOST_RANKS:
        needed = _plan_head(config, more).device_bytes + backbone.device_bytes
        if needed <= limit:
            yield f"--ranks {more}", needed
            break
        more *= 2
    for changes in _SMALLER:
        changed = config.changed(changes)
        head, other = _plan_head(changed, ranks), backbone
        if any(not path.startswith("head.") for path in changes):
            if head.device_bytes > limit:
                continue
            try:
                other = _plan_backbone(changed, ranks)
            except OptionError:  # such as a network without blocks to recompute
                continue
        needed = head.device_bytes + other.device_bytes
        if needed <= limit:
            yield " ".join(f"--{path} {value}" for path, value in changes.items()), needed


def _most_classes(config: Config, ranks: int, room: int) -> int:
    """Return the number of classes whose head fits in `room` bytes per rank."""
    low, high = 0, _MOST_CLASSES
    while low < high:
        middle = (low + high + 1) // 2
        fits = _plan_head(config.changed({"head.class_num": middle}), ranks).device_bytes <= room
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _batch_of(config: Config, ranks: int) -> tuple[int, int]:
    """Return the global batch size, and the largest batch size per rank."""
    total = config.train.global_batch_size or config.train.batch_size * ranks
    return total, -(-total // ranks)


def _plan_head(config: Config, ranks: int) -> HeadPlan:
    if not 1 <= ranks <= _MOST_RANKS:
        raise OptionError(f"ranks is {ranks}; expected a number between 1 and {_MOST_RANKS}")
    head, d, k = config.head, config.model.emb_size, config.head.sub_centers
    assert head.class_num is not None
    b, b_local = _batch_of(config, ranks)
    local = -(-head.class_num // ranks)  # classes of the first rank, which has the most
    per_class = _bytes_per_class(config)
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
    copies = n // k * sum(per_class.values())
    if is_copied:
        step |= {f"copy of {name}": n // k * size for name, size in per_class.items()}
        moved = 2 * copies
    else:  # forward pass and update read the class weights; states are read once; the update writes both
        moved = n // k * per_class["weight"] + 2 * copies + 2 * kept
    return HeadPlan(
        f"Head: {head.class_num:,} classes; ranks: {ranks:,}; per rank: {local:,}; global batch: {b:,}",
        {name: local * size for name, size in (per_class | lists).items()},
        step,
        bytes_per_class=sum((per_class | lists).values()),
        operations=(6 if kept else 8) * b * n * d,  # without kept terms, the update computes the logits again
        rows_moved=moved,
        place="in CPU memory" if head.offload else _DEVICE if head.weights_file is None else "in a file",
    )


def _bytes_per_class(config: Config) -> dict[str, int]:
    """Return the bytes of the weights of a class and of their optimizer states, counted on a head of one."""
    head, optimizer = config.head, ROW_OPTIMIZERS[config.head.optimizer]
    margin = build_margin(head.loss_type.removeprefix("dist_"))
    one = ShardedHead(1, config.model.emb_size, margin, centers=head.sub_centers, row_dtype=head.row_dtype)
    momentum = {"momentum": config.optim.momentum} if head.optimizer == "sgd" else {}
    states = optimizer(one, state_dtype=head.state_dtype, **momentum).state
    found: dict[str, int] = {}
    for name, parameter in one.named_parameters():
        for key, tensor in {name: parameter, **states[parameter]}.items():
            found[key] = found.get(key, 0) + tensor.nbytes
    return found


def _plan_backbone(config: Config, ranks: int) -> PartPlan:
    parts, images = config.train.micro_batches, _batch_of(config, ranks)[1]
    optimizer = config.optim.optimizer
    if names_code(optimizer):
        raise OptionError(
            f"optim.optimizer is {optimizer!r}; a plan supports only built-in optimizers: choose the one "
            "with the most similar states"
        )
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        network = _build_fake(config, fake)
        step = {"activations": _measure_activations(network, config, fake, -(-images // parts))}
        states = _count_states(network, config)
    except PlscError:
        raise
    except Exception as error:  # networks may raise anything
        raise OptionError(
            f"the network cannot be planned, because it fails with fake tensors: {kind_and_line(error)[:200]}"
        ) from error
    parameters = _nbytes(network)
    stored = {
        "parameters": parameters,
        "gradients": sum(p.nbytes for p in network.parameters() if p.requires_grad),
        f"{optimizer} states": states,
        "buffers": sum(buffer.nbytes for buffer in network.buffers()),
    }
    if config.optim.ema_decay:
        stored["moving average"] = stored["parameters"] + stored["buffers"]
    title = (
        f"Backbone: {config.model.name}, {config.precision.mode}; images per rank: {images:,}; "
        f"micro-batches: {parts:,}"
    )
    return PartPlan(title, stored, step)


def _build_fake(config: Config, fake: FakeTensorMode) -> nn.Module:
    """Return the network for training, with fake parameters and buffers."""
    model = config.model

    def build() -> nn.Module:
        return build_model(model.name, model.emb_size, model.image_shape, model.dropout, model.neck).train()

    try:
        with fake:
            network = build()
    except PlscError:  # a constructor may need real values
        with FakeCopyMode(fake):
            network = copy.deepcopy(build())
    use_torch_layers(network)
    recompute_activations(network, config.memory.recompute)
    return network


def _measure_activations(network: nn.Module, config: Config, fake: FakeTensorMode, batch: int) -> int:
    """Return the peak memory of forward and backward pass, without parameters, gradients and buffers."""
    mode = config.precision.mode
    with fake, torch.random.fork_rng(devices=[]):
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        tracker = MemTracker()
        tracker.track_external(network)
        with tracker:
            before = _total(tracker, "current")
            example: Input | None = getattr(network, "example_input", None)
            one = torch.empty(0, *config.model.image_shape) if example is None else example
            images = map_tensors(lambda part: part.new_zeros(batch, *part.shape[1:]), one)
            is_mixed = mode != "float32"
            with torch.autocast("cpu", getattr(torch, mode) if is_mixed else None, enabled=is_mixed):
                embeddings = network(images)
            embeddings.float().backward(torch.ones_like(embeddings, dtype=torch.float32))
    return _total(tracker, "peak") - before


def _total(tracker: MemTracker, moment: str) -> int:
    return sum(int(device["Total"]) for device in tracker.get_tracker_snapshot(moment).values())


def _count_states(network: nn.Module, config: Config) -> int:
    """Return the bytes of the optimizer states of a network's parameters."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    states = ExpectedStates(
        build_optimizer(config.optim, [{"params": trained}], DEFAULT_RATE, torch.device("cpu"))
    )
    found = [info for parameter in trained for info in (states.of(parameter) or {}).values() if info]
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in found)


def _nbytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
