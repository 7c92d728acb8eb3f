"""``plsc doctor``: check the installation, the hardware, and a collective between the ranks."""

from __future__ import annotations

import platform
import time
from dataclasses import replace
from typing import Any, NamedTuple

from plsc.cli.parser import Command
from plsc.config import Options
from plsc.errors import OptionError, kind_and_line
from plsc.version import __version__

_SECONDS = 60.0  # timeout of a rank, unless runtime.timeout is set
_NUMBERS = 2**20  # elements of the tensor of the collective


class Finding(NamedTuple):
    """A line of the report. status: ok, warning or error; `text` says what to do unless it is ok."""

    status: str
    name: str
    text: str


def run_doctor(options: Options) -> None:
    """Print the findings of rank 0. Exit code 1 for an error; other ranks raise their own."""
    from plsc.entry import join_ranks

    runtime = options.runtime
    if "runtime.timeout" not in options.values:
        runtime = replace(runtime, timeout=_SECONDS)
    world = join_ranks(runtime)
    findings = [_versions(), _devices(), _head_kernels(world.device), _data_tools()]
    try:
        findings.append(_collective(world))
    except RuntimeError as error:  # of gloo or NCCL
        findings.append(Finding("error", "collective", f"{kind_and_line(error)}; check network and driver"))
    world.close()
    for status, name, text in findings if world.is_main else []:
        print(f"{status:9}{name:14}{text}")
    if findings[-1].status == "error":
        raise SystemExit(1)


def _versions() -> Finding:
    import torch

    texts = [f"plsc {__version__}", f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    if torch.version.cuda:
        texts.append(f"CUDA {torch.version.cuda}")
    if torch.distributed.is_nccl_available() and torch.cuda.is_available():
        texts.append("NCCL " + ".".join(map(str, torch.cuda.nccl.version())))
    return Finding("ok", "versions", ", ".join(texts))


def _devices() -> Finding:
    import torch

    from plsc.machine import usable_cores
    from plsc.storage.store import format_bytes

    texts = []
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        texts.append(f"{number}: {name}, {format_bytes(free)} of {format_bytes(total)} free")
    cores = f"{usable_cores()} CPU cores, {torch.get_num_threads()} threads per rank"
    if not texts:
        return Finding("warning", "devices", f"no GPU (it needs a driver, and torch for CUDA), {cores}")
    return Finding("ok", "devices", "; ".join([*texts, cores]))


def _head_kernels(device: Any) -> Finding:
    import torch

    from plsc.heads.kernels import choose_backend

    wanted, dtypes = "triton" if device.type == "cuda" else "native", (torch.float32, torch.bfloat16)
    try:
        float32, bfloat16 = (
            choose_backend(wanted, device, torch.float32, products, None, 1).describe() for products in dtypes
        )
    except OptionError as error:
        return Finding("warning", "head kernels", f"plain PyTorch, which is slower; {error}")
    text = float32 if float32 == bfloat16 else f"float32: {float32}; bfloat16: {bfloat16}"
    return Finding("ok", "head kernels", text)


def _data_tools() -> Finding:
    from plsc.data import native

    if native.library() is None:
        return Finding("warning", "data tools", "slower: no C library; install a C compiler, then plsc")
    return Finding("ok", "data tools", "C library")


def _collective(world: Any) -> Finding:
    """Sum a tensor over the ranks, and compare the sum."""
    import torch
    import torch.distributed as dist

    if world.size == 1:
        return Finding("ok", "collective", "one rank; to test more: plsc launch --nproc 2 -m plsc.cli doctor")
    numbers = torch.full((_NUMBERS,), float(world.rank + 1), device=world.device)
    dist.all_reduce(numbers.clone(), group=world.backbone_group)  # a warm-up, which connects the ranks
    world.barrier()
    start = time.perf_counter()
    dist.all_reduce(numbers, group=world.backbone_group)
    total = numbers.sum().item() / _NUMBERS
    milliseconds = 1000 * (time.perf_counter() - start)
    expected = world.size * (world.size + 1) / 2
    how = f"{world.size} ranks, {dist.get_backend(world.backbone_group)}"
    if total != expected:
        text = f"{how}: the sum is {total}, expected {expected}; check the driver and the network"
        return Finding("error", "collective", text)
    text = f"{how}: the sum of {_NUMBERS * 4 / 2**20:.0f} MiB took {milliseconds:.1f} ms"
    return Finding("ok", "collective", text)


COMMAND = Command(
    "check versions, devices, kernels, and one all-reduce", run_doctor, options=("runtime.device",)
)
