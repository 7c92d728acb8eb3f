from __future__ import annotations

import json
import zlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

from plsc.checkpoint.layout import DTYPES
from plsc.checkpoint.shard_file import (
    Entry,
    is_shard,
    is_shard_of,
    shard_name,
    tensor_chunks,
    write_shard,
)


def entry_of(key, tensor, offsets=None):
    offsets = (0,) * tensor.ndim if offsets is None else offsets
    return Entry(key, tensor.dtype, tuple(tensor.shape), offsets, tensor_chunks(tensor))


def make_tensors():
    numbers = torch.arange(2 * 3 * 5).view(2, 3, 5) % 2
    tensors = {f"t/{name}": numbers.to(dtype) for name, dtype in DTYPES.items()}
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.zeros(0, 4)
    tensors["turned"] = torch.arange(12.0).view(3, 4).T
    tensors["one of a column"] = torch.ones(1, 300)[:, 0]
    tensors["large"] = torch.randn(3 << 20)  # several pieces
    return tensors


def test_a_shard_reads_back_with_its_size_and_checksum(tmp_path):
    tensors = make_tensors()
    file = tmp_path / shard_name(0)
    info = write_shard(file, [entry_of(key, tensor) for key, tensor in tensors.items()])
    data = file.read_bytes()
    assert (info.bytes, info.crc32) == (len(data), zlib.crc32(data))
    with safe_open(file, framework="pt") as shard:
        assert set(shard.keys()) == set(tensors)
        for key, tensor in tensors.items():
            assert shard.get_tensor(key).dtype == tensor.dtype
            assert torch.equal(shard.get_tensor(key), tensor), key
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    for key, tensor in tensors.items():
        begin = 8 + int.from_bytes(data[:8], "little") + header[key]["data_offsets"][0]
        assert begin % tensor.element_size() == 0, f"{key} is not aligned"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("ends", [(2, 5, 9), (5, 9, 9, 9)])
def test_torch_puts_the_parts_of_several_shards_together(tmp_path, ends):
    whole = torch.arange(27.0).view(9, 3).bfloat16()
    start = 0
    for rank, stop in enumerate(ends):
        part = entry_of("rows", whole[start:stop], (start, 0))
        write_shard(tmp_path / shard_name(rank), [part])
        start = stop
    # As class_range splits; a part without rows may only follow those that have some.
    state = {"rows": torch.zeros(9, 3, dtype=torch.bfloat16)}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert torch.equal(state["rows"], whole)


def test_a_part_that_does_not_fill_its_shape_is_refused(tmp_path):
    for number, rows in enumerate((1, 3)):
        wrong = Entry("w", torch.float32, (2, 4), (0, 0), tensor_chunks(torch.zeros(rows, 4)))
        with pytest.raises(ValueError, match=f"w came to {rows * 16} bytes, its shape says 32"):
            write_shard(tmp_path / str(number), [wrong])


def test_a_key_twice_a_strange_type_and_a_file_that_is_there_are_refused(tmp_path):
    one = entry_of("w", torch.zeros(2))
    with pytest.raises(ValueError, match="twice"):
        write_shard(tmp_path / "a", [one, one])
    with pytest.raises(ValueError, match="complex64"):
        write_shard(tmp_path / "b", [entry_of("w", torch.zeros(2, dtype=torch.complex64))])
    write_shard(tmp_path / "c", [one])
    with pytest.raises(FileExistsError):
        write_shard(tmp_path / "c", [one])


def test_the_names_of_shards_are_recognised_and_no_others():
    names = [shard_name(0), shard_name(123_456, "step7")]
    assert all(map(is_shard, names))
    assert is_shard_of(names[0], 0)
    assert not is_shard_of(names[0], 1)
    others = [
        "shard-00001.safetensors",
        "shard-1-0.safetensors",
        "model.safetensors",
        names[0] + "x",
    ]
    assert not any(map(is_shard, others))
