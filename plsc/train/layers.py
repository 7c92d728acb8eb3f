"""Callbacks that look into a step: a table of the layers, and a profile of its time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule

from plsc.parallel.collectives import PREFIX
from plsc.storage.regular import check_inside
from plsc.train.callbacks import Callback, Context

_SHAPES = ("layer", "kind", "parameters", "output")
_VALUES = ("mean", "std", "zeros", "nan or inf", "first values")


class LayerTable(Callback):
    """Logs a table of the layers on rank 0: those that have parameters or no sublayers.

    It describes the first micro-batch of this run: the weights before the step, and the first output of each
    layer. Hooks exist only until the end of this forward pass. Of parameters that are sharded, the values are
    those of rank 0's part.

    with_content: add a row per parameter, and the columns mean, standard deviation, share of zeros, share of
    values that are not finite, and the first values.
    """

    def __init__(self, with_content: bool) -> None:
        self._with_content = with_content
        self._rows: dict[str, list[list[str]]] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def batch_start(self, context: Context) -> None:
        """Describe the parameters, and add the hooks."""
        if self._rows or not context.is_main:
            return
        for name, module in context.network.named_modules():
            own = dict(module.named_parameters(recurse=False))
            if not own and any(module.children()):
                continue
            shapes = ", ".join(f"{key} {list(value.shape)}" for key, value in own.items())
            row = [name or "(network)", type(module).__name__, shapes or "-", "-", *self._values(None)]
            details = [
                [f"  {key}", "", str(list(value.shape)), "", *self._values(value)]
                for key, value in own.items()
                if self._with_content
            ]
            self._rows[name] = [row, *details]
            self._hooks.append(module.register_forward_hook(self._noting(row)))

    def after_forward(self, context: Context) -> None:
        """Log the table, and remove the hooks."""
        if not self._hooks:
            return
        self.exception(context)
        parts = context.options.train.micro_batches
        of = f", micro-batch 1 of {parts}" if parts > 1 else ""
        rows = [[*_SHAPES, *(_VALUES if self._with_content else ())]]
        rows += [row for group in self._rows.values() for row in group]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        title = f"layers in the first batch: {len(context.batch)} images of rank 0{of}"
        context.world.log("\n".join([title, *lines]))

    def exception(self, context: Context) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _noting(self, row: list[str]) -> Any:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            first = next(iter(tensors_of(output)), None)
            if row[3] == "-" and first is not None:
                row[3:] = [str(list(first.shape)), *self._values(first)]

        return note

    def _values(self, tensor: Tensor | None) -> list[str]:
        if not self._with_content:
            return []
        if tensor is None or tensor.numel() == 0:
            return ["-"] * len(_VALUES)
        values = tensor.detach().float()
        mean, std = float(values.mean()), float(values.std(correction=0))
        shares = [float(chosen.float().mean()) for chosen in (values == 0, ~values.isfinite())]
        first = ", ".join(f"{value:.4g}" for value in values.flatten()[:3].tolist())
        return [f"{mean:.4g}", f"{std:.4g}", *(f"{share:.2%}" for share in shares), first]


def tensors_of(output: Any) -> list[Tensor]:
    """Return the tensors in the output of a module: a tensor, or nested lists, tuples and dicts of them."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    return [leaf for part in output for leaf in tensors_of(part)] if isinstance(output, (list, tuple)) else []


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
