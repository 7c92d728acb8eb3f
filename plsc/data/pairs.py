"""Read verification pairs, pickled as ``(bins, issame_list)``, as for LFW, CFP-FP and AgeDB.

``bins`` has 2P encoded images, where pair p is the images 2p and 2p + 1; ``issame_list`` has P flags.
This is the format of insightface's ``.bin`` files, by Python 2 or 3 with any pickle protocol. The pickle
is parsed safely: its operations are checked before loading, and nothing that it names is imported or called.
The few names with which Python and NumPy pickle bytes, arrays and scalars map to functions of this module.
"""

from __future__ import annotations

import math
import os
import pickle
import pickletools
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from plsc.data.sources.base import printable
from plsc.errors import DataError
from plsc.storage.disk import open_regular

_MOST_BYTES = (
    2**26
)  # of an image; four times that for a line, because text escapes take 4 characters per byte
# An operation of one byte can take 100 bytes of memory. An image has at least a few hundred bytes and takes
# at most 25 operations, so a large file needs no more than this.
_FREE_OPERATIONS = 1_000_000
_BYTES_PER_OPERATION = 4
_OPERATIONS = {operation.code.encode("latin-1"): operation for operation in pickletools.opcodes}
# The operations that pair files use; and INST, so that the error names the global that it calls.
_ALLOWED = """
    PROTO FRAME MARK STOP NONE NEWTRUE NEWFALSE INT LONG BININT BININT1 BININT2 LONG1 STRING BINSTRING
    SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 UNICODE BINUNICODE SHORT_BINUNICODE
    BINUNICODE8 EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 PUT BINPUT
    LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL INST REDUCE BUILD
"""
_DTYPES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
_NDARRAY = object()  # represents numpy.ndarray, which may be named but not called


@dataclass(frozen=True)
class PairSet:
    """P pairs of encoded images: ``images`` has 2P entries, ``is_same`` is bool [P]."""

    images: list[bytes]
    is_same: np.ndarray

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.is_same)


def read_pairs(path: str | os.PathLike[str]) -> PairSet:
    """Read a pair file; no code in it is run, so the file need not be trusted.

    Raises:
        DataError: the file is missing, truncated, not a pair file, or requests an object that pair files
            never need; the message names it.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            bounded = _Bounded(file)
            _check_operations(bounded, size)
            file.seek(0)
            value = _PairUnpickler(bounded, size).load()
    except OSError as error:
        raise DataError(f"cannot read pair file {path}: {error.strerror or error}") from error
    except (pickle.UnpicklingError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = printable(str(error)[:200]) or type(error).__name__
        raise DataError(f"{path} is not a pair file, or damaged: {reason}") from error
    images, flags = value if isinstance(value, (tuple, list)) and len(value) == 2 else (value, ())
    return _checked(images, flags, str(path))


class _Bounded:
    """A file whose values are at most as large as an image; the file may be sparse."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.tell = file, file.tell

    def read(self, length: int) -> bytes:
        if length > _MOST_BYTES:
            raise ValueError(f"a value of {length} bytes; expected at most {_MOST_BYTES}")
        return self._file.read(length)

    def readline(self) -> bytes:
        return self._file.readline(4 * _MOST_BYTES)


def _check_operations(file: Any, size: int) -> None:
    """Raise ValueError unless the pickle has only allowed operations, not too many and not too large."""
    name, allowed = "", frozenset(_ALLOWED.split())
    for number in range(_FREE_OPERATIONS + size // _BYTES_PER_OPERATION):
        operation = _OPERATIONS.get(code := file.read(1))
        name = f"{code!r}" if operation is None else operation.name
        if operation is None or name not in allowed:
            break
        # pickletools' reader of STRING expects ASCII.
        read = type(file).readline if name == "STRING" else operation.arg and operation.arg.reader
        argument: Any = read(file) if read else None
        if name == "STOP":
            return
        # The unpickler allocates memory for all memo entries up to the highest index.
        if name in ("PUT", "LONG_BINPUT") and not 0 <= argument <= number:
            break
    raise ValueError(f"operation {number} is {name}, which a pair file never needs")


class _PairUnpickler(pickle.Unpickler):
    """Build only bytes, strings, integers, lists, tuples and `_Array`; refuse all other globals by name."""

    def __init__(self, file: Any, size: int) -> None:
        super().__init__(file, encoding="bytes")  # strings written by Python 2
        self._left = size

    def find_class(self, module: str, name: str) -> Any:
        # Python 3 pickles bytes like this at protocols 0 to 2, and bytearrays below protocol 5.
        if (module, name) == ("_codecs", "encode"):
            return self._encode
        if module in ("builtins", "__builtin__") and name in ("bytes", "bytearray"):
            return self._bytes
        key = module.replace("numpy._core.", "numpy.core."), name  # renamed by NumPy 2
        if key not in _BUILDERS:
            raise ValueError(f"it requests {module}.{name}, which a pair file never needs")
        return _BUILDERS[key]

    def _bytes(self, value: Any = b"", encoding: Any = None) -> bytes:
        return value if type(value) is bytes else self._encode(value, encoding)

    def _encode(self, text: Any, encoding: Any) -> bytes:
        # A regular file encodes each string once; a file that repeats one many times is a bomb.
        self._left -= len(text)
        if self._left < 0 or type(text) is not str or _text(encoding) not in ("latin1", "latin-1"):
            raise ValueError("more bytes than the file has, or in another encoding")
        return text.encode("latin-1")


@dataclass
class _Array:
    dtype: np.dtype
    data: bytes | bytearray

    def __setstate__(self, state: Any) -> None:
        _version, shape, dtype, _fortran, data = state
        vars(self).update(vars(_array(data, dtype, shape)))


class _Dtype:
    def __init__(self, code: str) -> None:
        self.code, self.numpy = code, np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        self.numpy = np.dtype(_text(state[1]) + self.code)  # state[1]: the byte order


# No function takes a variable number of arguments: passing one long list many times would cost its length
# each time.


def _dtype(code: Any, _align: Any = False, _copy: Any = True) -> _Dtype:
    if _text(code) not in _DTYPES:
        raise ValueError("an array of a dtype other than uint8 for images, and bool or integers for flags")
    return _Dtype(_text(code))


def _array(data: Any, dtype: Any, shape: Any, _order: Any = None) -> _Array:
    # The dimensions are checked one by one, so that their product stays small.
    is_sound = type(data) in (bytes, bytearray) and type(dtype) is _Dtype and type(shape) is tuple
    is_sound = is_sound and len(shape) <= 32 and all(type(n) is int and 0 <= n < 1 << 63 for n in shape)
    if not is_sound or math.prod(shape) * dtype.numpy.itemsize != len(data):
        raise ValueError("an inconsistent array")
    return _Array(dtype.numpy, data)


def _empty_array(_kind: Any, _shape: Any, _code: Any) -> _Array:
    return _Array(np.dtype(np.uint8), b"")


def _scalar(dtype: Any, data: Any) -> int | bool:
    return np.frombuffer(_array(data, dtype, ()).data, dtype.numpy)[0].item()


def _text(value: Any) -> Any:
    return value.decode("latin-1") if type(value) is bytes else value  # bytes from Python 2


_BUILDERS = {
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _dtype,
    ("numpy.core.multiarray", "_reconstruct"): _empty_array,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy.core.numeric", "_frombuffer"): _array,
}


def _checked(bins: Any, flags: Any, name: str) -> PairSet:
    if isinstance(flags, _Array):
        flags = np.frombuffer(flags.data, flags.dtype).tolist()
    is_list = isinstance(bins, (list, tuple)) and isinstance(flags, (list, tuple))
    if not is_list or not bins or len(bins) != 2 * len(flags):
        raise DataError(f"{name}: {_kind(bins)} and {_kind(flags)}; expected two images for each flag")
    copies: dict[int, bytes] = {}  # a bytearray that is repeated is copied once
    images = []
    for index, image in enumerate(bins):
        data = image.data if isinstance(image, _Array) and image.dtype == np.uint8 else image
        if not isinstance(data, (bytes, bytearray)) or not data:
            raise DataError(f"{name}: image {index} is {_kind(image)}; expected encoded bytes, or uint8")
        if isinstance(data, bytearray):
            data = copies.get(id(data)) or copies.setdefault(id(data), bytes(data))
        images.append(data)
    for index, flag in enumerate(flags):
        if not isinstance(flag, int) or flag not in (0, 1):
            raise DataError(f"{name}: is_same[{index}] is {_kind(flag)}; expected True or False")
    return PairSet(images, np.array(flags, dtype=bool))


def _kind(value: Any) -> str:
    if isinstance(value, _Array):
        return f"an array of {value.dtype}"
    if isinstance(value, (list, tuple, bytes, str)):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"a {type(value).__name__.lstrip('_')}"
