"""A private stream behind the global random generators, for people's own code."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


class IsolatedRandom:
    """A private stream behind ``random``, ``numpy.random`` and torch's CPU generator.

    Inside ``active()`` the three global generators continue this stream, seeded from ``key``; outside
    they are as if it had never run. So people's code may call ``random.shuffle`` and still be
    repeatable, and dropout in the main process is not disturbed.
    """

    def __init__(self, key: int) -> None:
        self._python = random.Random(key).getstate()
        self._numpy = np.random.RandomState(key % 2**32).get_state()
        self._torch = torch.Generator().manual_seed(key).get_state()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Swap the stream in, and back out at the end, also after an exception."""
        outer = random.getstate(), np.random.get_state(), torch.get_rng_state()
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        try:
            yield
        finally:
            self._python = random.getstate()
            self._numpy = np.random.get_state()
            self._torch = torch.get_rng_state()
            random.setstate(outer[0])
            np.random.set_state(outer[1])
            torch.set_rng_state(outer[2])
