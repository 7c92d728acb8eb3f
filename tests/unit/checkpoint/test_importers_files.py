"""Files of other programs are read with the same numbers; damaged or malicious ones are refused."""

import io
import os
import pickle
import pkgutil
import struct
import zipfile
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from plsc.checkpoint.tensor_files import (
    RowParts,
    match_into,
    read_paddle_file,
    read_state_dict,
    read_tensors,
    shortened,
)
from plsc.errors import CheckpointError
from tests.unit.checkpoint.external_files import paddle_bytes

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool]


def refusal(read, path):
    with pytest.raises(CheckpointError) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    return str(caught.value)


@pytest.mark.parametrize("new", [True, False])
def test_torch_save_files_are_read(tmp_path, new):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    large = torch.arange(60.0).view(5, 4, 3)
    value = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "types": [torch.ones(2, 2).to(dtype) for dtype in DTYPES],
        "views": (large[1:3], large.permute(2, 0, 1), large[:, 1], large[2, 3, 1]),
        "empty": torch.zeros(0, 7),
        "parameter": nn.Parameter(torch.ones(2)),
        "plain": [1, -5, 2.5, "text", None, True, (1, 2)],
    }
    torch.save(value, tmp_path / "a.pt", _use_new_zipfile_serialization=new)
    mine = read_tensors(tmp_path / "a.pt")
    theirs = torch.load(tmp_path / "a.pt", weights_only=True)
    assert mine["plain"] == theirs["plain"]
    assert mine["optimizer"]["param_groups"] == theirs["optimizer"]["param_groups"]
    for key in ("model", "types", "views", "empty", "parameter"):
        torch.testing.assert_close(mine[key], theirs[key], rtol=0, atol=0, check_stride=False)
    torch.testing.assert_close(mine["optimizer"]["state"], theirs["optimizer"]["state"])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 9), st.integers(1, 5), st.data())
def test_rows_of_any_memory_layout_equal_the_tensor(tmp_path_factory, rows, width, data):
    path = tmp_path_factory.mktemp("t") / "a"
    whole = torch.randn(rows, width)
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=2)))
    parts = []
    for number, part in enumerate(whole.tensor_split(cuts)):
        file = path.with_name(f"{number}")
        if data.draw(st.booleans()):
            file.write_bytes(paddle_bytes(part.t()))
            parts.append(read_paddle_file(file).t())
        else:
            file = file.with_suffix(".safetensors")
            save_file({"a": part.contiguous()}, file)
            parts.append(read_tensors(file)["a"])
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    pieces = list(RowParts(tuple(parts)).pieces(start, stop))
    assert torch.equal(torch.cat([torch.zeros(0, width), *[p for _, p in pieces]]), whole[start:stop])
    assert RowParts(tuple(parts)).shape == (rows, width)


class Malicious:
    def __reduce__(self):
        return os.system, ("echo run > /tmp/plsc-must-not-exist",)


class Call:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


class MaliciousByBuild:
    def __reduce__(self):
        return OrderedDict, (), {"x": Malicious()}


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("thing", [Malicious(), MaliciousByBuild()])
def test_a_pickle_that_runs_code_is_refused_and_not_run(tmp_path, thing, new):
    torch.save({"a": torch.ones(2), "b": thing}, tmp_path / "a.pt", _use_new_zipfile_serialization=new)
    assert "posix.system" in refusal(read_tensors, tmp_path / "a.pt")
    assert not os.path.exists("/tmp/plsc-must-not-exist")  # noqa: PTH110


@pytest.fixture
def saved(tmp_path):
    torch.save({"a": torch.randn(4, 3), "b": torch.randn(5)}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def test_an_archive_that_torch_does_not_write_is_refused(saved, tmp_path):
    """Without the bytes of a tensor, with compressed records, and another one for zipfile than for torch."""
    for kind, dropped in ((zipfile.ZIP_STORED, "data/0"), (zipfile.ZIP_DEFLATED, "")):
        with zipfile.ZipFile(saved) as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
            for info in old.infolist():
                if info.filename.split("/", 1)[1] != dropped:
                    new.writestr(info.filename, old.read(info), kind)
        assert "is damaged" in refusal(read_tensors, tmp_path / "b.pt")
    saved.write_bytes(b"PK\3\4" + bytes(26) + saved.read_bytes())
    assert "is damaged" in refusal(read_tensors, saved)


@pytest.mark.parametrize("new", [True, False])
def test_a_truncated_file_is_refused(tmp_path, new):
    path = tmp_path / "a.pt"
    torch.save({"a": torch.randn(4, 3)}, path, _use_new_zipfile_serialization=new)
    for keep in (path.stat().st_size - 1, 600, 300, 110, 30, 1, 0):
        os.truncate(path, min(keep, path.stat().st_size))
        assert refusal(read_tensors, path)
    save_file({"a": torch.ones(4)}, path := tmp_path / "a.safetensors")
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:5], (1 << 60).to_bytes(8, "little") + whole[8:], b""):
        path.write_bytes(damaged)
        assert refusal(read_tensors, path)


def with_pickle(path, operations):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", operations)
        archive.writestr("a/data/0", bytes(64))
        archive.writestr("a/version", "3")
    return path


def doubled(make):
    """A pickle of 60 values that each contain the previous one twice: 2^60 steps to hash the last."""
    return b"\x80\x02}K\x01q\x00" + b"".join(
        make(b"h" + bytes([n])) + b"q" + bytes([n + 1]) for n in range(60)
    )


@pytest.mark.parametrize(
    "operations",
    [
        doubled(lambda last: last * 2 + b"\x86") + b"K\x01s.",  # a key of a dict
        doubled(lambda last: b"](" + last * 2 + b"e") + b")R.",  # a function, in the error message of torch
        b"\x80\x02}" + b"K\x01" + b"\x85" * 1_000_000 + b"K\x01s.",  # hash() would overflow the stack
        b"\x80\x02]q\x00h\x00a.",
    ],
    ids=["tuples", "lists", "deep", "endless"],
)
@pytest.mark.parametrize("new", [True, False])
def test_values_that_are_shared_or_nested_too_often_are_refused(tmp_path, operations, new):
    path = tmp_path / "a.pt"
    if new:
        with_pickle(path, operations)
    else:
        torch.save({}, path, _use_new_zipfile_serialization=False)
        path.write_bytes(path.read_bytes().replace(pickle.dumps({}, 2), operations))
    assert "is damaged" in refusal(read_tensors, path)


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("builtins.bytearray", 10**9),  # 1 GB of zeros
        ("torch.ByteTensor", 64),  # memory as it is
        ("torch.Tensor", 16),
        ("torch.storage.UntypedStorage", 64),
        ("_codecs.encode", "text"),  # quadratic, with "punycode"
    ],
)
def test_what_tensors_never_need_is_not_called(tmp_path, name, argument):
    function = pkgutil.resolve_name(name)
    value = {"weight": Call(function, (argument,))}
    torch.save({"a": torch.ones(4096), "b": value}, tmp_path / "a.pt")
    assert name.rpartition(".")[2] in refusal(read_tensors, tmp_path / "a.pt")


def test_a_long_pickle_is_refused_and_shared_values_are_read(tmp_path):
    long = pickle.dumps("x" * (5 << 20))
    assert "is damaged" in refusal(read_tensors, with_pickle(tmp_path / "e.pt", long))
    state, betas = {f"{n}": torch.ones(2) for n in range(2000)}, (0.9, 0.99)
    value = {"model": state, "ema": state, "groups": [{"betas": betas} for _ in range(2000)]}
    torch.save(value, tmp_path / "a.pt")
    assert read_tensors(tmp_path / "a.pt")["groups"] == value["groups"]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_changed_byte_gives_tensors_or_a_one_line_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("t") / "a.pt"
    buffer = io.BytesIO()
    new = data.draw(st.booleans())
    torch.save({"a": torch.arange(6.0)}, buffer, _use_new_zipfile_serialization=new)
    changed = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, 2**16)) % len(changed)  # the length depends on an address in memory
        changed[place] = data.draw(st.integers(0, 255))
    path.write_bytes(changed)
    message = ""
    try:
        read_tensors(path)
    except CheckpointError as error:
        message = str(error)
    assert "\n" not in message


def paddle_with(levels=0, length=6, description=b"\x08\x05\x10\x02\x10\x03", data=bytes(24)):
    return struct.pack("<IQIi", 0, levels, 0, length) + description + data


def test_a_paddle_variable_is_read(tmp_path):
    for number, dtype in enumerate((torch.float32, torch.float64, torch.float16, torch.int64)):
        value = torch.arange(300).view(2, 150).to(dtype)
        (tmp_path / str(number)).write_bytes(paddle_bytes(value))
        assert torch.equal(read_paddle_file(tmp_path / str(number)), value)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\x80\x02" + bytes(40)),
        *(paddle_with(levels=1 << 60), paddle_with(length=-1), paddle_with(length=1 << 30)),
        paddle_with(data=bytes(23)),
        paddle_with(description=b"\x08\x63\x10\x02\x10\x03"),
        paddle_with(length=12, description=b"\x08\x05\x10" + b"\xff" * 8 + b"\x7f"),
        paddle_with(length=14, description=b"\x08\x05" + b"\x10\xff\xff\xff\xff\x0f" * 2),
        paddle_with(length=16, description=b"\x08\x05\x10\x00\x10" + b"\xff" * 10 + b"\x7f", data=b""),
    ],
)
def test_a_damaged_paddle_variable_is_refused(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    assert "not a Paddle 1.x variable" in refusal(read_paddle_file, tmp_path / "a")


@pytest.mark.parametrize("read", [read_tensors, read_paddle_file])
def test_only_regular_files_are_read(tmp_path, read):
    assert "No such file" in refusal(read, tmp_path / "absent")
    assert "Is a directory" in refusal(read, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "regular file" in refusal(read, tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/etc/passwd")
    assert "is a link" in refusal(read, tmp_path / "link")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: {"model": {f"_orig_mod.module.{k}": v for k, v in s.items()}},
        lambda s: {f"module.backbone.{k}": v for k, v in s.items()},
        lambda s: {**{f"backbone.{k}": v for k, v in s.items()}, "head.weight": torch.ones(2, 2)},
        lambda s: {"backbone": s, "optimizer": {"state": {}}},
    ],
)
def test_wrappers_and_prefixes_are_removed(tmp_path, wrap):
    state = {"conv1.weight": torch.ones(2), "fc.bias": torch.zeros(3)}
    torch.save(wrap(state), tmp_path / "a.pth")
    backbone, head = read_state_dict(tmp_path / "a.pth")
    assert list(backbone) == list(state)
    assert list(head) in ([], ["head.weight"])
    # The last layer of a vision transformer is no class weights.
    save_file({"cls_token": torch.ones(2), "head.weight": torch.ones(2, 2)}, tmp_path / "a.safetensors")
    assert read_state_dict(tmp_path / "a.safetensors")[1] == {}


def test_the_summary_of_a_match_is_bounded_and_printable():
    target = {f"layer{n}.weight": torch.zeros(2) for n in range(5000)} | {"b": torch.zeros(2)}
    found = {f"\x1b[31m{'x' * 500}{n}": torch.ones(1) for n in range(5000)}
    found |= {"b": torch.ones(2), "layer0.weight": torch.ones(3)}
    text = "\n".join(match_into(target, found, "somewhere").lines())
    assert target["b"].tolist() == [1, 1]
    assert len(text) < 1500
    assert "\x1b" not in text
    assert "and 4995 more" in text
    assert shortened("a\nb") == "a\\nb"


def test_a_tensor_without_plain_values_in_the_file_is_refused(tmp_path):
    ones = torch.ones(2, 2)
    quantised = torch.quantize_per_tensor(ones, 0.1, 0, torch.quint8)
    for tensor in (ones.to_sparse(), ones.to("meta"), quantised):
        torch.save({"weight": tensor}, tmp_path / "a.pt")
        assert "save_file" in refusal(read_state_dict, tmp_path / "a.pt")
    torch.save({"weight": torch.zeros(1).expand(10**9, 512)}, tmp_path / "a.pt")  # larger than its storage
    assert "bytes" in refusal(read_state_dict, tmp_path / "a.pt")
    for value in ([1, 2], {"a": 3}, {"state_dict": {}}):
        torch.save(value, tmp_path / "a.pt")
        assert "state dict" in refusal(read_state_dict, tmp_path / "a.pt")


def test_a_file_of_the_old_format_without_its_values_is_refused(tmp_path):
    torch.save({"weight": torch.ones(4096)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    content = (tmp_path / "a.pt").read_bytes()
    header = content[: content.rindex(b"\x80\x02]")]  # the list of the storages that follow
    (tmp_path / "a.pt").write_bytes(header + pickle.dumps([], 2))
    assert "bytes" in refusal(read_state_dict, tmp_path / "a.pt")
