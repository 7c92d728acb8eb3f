"""Values that ranks exchange: they come back as they were, and bytes of others run no code."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from plsc.errors import DataError
from plsc.parallel.encoding import decode, encode


def test_a_value_comes_back_with_its_types():
    value = {
        "a": (1, 2.5, None, True, "ü\udc80"),
        3: [{"x"}, b"\xff\0", Path("/a")],
        0.001: {"dict": {}, "array": [1]},
    }
    assert decode(encode(value)) == value
    arrays = {
        "one": np.arange(6, dtype="f4").reshape(2, 3),
        "none": np.empty((0, 7)),
        "odd": np.ones(3, bool),
    }
    back = decode(encode(arrays))
    assert {name: (one.dtype, one.tolist()) for name, one in back.items()} == {
        name: (one.dtype, one.tolist()) for name, one in arrays.items()
    }
    assert [one.shape for one in back.values()] == [(2, 3), (0, 7), (3,)]


@pytest.mark.parametrize("value", [np.int64(3), DataError("x"), np.array([print]), print])
def test_another_type_is_refused_where_it_is_sent(value):
    with pytest.raises(TypeError):
        encode([value])


def test_a_pickle_and_an_array_of_objects_are_refused():
    text = b'{"array": ["|O", [1]]}'
    for data in (pickle.dumps(print), len(text).to_bytes(8, "little") + text + bytes(8)):
        with pytest.raises((ValueError, TypeError)):
            decode(bytearray(data))
