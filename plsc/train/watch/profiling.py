"""The callback `profile`: where the time of a training step goes, by torch.profiler."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from plsc.run.callbacks import Callback, Context
from plsc.spans import PREFIX
from plsc.storage.regular import check_inside

_WARM_UP = 5  # steps in which memory is allocated, workers fill their queues and code is compiled
_TRACED = 10  # larger traces open slowly


class Profile(Callback):
    """Traces steps 6 to 15 of a run on every rank, and logs the table of rank 0.

    Writes trace-rank<r>.json.gz (for ui.perfetto.dev or chrome://tracing) and profile-rank<r>.txt to the
    folder ``profile`` of the run. A step ends at `after_step`; a save belongs to the step after it.
    """

    def __init__(self) -> None:
        self._context: Context | None = None
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        steps = schedule(wait=_WARM_UP - 1, warmup=1, active=_TRACED, repeat=1)
        self._profile = profile(activities=activities, schedule=steps, on_trace_ready=self._write)

    def run_start(self, context: Context) -> None:
        """Start the profiler, which waits for its steps."""
        self._context = context
        self._profile.start()

    def after_step(self, context: Context) -> None:
        """Finish a step of the profile."""
        if self._context is not None:
            self._profile.step()

    def run_end(self, context: Context) -> None:
        """Write what was traced, if the run was shorter."""
        if self._context is not None:
            self._profile.stop()

    exception = run_end

    def _write(self, profiled: profile) -> None:
        assert self._context is not None
        context, self._context = self._context, None
        folder, rank = context.folder / "profile", context.rank
        folder.mkdir(parents=True, exist_ok=True)
        check_inside(folder, context.folder)
        text, table = _table(profiled), folder / f"profile-rank{rank}.txt"
        trace = folder / f"trace-rank{rank}.json.gz"
        for path in (table, trace):
            path.unlink(missing_ok=True)  # it may be a link
        table.write_text(text + "\n", "utf-8")
        profiled.export_chrome_trace(str(trace))
        context.world.log(f"{text}\ntraces (ui.perfetto.dev, chrome://tracing): {folder}")


def _table(profiled: profile) -> str:
    """Return a table of the phases, whose times include those of the phases within, and of the operators."""
    averages = profiled.key_averages()
    steps = next(one for one in averages if one.key.startswith("ProfilerStep"))
    phases = [one for one in averages if one.key.startswith(PREFIX) and "CPU" in str(one.device_type)]
    phases.sort(key=lambda one: -one.cpu_time_total)
    averages[:] = [one for one in averages if not one.key.startswith((PREFIX, "ProfilerStep"))]
    on_gpu = ProfilerActivity.CUDA in profiled.activities
    lines = [
        f"{steps.count} steps of {steps.cpu_time / 1e3:.2f} ms",
        f"{'phase':30}  host ms   share  device ms",
    ]
    for one in phases:
        host, device = (time / steps.count / 1e3 for time in (one.cpu_time_total, one.device_time_total))
        share = one.cpu_time_total / steps.cpu_time_total
        lines.append(f"{one.key.removeprefix(PREFIX):30} {host:8.2f} {share:7.1%} {device:10.2f}")
    order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    return "\n".join([*lines, "", averages.table(sort_by=order, row_limit=20, max_name_column_width=40)])
