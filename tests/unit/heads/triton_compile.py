"""Compile all kernel launches for some GPU architectures, without a GPU.

A fake driver reports the architecture, and every launch stops after compilation.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import torch
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from plsc.heads.kernels.triton_backend import TritonBackend
from plsc.heads.softmax import tile_size
from plsc.heads.weights import Rule
from tests.unit.heads.test_kernels import RULES, SHIFT, Shape, make, some_context, states_of

LEAST_SHARED = 48 * 1024  # bytes of shared memory per block that every GPU supports
CUOBJDUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
FLOAT, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8
HEAVY = (  # most registers and shared memory
    Shape(dimension=512, row_dtype=INT8, products=BF16, is_sampled=True),
    Shape(dimension=4096, row_dtype=BF16),  # the largest dimension
    Shape(centers=3, has_hard=True, is_sampled=True),
)
OTHERS = (
    Shape(dimension=512, row_dtype=BF16, products=BF16, is_sampled=True),
    Shape(dimension=300, cosine=False),
    Shape(dimension=4096, row_dtype=INT8),
    Shape(has_hard=True, is_sampled=True, dimension=1),
    *(Shape(batch, classes=2000, dimension=64, products=BF16) for batch in (768, 1000)),  # a tile of a run
)
SHAPES = {90: (*HEAVY, *OTHERS), 80: HEAVY, 120: HEAVY[:1]}  # 120 has the matrix instructions of 80
compiled = set()


class Driver:
    """Each architecture is a device of its own."""

    architecture = 90

    def get_current_device(self):
        return self.architecture

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self.architecture, 32)


def compile_only(kernel, *args, grid, warmup, **options):
    assert 1 <= len(grid) <= 2, grid
    result = launch(kernel, *args, grid=grid, warmup=True, **options)
    assert result.asm["cubin"]
    assert result.metadata.shared <= LEAST_SHARED
    name = kernel.fn.__name__
    if (name, result.hash) not in compiled:
        check_code(name, result.asm)
    compiled.add((name, result.hash))


def check_code(name, asm):
    """Assert that a kernel has no atomics, no spilled registers, and loads rows of [B, tile] as vectors."""
    assert not re.search(r"\b(atom|red)\.", asm["ptx"]), name
    if name in ("exponentials", "coefficients"):
        assert re.search(r"ld\.global[.\w:]*\.v4\.b32", asm["ptx"]), name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found, usage
    assert found.groups() == ("0", "0"), (name, usage)


def launch_everything(shape, rules):
    """Launch each kernel as a head of this shape does, with these rules of the update."""
    rows, queries = make(shape)
    rows.weight = rows.weight.contiguous()
    tile = 32 if shape.classes < 1000 else tile_size(torch.device("cuda"), shape.batch)
    backend = TritonBackend(shape.products, tile)
    context = some_context(shape, rows, queries)
    for want_weighted in (False, True):
        backend.forward(rows, queries, fixed_shift=None, want_weighted=want_weighted)
    for keep in (False, True):
        sums = backend.forward(rows, queries, fixed_shift=SHIFT, keep=keep)
    context.kept, context.shift = sums.kept, sums.shift
    backend.gradients(context, slice(0, 21))
    context.kept = None
    for number, rule in enumerate(rules):
        states = states_of(rule, rows, (FLOAT, BF16)[number % 2])
        backend.update([context], rows, rule, states)
    backend.update([context, context], rows, RULES[1], states_of(RULES[1], rows, BF16))


launch, JITFunction.run = JITFunction.run, compile_only
driver.set_active(Driver())
for Driver.architecture, shapes in SHAPES.items():
    before = len(compiled)
    for shape in shapes:
        launch_everything(shape, RULES if shape in HEAVY and Driver.architecture == 90 else RULES[3:4])
    assert {name for name, _ in compiled} == {"tile_weights", "exponentials", "coefficients", "update"}
    assert len(compiled) > before

# A new step must not recompile: not for another key, learning rate or tile start.
shape = Shape(dimension=64, row_dtype=BF16)
rows, queries = make(shape)
backend, context, before = TritonBackend(FLOAT, 32), some_context(shape, rows, queries), None
for key in (1, 16, 2**31, 2**32 - 1):
    rule = Rule("sgd", lr=1 / key, key=key)
    backend.update([context], rows, rule, {})
    assert before is None or len(compiled) == before, key
    before = len(compiled)
