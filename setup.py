"""Compiles the C parts (plsc/heads/kernels, plsc/data/native); everything else is in pyproject.toml.

In a checkout: ``python setup.py build_ext --inplace``. A failure is a warning: plsc works without them.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

COMMON = [
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
]
AVX512 = ["-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
BF16 = [*AVX512, "-mavx512bf16"]
# The files that are compiled once per instruction set: processor, file, engine of native.h, flags. The
# library asks the processor before it calls anything in there.
ENGINES = [
    ("x86_64", "fp32.c", "PLSC_AVX2", ["-mavx2", "-mfma"]),
    ("x86_64", "fp32.c", "PLSC_AVX512", AVX512),
    ("x86_64", "bf16.c", "PLSC_AVX512_BF16", BF16),
    ("x86_64", "bf16.c", "PLSC_AMX", [*BF16, "-mamx-tile", "-mamx-bf16", "-DTILES"]),
    ("aarch64", "fp32.c", "PLSC_NEON", []),
]


class BuildLibraries(build_ext):
    """Builds plain shared libraries, which Python loads with ctypes."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the path of the library: it does not depend on Python's version."""
        return fullname.replace(".", "/") + ".so"

    def build_extensions(self) -> None:
        """Compile and link; raises nothing, since plsc works without."""
        compiler = _compiler()
        if compiler is None:
            self.warn("plsc will run slower: there is no C compiler, neither $CC nor cc, gcc or clang")
            return
        for extension in self.extensions:
            target = Path(self.get_ext_fullpath(extension.name))
            objects = Path(self.build_temp, extension.name)
            try:
                for left_out in _build(compiler, extension.sources, objects, target):
                    self.warn(f"{extension.name} is built without {left_out}")
            except subprocess.CalledProcessError as error:
                self.warn(f"{extension.name} is not built, plsc will run slower: {error.stderr}")


def _compiler() -> list[str] | None:
    for command in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    return None


def _build(compiler: list[str], sources: list[str], objects: Path, target: Path) -> list[str]:
    """Build a library; return the engines whose instructions the compiler does not know, with its errors."""
    objects.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    compiled, left_out = [], []
    machine = _run([*compiler, "-dumpmachine"])  # of the compiled code, such as arm64-apple-darwin
    processor = machine.partition("-")[0].replace("arm64", "aarch64")
    for source in sources:
        name = Path(source).name
        variants = [engine for engine in ENGINES if engine[1] == name] or [(processor, name, "", [])]
        for only, _, engine, flags in variants:
            if only != processor:
                continue
            output = str(objects / f"{name}{engine}.o")
            try:
                _run([*compiler, *COMMON, f"-DENGINE={engine}", *flags, "-c", source, "-o", output])
                compiled.append(output)
            except subprocess.CalledProcessError as error:
                if not flags:
                    raise
                left_out.append(f"{engine}: {error.stderr}")
    checks = [] if "apple" in machine else ["-Wl,-z,defs"]
    _run([*compiler, "-shared", *compiled, "-o", str(target), *checks, "-lpthread", "-lm"])
    return left_out


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class PlatformWheel(bdist_wheel):
    """Tags the wheel for the platform, and any Python: the library knows nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the wheel's tags."""
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if self.distribution.ext_modules else (python, abi, platform)


def _library(name: str) -> Extension:
    """Return the library of all C files that lie beside it."""
    folder = Path(*name.split(".")[:-1])
    return Extension(
        name,
        sources=sorted(str(path) for path in folder.glob("*.c")),
        depends=sorted(str(path) for path in folder.glob("*.h")),
        optional=True,
    )


LIBRARIES = ["plsc.heads.kernels.libnative", "plsc.data.native.libdata"]
HAS_KERNELS = (
    sys.platform in ("linux", "darwin")
    and platform.machine() in ("x86_64", "aarch64", "arm64")
    and sys.maxsize > 2**32
)
setup(
    ext_modules=[_library(name) for name in LIBRARIES] if HAS_KERNELS else [],
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel},
)
