"""How many processor cores this process may use."""

from __future__ import annotations

import os
from pathlib import Path

_CONTROL_GROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return the cores that this process may run on, the limit of a container included; at least 1."""
    # Not everywhere: macOS and Windows bind no process to cores.
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _quota()
    return max(1, min(bound or 1, round(quota) if quota else 2**20))


def _quota() -> float | None:
    """Return the cores' worth of time that a container may take, None: no limit is known."""
    try:
        limit, period = (_CONTROL_GROUP / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
