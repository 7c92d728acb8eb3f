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

ROOT = Path(__file__).parents[2]
LIBRARY = "plsc/heads/kernels/libnative.so"
SUPPORTS = "import ctypes, sys; print([ctypes.CDLL(sys.argv[1]).plsc_supports(i) for i in range({})])"
COMPILER = """#!/bin/sh
for word; do
  if [ "$word" = "{refused}" ]; then echo "unknown option $word" >&2; exit 1; fi
done
exec gcc {more} "$@" -O0  # which takes seconds less
"""

pytestmark = pytest.mark.slow
on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86-64 processor")


def needs(*programs: str) -> pytest.MarkDecorator:
    missing = [program for program in programs if not shutil.which(program)]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(cwd), **variables}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def install(folder: Path, compiler: str | Path) -> str:
    """Copy plsc to a folder, with the C parts as setup.py builds them; return the warnings."""
    shutil.copytree(ROOT / "plsc", folder / "plsc", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    where = "--build-lib", folder, "--build-temp", folder / "objects"
    return run(sys.executable, "setup.py", "-q", "build_ext", *where, CC=str(compiler)).stderr


def compiler_in(folder: Path, refused: str = "", more: str = "") -> Path:
    """Write a gcc that refuses a flag, or has more of them."""
    path = folder / "cc"
    path.write_text(COMPILER.format(refused=refused, more=more))
    path.chmod(0o755)
    return path


def supported(folder: Path, *emulator: str) -> set[str]:
    """Return the engines of a library that this processor, or the emulated one, supports."""
    code = SUPPORTS.format(len(ENGINES))
    numbers = json.loads(run(*emulator, sys.executable, "-S", "-c", code, folder / LIBRARY).stdout)
    return {engine for engine, number in zip(ENGINES, numbers, strict=True) if number}


def doctor(folder: Path, *emulator: str) -> str:
    """Return what the doctor reports about the kernels."""
    code = "from plsc.cli import main; main()"
    words = sys.executable, "-c", code, "doctor", "--runtime.device", "cpu"
    done = run(*emulator, *words, cwd=folder)
    return next(line for line in done.stdout.splitlines() if "head kernels" in line)


def run_tests(engine: str, folder: Path, compiler: str, *emulator: str) -> str:
    """Run the tests of one engine in the library of a folder; return what pytest prints."""
    program = folder / "far_kernels"
    run(compiler, "-Wall", "-Wextra", "-Werror", "-O2", "tests/far_kernels.c", "-o", program)
    return run(
        *(sys.executable, "-m", "pytest", "-v", "-p", "no:xdist", "-p", "tests.far_kernels"),
        *("tests/unit/heads/test_kernels.py", "-k", engine),
        FAR_KERNELS=" ".join([*emulator, str(program), str(folder / LIBRARY)]),
    ).stdout


@needs("aarch64-linux-gnu-gcc", "qemu-aarch64")
def test_the_kernels_pass_their_tests_on_64_bit_arm(tmp_path: Path) -> None:
    install(tmp_path, "aarch64-linux-gnu-gcc")
    emulator = "qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"
    found = run_tests("native-neon", tmp_path, "aarch64-linux-gnu-gcc", *emulator)
    assert "[native-neon] PASSED" in found
    assert "skipped" not in found


@on_x86
@needs("gcc")
def test_the_kernels_pass_their_tests_with_the_tiles_of_amx_in_c(tmp_path: Path) -> None:
    install(tmp_path, compiler_in(tmp_path, more=f"-include {ROOT / 'tests/amx_in_c.h'}"))
    if "native-amx" not in supported(tmp_path):
        pytest.skip("this processor lacks AVX512-BF16")
    assert "[native-amx] PASSED" in run_tests("native-amx", tmp_path, "gcc")


@on_x86
@needs("clang", "objdump")
def test_clang_builds_all_kernels_without_warnings(tmp_path: Path) -> None:
    assert install(tmp_path, "clang -Werror") == ""
    assert "tdpbf16ps" in run("objdump", "-d", tmp_path / LIBRARY).stdout


@on_x86
@needs("gcc", "qemu-x86_64")
@pytest.mark.parametrize(
    ("processor", "expected"),
    [("Haswell", {"native-avx2"}), ("Nehalem", set()), ("Haswell,-xsave", set())],
    ids=["AVX2", "none", "AVX2 whose registers the system does not save"],
)
def test_only_engines_that_processor_and_system_support_are_used(processor: str, expected: set[str]) -> None:
    assert supported(ROOT, "qemu-x86_64", "-cpu", processor) == expected


@on_x86
@needs("gcc", "qemu-x86_64")
def test_the_doctor_names_the_kernels_and_what_the_processor_lacks() -> None:
    line = doctor(ROOT, "qemu-x86_64", "-cpu", "Haswell")
    assert line.split(maxsplit=3)[3] == "native-avx2 (this processor or system lacks AVX-512)"


@on_x86
@needs("gcc")
@pytest.mark.parametrize(
    ("flag", "left_out", "why"),
    [
        ("-mavx512bf16", 2, "native-avx512 (the compiler lacked AVX512-BF16"),
        ("-mavx2", 4, "plain PyTorch"),
    ],
)
def test_engines_whose_flags_the_compiler_lacks_are_left_out(
    flag: str, left_out: int, why: str, tmp_path: Path
) -> None:
    warnings = install(tmp_path, compiler_in(tmp_path, refused=flag))
    assert warnings.count(f"unknown option {flag}") == left_out
    everything = supported(ROOT)
    assert supported(tmp_path) == everything - set(ENGINES[:left_out])
    if ENGINES[left_out - 1] in everything:
        assert why in doctor(tmp_path)
