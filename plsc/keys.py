"""Seeds for one purpose each, made from the run's seed and a few counters.

All randomness of a run is a function of its seed and of where it is used (epoch, sample, step, rank),
never of how many numbers were drawn before. So no generator state has to be saved to resume exactly.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1


def derive_key(seed: int, *counters: int) -> int:
    """Return a 63-bit key of the seed and the counters.

    Each is stirred in with the finaliser of SplitMix64 (Steele, Lea, Flood 2014), so that keys of
    neighbouring counters share no pattern. The order of the counters matters.
    """
    state = _mix(seed)
    for counter in counters:
        state = _mix(state ^ _mix(counter))
    return state >> 1


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
