"""How the memory that a partition may use is shared out."""

from __future__ import annotations

import re
from dataclasses import dataclass

from plsc.errors import OptionError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
LEAST = 32 * 2**20
LEAST_OF_WORKER = 16 * 2**20  # with less, the fixed parts of a worker would break the bound

BYTES_A_LINE = 112
"""What the number, key, place and order of a line in memory take, copies on the way included."""


def read_size(text: str | int) -> int:
    """Return '512M' as bytes; K, M, G, T are powers of 1024. Raises OptionError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", str(text), re.IGNORECASE)
    if match is None:
        raise OptionError(f"--memory is {text!r}; expected a size such as 512M or 4G")
    size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size < LEAST:
        raise OptionError(f"--memory is {text!r}; expected at least {LEAST // 2**20}M")
    return size


@dataclass(frozen=True)
class Budget:
    """Shares of the memory, in bytes.

    block: half a buffer of a reader. There are workers + 1 of them, and where lines are as short as can be (4
    bytes) numbers of up to 35 blocks for one of them. bucket: what a bucket may take once it is read, its
    numbers included; each worker reads one at a time.
    """

    total: int
    workers: int

    @property
    def copiers(self) -> int:
        """Threads that write parts: while one waits for the disk, another one copies."""
        return 2 * self.workers

    @property
    def block(self) -> int:
        """Bytes that are read at once."""
        share = self.total // (16 * (self.workers + 3))
        return max(2**18, min(4 * 2**20, share // 2**18 * 2**18))

    @property
    def bucket(self) -> int:
        """Bytes that a bucket may take."""
        return max(2**20, int(0.6 * self.total) // self.workers)
