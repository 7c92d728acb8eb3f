"""The options of plsc data partition, and how it divides its memory."""

from __future__ import annotations

import os
import posixpath
import re
from dataclasses import MISSING, dataclass
from pathlib import Path

from plsc.config.option import Size, between, check_fields, declare, not_empty, one_of
from plsc.data.lines import Buffers
from plsc.errors import OptionError
from plsc.storage.urls import is_url
from plsc.version import install

MOST_RANKS = 65_536
LEAST = 32 * 2**20
LEAST_OF_WORKER = 16 * 2**20  # bytes; with less, a worker's fixed memory would exceed its share

BYTES_PER_LINE = 112
"""Bytes of memory per line for its number, key, position and order, including temporary copies."""


@dataclass(frozen=True)
class Budget:
    """Shares of the memory, in bytes.

    block: half a reader's buffer. There are workers + 1 buffers. With the shortest possible lines (4 bytes)
    the line numbers of one buffer take up to 35 blocks. bucket: the memory of a bucket after it is read,
    including its line numbers; each worker reads one bucket at a time.
    """

    total: int
    workers: int

    @property
    def block(self) -> int:
        """Bytes read at a time."""
        share = self.total // (16 * (self.workers + 3))
        return max(2**18, min(4 * 2**20, share // 2**18 * 2**18))

    @property
    def bucket(self) -> int:
        """Bytes of memory per bucket."""
        return max(2**20, int(0.75 * self.total) // self.workers)

    def buffers(self, count: int) -> Buffers:
        """Return buffers for a reader; a line longer than a block may take half of the memory."""
        return Buffers(count, self.block, self.total // 2)


def _enough(size: int) -> str | None:
    return None if size >= LEAST else f"at least {LEAST // 2**20}M"


def _start_of_name(text: str) -> str | None:
    return None if re.fullmatch(r"\w[\w.-]*", text) else "letters, digits, '_', '-' and '.'"


@dataclass(frozen=True)
class PartitionOptions:
    """The options of a partition. Raises OptionError for invalid values."""

    data_dir: str = declare(MISSING, "folder or fsspec URL of the data files", check=not_empty)
    nranks: int = declare(MISSING, "number of parts, one per rank", check=between(1, MOST_RANKS))
    file_list: str = declare("file_list.txt", "list of the data files: a name in data_dir, or a path")
    output_dir: str | None = declare(
        None, "output folder or fsspec URL; default: <data_dir>/partition_<nranks>"
    )
    output_name: str | None = declare(
        None,
        "start of the names of the parts, before the rank: base64_rank_ gives the names of PLSC; default: "
        "part_0.txt, part_1.txt, ...",
        check=_start_of_name,
    )
    seed: int = declare(0, "seed of the shuffle")
    memory: Size = declare(
        512 * 2**20, "memory limit, not counting the interpreter and the page cache", check=_enough
    )
    workers: int | None = declare(
        None, "number of threads; default: one per core, at most 8", check=between(1, 64)
    )
    tmp_dir: str | None = declare(
        None, "folder for temporary files; default: next to the output (for a URL, the system's)"
    )
    engine: str = declare(
        "local",
        f"local, or spark for datasets too large for one machine ({install('spark')})",
        check=one_of("local", "spark"),
    )
    master: str | None = declare(
        None, "with engine spark: URL of the cluster, such as local[2]; default: Spark's configuration"
    )
    bad_lines: str = declare(
        "stop", "what to do with an invalid line: stop or skip", check=one_of("stop", "skip")
    )
    no_sync: bool = declare(
        False,
        "do not wait until the parts are flushed to the disk; after a power loss they may be damaged, which "
        "--verify detects",
    )
    delete_inputs: bool = declare(False, "delete the data files after the output is published")
    dry_run: bool = declare(False, "read and check the inputs and report the counts; write nothing")
    verify: bool = declare(False, "check an existing output folder against its inputs; write nothing")
    allowed: str | tuple[str, ...] = declare((), "prefixes of URLs that the list may name: s3://bucket/")

    def __post_init__(self) -> None:
        check_fields(self)
        is_spark = self.engine == "spark"
        if (
            self.verify + self.dry_run + self.delete_inputs > 1
            or (self.no_sync and (self.delete_inputs or is_spark))
            or (self.master and not is_spark)
        ):
            raise OptionError(
                "of --verify, --dry_run and --delete_inputs only one can be set; --no_sync excludes "
                "--delete_inputs and --engine spark; --master needs --engine spark"
            )

    @property
    def output(self) -> str:
        """Folder or URL of the output."""
        given = self.output_dir or posixpath.join(self.data_dir, f"partition_{self.nranks}")
        return given if is_url(given) else str(Path(given).expanduser().absolute())

    @property
    def budget(self) -> Budget:
        """The memory, divided among the workers."""
        cores = len(os.sched_getaffinity(0))
        return Budget(self.memory, min(self.workers or min(8, cores), self.memory // LEAST_OF_WORKER))

    @property
    def skip_bad(self) -> bool:
        """Whether invalid lines are skipped."""
        return self.bad_lines == "skip"
