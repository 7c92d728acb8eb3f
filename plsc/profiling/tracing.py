"""A few steps under torch.profiler: a trace file a rank, a table of operators, and the collectives."""

from __future__ import annotations

import gzip
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import torch

from plsc.errors import TrainingError
from plsc.marks import Part

OPERATORS_SHOWN = 40
_QUIET = "99"  # kineto's level above all: else it prints when it starts and stops, and what it did not find


class Tracer:
    """Runs torch.profiler over steps; the marks become ranges in its trace.

    device: of the rank. One step goes by before the first that is traced: starting the tracing of a GPU takes
    its time.
    """

    def __init__(self, device: torch.device) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET)
        from torch.profiler import ProfilerActivity, profile, schedule

        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._device = device
        self._thread = threading.get_ident()
        self._ranges: list[Any] = []
        self._is_running = False
        # One step is passed over, the others are kept until they are stopped.
        self._profile = profile(
            activities=activities, schedule=schedule(wait=0, warmup=1, active=2**30)
        )

    def start(self) -> None:
        """Begin the step that is passed over."""
        self._profile.start()
        self._is_running = True

    def next_step(self) -> None:
        """Another step begins."""
        self._profile.step()

    def stop(self) -> None:
        """End the last step, if one is traced."""
        if not self._is_running:
            return
        self._is_running = False
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._profile.stop()

    def enter(self, part: Part) -> None:
        """See `plsc.marks.Recorder`."""
        named = torch.profiler.record_function(part.value)
        named.__enter__()
        self._ranges.append(named)

    def switch(self, part: Part) -> None:
        """See `plsc.marks.Recorder`. A range cannot end in another thread: the one that is open goes on."""
        if self._ranges and threading.get_ident() == self._thread:
            self.leave()
            self.enter(part)

    def leave(self) -> None:
        """See `plsc.marks.Recorder`."""
        if self._ranges:
            self._ranges.pop().__exit__(None, None, None)

    def events(self) -> list[Any]:
        """Return what was traced, as torch's FunctionEvents."""
        return list(self._profile.events() or ())

    def write(self, folder: Path, rank: int) -> tuple[Path, Path]:
        """Write the trace and the table of operators of this rank; return their paths.

        Raises TrainingError where they cannot be written whole.
        """
        trace = folder / f"trace-rank{rank}.json.gz"
        operators = folder / f"operators-rank{rank}.txt"
        key = "self_device_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
        try:
            self._write_trace(trace)
            averages = self._profile.key_averages()
            table = averages.table(sort_by=key, row_limit=OPERATORS_SHOWN, max_name_column_width=60)
            operators.write_text(table, encoding="utf-8")
        except OSError as error:
            raise TrainingError(
                f"cannot write the trace to {folder}: {error.strerror or error}; see to the folder, or "
                "choose another output"
            ) from error
        return trace, operators

    def _write_trace(self, path: Path) -> None:
        plain, packed = path.with_suffix(".part"), path.with_suffix(".gz.part")
        try:
            self._profile.export_chrome_trace(str(plain))
            # torch says nothing of a file that it could not write, or not to its end.
            if not plain.is_file() or not _ends_whole(plain):
                raise OSError("the file is not whole: is the disk full?")
            with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=4) as target:
                shutil.copyfileobj(source, target, 2**20)
            packed.replace(path)
        finally:
            for left in path.parent.glob(f"{plain.name}*"):  # torch's own temporary file, too
                left.unlink(missing_ok=True)
            packed.unlink(missing_ok=True)


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16))
        return file.read().rstrip().endswith(b"}")
