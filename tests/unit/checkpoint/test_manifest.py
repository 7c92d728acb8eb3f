"""A manifest and shard files are read back, also by torch; damaged manifests are refused."""

import json
import os
import zlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from plsc.checkpoint import Manifest, read_manifest
from plsc.checkpoint.manifest import (
    DTYPES,
    FileInfo,
    HeadInfo,
    Role,
    TensorInfo,
    entry_of,
    rank_of_shard,
    shard_name,
    write_shard,
)
from plsc.errors import CheckpointError

GOOD = Manifest(
    plsc_version="0.1.0",
    step=30,
    epoch=2,
    step_in_epoch=5,
    world_size=2,
    emb_size=6,
    heads={"": HeadInfo(5, [(0, 3), (3, 5)], "dist_arcface", 20, "native")},
    options={"head": {"margin": 0.5, "names": ["ä"]}},
    scalars={"best": None},
    tensors={
        "head.weight": TensorInfo((5, 6), "float32", True, Role("class_weights", "weight")),
        "s": TensorInfo((), "int64", False, Role("extra", "s")),
    },
    files={"a.safetensors": FileInfo(10, 11)},
    lineage=[{"what": "grow", "source": "5"}],
)


def refusal(folder):
    with pytest.raises(CheckpointError) as caught:
        read_manifest(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    return str(caught.value)


def test_a_folder_without_a_manifest_and_one_whose_manifest_is_a_pipe_or_huge_is_no_checkpoint(tmp_path):
    (tmp_path / "file").touch()
    assert "exist" in refusal(tmp_path / "absent")
    for path in (tmp_path / "file", tmp_path):
        assert "manifest.json" in refusal(path)
    os.mkfifo(tmp_path / "manifest.json")
    assert "manifest.json" in refusal(tmp_path)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "manifest.json").touch()
    os.truncate(tmp_path / "manifest.json", 1 << 40)
    assert "67108864" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format_version", 5, "format_version"),
        ("format_version", 3, "format_version"),
        ("more", 3, "more"),
        ("step", 1.0, "step"),
        ("epoch", 2**80, "integer"),
        ("heads", {"": {"class_num": 1, "class_ranges": [[0]]}}, "class_ranges"),
        ("tensors", {"w": {"shape": [-1], "dtype": "f", "sharded": True}}, "shape"),
        ("tensors", {"w": {"shape": [1], "dtype": "quint8"}}, "dtype"),
        ("files", {"..": {"bytes": 1, "crc32": 1}}, "file name"),
        ("files", {"..%2fx?a": {"bytes": 1, "crc32": 1}}, "file name"),
        ("files", {"a\0b": {"bytes": 1, "crc32": 1}}, "file name"),
        ("scalars", {"updates": -1}, "updates"),
        ("scalars", {"loss_scaling": {"scale": 0.5}}, "scale"),
    ],
)
def test_an_invalid_field_is_reported(key, value, message, tmp_path):
    content = {**json.loads(GOOD.to_json()), key: value}
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    assert message in refusal(tmp_path)
    content.pop(key)
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    assert key == "more" or key in refusal(tmp_path)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(key=st.sampled_from(sorted(json.loads(GOOD.to_json()))), value=anything)
def test_any_value_in_any_field_is_read_or_gives_a_one_line_error(key, value, tmp_path_factory):
    folder = tmp_path_factory.mktemp("manifest")
    content = {**json.loads(GOOD.to_json()), key: value}
    (folder / "manifest.json").write_text(json.dumps(content))
    try:
        assert isinstance(read_manifest(folder), Manifest)
    except CheckpointError as error:
        assert "\n" not in str(error)  # noqa: PT017


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


def test_only_names_of_shards_are_recognised():
    names = [shard_name(0), shard_name(123_456), "shard-00008-step7.safetensors"]
    assert [rank_of_shard(name) for name in names] == [0, 123_456, 7]
    others = ["shard-00001.safetensors", "shard-1-0.safetensors", "model.safetensors", names[0] + "x"]
    assert [rank_of_shard(name) for name in others] == [None] * 4
