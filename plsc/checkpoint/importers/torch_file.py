"""Read what torch.save wrote as a data format: nothing that its pickle names is imported or called.

A zip file whose records are stored as they are: ``data.pkl`` says which tensors there are, ``data/<key>``
are their bytes. Files from before torch 1.6 are a row of pickles with the bytes after them; they are read,
too. Format: torch/serialization.py (_save, _legacy_save) and Lib/pickletools.py of Python.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from plsc.checkpoint.importers.file_tensor import RawFile, file_tensor
from plsc.errors import CheckpointError

# The description of thousands of tensors takes some hundred KiB. An operation of a pickle may take 100
# bytes of memory while it fills one of the file, so this bounds what a hostile file can take.
_LONGEST_PICKLE = 4 << 20
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_START = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_ADVICE = "keep its tensors with safetensors.torch.save_file, and import that file"
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_ALLOWED = """
    PROTO FRAME MARK STOP POP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE
    SHORT_BINUNICODE BINSTRING SHORT_BINSTRING SHORT_BINBYTES EMPTY_LIST APPEND APPENDS EMPTY_TUPLE TUPLE
    TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT SETITEM SETITEMS BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET GLOBAL
    STACK_GLOBAL REDUCE BUILD BINPERSID
"""
_MISFITS = (
    pickle.UnpicklingError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: torch.dtype
    elements: int


@dataclass(frozen=True)
class _Description:
    """A tensor as the pickle describes it; offset and strides in elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_torch_file(path: str | os.PathLike[str], follow_links: bool = False) -> Any:
    """Return what torch.save wrote: plain values, and a `FileTensor` for each tensor or parameter.

    Dictionaries of all kinds come back as dict. No tensor data is read yet.

    Raises:
        CheckpointError: no such file, or it is damaged, or its pickle asks for anything but tensors in
            dictionaries, lists and tuples of plain values.
    """
    file = RawFile(path, follow_links)
    try:
        if file.read(0, min(4, file.size)) == b"PK\x03\x04":
            return _read_zip(file)
        if file.read(0, min(len(_LEGACY_START), file.size)) == _LEGACY_START:
            return _read_legacy(file)
    except (*_MISFITS, zipfile.BadZipFile, NotImplementedError, OSError) as error:
        raise CheckpointError(
            f"{path} is damaged or not a file of torch.save; fetch it again"
        ) from error
    raise CheckpointError(
        f"{path} is no file of torch.save: it begins as neither of its two formats; expected a state dict"
    )


def _read_zip(file: RawFile) -> Any:
    with zipfile.ZipFile(file.path) as archive:
        records = {info.filename: info for info in archive.infolist()}
        if len(records) != len(archive.infolist()):
            raise CheckpointError(f"{file.path} has a record twice; it is no file of torch.save")
    found = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(found) != 1:
        raise CheckpointError(
            f"{file.path} is a zip file without a data.pkl: not a file of torch.save, or a TorchScript "
            f"archive; {_ADVICE}"
        )
    root = found[0].removesuffix("data.pkl")

    def place(name: str) -> tuple[int, int]:
        """Return where the bytes of a record begin and end."""
        info = records[root + name]
        header = file.read(info.header_offset, 30)
        if header[:4] != b"PK\x03\x04" or info.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"{file.path}: record {name!r} is compressed or damaged")
        begin = info.header_offset + 30
        begin += int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        return begin, begin + info.file_size

    if root + "byteorder" in records:
        begin, end = place("byteorder")
        if file.read(begin, min(end - begin, 16)) != b"little":
            raise CheckpointError(f"{file.path} was saved on a big-endian machine; {_ADVICE}")
    begin, end = place("data.pkl")
    if end - begin > _LONGEST_PICKLE:
        raise CheckpointError(
            f"{file.path} describes its tensors in {end - begin} bytes, expected at most "
            f"{_LONGEST_PICKLE}; {_ADVICE}"
        )
    value = _Reader(io.BytesIO(file.read(begin, end - begin)), file).load()
    return _resolve(value, file, lambda storage: place(f"data/{storage.key}"))


def _read_legacy(file: RawFile) -> Any:
    stream = io.BytesIO(file.read(0, min(file.size, _LONGEST_PICKLE)))
    values = [_Reader(stream, file).load() for _ in range(5)]
    magic, _protocol, system, value, keys = values
    if magic != _LEGACY_MAGIC or not isinstance(keys, list):
        raise ValueError
    if system.get("little_endian") is not True:
        raise CheckpointError(f"{file.path} was saved on a big-endian machine; {_ADVICE}")
    sizes = {storage.key: storage for storage in _storages_in(value, set())}
    places: dict[str, tuple[int, int]] = {}
    position = stream.tell()
    for key in keys:  # each: its number of elements in 8 bytes, then they
        storage = sizes[key]
        begin = position + 8
        if int.from_bytes(file.read(position, 8), "little") != storage.elements:
            raise ValueError
        position = begin + storage.elements * storage.dtype.itemsize
        places[key] = begin, position
    return _resolve(value, file, lambda storage: places[storage.key])


def _storages_in(value: Any, seen: set[int]) -> list[_Storage]:
    if isinstance(value, _Description):
        return [value.storage]
    if not isinstance(value, (dict, list, tuple)) or id(value) in seen:
        return []
    seen.add(id(value))
    parts = value.values() if isinstance(value, dict) else value
    return [storage for part in parts for storage in _storages_in(part, seen)]


def _resolve(
    value: Any,
    file: RawFile,
    place: Callable[[_Storage], tuple[int, int]],
    done: dict[int, Any] | None = None,
    depth: int = 0,
) -> Any:
    """Return the same value with tensors of the file in place of their descriptions."""
    if isinstance(value, _Description):
        begin, end = place(value.storage)
        dtype = value.storage.dtype
        if end - begin < value.storage.elements * dtype.itemsize:
            raise ValueError
        begin += value.offset * dtype.itemsize
        return file_tensor(file, begin, end, dtype, value.shape, value.strides, "a tensor")
    if not isinstance(value, (dict, list, tuple)):
        return value
    if depth > 16:
        raise CheckpointError(f"{file.path} nests its values more than 16 deep; {_ADVICE}")
    done = {} if done is None else done  # what is in many places is resolved once, or it never ends
    if id(value) not in done:
        if isinstance(value, dict):
            items = {key: _resolve(v, file, place, done, depth + 1) for key, v in value.items()}
            done[id(value)] = items
        else:
            parts = (_resolve(part, file, place, done, depth + 1) for part in value)
            done[id(value)] = type(value)(parts)
    return done[id(value)]


def _rebuild_tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, _gradient: Any = None, *_more: Any
) -> _Description:
    numbers = (offset, *shape, *strides)
    is_good = isinstance(storage, _Storage) and len(shape) == len(strides) <= 16
    if not is_good or not all(type(n) is int and 0 <= n < 1 << 48 for n in numbers):
        raise ValueError
    return _Description(storage, offset, tuple(shape), tuple(strides))


def _rebuild_parameter(data: Any, *_more: Any) -> _Description:
    if not isinstance(data, _Description):
        raise TypeError
    return data


def _dictionary(*_items: Any) -> dict[Any, Any]:
    return {}


def _size(numbers: Any) -> tuple[Any, ...]:
    return tuple(numbers)


_BUILDERS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _dictionary,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch", "Size"): _size,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
}


class _Reader(pickle._Unpickler):
    # The unpickler in Python, not the one in C, for its table of operations, here cut down.
    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]]
        for name in _ALLOWED.split()
    }

    def __init__(self, stream: io.BytesIO, file: RawFile) -> None:
        super().__init__(stream)
        self._path = file.path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _BUILDERS:
            wanted = ascii(f"{module}.{name}"[:100])[1:-1]
            raise CheckpointError(
                f"{self._path} asks for {wanted}, which a file of tensors never needs; it is malicious, or "
                f"holds more than tensors: then {_ADVICE}"
            )
        return _BUILDERS[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _location, elements, *view = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or any(view):
            raise ValueError
        if type(key) is not str or type(elements) is not int or not 0 <= elements < 1 << 48:
            raise ValueError
        return _Storage(key, dtype, elements)

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        builder = self.stack.pop()
        if builder not in _BUILDERS.values() or not callable(builder):
            raise TypeError
        self.append(builder(*arguments))

    def load_build(self) -> None:
        self.stack.pop()  # such as the _metadata of a state dict: not needed

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set(self.stack[-1], [key, value])

    def load_setitems(self) -> None:
        items = self.pop_mark()
        self._set(self.stack[-1], items)

    def _set(self, target: Any, items: list[Any]) -> None:
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Only these: the hash of a nested tuple can take for ever.
            if type(target) is not dict or type(key) not in (str, int):
                raise TypeError
            target[key] = value

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
