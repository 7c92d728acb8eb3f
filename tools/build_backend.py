"""The build backend: setuptools, plus a C compiler from PyPI where the machine has none.

The head's kernels (plsc/heads/kernels/*.c) are compiled on installation. `ziglang` is a C compiler in a
wheel; it is asked for only if neither $CC nor cc, gcc or clang can be run.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import sys

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401  (hooks that pip looks for here)
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

ZIG = "ziglang>=0.13"
# Without a target, zig compiles for this very processor and the newest C library it knows.
ZIG_TARGET = ["-target", "x86_64-linux-gnu.2.17", "-mcpu=baseline"]


def is_supported() -> bool:
    """Return whether there are kernels for this platform: x86-64 Linux."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and sys.maxsize > 2**32


def system_compiler() -> list[str] | None:
    """Return the command of the C compiler of this machine: $CC, cc, gcc or clang."""
    for command in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    return None


def compiler() -> list[str] | None:
    """Return the command of a C compiler, that of the machine before that from PyPI."""
    command = system_compiler()
    if command is None and importlib.util.find_spec("ziglang"):
        command = [sys.executable, "-m", "ziglang", "cc", *ZIG_TARGET]
    return command


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    """Return what a build needs besides setuptools."""
    return build_meta.get_requires_for_build_wheel(config_settings) + _compiler_requirement()


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    """Return what an editable build needs besides setuptools."""
    return build_meta.get_requires_for_build_editable(config_settings) + _compiler_requirement()


def build_editable(
    wheel_directory: str,
    config_settings: dict | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Install the checkout by its path: an import hook is not found beside a folder named plsc."""
    settings = {"editable_mode": "compat", **(config_settings or {})}
    return build_meta.build_editable(wheel_directory, settings, metadata_directory)


def _compiler_requirement() -> list[str]:
    return [ZIG] if is_supported() and system_compiler() is None else []
