"""Trace spans: the phases of a training step, by the names that torch.profiler and `plsc profile` show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

PREFIX = "plsc: "


@contextmanager
def span(name: str) -> Iterator[None]:
    """Name a block, or as a decorator a function, for torch.profiler.

    A microsecond where nothing records; `record_function` alone takes six.
    """
    if torch.autograd.profiler._is_profiler_enabled:
        with torch.profiler.record_function(PREFIX + name):
            yield
    else:
        yield
