"""Arguments of heads and row optimizers, checked; errors name the argument."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from plsc.errors import OptionError

PRODUCTS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROW_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


def read_dtype(name: str, value: Any, known: Mapping[str, torch.dtype]) -> torch.dtype:
    """Return one of the `known` types, given as torch's or by its name."""
    for text, dtype in known.items():
        if value is dtype or (isinstance(value, str) and value == text):
            return dtype
    raise OptionError(f"{name} is {value!r}; expected one of {', '.join(known)}")
