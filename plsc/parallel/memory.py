"""How much memory this machine has left."""

from __future__ import annotations

import re
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CONTROL_GROUP = Path("/sys/fs/cgroup")


def available_memory() -> int | None:
    """Return the bytes that can be taken without harm, the limit of a container included; None if unknown."""
    known = [value for value in (_of_machine(), _of_container()) if value is not None]
    return min(known) if known else None


def _of_machine() -> int | None:
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", _MEMINFO.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def _of_container() -> int | None:
    try:
        limit = (_CONTROL_GROUP / "memory.max").read_text().strip()
        used = int((_CONTROL_GROUP / "memory.current").read_text())
        cache = re.search(
            r"^inactive_file (\d+)", (_CONTROL_GROUP / "memory.stat").read_text(), re.MULTILINE
        )
        return None if limit == "max" else int(limit) - used + (int(cache[1]) if cache else 0)
    except (OSError, ValueError):
        return None
