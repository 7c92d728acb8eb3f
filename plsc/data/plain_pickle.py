"""Read a pickle as a data format: nothing that it names is imported or called.

The standard library's own unpickler runs the operations, cut down to those that build bytes, text,
whole numbers, lists and tuples. The few globals by which Python 2, Python 3 and NumPy spell bytes,
arrays and scalars stand for builders of our own; all else is refused by name.

Format: https://github.com/python/cpython/blob/main/Lib/pickletools.py
"""

from __future__ import annotations

import math
import pickle
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar

import numpy as np

from plsc.errors import DataError

MAX_VALUE_BYTES = 1 << 26  # one encoded image of 64 MiB is no image of a pair file
# An operation can take 100 bytes of memory while it fills one byte of the file. An image is at least
# some hundred bytes long and takes at most 25 operations, so a large file needs no more than this.
FREE_OPERATIONS = 1_000_000
BYTES_PER_OPERATION = 4
_DTYPES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
_NDARRAY = object()  # stands for numpy.ndarray, which may be named but not called
_NEEDLESS = "which a pair file never needs; it is malicious or not a pair file"
_NAMES = {ord(operation.code): operation.name for operation in pickletools.opcodes}
# All that such files use, and INST, so that the global which it calls is refused by its name.
_ALLOWED = """
    PROTO FRAME MARK STOP NONE NEWTRUE NEWFALSE INT LONG BININT BININT1 BININT2 LONG1 STRING BINSTRING
    SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 UNICODE BINUNICODE SHORT_BINUNICODE
    BINUNICODE8 EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 PUT BINPUT
    LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL INST REDUCE BUILD
"""
# What the operations and the builders raise when a pickle puts together what does not fit.
_MISFITS = (pickle.UnpicklingError, AttributeError, LookupError, TypeError, ValueError)


def load_plain(file: BinaryIO, size: int, name: str) -> Any:
    """Return the value of the pickle in ``file``, which is ``size`` bytes long.

    Arrays come back as `PlainArray`, NumPy scalars as int or bool, bytearrays and the strings of
    Python 2 as bytes. ``name`` is what the errors call the file.

    Raises:
        DataError: the pickle is damaged, truncated, or asks for something that is refused.
    """
    try:
        return _PlainUnpickler(file, size).load()
    except DataError as error:
        raise DataError(f"{name} {error}") from error.__cause__


class _Dtype:
    def __init__(self, code: str) -> None:
        self.code, self.numpy = code, np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        order, *structure = state[1:5]
        if _text(order) not in ("<", ">", "|") or structure != [None] * 3:
            raise ValueError
        self.numpy = np.dtype(_text(order) + self.code)


@dataclass
class PlainArray:
    """An array as the pickle describes it: its bytes, and how to read them."""

    dtype: np.dtype
    shape: tuple[int, ...]
    data: bytes

    def __setstate__(self, state: Any) -> None:
        _version, shape, dtype, _fortran, data = state
        vars(self).update(vars(_array(data, dtype, shape)))


# No builder takes a variable number of arguments: one long list, given again and again, would cost
# its length each time. A call that does not fit ends the reading.


def _dtype(code: Any, _align: Any = False, _copy: Any = True) -> _Dtype:
    if _text(code) not in _DTYPES:
        raise DataError(
            f"holds an array of dtype {ascii(_text(code)[:20])[1:-1]}; "
            "a pair file has uint8 images and bool or integer flags"
        )
    return _Dtype(_text(code))


def _array(data: Any, dtype: Any, shape: Any, _order: Any = None) -> PlainArray:
    if type(data) is not bytes or type(dtype) is not _Dtype or type(shape) is not tuple:
        raise TypeError
    if len(shape) > 32 or not all(type(n) is int and 0 <= n < 1 << 63 for n in shape):
        raise ValueError  # which also keeps the product below cheap
    if math.prod(shape) * dtype.numpy.itemsize != len(data):
        raise ValueError
    return PlainArray(dtype.numpy, shape, data)


def _empty_array(kind: Any, _shape: Any, _code: Any) -> PlainArray:
    if kind is not _NDARRAY:
        raise TypeError
    return PlainArray(np.dtype(np.uint8), (0,), b"")


def _scalar(dtype: Any, data: Any) -> int | bool:
    return np.frombuffer(_array(data, dtype, ()).data, dtype.numpy)[0].item()


_BUILDERS = {
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _dtype,
    ("numpy.core.multiarray", "_reconstruct"): _empty_array,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy.core.numeric", "_frombuffer"): _array,
}


def _text(value: Any) -> str:
    if type(value) not in (bytes, str):
        raise TypeError
    return value.decode("latin-1") if type(value) is bytes else value  # bytes by Python 2


class _PlainUnpickler(pickle._Unpickler):
    # Not the C unpickler: that one allots its memo up to the highest index in the file, and has no
    # table by which to limit its operations.
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]]
        for name in _ALLOWED.split()
    }

    def __init__(self, file: BinaryIO, size: int) -> None:
        super().__init__(file, encoding="bytes")
        self.file, self.size, self.left = file, size, size
        self.encoded_bytes = 0

    def load(self) -> Any:
        self.stack: list[Any] = []
        self.metastack: list[list[Any]] = []
        self.append = self.stack.append
        limit = FREE_OPERATIONS + self.size // BYTES_PER_OPERATION
        for _ in range(limit):
            self.operation = self.read(1)[0]
            if self.operation not in self.dispatch:
                raise self.refusal()
            try:
                if self.operation == pickle.STOP[0]:
                    return self.stack.pop()
                self.dispatch[self.operation](self)
            except _MISFITS as error:
                raise DataError(
                    f"is damaged or not a pair file: the pickle operation {_NAMES[self.operation]} "
                    f"before byte {self.size - self.left} makes no sense"
                ) from error
        raise DataError(
            f"runs more than {limit} pickle operations in {self.size} bytes, {_NEEDLESS}"
        )

    def refusal(self) -> DataError:
        if self.operation in _NAMES:
            return DataError(f"uses the pickle operation {_NAMES[self.operation]}, {_NEEDLESS}")
        return DataError(
            f"is not a pickle of (images, is_same): byte {self.size - self.left - 1} is "
            f"0x{self.operation:02x}, which starts no pickle operation"
        )

    def truncated(self) -> DataError:
        return DataError(
            f"is truncated: it ends at byte {self.size}, inside the pickle; fetch or write it again"
        )

    # The operations read with these two, not with the ones that the base class makes in load().

    def read(self, length: int) -> bytes:
        if length > self.left:
            raise self.truncated()
        if length > MAX_VALUE_BYTES:
            raise DataError(
                f"holds one value of {length} bytes; no image of a pair file is over {MAX_VALUE_BYTES}"
            )
        self.left -= length
        data = self.file.read(length)
        if len(data) < length:  # the file has shrunk
            raise self.truncated()
        return data

    def readline(self) -> bytes:
        # A byte of text is escaped as \x00 at most; int() takes quadratic time for a long number.
        limit = 4 * MAX_VALUE_BYTES if self.operation in b"SV" else 1024
        line = self.file.readline(limit)
        self.left -= len(line)
        if not line.endswith(b"\n"):
            raise pickle.UnpicklingError if len(line) == limit else self.truncated()
        return line

    def load_frame(self) -> None:  # only a hint for buffering: checked, then not needed
        if int.from_bytes(self.read(8), "little") > self.left:
            raise self.truncated()

    def load_build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, (_Dtype, PlainArray)):
            raise TypeError
        target.__setstate__(state)

    dispatch[pickle.FRAME[0]] = load_frame
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.BYTEARRAY8[0]] = dispatch[pickle.BINBYTES8[0]]  # not into memory taken before

    def find_class(self, module: str, name: str) -> Any:
        # Python 3 writes bytes so at protocols 0 to 2, and bytearrays so below protocol 5
        if (module, name) == ("_codecs", "encode"):
            return self.encode
        if module in ("builtins", "__builtin__") and name in ("bytes", "bytearray"):
            return self.make_bytes
        key = module.replace("numpy._core.", "numpy.core."), name  # renamed by NumPy 2
        if key not in _BUILDERS:
            wanted = ascii(f"{module}.{name}"[:101])[1:-1]
            wanted = wanted if len(wanted) <= 100 else wanted[:97] + "..."
            raise DataError(f"asks for {wanted}, {_NEEDLESS}")
        return _BUILDERS[key]

    def make_bytes(self, value: Any = b"", encoding: Any = None) -> bytes:
        if encoding is not None:
            return self.encode(value, encoding)
        if type(value) is not bytes:
            raise TypeError
        return value

    def encode(self, text: Any, encoding: Any) -> bytes:
        if type(text) is not str or _text(encoding) not in ("latin1", "latin-1"):
            raise TypeError
        # An honest file encodes each text once; one text encoded again and again is a bomb.
        self.encoded_bytes += len(text)
        if self.encoded_bytes > self.size:
            raise DataError("unpacks to more bytes than it has; it is malicious")
        return text.encode("latin-1")
