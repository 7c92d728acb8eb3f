from __future__ import annotations

import json
import zlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

from plsc.checkpoint.manifest import (
    DTYPES,
    entry_of,
    rank_of_shard,
    shard_name,
    write_shard,
)


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
def test_torch_joins_the_parts_of_several_shards(tmp_path, ends):
    whole = torch.arange(27.0).view(9, 3).bfloat16()
    start = 0
    for rank, stop in enumerate(ends):
        part = entry_of("rows", whole[start:stop], start)
        write_shard(tmp_path / shard_name(rank), [part])
        start = stop
    # Like class_range; a part without rows may only follow parts with rows.
    state = {"rows": torch.zeros(9, 3, dtype=torch.bfloat16)}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert torch.equal(state["rows"], whole)


def test_an_existing_file_is_not_overwritten(tmp_path):
    write_shard(tmp_path / "c", [entry_of("w", torch.zeros(2))])
    with pytest.raises(FileExistsError):
        write_shard(tmp_path / "c", [entry_of("w", torch.zeros(2))])


def test_only_names_of_shards_are_recognised():
    names = [shard_name(0), shard_name(123_456, "step7")]
    assert [rank_of_shard(name) for name in names] == [0, 123_456]
    others = ["shard-00001.safetensors", "shard-1-0.safetensors", "model.safetensors", names[0] + "x"]
    assert [rank_of_shard(name) for name in others] == [None] * 4
