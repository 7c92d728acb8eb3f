"""Values as bytes, to exchange between ranks without pickles, which can run code.

Eight bytes with the length of the JSON text, the text, and the bytes of the arrays in it. Containers, bytes,
paths and arrays are objects with one key, the name of their type.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_TYPES: dict[str, Callable[[Any], Any]] = {"dict": dict, "list": list, "tuple": tuple, "set": set}
_TYPES |= {"bytes": lambda text: text.encode("latin-1"), "Path": Path}


def encode(value: Any) -> bytearray:
    """Return the bytes of such a value, a number, a string or None. Raises TypeError for another type."""
    arrays: list[bytes] = []

    def plain(one: Any) -> Any:
        if isinstance(one, np.ndarray) and not one.dtype.hasobject:
            arrays.append(one.tobytes())
            return {"array": [one.dtype.str, one.shape]}
        if type(one) in (dict, list, tuple, set):
            return {
                type(one).__name__: [plain(inner) for inner in (one.items() if type(one) is dict else one)]
            }
        if isinstance(one, (bytes, Path)):
            return {"bytes": one.decode("latin-1")} if isinstance(one, bytes) else {"Path": str(one)}
        return one

    text = json.dumps(plain(value)).encode()
    return bytearray().join([len(text).to_bytes(8, "little"), text, *arrays])


def decode(data: bytearray | memoryview) -> Any:
    """Return the value that `encode` was given; other bytes raise an exception."""
    begin = 8 + int.from_bytes(data[:8], "little")

    def typed(found: dict[str, Any]) -> Any:
        nonlocal begin
        [(name, content)] = found.items()
        if name != "array":
            return _TYPES[name](content)
        dtype = np.dtype(content[0])
        if dtype.hasobject:
            raise TypeError("the bytes of an array of objects are addresses")
        array = np.ndarray(content[1], dtype, data, begin)
        begin += array.nbytes
        return array.copy()  # aligned, and of its own

    return json.loads(bytes(data[8:begin]), object_hook=typed)
