"""Read and write verification pairs, pickled as ``(bins, issame_list)``, as for LFW, CFP-FP and AgeDB.

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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from plsc.data.sources.base import printable
from plsc.errors import DataError
from plsc.storage.publish import replacing
from plsc.storage.regular import open_regular

_MAX_VALUE_BYTES = 1 << 26  # per image
_MAX_LINE_BYTES = 1024  # of a number or name in text form
# An operation of one byte can take 100 bytes of memory. An image has at least a few hundred bytes and takes
# at most 25 operations, so a large file needs no more than this.
_FREE_OPERATIONS = 1_000_000
_BYTES_PER_OPERATION = 4
_NEEDLESS = "which a pair file never needs; it is malicious or not a pair file"
_OPERATIONS = {operation.code.encode("latin-1"): operation for operation in pickletools.opcodes}
# The operations that pair files use; and INST, so that the error names the global that it calls.
_ALLOWED = """
    PROTO FRAME MARK STOP NONE NEWTRUE NEWFALSE INT LONG BININT BININT1 BININT2 LONG1 STRING BINSTRING
    SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 UNICODE BINUNICODE SHORT_BINUNICODE
    BINUNICODE8 EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 PUT BINPUT
    LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL INST REDUCE BUILD
"""
# pickletools' codes for "the preceding number gives the length", and the size of that number in bytes.
_LENGTH_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
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
        DataError: the file is missing, empty, truncated, not a pair file, or requests an object that
            pair files never need; the message names it.
    """
    path = Path(path)
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise DataError(f"{path} is empty; expected a pickled (images, is_same) pair file")
            value = _load(file, size, str(path))
    except OSError as error:
        raise DataError(
            f"cannot read pair file {path}: {error.strerror or error}; data.val_targets expects names of "
            "pair files in the dataset folder, without .bin, or of text lists, such as pairs.txt"
        ) from error
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise DataError(f"{path} contains {_kind(value)}; expected a pair of lists (images, is_same)")
    return _checked(value[0], value[1], str(path))


def write_pairs(
    path: str | os.PathLike[str], images: Sequence[bytes], is_same: Sequence[bool] | np.ndarray
) -> None:
    """Write a pair file that insightface, and ``pickle.load`` of any Python 3, can read. The write is atomic.

    Raises:
        DataError: the number of images is not twice the number of flags, or the file cannot be written.
    """
    pairs = _checked(list(images), np.asarray(is_same).tolist(), f"the list for {path}")
    with replacing(path) as temporary, temporary.open("wb") as file:
        pickle.dump((pairs.images, pairs.is_same.tolist()), file, protocol=4)


def _load(file: BinaryIO, size: int, name: str) -> Any:
    """Return the value of a pickle of `size` bytes; DataError if it is damaged or not allowed."""
    try:
        _check_operations(file, size)
        file.seek(0)
        return _PairUnpickler(file, size).load()
    except DataError as error:
        raise DataError(f"{name} {error}") from error.__cause__
    except (pickle.UnpicklingError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = printable(str(error)[:200]) or type(error).__name__
        raise DataError(f"{name} is damaged or not a pair file: its pickle is invalid ({reason})") from error


def _check_operations(file: BinaryIO, size: int) -> None:
    """Raise DataError unless the pickle has only allowed operations, not too many and not too large."""
    allowed = frozenset(_ALLOWED.split())
    most = _FREE_OPERATIONS + size // _BYTES_PER_OPERATION

    def read(length: int) -> bytes:
        data = file.read(length)
        if len(data) < length:
            raise _truncated(size)
        return data

    for number in range(most):
        code = read(1)
        operation = _OPERATIONS.get(code)
        if operation is None:
            raise DataError(
                f"is not a pickle of (images, is_same): byte {file.tell() - 1} is 0x{code.hex()}, which is "
                "not a pickle operation; write it with plsc.data.pairs.write_pairs"
            )
        name = operation.name
        if name not in allowed:
            raise DataError(f"uses the pickle operation {name}, {_NEEDLESS}")
        if name == "STOP":
            return
        if operation.arg is None:
            continue
        width = operation.arg.n
        if width == pickletools.UP_TO_NEWLINE:
            # Text escapes take at most 4 characters per byte (\x00).
            limit = 4 * _MAX_VALUE_BYTES if name in ("STRING", "UNICODE") else _MAX_LINE_BYTES
            for _ in range(2 if name in ("GLOBAL", "INST") else 1):
                argument = file.readline(limit)
                if not argument.endswith(b"\n"):
                    raise (_too_large(name, len(argument)) if len(argument) == limit else _truncated(size))
            index = int(argument) if name == "PUT" else 0
        elif width < 0:
            index, length = 0, int.from_bytes(read(_LENGTH_BYTES[width]), "little")
            if length > size - file.tell():
                raise _truncated(size) if length <= _MAX_VALUE_BYTES else _too_large(name, length)
            if length > _MAX_VALUE_BYTES:
                raise _too_large(name, length)
            file.seek(length, os.SEEK_CUR)
        else:
            index = int.from_bytes(read(width), "little")
            if name == "FRAME" and index > size - file.tell():
                raise _truncated(size)
        # The unpickler allocates memory for all memo entries up to the highest index.
        if name in ("PUT", "LONG_BINPUT") and not 0 <= index <= number:
            raise DataError(f"writes to memo entry {index}, {_NEEDLESS}")
    raise DataError(f"has more than {most} pickle operations in {size} bytes, {_NEEDLESS}")


class _PairUnpickler(pickle.Unpickler):
    """Build only bytes, strings, integers, lists, tuples and `_Array`; refuse all other globals by name."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        super().__init__(file, encoding="bytes")  # strings written by Python 2
        self._size = self._left = size

    def find_class(self, module: str, name: str) -> Any:
        # Python 3 pickles bytes like this at protocols 0 to 2, and bytearrays below protocol 5.
        if (module, name) == ("_codecs", "encode"):
            return self._encode
        if module in ("builtins", "__builtin__") and name in ("bytes", "bytearray"):
            return self._bytes
        key = module.replace("numpy._core.", "numpy.core."), name  # renamed by NumPy 2
        if key not in _BUILDERS:
            wanted = ascii(f"{module}.{name}")[1:-1]
            wanted = wanted if len(wanted) <= 100 else f"{wanted[:97]}..."
            raise DataError(f"requests {wanted}, {_NEEDLESS}")
        return _BUILDERS[key]

    def _bytes(self, value: Any = b"", encoding: Any = None) -> bytes:
        return value if type(value) is bytes else self._encode(value, encoding)

    def _encode(self, text: Any, encoding: Any) -> bytes:
        if type(text) is not str or _text(encoding) not in ("latin1", "latin-1"):
            raise TypeError(f"bytes of {_kind(text)}")
        # A regular file encodes each string once; a file that repeats one many times is a bomb.
        self._left -= len(text)
        if self._left < 0:
            raise DataError("unpacks to more bytes than the file has; it is malicious")
        return text.encode("latin-1")


@dataclass
class _Array:
    """An array as pickled: its bytes, and how to interpret them."""

    dtype: np.dtype
    data: bytes | bytearray

    def __setstate__(self, state: Any) -> None:
        _version, shape, dtype, _fortran, data = state
        vars(self).update(vars(_array(data, dtype, shape)))


class _Dtype:
    def __init__(self, code: str) -> None:
        self.code, self.numpy = code, np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        order, *structure = state[1:5]
        if _text(order) not in ("<", ">", "|") or structure != [None] * 3:
            raise ValueError("a dtype with fields")
        self.numpy = np.dtype(_text(order) + self.code)


# No function takes a variable number of arguments: passing one long list many times would cost its length
# each time.


def _dtype(code: Any, _align: Any = False, _copy: Any = True) -> _Dtype:
    if _text(code) not in _DTYPES:
        raise DataError(
            f"contains an array of dtype {ascii(_text(code)[:20])[1:-1]}; "
            "a pair file has uint8 images and bool or integer flags"
        )
    return _Dtype(_text(code))


def _array(data: Any, dtype: Any, shape: Any, _order: Any = None) -> _Array:
    if type(data) not in (bytes, bytearray) or type(dtype) is not _Dtype or type(shape) is not tuple:
        raise TypeError("an invalid array")
    # The dimensions are checked one by one, so that their product stays small.
    if len(shape) > 32 or not all(type(n) is int and 0 <= n < 1 << 63 for n in shape):
        raise ValueError("an array of a wrong shape")
    if math.prod(shape) * dtype.numpy.itemsize != len(data):
        raise ValueError(f"an array of {len(data)} bytes")
    return _Array(dtype.numpy, data)


def _empty_array(kind: Any, _shape: Any, _code: Any) -> _Array:
    if kind is not _NDARRAY:
        raise TypeError("an array of another class")
    return _Array(np.dtype(np.uint8), b"")


def _scalar(dtype: Any, data: Any) -> int | bool:
    return np.frombuffer(_array(data, dtype, ()).data, dtype.numpy)[0].item()


def _text(value: Any) -> str:
    if type(value) not in (bytes, str):
        raise TypeError(f"{_kind(value)} where a string was expected")
    return value.decode("latin-1") if type(value) is bytes else value  # bytes from Python 2


_BUILDERS = {
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _dtype,
    ("numpy.core.multiarray", "_reconstruct"): _empty_array,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy.core.numeric", "_frombuffer"): _array,
}


def _truncated(size: int) -> DataError:
    return DataError(f"is truncated: it ends at byte {size}, inside the pickle; download or write it again")


def _too_large(operation: str, length: int) -> DataError:
    return DataError(
        f"contains a value of {length} bytes ({operation}); an image must not exceed {_MAX_VALUE_BYTES}"
    )


def _checked(bins: Any, flags: Any, name: str) -> PairSet:
    if not isinstance(bins, (list, tuple)):
        raise DataError(f"{name}: the images are {_kind(bins)}; expected a list of encoded images")
    copies: dict[int, bytes] = {}
    images = [_image_bytes(image, f"image {index} of {name}", copies) for index, image in enumerate(bins)]
    is_same = _flags(flags, name)
    if len(images) != 2 * len(is_same):
        raise DataError(
            f"{name} has {len(images)} images for {len(is_same)} pairs; "
            f"expected {2 * len(is_same)}, two per pair"
        )
    if not images:
        raise DataError(f"{name} contains no pairs")
    return PairSet(images, is_same)


def _image_bytes(image: Any, name: str, copies: dict[int, bytes]) -> bytes:
    """Return an image as bytes; copies: cache of converted bytearrays, so that each is copied only once."""
    if isinstance(image, _Array) and image.dtype == np.uint8:
        image = image.data
    if isinstance(image, bytearray):
        if id(image) not in copies:
            copies[id(image)] = bytes(image)
        image = copies[id(image)]
    if not isinstance(image, bytes):
        raise DataError(f"{name} is {_kind(image)}; expected encoded bytes or a uint8 array")
    if not image:
        raise DataError(f"{name} is empty")
    return image


def _flags(flags: Any, name: str) -> np.ndarray:
    if isinstance(flags, _Array):
        flags = np.frombuffer(flags.data, flags.dtype).tolist()
    if not isinstance(flags, (list, tuple)):
        raise DataError(f"{name}: is_same is {_kind(flags)}; expected a list of booleans")
    for index, flag in enumerate(flags):
        if not isinstance(flag, int) or flag not in (0, 1):
            value = flag if isinstance(flag, int) and abs(flag) < 1 << 64 else _kind(flag)
            raise DataError(f"{name}: is_same[{index}] is {value}; expected True or False")
    return np.array(flags, dtype=bool)


def _kind(value: Any) -> str:
    if isinstance(value, _Array):
        return f"an array of {value.dtype}"
    if isinstance(value, (list, tuple, bytes, str)):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"a {type(value).__name__.lstrip('_')}"
