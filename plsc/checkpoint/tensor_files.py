"""Read tensor files of other programs, and copy what matches into a network.

Files are memory-mapped: only used tensors are read.

Formats: safetensors; torch.save, read with ``weights_only=True``, which runs no code; and Paddle 1.x
(fluid.io.save_vars, one LoDTensor per file): uint32 version 0; uint64 number of levels; uint32 version 0;
int32 size of a protobuf TensorDesc {data_type = 1; repeated int64 dims = 2}; the values, little-endian.
See paddle/fluid/framework/lod_tensor.cc, tensor_util.cc and framework.proto.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import pickletools
import re
import struct
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from plsc.checkpoint.load import StoredTensor
from plsc.errors import CheckpointError, printable
from plsc.storage.disk import open_regular

# Usual keys of the network's state dict within a larger checkpoint.
_WRAPPERS = ("state_dict", "state_dict_backbone", "model", "backbone", "model_state_dict", "net")
# Prefixes added by DDP, torch.compile and wrapper classes.
_PREFIXES = ("module.", "_orig_mod.", "model.", "network.")
_BACKBONE, _HEAD = "backbone.", "head."
# Thousands of tensors are described in a few hundred KiB. Reading them needs up to 100 times that memory.
_LONGEST_PICKLE = 4 << 20
# What torch.save writes into state dicts of strided tensors. torch.load calls more, by name, without running
# code: tensors of memory that nobody has written, byte arrays of any size, slow codecs.
_CALLED = re.compile(
    r"collections (OrderedDict|Counter)|torch (\w+Storage|Size|device|[a-z]\w*)"
    r"|torch\._utils (_rebuild_tensor_v2|_rebuild_parameter)"
)
_ADVICE = "save its tensors with safetensors.torch.save_file, and import that file"
_LONGEST_DESCRIPTION = 1024  # bytes, of a Paddle variable
_PADDLE_TYPES = {2: "<i4", 3: "<i8", 4: "<f2", 5: "<f4", 6: "<f8", 22: "<i2"}
_PADDLE_BFLOAT16 = 22
_PIECE_BYTES = 8 << 20
_SHOWN = 5  # names per list
_LONGEST_NAME = 80


def read_state_dict(
    path: str | os.PathLike[str], follow_links: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the backbone's tensors and the class weights, each by name.

    Only tensors named ``head.`` next to others named ``backbone.`` are class weights, as in checkpoints of
    plsc. Otherwise "head" is a layer of the network, such as the last one of many vision transformers.

    Raises:
        CheckpointError: the file is missing, damaged or malicious, or has no tensors.
    """
    state = strip(unwrap(read_tensors(path, follow_links)))
    if not state:
        raise CheckpointError(
            f"{path} has no state dict; expected tensors by name, possibly under {', '.join(_WRAPPERS)}"
        )
    inside = {name: tensor for name, tensor in state.items() if name.startswith(_BACKBONE)}
    if not inside:
        return state, {}
    head = {name: tensor for name, tensor in state.items() if name.startswith(_HEAD)}
    return strip({name.removeprefix(_BACKBONE): t for name, t in inside.items()}), head


def unwrap(value: Any) -> dict[str, Tensor]:
    """Return the tensors by name, also from within the usual wrapper keys; empty if there are none."""
    for _ in range(4):
        if not isinstance(value, Mapping):
            return {}
        inner = [value[name] for name in _WRAPPERS if isinstance(value.get(name), Mapping)]
        if not inner:
            break
        value = inner[0]
    return {name: t for name, t in value.items() if isinstance(t, Tensor) and type(name) is str}


def strip(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict without prefixes that all names share."""
    for prefix in _PREFIXES * 2:
        if state and all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return state


def read_tensors(path: str | os.PathLike[str], follow_links: bool = False) -> Any:
    """Return the content of a .safetensors file, or of a torch.save file (any other name).

    Raises:
        CheckpointError: the file is missing, not a regular one, a link out of its folder (without
            follow_links), damaged, or requests anything but tensors in plain containers.
    """
    file = check_regular(path, follow_links)
    if file.suffix == ".safetensors":
        return _read_safetensors(file)
    value = _read_torch_file(file)
    _check_tensors(value, file)
    return value


def check_regular(path: str | os.PathLike[str], follow_links: bool = False) -> Path:
    """Return the path of a regular file; CheckpointError for anything else.

    follow_links: also those that leave the folder of the file.
    """
    file = Path(path)
    try:
        open_regular(file, None if follow_links else file.parent).close()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    return file


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{file} is not a complete safetensors file: {reason}") from error


def _read_torch_file(file: Path) -> Any:
    try:
        with file.open("rb") as stream:
            is_zip = stream.read(4) == b"PK\3\4"  # as torch decides
        if is_zip:
            with zipfile.ZipFile(file) as archive:
                records = archive.infolist()
            if (
                max(r.file_size for r in records if r.filename.endswith(".pkl")) > _LONGEST_PICKLE
                or min(record.header_offset for record in records)  # torch would see another archive
                or any(record.compress_type != zipfile.ZIP_STORED for record in records)
            ):
                raise ValueError("not what torch.save writes")
        with warnings.catch_warnings(), file.open("rb") as stream:
            warnings.simplefilter("ignore")  # about storages and TorchScript
            if is_zip:
                _check_values(io.BytesIO(torch._C.PyTorchFileReader(str(file)).get_record("data.pkl")))
            for _ in range(0 if is_zip else 5):  # the older format: the tensors are the fourth of five
                _check_values(stream)
            # Of a map of the older format, torch does not try whether it is a tar, in quadratic time.
            source: Any = file if is_zip else mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            return torch.load(source, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # a damaged file fails in many ways
        # torch's own message advises to disable the protection.
        asked = re.search(r"GLOBAL:? ([\w.]{1,100})", str(error))
        raise CheckpointError(
            f"{file} requests {asked[1]}, which tensors never need; it is malicious, or contains more than "
            f"tensors: then {_ADVICE}"
            if asked
            else f"{file} is damaged or no file of torch.save; download it again, or {_ADVICE}"
        ) from error


def _check_values(file: IO[bytes]) -> None:
    """Raise ValueError for a pickle that calls what tensors never need, or whose values are too many.

    Each is counted as often as it is used: hash() and repr() of 60 tuples that each contain the previous one
    twice would take 2^60 steps.
    """
    left, memo, marks, stack = _LONGEST_PICKLE, {}, [], list[Any]()
    for operation, argument, _ in pickletools.genops(file):
        name, needed = operation.name, operation.stack_before
        if name == "GLOBAL" and not _CALLED.fullmatch(str(argument)):
            raise ValueError(f"GLOBAL {str(argument).replace(' ', '.')}")
        if name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
            continue
        if name == "MARK":
            marks.append(stack)
            stack = []
            continue
        taken = []
        if pickletools.stackslice in needed:  # all values since the mark
            taken, stack, needed = stack, marks.pop(), needed[:-2]
        taken += [stack.pop() for _ in needed]
        value = SimpleNamespace(size=1 + sum(part.size for part in taken), is_shared=False)
        if name in ("BINGET", "LONG_BINGET"):
            value = memo[argument]
            value.is_shared = True
        elif name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD"):
            taken[-1].size, value = value.size, taken[-1]
            if value.is_shared:  # it might contain itself, any number of times
                left = 0
        left -= 1 if name[:6] in ("APPEND", "SETITE") else value.size
        if left < 0:
            raise ValueError("too many values")
        stack += [value] * len(operation.stack_after)


def _check_tensors(value: Any, file: Path) -> None:
    """Refuse a tensor that is larger than its storage in the file: using it would take far more memory.

    Of a storage that the file does not contain, torch.load leaves the memory as it was.
    """
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, Tensor):
            value.requires_grad_(False)  # set for parameters
            there = min(value.untyped_storage().nbytes(), file.stat().st_size)
            if value.nbytes > there:
                raise CheckpointError(f"{file}: a tensor {list(value.shape)!s:.80} has only {there} bytes")
        elif isinstance(value, (dict, list, tuple)):
            left += value.values() if isinstance(value, dict) else value


def read_paddle_file(path: Path) -> Tensor:
    """Return the tensor of one Paddle file.

    Raises:
        CheckpointError: the file is missing, of another format, or its size does not match its dimensions.
    """
    file = check_regular(path)
    with file.open("rb") as stream:
        head = stream.read(20 + _LONGEST_DESCRIPTION)
    try:
        version, levels, inner, length = struct.unpack_from("<IQIi", head)
        message, fields = iter(head[20 : 20 + length]), {0x08: list[int](), 0x10: list[int]()}
        for tag in message:
            value = shift = 0
            for byte in message:  # a varint of protobuf
                value |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    break
            fields[tag].append(value)
        (kind,), shape = fields.values()
        dtype, begin = np.dtype(_PADDLE_TYPES[kind]), 20 + length
        needed = begin + math.prod(shape) * dtype.itemsize
        if version or levels or inner or needed != file.stat().st_size:
            raise ValueError(f"values of the shape {shape!s:.80} would need {needed} bytes")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about memory that is not writable
            empty = 0 in shape  # which cannot be mapped
            values = np.empty(shape, dtype) if empty else np.memmap(file, dtype, "r", begin, (*shape,))
            tensor = torch.from_numpy(values)
    except (ValueError, KeyError, OverflowError, struct.error) as error:
        raise CheckpointError(
            f"{path} is truncated, damaged, or not a Paddle 1.x variable (save_vars): {error!s:.200}"
        ) from error
    return tensor.view(torch.bfloat16) if kind == _PADDLE_BFLOAT16 else tensor


# Class weights in parts.


@dataclass(frozen=True)
class RowParts:
    """The rows of a tensor in consecutive parts."""

    parts: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        if not self.parts[0].shape:
            return ()
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    def read(self) -> Tensor:
        """Return the whole tensor, contiguous, on the CPU."""
        return torch.cat(self.parts) if len(self.parts) > 1 else self.parts[0].contiguous()

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the rows [start, stop) in order, a few MiB at a time, each with its first row's index."""
        row_bytes = max(1, math.prod(self.shape[1:]) * self.parts[0].dtype.itemsize)
        step = max(1, _PIECE_BYTES // row_bytes)
        first = 0
        for part in self.parts:
            last = first + part.shape[0]
            for row in range(max(start, first), min(stop, last), step):
                end = min(row + step, stop, last)
                yield row, part[row - first : end - first].contiguous()
            first = last


def join_rows(parts: Sequence[Tensor], what: str) -> RowParts:
    """Return the parts as one tensor; CheckpointError unless all are floats with the same row shape."""
    first = parts[0]
    for part in parts:
        fits = len(part.shape) >= 1 and part.shape[1:] == first.shape[1:] and part.dtype.is_floating_point
        if not fits:
            kinds = [f"{one.dtype} {list(one.shape)!s:.80}" for one in (first, part)]
            raise CheckpointError(f"{what} is {kinds}; expected floats of one row shape in all files")
    return RowParts(tuple(parts))


# Into a network.


@dataclass
class Match:
    """The result of `match_into`.

    Attributes:
        matched: names of the network's tensors that were in the file.
        missing: names that are only in the network.
        unused: names that are only in the file.
        shapes: by name the (shape in the network, shape in the file) that differ.
        share: fraction of the network's numbers that came from the file.
    """

    matched: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    share: float = 0.0

    def lines(self) -> list[str]:
        """Return a summary of a few lines."""
        total = len(self.matched) + len(self.missing) + len(self.shapes)
        lines = [
            f"{len(self.matched)} of the network's {total} tensors match ({self.share:.1%} of its elements)"
        ]
        if self.missing:
            lines.append(f"not in the file: {shorten(self.missing)}")
        if self.unused:
            lines.append(f"not in the network: {shorten(self.unused)}")
        if self.shapes:
            pairs = [
                f"{shortened(name)} {list(here)} in the network, {str(list(there))[:80]} in the file"
                for name, (here, there) in self.shapes.items()
            ]
            lines.append(f"different shape: {shorten(pairs, longest=240)}")
        return lines


def match_into(
    target: Mapping[str, Tensor], tensors: Mapping[str, StoredTensor | Tensor], source: str
) -> Match:
    """Copy tensors with the same name and shape into ``target``, in place; return what matched.

    Names of the target may have the additional prefix ``network.`` of an adapter. Values are converted to
    the target's dtype. Everything is read and checked before the first tensor changes.

    Raises:
        CheckpointError: a value is not finite, or of another kind, as those of quantised weights.
    """
    match = Match()
    taken: dict[str, Tensor] = {}
    left = dict(tensors)
    for name, here in target.items():
        key = next((k for k in (name, name.removeprefix("network.")) if k in left), None)
        if key is None:
            match.missing.append(name)
            continue
        there = left.pop(key)
        if tuple(there.shape) != tuple(here.shape):
            match.shapes[name] = (tuple(here.shape), tuple(there.shape))
            continue
        value = there if isinstance(there, Tensor) else there.read()
        taken[name] = converted(value, here.dtype, f"{source}: {shortened(key)}")
        match.matched.append(name)
    match.unused = list(left)
    for name, value in taken.items():
        target[name].copy_(value)
    # Not counted: batch norm's num_batches_tracked, which all networks have.
    total = sum(tensor.numel() for tensor in target.values() if tensor.is_floating_point())
    learnt = sum(value.numel() for value in taken.values() if value.is_floating_point())
    match.share = learnt / max(1, total)
    return match


def refuse_no_match(match: Match, source: str, advice: str) -> None:
    """Raise CheckpointError if no parameter came from the file."""
    if not match.share:
        raise CheckpointError(
            f"no tensor in {source} matches the network by name and shape: "
            f"{'; '.join(match.lines()[1:])}; {advice}"
        )


def converted(value: Tensor, dtype: torch.dtype, what: str) -> Tensor:
    """Return a tensor of a file in a type.

    Raises CheckpointError if it has NaN or infinity, there or then, or values of another kind: integers, or
    floats of 8 bits, are quantised weights, whose scales have other names.
    """
    is_float = value.is_floating_point() and value.element_size() > 1
    if is_float != dtype.is_floating_point or value.is_complex():
        raise CheckpointError(f"{what} has values of {value.dtype}; expected {dtype}, not quantised")
    value = value.to(dtype)
    if is_float and not bool(torch.isfinite(value).all()):
        raise CheckpointError(f"{what} contains values that are not finite; choose another file")
    return value


def shorten(names: list[str], longest: int = _LONGEST_NAME) -> str:
    """Return the first names and the number of the others."""
    shown = ", ".join(shortened(name, longest) for name in names[:_SHOWN])
    more = len(names) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def shortened(name: str, longest: int = _LONGEST_NAME) -> str:
    """Return a name from a file, cut short and without control characters."""
    text = printable(name)
    return text if len(text) <= longest else text[: longest - 3] + "..."
