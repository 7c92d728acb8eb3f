"""The options of a partition, once: name, type, default and meaning; and how its memory is shared out."""

from __future__ import annotations

import os
import posixpath
import re
from dataclasses import MISSING, dataclass
from pathlib import Path

from plsc.config.option import between, declare, not_empty, one_of, specs_of
from plsc.data.lines import Buffers
from plsc.errors import OptionError
from plsc.storage.urls import is_url

MOST_RANKS = 65_536
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
LEAST = 32 * 2**20
LEAST_OF_WORKER = 16 * 2**20  # with less, the fixed parts of a worker would break the bound

BYTES_PER_LINE = 112
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
    def block(self) -> int:
        """Bytes that are read at once."""
        share = self.total // (16 * (self.workers + 3))
        return max(2**18, min(4 * 2**20, share // 2**18 * 2**18))

    @property
    def bucket(self) -> int:
        """Bytes that a bucket may take."""
        return max(2**20, int(0.6 * self.total) // self.workers)

    def buffers(self, count: int) -> Buffers:
        """Return buffers for a reader; a line longer than a block may take half of the memory."""
        return Buffers(count, self.block, self.total // 2)


@dataclass(frozen=True)
class PartitionOptions:
    """What is partitioned, into what, and with what. Raises OptionError for values that make no sense."""

    data_dir: str = declare(MISSING, "folder or fsspec URL of the data files", check=not_empty)
    nranks: int = declare(MISSING, "number of parts, one for each rank", check=between(1, MOST_RANKS))
    file_list: str = declare("file_list.txt", "list of the data files, in data_dir or a path of its own")
    output_dir: str | None = declare(
        None, "folder or fsspec URL to make; when not set, <data_dir>/partition_<nranks>"
    )
    seed: int = declare(0, "of the shuffle")
    memory: str = declare("512M", "bound on the memory used beyond the interpreter's, such as 512M or 8G")
    workers: int | None = declare(
        None, "threads; when not set, one per core, at most 8", check=between(1, 64)
    )
    tmp_dir: str | None = declare(
        None,
        "folder for temporary files; when not set, next to the output (for a URL, the system's)",
    )
    engine: str = declare(
        "local",
        "local, or spark for sets beyond one machine (pip install 'plsc[spark]')",
        check=one_of("local", "spark"),
    )
    master: str | None = declare(
        None,
        "of engine spark: URL of the cluster, such as local[2]; when not set, Spark's own configuration",
    )
    bad_lines: str = declare(
        "stop",
        "what to do about a line that is no sample: stop or skip",
        check=one_of("stop", "skip"),
    )
    no_sync: bool = declare(
        False,
        "do not wait until the parts are on the disk, as cp does not: a loss of power soon afterwards may "
        "damage them, which --verify reports",
    )
    delete_inputs: bool = declare(False, "delete the data files once the output is published")
    dry_run: bool = declare(False, "read and check the inputs, say what would be written, write nothing")
    verify: bool = declare(False, "check an existing output folder against its inputs, write nothing")

    def __post_init__(self) -> None:
        for name, spec in specs_of("", PartitionOptions).items():
            object.__setattr__(self, name, spec.checked(getattr(self, name)))
        if self.no_sync and self.engine == "spark":
            raise OptionError("--no_sync is for --engine local; the executors of spark sync their parts")
        if self.master and self.engine != "spark":
            raise OptionError("--master is set, but not --engine spark; pass both")
        for first, second in (
            ("verify", "delete_inputs"),
            ("verify", "dry_run"),
            ("dry_run", "delete_inputs"),
            ("no_sync", "delete_inputs"),
        ):
            if getattr(self, first) and getattr(self, second):
                raise OptionError(f"--{first} and --{second} exclude each other; give one of them")
        read_size(self.memory)

    @property
    def output(self) -> str:
        """The folder or URL of the output."""
        given = self.output_dir or posixpath.join(self.data_dir, f"partition_{self.nranks}")
        return given if is_url(given) else str(Path(given).expanduser().absolute())

    @property
    def budget(self) -> Budget:
        """The memory, shared out over the workers."""
        cores = len(os.sched_getaffinity(0))
        memory = read_size(self.memory)
        return Budget(memory, min(self.workers or min(8, cores), memory // LEAST_OF_WORKER))

    @property
    def skip_bad(self) -> bool:
        """Whether bad lines are left out."""
        return self.bad_lines == "skip"
