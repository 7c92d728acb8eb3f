"""The C parts of the data tools (the .c files beside this one), built with the package.

Each has a plain counterpart in Python that says what it must return, and that is used where the library
is not: on other platforms, or where no C compiler was found. In a checkout
``python setup.py build_ext --inplace`` builds it.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Kept = TypeVar("Kept")

_ABI = 5  # PLSC_DATA_ABI of native.h
_LIBRARY = Path(__file__).with_name("libdata.so")


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library, or None where there is none of this version."""
    try:
        loaded = ctypes.CDLL(str(_LIBRARY))
        abi = loaded.plsc_data_abi()
    except (OSError, AttributeError):
        return None
    return loaded if abi == _ABI else None


@functools.cache
def function(name: str, argument_types: tuple[Any, ...]) -> Any:
    """Return a function of the library, which returns an int64; None where there is no library."""
    loaded = library()
    if loaded is None:
        return None
    found = getattr(loaded, name)
    found.argtypes, found.restype = argument_types, ctypes.c_int64
    return found


def kept_by_thread(make: Callable[[], Kept]) -> Callable[[], Kept]:
    """Return a function that returns what `make` returned when the thread first called it.

    For the memory that a call of the library fills: made anew each time, its pages would cost more than the
    call.
    """
    memory = threading.local()

    def kept() -> Kept:
        if not hasattr(memory, "value"):
            memory.value = make()
        value: Kept = memory.value
        return value

    return kept
