"""Read a pickle as a data format: nothing that it names is imported, and nothing is called.

A pickle is a program for a small stack machine. `load_plain` runs only the operations that build
bytes, text, whole numbers, booleans, lists and tuples, and understands the few globals by which
Python 2, Python 3 and NumPy spell bytes, arrays and scalars; all else is refused by name. Time and
memory are bounded by the size of the file: lengths are checked before memory is taken, operations
are counted, the memo is a dictionary, and references are never expanded.

Format: https://github.com/python/cpython/blob/main/Lib/pickletools.py
"""

from __future__ import annotations

import codecs
import math
import pickletools
from dataclasses import dataclass
from types import FunctionType
from typing import Any, BinaryIO

import numpy as np

from plsc.errors import DataError

MAX_VALUE_BYTES = 1 << 26  # one encoded image of 64 MiB is no image of a pair file
# An operation can take 100 bytes of memory while it fills one byte of the file. An image is at least
# some hundred bytes long and takes at most 25 operations, so a large file needs no more than this.
FREE_OPERATIONS = 1_000_000
BYTES_PER_OPERATION = 4
_DTYPES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
_OPERATION_NAMES = {op.code.encode("latin-1")[0]: op.name for op in pickletools.opcodes}


@dataclass
class _Dtype:
    code: str
    order: str = "|"


@dataclass
class PlainArray:
    """An array as the pickle describes it: its bytes, and how to read them."""

    dtype: np.dtype
    shape: tuple[int, ...]
    data: bytes


class _NdarrayClass:
    """Stands for ``numpy.ndarray``, which may be named but not called."""


def load_plain(file: BinaryIO, size: int, name: str) -> Any:
    """Return the value of the pickle in ``file``, which is ``size`` bytes long.

    Arrays come back as `PlainArray`, NumPy scalars as int or bool, bytearrays and the strings of
    Python 2 as bytes. ``name`` is what the errors call the file.

    Raises:
        DataError: the pickle is damaged, truncated, or asks for something that is refused.
    """
    return _Machine(file, size, name).run()


class _Malformed(Exception):
    """The operations do not fit each other."""


class _Machine:
    def __init__(self, file: BinaryIO, size: int, name: str) -> None:
        self.file = file
        self.size = size
        self.name = name
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.encoded_bytes = 0

    def run(self) -> Any:
        operations = {code: getattr(self, method) for code, method in _OPERATIONS.items()}
        read = self.file.read
        operation = b""
        limit = FREE_OPERATIONS + self.size // BYTES_PER_OPERATION
        try:
            for _ in range(limit):
                operation = read(1)
                if operation == b".":
                    return self.stack.pop()
                if operation not in operations:
                    raise self.refusal(operation)
                operations[operation]()
        except (_Malformed, IndexError, KeyError, ValueError, OverflowError) as error:
            raise DataError(
                f"{self.name} is damaged or not a pair file: the pickle operation "
                f"{_OPERATION_NAMES[operation[0]]} before byte {self.file.tell()} makes no sense"
            ) from error
        raise DataError(
            f"{self.name} runs more than {limit} pickle operations in {self.size} bytes, "
            "which a pair file never needs; it is malicious or not a pair file"
        )

    def refusal(self, operation: bytes) -> DataError:
        if not operation:
            return self.truncated()
        if operation == b"i":  # INST names a global and calls it
            return self.refused_global(self.line().decode("latin-1"), self.line().decode("latin-1"))
        if operation[0] in _OPERATION_NAMES:
            return DataError(
                f"{self.name} uses the pickle operation {_OPERATION_NAMES[operation[0]]}, which a "
                "pair file never needs; it is malicious or not a pair file"
            )
        return DataError(
            f"{self.name} is not a pickle of (images, is_same): byte {self.file.tell() - 1} is "
            f"0x{operation[0]:02x}, which starts no pickle operation"
        )

    def refused_global(self, module: str, attribute: str) -> DataError:
        wanted = f"{module}.{attribute}".encode("unicode_escape").decode()
        wanted = wanted if len(wanted) <= 100 else wanted[:97] + "..."
        return DataError(
            f"{self.name} asks for {wanted}, which a pair file never needs; "
            "it is malicious or not a pair file"
        )

    def truncated(self) -> DataError:
        return DataError(
            f"{self.name} is truncated: it ends at byte {self.size}, inside the pickle; "
            "fetch or write it again"
        )

    # reading

    def take(self, length: int) -> bytes:
        if length > self.size:
            raise self.truncated()
        if length > MAX_VALUE_BYTES:
            raise DataError(
                f"{self.name} holds one value of {length} bytes; "
                f"no image of a pair file is over {MAX_VALUE_BYTES}"
            )
        data = self.file.read(length)
        if len(data) < length:
            raise self.truncated()
        return data

    def line(self) -> bytes:
        line = self.file.readline(4 * MAX_VALUE_BYTES)  # a byte is escaped as \x00 at most
        if not line.endswith(b"\n"):
            raise self.truncated()
        return line[:-1]

    def number(self, length: int, signed: bool = False) -> int:
        return int.from_bytes(self.take(length), "little", signed=signed)

    def short_line(self) -> bytes:
        line = self.line()
        if len(line) > 32:  # keeps int() of a decimal number cheap
            raise _Malformed
        return line

    # operations without a value

    def proto(self) -> None:
        if self.number(1) > 5:
            raise _Malformed

    def frame(self) -> None:
        if self.number(8) > self.size:  # only a hint for buffering: checked, then not needed
            raise self.truncated()

    def mark(self) -> None:
        self.marks.append(len(self.stack))

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        if start > len(self.stack):
            raise _Malformed
        items = self.stack[start:]
        del self.stack[start:]
        return items

    # plain values

    def none(self) -> None:
        self.stack.append(None)

    def new_true(self) -> None:
        self.stack.append(True)

    def new_false(self) -> None:
        self.stack.append(False)

    def int_line(self) -> None:
        line = self.short_line()
        booleans = {b"00": False, b"01": True}
        self.stack.append(booleans[line] if line in booleans else int(line))

    def long_line(self) -> None:
        self.stack.append(int(self.short_line().removesuffix(b"L")))

    def binint(self) -> None:
        self.stack.append(self.number(4, signed=True))

    def binint1(self) -> None:
        self.stack.append(self.number(1))

    def binint2(self) -> None:
        self.stack.append(self.number(2))

    def long1(self) -> None:
        length = self.number(1)
        if length > 16:
            raise _Malformed
        self.stack.append(self.number(length, signed=True))

    def string_line(self) -> None:
        line = self.line()
        if len(line) < 2 or line[:1] not in (b"'", b'"') or line[:1] != line[-1:]:
            raise _Malformed
        self.stack.append(codecs.escape_decode(line[1:-1])[0])

    def bytes1(self) -> None:
        self.stack.append(self.take(self.number(1)))

    def bytes4(self) -> None:
        self.stack.append(self.take(self.number(4)))

    def bytes8(self) -> None:
        self.stack.append(self.take(self.number(8)))

    def unicode_line(self) -> None:
        self.stack.append(self.line().decode("raw-unicode-escape"))

    def text1(self) -> None:
        self.stack.append(self.take(self.number(1)).decode())

    def text4(self) -> None:
        self.stack.append(self.take(self.number(4)).decode())

    def text8(self) -> None:
        self.stack.append(self.take(self.number(8)).decode())

    # containers

    def empty_list(self) -> None:
        self.stack.append([])

    def list_since_mark(self) -> None:
        self.stack.append(self.since_mark())

    def append(self) -> None:
        item = self.stack.pop()
        self.target_list().append(item)

    def appends(self) -> None:
        items = self.since_mark()
        self.target_list().extend(items)

    def target_list(self) -> list[Any]:
        if type(self.stack[-1]) is not list:
            raise _Malformed
        return self.stack[-1]

    def tuple_since_mark(self) -> None:
        self.stack.append(tuple(self.since_mark()))

    def tuple_of(self, length: int) -> None:
        if len(self.stack) < length:
            raise _Malformed
        items = tuple(self.stack[len(self.stack) - length :])
        del self.stack[len(self.stack) - length :]
        self.stack.append(items)

    def tuple0(self) -> None:
        self.stack.append(())

    def tuple1(self) -> None:
        self.tuple_of(1)

    def tuple2(self) -> None:
        self.tuple_of(2)

    def tuple3(self) -> None:
        self.tuple_of(3)

    # memo

    def put_line(self) -> None:
        self.memo[int(self.short_line())] = self.stack[-1]

    def put1(self) -> None:
        self.memo[self.number(1)] = self.stack[-1]

    def put4(self) -> None:
        self.memo[self.number(4)] = self.stack[-1]

    def memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def get_line(self) -> None:
        self.stack.append(self.memo[int(self.short_line())])

    def get1(self) -> None:
        self.stack.append(self.memo[self.number(1)])

    def get4(self) -> None:
        self.stack.append(self.memo[self.number(4)])

    # the few globals, and what they are asked to build

    def global_line(self) -> None:
        self.push_global(self.line().decode("latin-1"), self.line().decode("latin-1"))

    def stack_global(self) -> None:
        attribute, module = self.stack.pop(), self.stack.pop()
        self.push_global(_text(module), _text(attribute))

    def push_global(self, module: str, attribute: str) -> None:
        if (module, attribute) not in _GLOBALS:
            raise self.refused_global(module, attribute)
        self.stack.append(_GLOBALS[module, attribute])

    def reduce(self) -> None:
        arguments, builder = self.stack.pop(), self.stack.pop()
        if type(builder) is not FunctionType or type(arguments) is not tuple:
            raise _Malformed
        self.stack.append(builder(self, *_padded(arguments)))

    def build(self) -> None:
        state = self.stack.pop()
        if type(state) is not tuple:
            raise _Malformed
        if isinstance(self.stack[-1], _Dtype):
            _version, order, subarray, names, fields, *_ = state
            if _text(order) not in ("<", ">", "|") or (subarray, names, fields) != (None,) * 3:
                raise _Malformed
            self.stack[-1].order = _text(order)
        elif isinstance(self.stack[-1], PlainArray):
            _version, shape, dtype, _fortran, data = state
            array = _array(data, dtype, shape)
            target = self.stack[-1]
            target.dtype, target.shape, target.data = array.dtype, array.shape, array.data
        else:
            raise _Malformed

    def encode(self, text: Any, encoding: Any, *_: Any) -> bytes:
        if type(text) is not str or _text(encoding) not in ("latin1", "latin-1"):
            raise _Malformed
        # An honest file encodes each text once; one text encoded again and again is a bomb.
        self.encoded_bytes += len(text)
        if self.encoded_bytes > self.size:
            raise DataError(f"{self.name} unpacks to more bytes than it has; it is malicious")
        return text.encode("latin-1")

    def make_bytes(self, value: Any, encoding: Any, *_: Any) -> bytes:
        if encoding is not None:
            return self.encode(value, encoding)
        if value is not None and type(value) is not bytes:
            raise _Malformed
        return value or b""

    def make_dtype(self, code: Any, *_: Any) -> _Dtype:
        code = _text(code)
        if code not in _DTYPES:
            printable = code[:20].encode("unicode_escape").decode()
            raise DataError(
                f"{self.name} holds an array of dtype {printable}; a pair file has uint8 images "
                "and bool or integer flags"
            )
        return _Dtype(code)

    def make_scalar(self, dtype: Any, data: Any, *_: Any) -> int | bool:
        if type(data) is not bytes or not isinstance(dtype, _Dtype):
            raise _Malformed
        return np.frombuffer(data, _numpy_dtype(dtype), count=1)[0].item()

    def make_array(self, cls: Any, *_: Any) -> PlainArray:
        if cls is not _NdarrayClass:
            raise _Malformed
        return PlainArray(np.dtype(np.uint8), (0,), b"")

    def array_from_buffer(self, data: Any, dtype: Any, shape: Any, *_: Any) -> PlainArray:
        return _array(data, dtype, shape)


def _padded(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*arguments[:4], *(None,) * (4 - len(arguments)))


def _text(value: Any) -> str:
    if type(value) is bytes:
        return value.decode("latin-1")
    if type(value) is not str:
        raise _Malformed
    return value


def _numpy_dtype(dtype: _Dtype) -> np.dtype:
    return np.dtype(dtype.order + dtype.code)


def _array(data: Any, dtype: Any, shape: Any) -> PlainArray:
    if type(data) is not bytes or not isinstance(dtype, _Dtype) or type(shape) is not tuple:
        raise _Malformed
    if len(shape) > 32 or not all(type(n) is int and n >= 0 for n in shape):
        raise _Malformed
    if math.prod(shape) * int(dtype.code[1]) != len(data):
        raise _Malformed
    return PlainArray(_numpy_dtype(dtype), shape, data)


_GLOBALS: dict[tuple[str, str], Any] = {
    # Python 3 writes bytes so at protocols 0 to 2, and bytearrays so below protocol 5
    ("_codecs", "encode"): _Machine.encode,
    **{
        (module, kind): _Machine.make_bytes
        for module in ("__builtin__", "builtins")
        for kind in ("bytes", "bytearray")
    },
    ("numpy", "ndarray"): _NdarrayClass,
    ("numpy", "dtype"): _Machine.make_dtype,
    # NumPy 2 renamed numpy.core to numpy._core
    **{
        (f"numpy.{core}.{module}", attribute): builder
        for core in ("core", "_core")
        for module, attribute, builder in (
            ("multiarray", "_reconstruct", _Machine.make_array),
            ("multiarray", "scalar", _Machine.make_scalar),
            ("numeric", "_frombuffer", _Machine.array_from_buffer),
        )
    },
}

_OPERATIONS = {
    b"\x80": "proto",
    b"\x95": "frame",
    b"(": "mark",
    b"N": "none",
    b"\x88": "new_true",
    b"\x89": "new_false",
    b"I": "int_line",
    b"L": "long_line",
    b"J": "binint",
    b"K": "binint1",
    b"M": "binint2",
    b"\x8a": "long1",
    b"S": "string_line",
    b"U": "bytes1",
    b"T": "bytes4",
    b"C": "bytes1",
    b"B": "bytes4",
    b"\x8e": "bytes8",
    b"\x96": "bytes8",
    b"V": "unicode_line",
    b"\x8c": "text1",
    b"X": "text4",
    b"\x8d": "text8",
    b"]": "empty_list",
    b"l": "list_since_mark",
    b"a": "append",
    b"e": "appends",
    b")": "tuple0",
    b"\x85": "tuple1",
    b"\x86": "tuple2",
    b"\x87": "tuple3",
    b"t": "tuple_since_mark",
    b"p": "put_line",
    b"q": "put1",
    b"r": "put4",
    b"\x94": "memoize",
    b"g": "get_line",
    b"h": "get1",
    b"j": "get4",
    b"c": "global_line",
    b"\x93": "stack_global",
    b"R": "reduce",
    b"b": "build",
}
