"""Callbacks that watch a run: log lines, speed, layers; and the average of its weights."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule
from tqdm import tqdm

from plsc.checkpoint.manifest import EMA
from plsc.data.batch import LIST_NAME, BadSample, BadSampleList
from plsc.models import BaseModel
from plsc.parallel.world import World, sum_over_ranks
from plsc.storage.regular import check_inside
from plsc.train.callbacks import Callback, Context

logger = logging.getLogger(__name__)


_SHOWN = 10  # bad samples printed per rank: all samples of a dataset may be bad


class BadSampleReport:
    """Collects the bad samples of all ranks; rank 0 writes them to a file in the folder, if there is one."""

    def __init__(self, world: World, folder: Path | None, name: str = LIST_NAME) -> None:
        self._world = world
        self._list = BadSampleList(folder, name) if world.is_main and folder is not None else None
        self._others = "not logged" if folder is None else f"only listed in {name}"
        self._pending: list[BadSample] = []
        self._shown: set[str] = set()
        self._is_cut = False
        self._summary = ""  # the last one logged

    def add(self, problems: list[BadSample]) -> None:
        """Add the bad samples of a batch of this rank; the first few are logged, each only once."""
        for problem in problems:
            if problem.text in self._shown:
                continue
            if len(self._shown) < _SHOWN:
                self._shown.add(problem.text)
                logger.warning(f"skipped: {problem.text}")
            elif not self._is_cut:
                self._is_cut = True
                logger.warning(f"more bad samples were found; they are {self._others}")
        self._pending.extend(problems)

    def gather(self) -> int:
        """Write the bad samples of all ranks since the last call to the file; a collective.

        Returns the number of different bad samples so far on rank 0, and 0 on other ranks.
        """
        everywhere = self._world.all_gather_object([vars(problem) for problem in self._pending])
        self._pending = []
        if self._list is None:
            return 0
        self._list.add([BadSample(**problem) for part in everywhere for problem in part])
        return sum(self._list.counts.values())

    def log_summary(self) -> None:
        """Log the number of bad samples of each kind, if it has changed."""
        summary = "" if self._list is None else self._list.summary()
        if self._list is not None and summary != self._summary:
            self._summary = summary
            self._world.log(f"bad samples: {summary}; listed in {self._list.path}")


class Meter:
    """Measures the speed over the steps since the last `report`."""

    def __init__(self) -> None:
        self.wait = self.step = 0.0  # seconds of the last step: waiting for its batch, and in total
        self._clear()

    def start_step(self) -> None:
        """Start timing a step, before its batch is requested."""
        self._started = time.perf_counter()

    def batch_arrived(self) -> None:
        """Record the time since the start of the step as waiting for data."""
        self.wait = time.perf_counter() - self._started
        self._data_seconds += self.wait

    def end_step(self, images: int, skipped: int) -> None:
        """Count a step: images of the global batch, and bad images skipped on this rank."""
        self.step = time.perf_counter() - self._started
        self._step_seconds += self.step
        self._steps += 1
        self._images += images
        self._skipped += skipped

    def report(self) -> dict[str, float | int]:
        """Return the means over the steps since the last report, and reset them.

        images_per_second counts images of all ranks, skipped_images those of this rank.
        """
        steps = max(1, self._steps)
        report: dict[str, float | int] = {
            "images_per_second": self._images / max(self._step_seconds, 1e-9),
            "data_seconds": self._data_seconds / steps,
            "step_seconds": self._step_seconds / steps,
            "skipped_images": self._skipped,
        }
        self._clear()
        return report

    def _clear(self) -> None:
        self._started = time.perf_counter()
        self._steps = self._images = self._skipped = 0
        self._data_seconds = self._step_seconds = 0.0


QUIET = 30.0  # seconds after which a step is logged that is not due, where there is no bar
_BAR = "{desc} {percentage:3.0f}%|{bar}| step {n_fmt}/{total_fmt} {remaining} left{postfix}"
_COUNT = "{desc} step {n_fmt}{postfix}"  # of unknown length


class Progress(Callback):
    """Logs the metrics and evaluations of a run, and shows a progress bar on a terminal; on rank 0."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._spoke = time.monotonic()

    def run_start(self, context: Context) -> None:
        """Open the progress bar."""
        self._spoke = time.monotonic()
        if context.is_main and sys.stderr.isatty() and logger.isEnabledFor(logging.INFO):
            total = context.total_steps
            shape = _BAR if total else _COUNT
            self._bar = tqdm(total=total, initial=context.step, dynamic_ncols=True, bar_format=shape)

    def after_step(self, context: Context) -> None:
        """Show the step, or log it if no line was logged for long."""
        if self._bar is not None:
            self._bar.set_description_str(_epoch_of(context, context.current_epoch), refresh=False)
            self._bar.set_postfix_str(self._numbers(context, self._loss(context)), refresh=False)
            self._bar.update()
        elif not context.is_logged and time.monotonic() - self._spoke > QUIET:
            self._log(context, context.current_epoch, self._loss(context))

    def logged(self, context: Context) -> None:
        """Log the progress and the mean loss since the last line."""
        self._log(context, context.metrics["epoch"], context.metrics["mean_loss"])

    def _log(self, context: Context, epoch: int, loss: float | None) -> None:
        self._spoke = time.monotonic()
        steps = f"{context.step}/{context.total_steps}" if context.total_steps else f"{context.step}"
        context.world.log(f"{_epoch_of(context, epoch)} step {steps} {self._numbers(context, loss)}")

    def _loss(self, context: Context) -> float | None:
        """Return the last known mean loss: that of a step is unknown if losses are read late."""
        return context.metrics.get("mean_loss") if context.mean_loss is None else context.mean_loss

    def evaluated(self, context: Context) -> None:
        """Log the results."""
        for name, result in context.evaluation.items():
            epoch = _epoch_of(context, context.current_epoch)
            context.world.log(f"{epoch} step {context.step} {name}: {result.summary()}")

    def run_end(self, context: Context) -> None:
        """Close the progress bar."""
        if self._bar is not None:
            self._bar.close()

    exception = run_end

    def _numbers(self, context: Context, loss: float | None) -> str:
        """Return ``loss 5.876 accuracy 0.912 lr 0.1 429 images/s``, as far as known."""
        metrics = context.metrics
        parts = [f"loss {'overflow' if loss is None else f'{loss:#.4g}'}"]
        for key, text in _NUMBERS.items():
            if metrics.get(key) is not None:
                parts.append(text.format(metrics[key]))
        return " ".join(parts)


_NUMBERS = {
    "accuracy": "accuracy {:.3f}",
    "accuracy_top5": "top-5 {:.3f}",
    "lr": "lr {:.4g}",
    "loss_scale": "loss_scale {:g}",
    "skipped_steps": "skipped_steps {}",
    "images_per_second": "{:.0f} images/s",
}


def _epoch_of(context: Context, epoch: int) -> str:
    """Return ``epoch 1/3``; the epoch counts from 1 here, from 0 in metrics.jsonl."""
    train = context.options.train
    return f"epoch {epoch + 1}" + ("" if train.steps else f"/{train.epochs}")


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
