"""Ways to run one training step of a classification head over C classes: plsc and others.

A step computes the loss of a batch and the gradient of its embeddings, and updates the class weights by SGD
with momentum 0.9 and weight decay 5e-4 (or the optimizer in the name). Class weights W [C, D], embeddings x
[B, D], labels [B]. Ways share weights and momentum in a `Store`, so that many ways fit into one process.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SCALE, MARGIN = 64.0, 0.5
LR, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 5e-4
EVERYTHING = 10**15  # bytes, more than any head needs
BASELINE = "plain PyTorch, fp32"  # all others are compared with it


@dataclass
class Store:
    """Tensors that the ways of one process share, created on first use."""

    classes: int
    dimension: int
    device: torch.device
    kept: dict[str, Any] = field(default_factory=dict)

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the tensor of this name; create it on first use."""
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]

    def weight(self) -> Tensor:
        """Return the initial class weights of plsc, fp32 [C, D]."""
        from plsc.heads.weights import initial_rows

        return self.get("weight", lambda: initial_rows(0, 0, self.classes, self.dimension).to(self.device))

    def momentum(self) -> Tensor:
        """Return the momentum of the class weights, fp32 [C, D]."""
        return self.get("momentum", lambda: torch.zeros_like(self.weight()))


@dataclass
class Built:
    """A way, ready to run. step(x, labels): run a step, set x.grad, and return the loss.

    tensors: class weights and their states. note: the backend, after a step.
    """

    step: Callable[[Tensor, Tensor], Tensor]
    tensors: list[Tensor]
    note: Callable[[], str] = lambda: ""


@dataclass(frozen=True)
class Way:
    """A way. loss: 'arcface' or 'softmax' (plain, no normalisation). package: required besides torch.

    for_millions: whether to run it where the class weights alone fill the memory. planned: its options
    for plsc.plan, None if it is not plsc. tf32: whether float32 products may use tf32.
    """

    name: str
    loss: str
    build: Callable[[Store], Built]
    package: str | None = None
    needs_gpu: bool = False
    for_millions: bool = False
    planned: dict[str, Any] | None = None
    tf32: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether this is a way of plsc."""
        return self.name.startswith("plsc")

    def missing(self, device: str) -> str | None:
        """Return why the way cannot run here, or None."""
        if self.package == "torch":
            return None if hasattr(nn, "LinearCrossEntropyOptions") else f"not in torch {torch.__version__}"
        if self.package is not None and importlib.util.find_spec(self.package) is None:
            return "not installed"
        if self.needs_gpu and device != "cuda":
            return "needs a GPU"
        return None


def _ours(
    store: Store,
    products: str,
    keep: bool = False,
    ratio: float = 1.0,
    hard: float = 0.0,
    light: str = "",
    kernels: str = "auto",
    tile: int | None = None,
    loss: str = "arcface",
) -> Built:
    """Build plsc. light: bfloat16 or int8 class weights with row-wise Adagrad, 1,028 or 520 bytes each."""
    from plsc.heads import Execution, RowAdagrad, RowSGD, Sampling, ShardedHead, build_margin

    settings = {} if loss == "softmax" else {"scale": SCALE, "margin": MARGIN}

    def make_light() -> tuple[ShardedHead, RowAdagrad]:
        head = ShardedHead(store.classes, store.dimension, build_margin(loss, **settings), row_dtype=light)
        head.to(store.device)
        return head, RowAdagrad(head, lr=LR, weight_decay=WEIGHT_DECAY)

    def make_full() -> tuple[ShardedHead, RowSGD]:
        head = ShardedHead(store.classes, store.dimension, build_margin(loss, **settings)).to(store.device)
        head.weight.data = store.get("weight", lambda: head.weight.data)
        rows = RowSGD(head, lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
        states = rows.state[head.weight]
        states["momentum_buffer"] = store.get("momentum", lambda: states["momentum_buffer"])
        return head, rows

    head, rows = store.get(light + loss, make_light if light else make_full)
    sampling = Sampling(ratio=ratio, hard=hard)
    keep_bytes = EVERYTHING if keep else 0
    execution = Execution(products, keep_bytes=keep_bytes, kernels=kernels, tile=tile)
    said = [""]

    def step(x: Tensor, labels: Tensor) -> Tensor:
        head.sampling, head.execution = sampling, execution  # the ways share one head
        output = head(x, labels)
        output.loss.backward()
        context = head.contexts[-1]
        said[0] = f"{context.backend.name} kernels" + (", kept" if context.kept is not None else "")
        rows.step()
        return output.mean_loss

    return Built(step, [head.weight.data, *rows.state[head.weight].values()], lambda: said[0])


def use_tf32(allowed: bool) -> None:
    """Allow or forbid TF32 in matrix products for the next way; convolutions use it, as by default."""
    torch.backends.cuda.matmul.allow_tf32 = allowed


def _sgd(parameter: nn.Parameter, momentum: Tensor) -> torch.optim.SGD:
    optimizer = torch.optim.SGD([parameter], lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    optimizer.state[parameter]["momentum_buffer"] = momentum
    return optimizer


def _plain(store: Store, loss: Callable[[Tensor, Tensor, Tensor], Tensor], autocast: bool = False) -> Built:
    """Build a way from a loss of (x, W, labels), autograd and torch.optim.SGD."""
    weight = nn.Parameter(store.weight())
    optimizer = _sgd(weight, store.momentum())

    def step(x: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            value = loss(x, weight, labels)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return Built(step, [weight.data, store.momentum()])


def arcface(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the mean ArcFace loss (Deng et al. 2019), computed with the full logits [B, C]."""
    cosines = F.linear(F.normalize(x), F.normalize(weight)).float()
    samples = torch.arange(len(x), device=x.device)
    target = cosines[samples, labels].clamp(-1 + 1e-6, 1 - 1e-6)
    cosines[samples, labels] = torch.cos(torch.acos(target) + MARGIN)
    cosines *= SCALE  # in place, to save memory
    return F.cross_entropy(cosines, labels)


def _baseline(store: Store, autocast: bool = False) -> Built:
    return _plain(store, arcface, autocast)


def _scaled(store: Store, weight: nn.Parameter, loss: Callable[[Tensor, Tensor], Tensor]) -> Built:
    """Build the step of insightface's train_v2.py in float16: a scaled loss of (x, labels), then SGD."""
    optimizer = _sgd(weight, store.momentum())
    scaler = torch.amp.GradScaler(store.device.type, growth_interval=100)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        value = loss(x, labels)
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return value.detach()

    return Built(step, [weight.data, store.momentum()])


def _published(store: Store, ratio: float) -> Built:
    """Build PartialFC (An et al. 2022) as insightface publishes it: its own class and margin, in float16."""
    margin = importlib.import_module("losses").CombinedMarginLoss
    module = importlib.import_module("partial_fc_v2").PartialFC_V2
    _process_group(store)
    partial = module(margin(SCALE, 1.0, MARGIN, 0.0), store.dimension, store.classes, ratio, fp16=True)
    partial.weight = nn.Parameter(store.weight())  # those of the other ways
    return _scaled(store, partial.weight, partial)


def _rewritten(store: Store) -> Built:
    """Build the same step without that file: cosines in float16, then ArcFace with full logits in float32."""
    weight = nn.Parameter(store.weight())

    def loss(x: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.float16):
            return arcface(x, weight, labels)

    return _scaled(store, weight, loss)


def _partial_fc(store: Store) -> Built:
    """Build PartialFC (An et al. 2022): sample a tenth of the classes by random scores."""
    weight, momentum = store.weight(), store.momentum()

    def step(x: Tensor, labels: Tensor) -> Tensor:
        scores = torch.rand(len(weight), device=x.device)
        scores[labels] = 2
        chosen = scores.topk(max(len(weight) // 10, len(labels))).indices.sort().values
        part = weight[chosen].requires_grad_()
        loss = arcface(x, part, torch.searchsorted(chosen, labels))
        loss.backward()
        with torch.no_grad():
            assert part.grad is not None
            part.grad.add_(part, alpha=WEIGHT_DECAY)
            velocity = momentum[chosen].mul_(MOMENTUM).add_(part.grad)
            part.sub_(velocity, alpha=LR)
            weight[chosen] = part
            momentum[chosen] = velocity
        return loss.detach()

    return Built(step, [weight, momentum])


def _metric_learning(store: Store) -> Built:
    from pytorch_metric_learning.losses import ArcFaceLoss

    loss = ArcFaceLoss(1, 1, margin=math.degrees(MARGIN), scale=SCALE)
    loss.num_classes = store.classes
    columns = (
        store.dimension,
        store.classes,
    )  # its weights are transposed; both are random
    loss.W = nn.Parameter(store.weight().view(columns))
    optimizer = _sgd(loss.W, store.momentum().view(columns))

    def step(x: Tensor, labels: Tensor) -> Tensor:
        value = loss(x, labels)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return Built(step, [loss.W.data, store.momentum()])


def _chunked(store: Store, dtype: torch.dtype = torch.float32) -> Built:
    options = torch.nn.LinearCrossEntropyOptions()
    return _plain(store, lambda x, w, y: F.linear_cross_entropy(x.to(dtype), w.to(dtype), y, options=options))


def _process_group(store: Store) -> None:
    """Make a process group of this process alone."""
    import torch.distributed as dist

    if not dist.is_initialized():
        backend = "nccl" if store.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _liger(store: Store, autocast: bool = False) -> Built:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return _plain(store, lambda x, w, y: loss(w, x, y), autocast)


def _cut(store: Store, **how: Any) -> Built:
    """Build cut cross-entropy; by default it skips gradients that bfloat16 would round to 0."""
    from cut_cross_entropy import linear_cross_entropy

    def loss(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        # Its backward pass needs half precision.
        return linear_cross_entropy(x.bfloat16(), w.bfloat16(), labels, **how)

    return _plain(store, loss)


def _our_way(name: str, products: str, needs_gpu: bool = False, tf32: bool = False, **how: Any) -> Way:
    planned: dict[str, Any] = {"head.sample_ratio": how.get("ratio", 1.0)}
    if how.get("keep"):
        planned["head.execution"] = {"keep_mb": EVERYTHING / 2**20}
    if how.get("loss"):
        planned["head.loss_type"] = f"dist_{how['loss']}"
    if how.get("light"):
        planned |= {"head.row_dtype": how["light"], "head.optimizer": "adagrad"}
    return Way(
        name,
        how.get("loss", "arcface"),
        lambda store: _ours(store, products, **how),
        needs_gpu=needs_gpu,
        for_millions="light" in how and "ratio" in how,
        planned=planned,
        tf32=tf32,
    )


def _other(name: str, build: Callable[..., Built], loss: str = "arcface", **how: Any) -> Way:
    """Return a way of others. how: fields of Way; the rest are arguments of `build`."""
    fields = {key: how.pop(key) for key in ("package", "needs_gpu", "for_millions", "tf32") if key in how}
    return Way(name, loss, lambda store: build(store, **how), **fields)


_GPU: dict[str, Any] = {"needs_gpu": True}
_INSIGHTFACE: dict[str, Any] = {"package": "partial_fc_v2", **_GPU}
_LIGER: dict[str, Any] = {"loss": "softmax", "package": "liger_kernel", **_GPU}
_CUT: dict[str, Any] = {"loss": "softmax", "package": "cut_cross_entropy", **_GPU}
_CHUNKED: dict[str, Any] = {"loss": "softmax", "package": "torch"}
WAYS = (
    _other(BASELINE, _baseline),
    _other("plain PyTorch, tf32", _baseline, tf32=True, **_GPU),
    _other("plain PyTorch, bf16 autocast", _baseline, autocast=True),
    _other("plain PyTorch, PartialFC 0.1", _partial_fc, for_millions=True),
    _other("pytorch-metric-learning", _metric_learning, package="pytorch_metric_learning"),
    _other("insightface PartialFC_V2, fp16", _published, ratio=1.0, **_INSIGHTFACE),
    _other("insightface PartialFC_V2, fp16, 0.1", _published, ratio=0.1, **_INSIGHTFACE),
    _other("PartialFC rewritten, fp16", _rewritten, **_GPU),
    _other("torch linear_cross_entropy, chunked", _chunked, **_CHUNKED),
    _other("torch linear_cross_entropy, chunked, bf16", _chunked, dtype=torch.bfloat16, **_CHUNKED, **_GPU),
    _other("liger-kernel", _liger, **_LIGER),
    _other("liger-kernel, bf16", _liger, autocast=True, **_LIGER),
    _other("cut-cross-entropy, bf16", _cut, **_CUT),
    _other("cut-cross-entropy, bf16, all gradients", _cut, filter_eps=None, **_CUT),
    _our_way("plsc, fp32", "float32"),
    _our_way("plsc, tf32", "float32", needs_gpu=True, tf32=True),
    _our_way("plsc, fp32, kept", "float32", keep=True),
    _our_way("plsc, bf16", "bfloat16"),
    _our_way("plsc, bf16, kept", "bfloat16", keep=True),
    _our_way("plsc, bf16, softmax", "bfloat16", loss="softmax"),
    _our_way("plsc, bf16, CurricularFace", "bfloat16", loss="curricularface"),
    _our_way("plsc, bf16, long tiles", "bfloat16", needs_gpu=True, tile=65_536),
    _our_way("plsc, bf16, no kernels", "bfloat16", kernels="torch"),
    _our_way("plsc, bf16, 0.1", "bfloat16", ratio=0.1),
    _our_way("plsc, bf16, 0.1, half hard", "bfloat16", ratio=0.1, hard=0.5),
    _our_way("plsc, bf16 rows, Adagrad", "bfloat16", light="bfloat16"),
    _our_way("plsc, bf16 rows, Adagrad, 0.1", "bfloat16", ratio=0.1, light="bfloat16"),
    _our_way("plsc, bf16 rows, Adagrad, 0.01", "bfloat16", ratio=0.01, light="bfloat16"),
    _our_way("plsc, bf16, int8 rows, Adagrad", "bfloat16", light="int8"),
    _our_way("plsc, bf16, int8 rows, Adagrad, 0.1", "bfloat16", ratio=0.1, light="int8"),
)
# By name only: the C kernels of one instruction set, one of plsc.heads.softmax.ENGINES.
_ENGINES = ("native-avx512", "native-avx2", "native-neon")
_OF_ENGINES = [
    _our_way(f"plsc, fp32{share}, {engine}", "float32", ratio=ratio, kernels=engine)
    for engine in _ENGINES
    for share, ratio in (("", 1.0), (", 0.1", 0.1))
]
BY_NAME = {way.name: way for way in (*WAYS, *_OF_ENGINES)}
