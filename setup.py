"""Compiles the C parts (plsc/heads/kernels, plsc/data/native); everything else is in pyproject.toml.

In a checkout: ``python setup.py build_ext --inplace``. A failure is a warning: plsc works without them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).with_name("tools")))
import build_backend

COMMON = ["-std=gnu11", "-O3", "-fPIC", "-fno-math-errno", "-fvisibility=hidden"]
COMMON += ["-Wall", "-Wextra"]
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

    def build_extension(self, ext: Extension) -> None:
        """Compile and link; raises nothing, since plsc works without."""
        target = Path(self.get_ext_fullpath(ext.name))
        objects = Path(self.build_temp) / ext.name
        objects.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        compiler = build_backend.compiler()
        try:
            if compiler is None:
                raise FileNotFoundError("no C compiler: neither $CC nor cc, gcc, clang or ziglang")
            _build(compiler, ext.sources, objects, target)
        except (OSError, subprocess.CalledProcessError) as error:
            target.unlink(missing_ok=True)
            reason = getattr(error, "stderr", None) or error
            self.warn(f"{ext.name} is not built, plsc will run slower: {reason}")


def _build(compiler: list[str], sources: list[str], objects: Path, target: Path) -> None:
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
    fresh = target.with_suffix(".new")  # a running process may have the old one mapped
    _run([*compiler, "-shared", *compiled, "-o", str(fresh), "-Wl,-z,defs", "-lpthread", "-lm"])
    fresh.replace(target)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


class PlatformWheel(bdist_wheel):
    """Tags the wheel for the platform, and any Python: the library knows nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the wheel's tags."""
        python, abi, platform = super().get_tag()
        return (
            ("py3", "none", platform) if self.distribution.ext_modules else (python, abi, platform)
        )


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
setup(
    ext_modules=[_library(name) for name in LIBRARIES] if build_backend.is_supported() else [],
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel},
)
