"""Whether the disks have room for what will be written."""

from __future__ import annotations

import shutil
from pathlib import Path

from plsc.errors import DataError

_STEP = 2**28


class Space:
    """Room on the disks of the output and of the temporary files.

    Checked before anything is written, by the sizes of the inputs, and again and again while inputs are read
    whose content may be any size (compressed ones).
    """

    def __init__(self, output: Path, temporary: Path | None) -> None:
        self._output = _existing(output)
        self._temporary = _existing(temporary) if temporary is not None else None
        self._seen = 0
        self._next_check = _STEP
        self._promised = 0

    @property
    def is_one_disk(self) -> bool:
        """Whether both are on the same file system."""
        return self._temporary is not None and (
            self._output.stat().st_dev == self._temporary.stat().st_dev
        )

    def check(self, size: int, spare: int) -> None:
        """Raise DataError if outputs of `size` bytes, and as much again in buckets, do not fit.

        Buckets are removed while the output grows: on one disk both together need `size` and `spare`.
        """
        self._promised = size
        if self._temporary is None:
            _require(self._output, size)
        elif self.is_one_disk:
            _require(self._output, size + spare)
        else:
            _require(self._output, size)
            _require(self._temporary, size)

    def take(self, count: int) -> None:
        """Count bytes of content that go to buckets; raise DataError once the rest would not fit."""
        self._seen += count
        if self._seen < self._next_check or self._seen <= self._promised:
            return
        self._next_check = self._seen + _STEP
        # What is written to buckets moves to the output: the same disk has the room already.
        _require(self._output, _STEP if self.is_one_disk else self._seen + _STEP)


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _require(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        raise DataError(
            f"the disk of {folder} has {free / 1e9:.2f} GB free, {size / 1e9:.2f} GB are needed; "
            f"free some, or choose another one with --output_dir or --tmp_dir"
        )
