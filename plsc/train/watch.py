"""Callbacks that are off by default: the average of the weights, norms of gradients, layers, a profile."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.profiler import ProfilerActivity, profile, schedule

from plsc.checkpoint.manifest import EMA
from plsc.models import BaseModel
from plsc.parallel.backbone import gradient_values
from plsc.parallel.world import sum_over_ranks
from plsc.storage.disk import check_inside
from plsc.train.callbacks import Callback, Context

logger = logging.getLogger(__name__)


class WeightAverage(Callback):
    """Keeps an exponential moving average of the network's weights, and uses it in evaluations.

    After update n, average = d * average + (1 - d) * weights with d = min(decay, (1 + n) / (10 + n)), as in
    TensorFlow's ExponentialMovingAverage. Running statistics of batch norms are also averaged.

    Args:
        network: its weights are averaged; of a sharded network, the part of this rank.
        decay: decay per step, in (0, 1).
        group: the ranks that train the network.
    """

    name = EMA

    def __init__(self, network: BaseModel, decay: float, group: dist.ProcessGroup | None = None) -> None:
        self.decay = decay
        saved = network.state_dict().keys()
        self._tensors: dict[str, Tensor] = dict(network.named_parameters())
        self._first_buffer = len(self._tensors)
        for name, buffer in network.named_buffers():
            if name in saved and buffer.is_floating_point():
                self._tensors[name] = buffer
        self._group = group
        self._average = [tensor.clone() for tensor in self._current()]
        self._is_loaded = False

    def run_start(self, context: Context) -> None:
        """Start from the weights of the network, unless the checkpoint has an average."""
        if not self._is_loaded:
            torch._foreach_copy_(self._average, self._current())

    def after_step(self, context: Context) -> None:
        """Add the weights to the average."""
        decay = min(self.decay, (1 + context.step) / (10 + context.step))
        torch._foreach_lerp_(self._average, self._current(), 1 - decay)

    def evaluation_start(self, context: Context) -> None:
        """Exchange the weights of the network and the average."""
        for current, average in zip(self._current(), self._average, strict=True):
            kept = current.clone()
            current.copy_(average)
            average.copy_(kept)

    evaluated = evaluation_start

    def state_dict(self) -> dict[str, Any]:
        """Return the average, by the names of the network's state dict; a collective.

        Averages of buffers that differ between the ranks become equal.
        """
        buffers = self._average[self._first_buffer :]
        if buffers and self._group is not None:
            flat = sum_over_ranks(torch.cat([buffer.double().flatten() for buffer in buffers]), self._group)
            means = (flat / self._group.size()).split([buffer.numel() for buffer in buffers])
            torch._foreach_copy_(
                buffers, [mean.view_as(buffer) for mean, buffer in zip(means, buffers, strict=True)]
            )
        return dict(zip(self._tensors, self._average, strict=True))

    def _current(self) -> list[Tensor]:
        return [tensor.detach() for tensor in self._tensors.values()]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Note that the average is loaded: `state_dict` gave the tensors themselves."""
        self._is_loaded = True


_SHAPES = ("layer", "kind", "parameters", "output")
_VALUES = ("mean", "std", "zeros", "nan or inf", "first values")


class GradientNorm(Callback):
    """Logs the 2-norm of the gradient of the network, before clipping, in logged steps; a collective."""

    def after_backward(self, context: Context) -> None:
        """Add ``gradient_norm`` to the log line."""
        if context.is_logged:
            gradients = [p.grad for p in context.network.parameters() if p.grad is not None]
            context.log("gradient_norm", float(get_total_norm(map(gradient_values, gradients))))


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
    """Traces steps 6 to 15 of a run on every rank, and logs torch's table of rank 0.

    Writes trace-rank<r>.json.gz (for ui.perfetto.dev or chrome://tracing) to the folder ``profile`` of the
    run. A step ends at `after_step`; a save belongs to the step after it.
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
        folder = context.folder / "profile"
        folder.mkdir(parents=True, exist_ok=True)
        check_inside(folder, context.folder)
        trace = folder / f"trace-rank{context.rank}.json.gz"
        trace.unlink(missing_ok=True)  # it may be a link
        profiled.export_chrome_trace(str(trace))
        # Times of the phases, "plsc: ...", include those of the phases and operators within.
        averages = profiled.key_averages()
        table = averages.table(sort_by="cpu_time_total", row_limit=40, max_name_column_width=40)
        context.world.log(f"{table}\ntraces (ui.perfetto.dev, chrome://tracing): {folder}")
