"""A pytest plugin (``-p tests.far_kernels``): the C kernels run in another process.

``FAR_KERNELS`` is the command of far_kernels.c and its library, for example in an emulator of another
processor. Python and PyTorch run on this processor. The tests of `plsc.heads.kernels` need no change.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shlex
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from plsc.heads import kernels

_ADDRESS, _BYTES = 1 << 36, 1 << 28  # free in both processes
_FIXED_NOREPLACE = 0x100000


class FarLibrary:
    """Has the functions of `kernels._library()`. tensors: those that a call may use, by their addresses."""

    def __init__(self, command: list[str]) -> None:
        file = os.memfd_create("tensors")
        os.ftruncate(file, _BYTES)
        map_memory = ctypes.CDLL(None).mmap
        map_memory.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        map_memory.restype = ctypes.c_void_p
        flags = mmap.MAP_SHARED | _FIXED_NOREPLACE
        assert map_memory(_ADDRESS, _BYTES, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, 0) == _ADDRESS
        words = [*command, str(file), str(_ADDRESS), str(_BYTES)]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[file], bufsize=0
        )
        self.tensors: dict[int, Tensor] = {}

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: self._call(name, arguments)

    def _call(self, name: str, arguments: tuple[Any, ...]) -> int:
        """Copy structures and tensors to the shared memory, call, and copy the tensors back."""
        end, copies = _ADDRESS, []

        def place(address: int, size: int) -> int:
            nonlocal end
            at, end = end, end + -(-size // 64) * 64
            assert end <= _ADDRESS + _BYTES
            ctypes.memmove(at, address, size)
            return at

        def passed(argument: Any) -> int:
            if hasattr(argument, "_obj"):  # ctypes.byref of a structure
                words = (ctypes.c_int64 * (ctypes.sizeof(argument._obj) // 8)).from_buffer_copy(argument._obj)
                words[:] = [passed(word) for word in words]
                return place(ctypes.addressof(words), ctypes.sizeof(words))
            tensor = self.tensors.get(argument)
            if tensor is None:
                return int(argument or 0)
            copies.append((argument, place(argument, tensor.nbytes), tensor.nbytes))
            return copies[-1][1]

        numbers = [passed(argument) for argument in arguments]
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(struct.pack("16s9q", name.encode(), *numbers, *[0] * (9 - len(numbers))))
        (result,) = struct.unpack("i", self.process.stdout.read(4))
        for copy in copies:
            ctypes.memmove(*copy)
        self.tensors.clear()
        return int(result)


def pytest_configure() -> None:
    words = shlex.split(os.environ["FAR_KERNELS"])
    far = FarLibrary(words)
    check, call = kernels._checked, kernels._call

    def checked(name: str, tensor: Tensor | None, *expected: Any) -> int | None:
        address = check(name, tensor, *expected)
        if tensor is not None and address:
            far.tensors[address] = tensor
        return address

    def called(function: str, *arguments: Any) -> None:
        far.tensors |= {x.data_ptr(): x for x in arguments if isinstance(x, Tensor) and x.numel()}
        call(function, *arguments)

    kernels._LIBRARY, kernels._library = Path(words[-1]), lambda: far
    kernels._checked, kernels._call = checked, called
