"""Python values as JSON and tensors: they come back exactly, or are refused."""

import json
import math
import pickle
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

from plsc.errors import CheckpointError, DataError
from plsc.values import decode, encode, from_bytes, to_bytes

VALUES = {
    "text": "a\x1b\r\n \udc80 \u00e9",
    "numbers": [0, -0.0, 10**30, True, None, math.inf, -math.inf],
    3: {(1, "b"): {2, 3}, None: frozenset({4})},
    "$list": OrderedDict(z=1, a=(torch.float16, torch.Size([2]))),
}
ARRAYS = [np.float32(2.5), np.float64(math.nan), np.arange(6).reshape(2, 3), np.zeros((0, 2)), np.str_("x")]
TENSORS = {"a": {"b": [torch.arange(3), torch.ones((), dtype=torch.bfloat16)]}, "a.b": torch.zeros(0, 2)}


def there_and_back(value):
    tensors = {}
    text = json.dumps(encode(value, "me", tensors), allow_nan=False, sort_keys=True)
    return decode(json.loads(text), dict(tensors)), tensors


def test_values_come_back_with_their_types_and_order():
    again, _ = there_and_back(VALUES)
    assert repr(again) == repr(VALUES)
    assert again["numbers"][0] is not False


def test_arrays_and_tensors_come_back():
    there, sent = there_and_back(ARRAYS)[0], from_bytes(to_bytes(ARRAYS))
    for value, *found in zip(ARRAYS, there, sent, strict=True):
        assert {*map(type, found)} == {type(value)}
        for one in found:
            assert (one.dtype, one.shape, one.tobytes()) == (value.dtype, value.shape, value.tobytes())
    again, tensors = there_and_back(TENSORS)
    assert list(tensors) == ["a.b.0", "a.b.1", "a.b"]
    assert again["a"]["b"][0] is TENSORS["a"]["b"][0]


@pytest.mark.parametrize("value", [len, torch.ones(2).to_sparse(), np.array([None]), DataError("x")])
def test_other_types_are_refused_by_name_and_where_they_are_sent(value):
    with pytest.raises(CheckpointError, match=rf"me: a\.0 .*{type(value).__name__}"):
        encode({"a": [value]}, "me", {})
    with pytest.raises(CheckpointError, match="type"):
        to_bytes([value])


@pytest.mark.parametrize("of", [{"$dict": 3}, {"$tensor": ["no", True]}, {"$array": ["O", [], 1]}])
def test_damaged_values_are_refused(of):
    with pytest.raises(CheckpointError, match="damaged"):
        decode(of, {})


def test_ranks_exchange_values_with_their_types():
    value = {
        "a": (1, 2.5, None, True, "ü\udc80"),
        3: [{"x"}, b"\xff\0", Path("/a")],
        0.001: {"dict": {}, "array": [1]},
    }
    assert from_bytes(to_bytes(value)) == value


def test_bytes_of_others_run_no_code():
    array = {"$array": ["|O", [1], {"$tensor": ["a", True]}]}
    text = torch.frombuffer(bytearray(json.dumps(array).encode()), dtype=torch.uint8)
    objects = safetensors.torch.save({"": text, "a": torch.zeros(8, dtype=torch.uint8)})
    for data in (pickle.dumps(print), objects):
        with pytest.raises((SafetensorError, CheckpointError)):
            from_bytes(data)
