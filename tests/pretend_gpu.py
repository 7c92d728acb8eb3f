"""A pretend GPU: what a training step would do on a CUDA device, recorded without one.

Tensors on "cuda" are PyTorch's fake tensors: shapes, strides and dtypes without values. Tensors on the CPU
are real, so what the host computes is exact. Triton kernels do not run. Recorded are: waits of the host for
the device, copies that block, collectives, launches, bytes, and tensors of [B, C]. It knows neither values
on the device nor time.

Run as a program, in a process of its own because it patches torch: reads cases (JSON) from stdin, and writes
a report (JSON) per line to stdout. `run_cases` does that.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
import traceback
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
DIMENSION = 512


@dataclass(frozen=True)
class Case:
    """What to run: one step of the head alone (network ""), or of a run with this network, or `copies`.

    ranks: of the process group, of which this process is rank 0. batch: per rank. options: of the run, or of
    the head alone (see `run_head`). way: of benchmarks/ways.py, or with a network of train.py.
    plant: a fault that the checks must find.
    """

    name: str
    network: str = ""
    ranks: int = 1
    batch: int = 128
    classes: int = 100_000
    options: dict[str, Any] = field(default_factory=dict)
    way: str = ""
    dimension: int = DIMENSION
    plant: str = ""
    copies: bool = False


@dataclass
class Report:
    """What a step would do. waits: of the host for the device, by place. blocking: copies to it that wait.

    pageable: asynchronous copies of more than 64 KiB from memory that is not page-locked, which CUDA copies
    before it returns. collectives: name, device and shape of tensors. mixed: kernels with tensors not
    on the device. huge: places that make a tensor of [B, C]. gigabytes: read and written by all
    operations, as if nothing stayed in a cache. flops: of products and convolutions of torch, by the dtype of
    their inputs. error: the traceback of a failure.
    """

    name: str = ""
    waits: Counter[str] = field(default_factory=Counter)
    blocking: Counter[str] = field(default_factory=Counter)
    pageable: Counter[str] = field(default_factory=Counter)
    collectives: list[tuple[str, list[str]]] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)
    huge: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)
    error: str = ""

    @property
    def gigabytes(self) -> float:
        return sum(self.bytes.values()) / 1e9


def faults(report: Report, *, waits: int = 0, collectives: int = 4, launches: int = 1000) -> list[str]:
    """Return what a step does that it must not do."""
    found = [report.error] if report.error else []
    if report.waits.total() > waits:
        found.append(f"host waits: {dict(report.waits)}")
    found += [f"blocking copy: {place}" for place in report.blocking]
    found += [f"copy from pageable memory: {place}" for place in report.pageable]
    found += [f"tensor of [B, C]: {place}" for place in report.huge]
    found += [f"kernel: {text}" for text in report.mixed]
    for name, tensors in report.collectives:
        if any(not tensor.startswith("cuda") for tensor in tensors):
            found.append(f"collective on the CPU: {name} {tensors}")
    if len(report.collectives) > collectives:
        found.append(f"{len(report.collectives)} collectives: {report.collectives}")
    if report.launches.total() > launches:
        found.append(f"{report.launches.total()} launches")
    return found


def unavailable() -> str:
    """Return why the pretend GPU cannot run here, else an empty string."""
    import torch

    if torch.version.cuda is None or not sys.platform.startswith("linux"):
        return "torch is no CUDA build for Linux"
    with contextlib.suppress(ImportError):
        import triton  # noqa: F401

        return "" if shutil.which("gcc") else "there is no gcc"
    return "triton is not installed"


def run_cases(cases: list[Case], folder: Path) -> dict[str, Report]:
    """Run the cases in a new process and return their reports by name; folder: for the compiled driver."""
    driver = folder / "libcuda.so.1"
    if not driver.exists():
        source = str(HERE / "pretend_driver.c")
        options = ["-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
        subprocess.run(["gcc", *options, "-o", str(driver), source], check=True)
        (folder / "libcuda.so").symlink_to(driver.name)  # Triton looks for the folder of the driver
    environment = {
        **os.environ,
        "LD_PRELOAD": str(driver),
        "LD_LIBRARY_PATH": str(folder),
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.pretend_gpu"], input=json.dumps([asdict(case) for case in cases]),
        env=environment | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}, cwd=ROOT,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    counters = {key for key, value in vars(Report()).items() if isinstance(value, Counter)}
    return {
        report["name"]: Report(**{k: Counter(v) if k in counters else v for k, v in report.items()})
        for report in found
    }


# What follows runs in the new process.

_FREE = frozenset(
    """
    view _unsafe_view t transpose permute slice select unsqueeze squeeze expand detach alias as_strided split
    unbind reshape _reshape_alias split_with_sizes chunk empty empty_like new_empty empty_strided
    new_empty_strided lift_fresh narrow diagonal device is_pinned
    """.split()  # noqa: SIM905
)
"""Operations without a kernel."""

_ONLY_WRITE = {"fill_", "zero_", "new_zeros", "zeros_like", "zeros", "full", "new_full", "arange"}

_UPDATED = {
    "update": ("weight", "state", "second_state", "steps"),
    "_cce_backward_kernel": ("dE", "dC"),
    "liger_cross_entropy_kernel": ("X_ptr",),
}
"""Arguments that a Triton kernel both reads and writes."""

_STAGED = 2**16  # bytes; smaller copies from pageable memory return at once


class PretendGPU:
    """Records what the process does with "cuda" in `modes`; `report` is of the time since `start`."""

    def __init__(self) -> None:
        self.report = Report()
        self.matrix = (0, 0)
        self._pinned: set[int] = set()

    def start(self, case: Case) -> None:
        self.report = Report(case.name)
        self.matrix = (case.batch * case.ranks, -(-case.classes // case.ranks))

    def _is_huge(self, tensor: Any) -> bool:
        """Return whether it has a value per sample and class, of more classes than a tile has."""
        shape = sorted(tensor.shape)
        return shape == sorted(self.matrix) and tensor.numel() > 2**25

    def place(self) -> str:
        """Return the lines of plsc that are running, the innermost first."""
        stack = traceback.extract_stack()
        frames = [f for f in stack if "/plsc/" in f.filename and "/tests/" not in f.filename]
        lines = [f"{f.filename.rsplit('/plsc/', 1)[1]}:{f.lineno}" for f in frames[-3:]]
        return " < ".join(reversed(lines))

    def wait(self, what: str) -> None:
        self.report.waits[f"{what} at {self.place()}"] += 1

    def make_pinned(self, tensor: Any) -> Any:
        self._pinned.add(tensor.untyped_storage()._cdata)
        return tensor

    def modes(self) -> contextlib.ExitStack:
        import torch
        from torch._library.custom_ops import OPDEFS
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
        from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
        from torch.utils._pytree import tree_leaves
        from torch.utils.flop_counter import flop_registry

        gpu = self

        class Recorder(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                kwargs = dict(kwargs or {})
                name = func._schema.name.split("::")[1]
                inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
                is_fake = any(isinstance(x, FakeTensor) for x in inputs)
                device = kwargs.get("device")
                if not is_fake and (device is None or torch.device(device).type == "cpu"):
                    is_pinned = kwargs.pop("pin_memory", False) or name == "_pin_memory"
                    with _disable_current_modes():
                        if name == "is_pinned":
                            return inputs[0].untyped_storage()._cdata in gpu._pinned
                        out = inputs[0].clone() if name == "_pin_memory" else func(*args, **kwargs)
                    return gpu.make_pinned(out) if is_pinned else out
                if name.startswith(("_fused_", "_amp_")):
                    gpu.report.mixed += [f"{name} on {x.device}" for x in inputs if x.device.type != "cuda"]
                    gpu.report.launches[name] += 1
                    read_only = args[1] if name.startswith("_fused_") else ()  # the gradients
                    gpu.report.bytes[name] += 2 * sum(map(_bytes, inputs)) - sum(map(_bytes, read_only))
                    return None
                written_in_python = OPDEFS.get(func._schema.name)
                if written_in_python is not None:  # its body may be many operations
                    with self:
                        return written_in_python._init_fn(*args, **kwargs)
                guess = gpu.guess(name, args, kwargs, inputs)
                if guess is not None:
                    return guess[0]
                if name == "_to_copy" and not is_fake:  # values of the host are not known on the device
                    x, dtype = inputs[0], kwargs.get("dtype") or inputs[0].dtype
                    layout = kwargs.get("memory_format", torch.preserve_format)
                    like = torch.empty_like(x, memory_format=layout)
                    out = torch.empty_strided(like.size(), like.stride(), dtype=dtype, device="cuda:0")
                else:
                    out = func(*args, **kwargs)
                    count = flop_registry.get(getattr(torch.ops.aten, name.removesuffix("_"), None))
                    if count and inputs[1].device.type == "cuda":
                        dtype = str(inputs[1].dtype).removeprefix("torch.")
                        gpu.report.flops[dtype] += count(*args, **kwargs, out_val=out)
                outputs = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
                gpu.saw(name, args, kwargs, inputs, outputs)
                return out

        stack = contextlib.ExitStack()
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(Recorder())
        return stack

    def guess(self, name: str, args: Any, kwargs: Any, inputs: list[Any]) -> tuple[Any] | None:
        """Return a guess of a result that the host has to wait for, and record it; None: there is no wait."""
        import torch
        from torch.utils._python_dispatch import _disable_current_modes

        x = inputs[0] if inputs else None
        if x is None or (x.device.type != "cuda" and name != "copy_"):
            return None
        if name == "_to_copy" and torch.device(kwargs.get("device", "cuda")).type == "cpu":
            return (self._to_host(name, x, kwargs.get("dtype", x.dtype), kwargs.get("non_blocking", False)),)
        if name == "copy_":
            if x.device.type == "cuda" or inputs[1].device.type != "cuda":
                return None
            is_late = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
            with _disable_current_modes():
                is_pinned = x.untyped_storage()._cdata in self._pinned
                x.zero_()
            if not (is_late and is_pinned):
                self.wait(name)
            return (x,)
        if name == "_local_scalar_dense":
            self.wait(name)
            return (1.0 if x.is_floating_point() else 0 if x.dtype is torch.int64 else False,)
        if name in ("is_nonzero", "equal"):
            self.wait(name)
            return (name == "equal",)
        if name == "nonzero":
            self.wait(name)
            return (x.new_empty(x.numel(), x.ndim, dtype=torch.int64),)
        if name in ("_unique2", "unique_dim", "unique_consecutive"):
            self.wait(name)
            places = x.new_empty(x.shape, dtype=torch.int64)
            return ((x.new_empty(x.numel()), places, x.new_empty(x.numel(), dtype=torch.int64)),)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            if not masks or (name != "index" and args[2].numel() == 1):
                return None
            self.wait(name)
            if name != "index":
                return (x,)
            return (x.new_empty(masks[0].numel(), *x.shape[masks[0].ndim :]),)
        return None

    def _to_host(self, name: str, x: Any, dtype: Any, is_late: bool) -> Any:
        import torch
        from torch.utils._python_dispatch import _disable_current_modes

        if not is_late:
            self.wait(name)
        with _disable_current_modes():
            return torch.zeros(x.shape, dtype=dtype)

    def saw(self, name: str, args: Any, kwargs: Any, inputs: list[Any], outputs: list[Any]) -> None:
        """Count an operation."""
        devices = {x.device.type for x in (*inputs, *outputs)}
        if name in ("_to_copy", "copy_") and devices == {"cpu", "cuda"}:
            source = inputs[-1]
            is_late = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
            if not is_late:
                self.report.blocking[f"{name} to the device at {self.place()}"] += 1
            elif _bytes(source) > _STAGED and source.untyped_storage()._cdata not in self._pinned:
                self.report.pageable[f"{name} of {_bytes(source)} bytes at {self.place()}"] += 1
            return
        if "cuda" not in devices or name in _FREE:
            return
        self.report.launches[name] += 1
        if any(map(self._is_huge, outputs)):
            self.report.huge[f"{name} at {self.place()}"] += 1
        written = sum(map(_bytes, outputs))
        read = written if name == "index" else 0 if name in _ONLY_WRITE else sum(map(_bytes, inputs))
        self.report.bytes[name] += written + read

    def launch(self, kernel: Any, args: Any, grid: Any, options: Any) -> None:
        """Count a launch of a Triton kernel."""
        import torch

        name = kernel.fn.__name__
        named = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
        tensors = {n: a for n, a in named.items() if isinstance(a, torch.Tensor)}
        is_ours = kernel.fn.__module__.startswith("plsc.")
        self.report.launches[name] += 1
        self.report.mixed += [f"{name} on {x.device}" for x in tensors.values() if x.device.type != "cuda"]
        if any(map(self._is_huge, tensors.values())):
            self.report.huge[f"{name} at {self.place()}"] += 1
        for n, x in tensors.items():
            rows = min(len(x), grid[0]) if x.ndim and is_ours else len(x) if x.ndim else 1
            if name == "_indexed_neg_dot_forward_kernel":  # of cut cross-entropy: the rows of the labels
                rows = min(rows, len(tensors["E"]))
            size = rows * _bytes(x) // max(1, len(x)) if x.ndim else x.element_size()
            self.report.bytes[name] += size * (2 if n in _UPDATED.get(name, ()) else 1)


def _bytes(tensor: Any) -> int:
    return tensor.numel() * tensor.element_size()


def install(gpu: PretendGPU) -> None:
    """Patch torch, torch.distributed and Triton for the rest of the process."""
    import torch
    import torch.distributed as dist
    import torch.utils._foreach_utils
    from torch._subclasses import fake_tensor
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from plsc.parallel.world import ALL_GATHER, REDUCE_SCATTER, World

    torch._C._ensureCUDADeviceGuardSet()
    ctypes.CDLL(None).pretend_devices(8)
    torch._C._set_only_lift_cpu_tensors(True)

    class Anything:
        """A stream or an event."""

        cuda_stream = 0
        device = torch.device("cuda", 0)

        def __init__(self, *args: Any, **named: Any) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            return (lambda *a, **k: gpu.wait(name)) if name == "synchronize" else lambda *a, **k: None

    cuda: Any = torch.cuda
    null = contextlib.nullcontext
    for name, value in {
        **dict.fromkeys(("is_available", "is_bf16_supported"), True),
        **dict.fromkeys(("current_device", "_exchange_device", "_maybe_exchange_device"), 0),
        **dict.fromkeys(("is_initialized", "_is_in_bad_fork"), False),
        **dict.fromkeys(
            ("_lazy_init", "set_device", "manual_seed", "manual_seed_all", "set_rng_state"), None
        ),
        "device_count": 1,
        "mem_get_info": (80 * 10**9, 80 * 10**9),
    }.items():
        setattr(cuda, name, lambda *a, value=value, **k: value)
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.get_device_name = lambda device=None: "pretend sm_90"
    cuda.get_rng_state = lambda device=None: torch.zeros(16, dtype=torch.uint8)
    cuda.synchronize = lambda device=None: gpu.wait("synchronize")
    cuda.device = cuda.stream = lambda device=None: null()
    cuda.current_stream = cuda.Stream = cuda.Event = Anything
    # The reference implementations of fake tensors ask the driver how to convolve.
    torch._C._select_conv_backend = lambda *a, **k: torch._C._ConvBackend.Cudnn
    torch._C._conv_determine_backend_memory_format = _memory_format
    for name in ("init_gpu_context", "init_cuda_context"):
        if hasattr(fake_tensor, name):
            setattr(fake_tensor, name, lambda *a, **k: None)
    torch.utils._foreach_utils._foreach_supported_types.append(fake_tensor.FakeTensor)
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
    torch.nn.Module._apply = _apply  # type: ignore[method-assign]
    # In inference mode, operations would arrive before they are decomposed.
    torch.inference_mode = lambda mode=True: torch.no_grad() if mode else null()  # type: ignore
    World.broadcast_object = lambda self, value: value  # type: ignore[method-assign]

    def collective(name: str) -> Any:
        class Done:
            def wait(self) -> bool:
                return True

        def call(*args: Any, **named: Any) -> Any:
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            shapes = [f"{t.device.type}{list(t.shape)}" for t in tensors]
            gpu.report.collectives.append((name, shapes))
            return Done() if named.get("async_op") else None

        return call

    others = (
        "all_reduce all_to_all_single broadcast all_gather all_gather_object broadcast_object_list barrier"
    )
    for name in (ALL_GATHER, REDUCE_SCATTER, "reduce", "scatter", "gather", *others.split()):
        setattr(dist, name, collective(name))

    class NoDriver:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    driver.set_active(NoDriver())

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        gpu.launch(kernel, args, grid, options)

    JITFunction.run = launch


def _memory_format(x: Any, weight: Any, backend: Any) -> Any:
    import torch

    last = torch.channels_last
    is_last = x.is_contiguous(memory_format=last) or (
        weight.is_contiguous(memory_format=last) and not weight.is_contiguous()
    )
    return last if is_last else torch.contiguous_format


def _apply(module: Any, convert: Any, recurse: bool = True) -> Any:
    """Replace `Module._apply`, which cannot put a fake tensor into a real parameter."""
    import torch

    for child in module.children():
        child._apply(convert)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            with torch.no_grad():
                value = convert(parameter.detach())
            module._parameters[name] = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = convert(buffer)
    return module


def _world(ranks: int) -> Any:
    """Return rank 0 of a world of this many ranks, whose collectives do nothing."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from plsc.parallel.world import World

    world = World(0, ranks, 0, torch.device("cuda", 0))
    if dist.is_initialized():
        dist.destroy_process_group()
    if ranks == 1:
        return world
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    group = dist.group.WORLD
    return replace(world, backbone_group=group, head_group=group, control_group=group)


def _plant(case: Case) -> Any:
    """Return a patch that puts the fault of a case into the code."""
    from unittest import mock

    from plsc.heads import margins, sharded

    if case.plant == "item":
        observe = margins.Margin.observe
        wait = lambda self, c, length: (length.sum().item(), observe(self, c, length))[1]  # noqa: E731
        return mock.patch.object(margins.Margin, "observe", wait)
    if case.plant == "cpu tensor":
        total = sharded.sum_over_ranks
        return mock.patch.object(sharded, "sum_over_ranks", lambda t, group: total(t.cpu(), group).to(t))
    return contextlib.nullcontext()


def run_head(case: Case, gpu: PretendGPU) -> None:
    """Run a step of the head and its row optimizer as the training loop does."""
    import torch

    from plsc.heads import Execution, Sampling, ShardedHead, base, build_margin
    from plsc.heads.optimizers import ROW_OPTIMIZERS

    options = {"loss_type": "arcface", "products": "bfloat16", "parts": 1, "sample_ratio": 1.0, "hard": 0.0}
    options |= {"row_dtype": "float32", "sub_centers": 1, "offload": False, "optimizer": "sgd", "tile": None}
    options |= case.options
    world = _world(case.ranks)
    is_offloaded = options["offload"]

    def rows(seed: int, start: int, stop: int, width: int, dtype: Any) -> Any:
        shape = (stop - start, width + (4 if dtype is torch.int8 else 0))
        return torch.empty(shape, dtype=dtype, device="cpu" if is_offloaded else "cuda:0")

    base.initial_rows = rows
    head = ShardedHead(
        case.classes, DIMENSION, build_margin(options["loss_type"]), centers=options["sub_centers"],
        sampling=Sampling(options["sample_ratio"], hard=options["hard"]), on_nonfinite="pass",
        execution=Execution(options["products"], tile=options["tile"]), row_dtype=options["row_dtype"],
        offload=is_offloaded, group=world.head_group,
    ).to(torch.device("cuda", 0))  # fmt: skip
    optimizer = ROW_OPTIMIZERS[options["optimizer"]](head)
    generator = torch.Generator().manual_seed(0)
    total = case.batch * case.ranks
    for _ in range(2):  # the second step is as all others
        gpu.start(case)
        everyone = torch.randint(case.classes, (total,), generator=generator)
        for part in everyone.tensor_split(options["parts"]):
            mine = part[: len(part) // case.ranks]
            x = torch.empty(len(mine), DIMENSION, device="cuda:0").requires_grad_()
            labels = mine.to("cuda:0", non_blocking=True)
            head(x, labels, sizes=[len(mine)] * case.ranks, all_labels=part).loss.backward()
        optimizer.step()


def run_step(case: Case, gpu: PretendGPU) -> None:
    """Run a training step of a run, from the batch of the loader to the update, without the network's DDP."""
    import torch

    import plsc.train.build
    from plsc.config import Options
    from plsc.data.batch import Batch, copied_in_side_stream
    from plsc.heads import base
    from plsc.train.callbacks import UserParts
    from plsc.train.run import build_run
    from plsc.train.step import Step

    world = _world(case.ranks)
    base.initial_rows = lambda seed, start, stop, width, *others: torch.empty(
        stop - start, width, device="cuda:0"
    )
    plsc.train.build.sum_gradients = lambda network, *_, **named: network  # C++: needs real tensors

    class Images(torch.utils.data.Dataset[tuple[Any, int]]):
        targets = tuple(index % case.classes for index in range(case.batch * case.ranks))

        def __len__(self) -> int:
            return len(self.targets)

        def __getitem__(self, index: int) -> tuple[Any, int]:
            return torch.zeros(3, 112, 112, dtype=torch.uint8), self.targets[index]

    options = Options()
    values = {
        "runtime.device": "cuda", "model.name": case.network, "model.image_shape": (3, 112, 112),
        "model.emb_size": DIMENSION, "head.class_num": case.classes, "train.batch_size": case.batch,
        "train.with_test": False, "train.epochs": 10, **case.options,
    }  # fmt: skip
    options.set_together(values)
    run = build_run(options.resolve(), world, UserParts(train_reader=Images()))
    assert torch.backends.cudnn.benchmark
    run.network.train()
    step = Step(run)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        everyone = torch.randint(case.classes, (case.batch * case.ranks,), generator=generator)
        images = torch.zeros((case.batch, 112, 112, 3), dtype=torch.uint8, pin_memory=True)
        images = images.permute(0, 3, 1, 2)
        labels = everyone[: case.batch].pin_memory()
        read = (batch for batch in [Batch(images, labels, [""] * case.batch)])
        batch = next(copied_in_side_stream(read, world.device))
        gpu.start(case)
        sizes = [case.batch] * case.ranks
        if getattr(run.head, "reads_labels", False):
            batch.all_labels = everyone  # as `exchange_status` of the training loop
        made = step.make(batch, sizes, False)
        run.position.advance(made.is_skipped)


def run_way(case: Case, gpu: PretendGPU) -> None:
    """Run a step of a way of the benchmarks: of the head, or with a network of a whole training step."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from plsc.heads import base

    sys.path.insert(0, str(ROOT / "benchmarks"))
    import train
    import ways

    def rows(seed: int, start: int, stop: int, width: int, *others: Any) -> Any:
        return torch.empty(stop - start, width, device="cuda:0")

    def take(scaler: Any, optimizer: Any, state: Any, *args: Any, **named: Any) -> Any:
        for value in state["found_inf_per_device"].values():
            value.item()
        return optimizer.step(*args, **named)

    base.initial_rows = train.initial_rows = rows
    tensor = torch.tensor
    torch.tensor = lambda x, **how: torch.full((), x, **how) if "device" in how else tensor(x, **how)
    torch.normal = lambda mean, std, size: torch.empty(size, device="cuda:0")  # type: ignore
    torch.amp.GradScaler._maybe_opt_step = take  # type: ignore[method-assign]
    world = _world(1)
    device = torch.device("cuda", 0)
    if case.network:
        problem = train.Case(case.network, (3, 112, 112), case.dimension, case.classes, case.batch)
        built = train.build(train.BY_NAME[case.way], problem, world)
        for _ in range(2):
            gpu.start(case)
            built.step()
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    store = ways.Store(case.classes, case.dimension, device)
    store.get("weight", lambda: rows(0, 0, case.classes, case.dimension))
    head = ways.BY_NAME[case.way].build(store)
    labels = torch.randint(case.classes, (case.batch,)).to(device)
    for _ in range(2):
        x = torch.empty(case.batch, case.dimension, device=device).requires_grad_()
        gpu.start(case)
        head.step(x, labels)


def run_copies(case: Case, gpu: PretendGPU) -> None:
    """Embed three batches of images, and copy a state to host memory as for a checkpoint."""
    import io

    import torch
    from PIL import Image

    from plsc.checkpoint.manifest import BACKBONE, Manifest, Role
    from plsc.checkpoint.save import Snapshot
    from plsc.evaluate.embed import embed_images
    from plsc.models import build_model

    file = io.BytesIO()
    Image.new("RGB", (112, 112)).save(file, "png")
    network = build_model(case.network, DIMENSION, image_shape=(3, 112, 112)).to(torch.device("cuda", 0))
    state = {"large": torch.empty(2**25 + 1, device="cuda:0"), "scalar": torch.empty((), device="cuda:0")}
    gpu.start(case)
    images = [file.getvalue()] * (2 * case.batch + 1)
    found = embed_images(network, images, (3, 112, 112), batch_size=case.batch, device="cuda:0")
    assert found.shape == (len(images), DIMENSION)
    tensors = {Role(BACKBONE, name): value for name, value in state.items()}
    copied = Snapshot(tensors, Manifest("0", 1, 0, 0, 1, DIMENSION, {})).copy_to_host()
    assert [value.shape for value in copied.tensors.values()] == [value.shape for value in state.values()]


def main() -> None:
    """Run the cases of stdin."""
    gpu = PretendGPU()
    install(gpu)
    for values in json.load(sys.stdin):
        case = Case(**values)
        gpu.start(case)
        with gpu.modes(), _plant(case):
            try:
                run = run_copies if case.copies else run_step if case.network else run_head
                (run_way if case.way else run)(case, gpu)
            except Exception:
                gpu.report.error = traceback.format_exc()
        print(json.dumps(vars(gpu.report)), flush=True)
    # All reports are out. On a busy machine, C++ threads that wait for the pretend device may outlive the
    # interpreter, whose exit then aborts.
    os._exit(0)


if __name__ == "__main__":
    main()
