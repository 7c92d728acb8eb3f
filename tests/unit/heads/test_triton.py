"""The Triton kernels: compiled for GPUs, interpreted on the CPU, and run on a GPU if there is one.

The interpreter runs the kernels' code on CPU tensors in NumPy. It shows that the formulas are right, not that
the compiled code is; that needs the tests marked gpu, which have not run where there is none.
"""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from plsc.heads.kernels import triton_backend
from plsc.heads.softmax import tile_size
from tests.devices import GPU, VISIBLE
from tests.distributed.launch import clean_environment

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def run(*command: str, **environment: str) -> None:
    """Run Python in a new process, because Triton chooses its mode at import."""
    done = subprocess.run(
        [sys.executable, *command],
        env=clean_environment(**VISIBLE, **environment),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]


def cases(**environment: str) -> None:
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "triton_cases.py"), **environment)


@pytest.mark.slow
def test_interpreted_kernels_equal_the_formulas() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    cases(TRITON_INTERPRET="1")


@pytest.mark.parametrize("device", [GPU])
def test_compiled_kernels_equal_the_formulas(device: str) -> None:
    reason = triton_backend.unavailable(torch.device(device, torch.cuda.current_device()))
    if reason is not None:
        pytest.skip(reason)
    cases(TRITON_INTERPRET="0")


@pytest.mark.slow
def test_every_launch_compiles_for_gpus_and_steps_do_not_recompile(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    run(str(HERE / "triton_compile.py"), TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))


def test_tiles_of_every_batch_size_are_aligned_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    tiles = {batch: tile_size(device, batch) for batch in range(1, 70_000)}
    assert [batch for batch, tile in tiles.items() if tile < 256 or tile % 128] == []


def test_tiles_of_long_embeddings_are_larger_on_a_gpu() -> None:
    # Otherwise most of the memory traffic is that of the weighted sum [B, D], once per tile.
    device = torch.device("cuda", 0)
    assert tile_size(device, 16_384, 2048) >= 2 * 2048
    assert tile_size(device, 1024, 512) == tile_size(device, 1024)
    assert all(tile_size(device, 16_384, dimension) % 128 == 0 for dimension in range(1, 4097))
    assert tile_size(torch.device("cpu"), 16_384, 2048) == tile_size(torch.device("cpu"), 16_384)


def test_a_failed_kernel_launch_is_reported_as_the_reason(monkeypatch) -> None:
    class Kernels:
        """Triton without a C compiler fails at the first launch."""

        def __getattr__(self, name: str):
            raise RuntimeError("Failed to find C compiler.\nSet CC")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "plsc.heads.kernels.triton_kernels", Kernels())
    monkeypatch.delattr("plsc.heads.kernels.triton_kernels", raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
    reason = triton_backend.unavailable(torch.device("cuda", 9))
    assert reason == "triton cannot run a kernel here: RuntimeError: Failed to find C compiler."


def test_without_triton_the_head_can_be_imported() -> None:
    code = (
        "import sys; sys.modules['triton'] = None; import torch, plsc.heads; "
        "from plsc.heads.kernels.triton_backend import unavailable; "
        "assert 'triton cannot be imported' in unavailable(torch.device('cuda', 0))"
    )
    run("-c", code)
