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
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
]
VECTORS = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"]
BF16 = [*VECTORS, "-mavx512bf16"]
# What a processor must have for a file; the library asks it before it calls anything in there.
FLAGS = {
    "elements.c": VECTORS,
    "rules.c": VECTORS,
    "fp32.c": VECTORS,
    "bf16.c": BF16,
    "tiles.c": [*BF16, "-mamx-tile", "-mamx-bf16"],
}
# Without the instructions these compile to nothing, and older compilers do not know them.
OPTIONAL = ("bf16.c", "tiles.c")


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
            try:
                _build(compiler, extension.sources, Path(self.build_temp, extension.name), target)
            except subprocess.CalledProcessError as error:
                self.warn(f"{extension.name} is not built, plsc will run slower: {error.stderr}")


def _compiler() -> list[str] | None:
    for command in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    return None


def _build(compiler: list[str], sources: list[str], objects: Path, target: Path) -> None:
    objects.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    compiled = []
    for source in sources:
        name = Path(source).name
        compiled.append(str(objects / f"{name}.o"))
        command = [*compiler, *COMMON, "-c", source, "-o", compiled[-1]]
        try:
            _run([*command, *FLAGS.get(name, [])])
        except subprocess.CalledProcessError:
            if name not in OPTIONAL:
                raise
            _run(command)
    _run([*compiler, "-shared", *compiled, "-o", str(target), "-Wl,-z,defs", "-lpthread", "-lm"])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


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
HAS_KERNELS = sys.platform == "linux" and platform.machine() == "x86_64" and sys.maxsize > 2**32
setup(
    ext_modules=[_library(name) for name in LIBRARIES] if HAS_KERNELS else [],
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel},
)
