"""Build the C kernels with other compilers, and run them on emulated processors (QEMU's user mode)."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from plsc.heads.softmax import ENGINES

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
SUPPORTS = "import ctypes, sys; print([ctypes.CDLL(sys.argv[1]).plsc_supports(i) for i in range({})])"
REFUSING = """#!/bin/sh
for word; do
  if [ "$word" = "{}" ]; then echo "unknown option $word" >&2; exit 1; fi
done
exec gcc "$@"
"""

pytestmark = pytest.mark.slow
on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86-64 processor")


def needs(*programs: str) -> pytest.MarkDecorator:
    missing = [program for program in programs if not shutil.which(program)]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def build(compiler: str | Path, folder: Path) -> tuple[Path, str]:
    """Return the library that setup.py builds, and its warnings."""
    where = "--build-lib", folder, "--build-temp", folder / "objects"
    done = run(sys.executable, "setup.py", "-q", "build_ext", *where, CC=str(compiler))
    return folder / "plsc/heads/kernels/libnative.so", done.stderr


def supported(library: Path, *emulator: str) -> set[str]:
    """Return the engines of a library that this processor, or the emulated one, supports."""
    code = SUPPORTS.format(len(ENGINES))
    numbers = json.loads(run(*emulator, sys.executable, "-S", "-c", code, library).stdout)
    return {engine for engine, number in zip(ENGINES, numbers, strict=True) if number}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("gcc", tmp_path_factory.mktemp("gcc"))[0]


@needs("aarch64-linux-gnu-gcc", "qemu-aarch64")
def test_the_kernels_pass_their_tests_on_64_bit_arm(tmp_path: Path) -> None:
    compiler, program = "aarch64-linux-gnu-gcc", tmp_path / "far_kernels"
    library, warnings = build(compiler, tmp_path)
    assert not warnings
    run(compiler, "-Wall", "-Wextra", "-Werror", "-O2", HERE / "far_kernels.c", "-o", program)
    plugin = "-p", "tests.unit.heads.far_kernels"
    done = run(
        *(sys.executable, "-m", "pytest", "-v", "-p", "no:xdist", *plugin, HERE / "test_native.py"),
        FAR_KERNELS=f"qemu-aarch64 -L /usr/aarch64-linux-gnu {program} {library}",
    )
    assert "[native-neon] PASSED" in done.stdout
    assert "skipped" not in done.stdout


@on_x86
@needs("gcc", "qemu-x86_64")
@pytest.mark.parametrize(
    ("processor", "expected"),
    [("Haswell", {"native-avx2"}), ("Nehalem", set()), ("Haswell,-xsave", set())],
    ids=["AVX2", "none", "AVX2 whose registers the system does not save"],
)
def test_only_engines_that_processor_and_system_support_are_used(
    processor: str, expected: set[str], library: Path
) -> None:
    assert supported(library, "qemu-x86_64", "-cpu", processor) == expected


@on_x86
@needs("gcc")
@pytest.mark.parametrize(("flag", "left_out"), [("-mavx512bf16", 2), ("-mavx512f", 3), ("-mavx2", 4)])
def test_engines_whose_flags_the_compiler_lacks_are_left_out(
    flag: str, left_out: int, library: Path, tmp_path: Path
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(REFUSING.format(flag))
    compiler.chmod(0o755)
    without, warnings = build(compiler, tmp_path)
    assert warnings.count(f"unknown option {flag}") == left_out
    assert supported(without) == supported(library) - set(ENGINES[:left_out])
