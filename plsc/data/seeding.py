"""Random numbers that are a pure function of what they are for: seed, epoch, sample, operation.

Threads, worker processes and ranks then draw the same numbers in whatever order they run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_MASK = 2**64 - 1


def splitmix64(value: int) -> int:
    """Return the 64-bit hash of a 64-bit integer (Steele, Lea and Flood 2014, the SplitMix mixer)."""
    z = (value + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def hash_key(*parts: int) -> int:
    """Return a 64-bit hash of a sequence of integers; their order matters."""
    key = 0
    for part in parts:
        key = splitmix64(key ^ (part & _MASK))
    return key


def uniform(*parts: int) -> float:
    """Return a number in [0, 1) that depends on ``parts`` alone."""
    return (hash_key(*parts) >> 11) / 2**53


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
