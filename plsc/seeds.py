"""Hash functions that turn the seed of a run and the place of use into random seeds.

Random numbers depend on the seed and on the place of use (class, epoch, sample, step, rank), not on how many
numbers were drawn before. So the number of ranks, worker processes and resumes do not change them, and no
generator state has to be saved.
"""

from __future__ import annotations

_MASK = 2**64 - 1


def splitmix64(value: int) -> int:
    """Return the 64-bit hash of a 64-bit integer (Steele, Lea and Flood 2014, the SplitMix mixer)."""
    z = (value + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def hash_key(*parts: int) -> int:
    """Return a 64-bit hash of a sequence of integers, which depends on their order."""
    key = 0
    for part in parts:
        key = splitmix64(key ^ (part & _MASK))
    return key
