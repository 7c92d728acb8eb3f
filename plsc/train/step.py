"""One step of training: forward, head, backward, clipping, and the update of backbone and class weights."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from plsc.data.batch import Batch, SampleNames
from plsc.data.reader import ReaderLoader
from plsc.errors import TrainingError
from plsc.heads import HeadOutput
from plsc.heads.base import join_outputs
from plsc.heads.joint import each_head
from plsc.models.autocast import autocast
from plsc.optim.loss_scaling import MOST_SKIPS, LossScaler, scale_gradient, unscale
from plsc.optim.optimizers import cannot_update_sharded, set_rates
from plsc.parallel.backbone import gradient_norm, is_sharded, local_part, no_gradient_sync
from plsc.parallel.collectives import max_over_ranks
from plsc.parallel.world import World
from plsc.seeds import hash_key
from plsc.spans import span
from plsc.train.build import Run
from plsc.train.checks import stop_at_bad_loss
from plsc.train.network import training_mode
from plsc.train.state import Position


@dataclass
class StepResult:
    """What a step made of a batch.

    output: what the head said; rate: the backbone's learning rate; is_skipped: there was an overflow, so
    nothing was learnt.
    """

    output: HeadOutput
    rate: float
    is_skipped: bool


class Step:
    """Makes the steps of a run, one at a call, at the run's position. A collective.

    save_dir: for the names of a bad batch; by default the run's option. losses: those of the steps that were
    made, to be read.
    """

    def __init__(self, run: Run, save_dir: Path | None = None) -> None:
        self._run = run
        self._options = run.options.train
        self._mode = training_mode(run.options, run.world.device)
        is_late = run.world.device.type == "cuda" and run.options.speed.late_losses
        folder = save_dir or Path(run.options.checkpoint.save_dir)
        self.losses = LossReader(run.world, folder, is_late)
        self._before = BufferCopy([run.network, run.head]) if run.scaler else None
        self._has_updated = False

    def make(self, batch: Batch, sizes: list[int] | None, is_logged: bool) -> StepResult:
        """Make one update, or skip it; its loss is then in `losses`.

        sizes: those of `Agreement`, so that the head need not ask the device. is_logged: measure what only a
        log line needs. Raises TrainingError for a loss that is not finite, here or, on a GPU, from `losses`
        (unless it is scaled).
        """
        run = self._run
        rate = run.rate(run.position.updates)
        self._set_rates(run.rate.factor(run.position.updates))
        self._set_margins(run.position.updates)
        run.optimizer.zero_grad(set_to_none=True)
        if self._before is not None:
            self._before.take()
        output = self._forward_backward(batch, sizes, is_logged)
        run.head.sync_gradients()
        with span("clip gradients"):
            is_skipped, is_excused = self._judge(output)
        self.losses.note(output.mean_loss, output.batch, run.position, rate, batch.names, is_excused)
        if run.scaler is not None or not self.losses.is_late:
            self.losses.check()  # before anything is written
        if is_skipped:
            self._skip()
        else:
            self._update()
        if run.scaler is not None:
            run.scaler.update(is_skipped)
            if run.scaler.is_hopeless:
                raise _hopeless(run.scaler)
        return StepResult(output, rate, is_skipped)

    def _set_rates(self, factor: float) -> None:
        groups = self._run.optimizer.param_groups
        rows = self._run.row_optimizer
        set_rates([*groups, *([] if rows is None else rows.param_groups)], factor)

    def _set_margins(self, updates: int) -> None:
        """Set the share of the margin of every head for the step after so many updates."""
        steps = self._run.options.head.margin_warmup_steps
        for _, head, _ in each_head(self._run.head, self._run.row_optimizer):
            head.margin.share = min(1.0, (updates + 1) / max(1, steps))

    def _forward_backward(self, batch: Batch, sizes: list[int] | None, is_logged: bool) -> HeadOutput:
        """Leave the gradients of the mean loss of the global batch; in micro-batches, one after another.

        The backbone's are multiplied by the loss scale, if there is one.
        """
        run, device, parts = self._run, self._run.world.device, self._options.micro_batches
        scale = 1.0 if run.scaler is None else run.scaler.scale
        with span("copy to device"):
            images = batch.input(device, run.network.input_layout).tensor_split(parts)
            labels = batch.labels.to(device, non_blocking=True).tensor_split(parts)
        numbers = self._number_samples(batch)
        split = None if numbers is None else numbers.tensor_split(parts)
        total = sum(sizes) if sizes else 0
        outputs: list[HeadOutput] = []
        for part in range(parts):
            is_last = part == parts - 1
            self._seed(part)
            run.samples.numbers = None if split is None else split[part]
            # Only the last one sums the gradients over the ranks.
            with nullcontext() if is_last else no_gradient_sync(run.trained_network):
                with span("forward"), autocast(self._mode, device):
                    embeddings = run.trained_network(images[part], labels[part], True)
                with span("head"):
                    output = run.head(
                        scale_gradient(embeddings, scale),
                        labels[part],
                        with_accuracy=is_logged and self._options.calc_acc,
                        with_gauge=is_logged,
                        sizes=_of_part(sizes, part, parts) if sizes else None,
                    )
                share = output.batch / total if total else 1.0
                with span("backward"):
                    (output.loss if parts == 1 else output.loss * share).backward()
            outputs.append(output)
        return outputs[0] if parts == 1 else join_outputs(outputs)

    def _number_samples(self, batch: Batch) -> Tensor | None:
        """Return the numbers of a batch's samples, int64 [b]; None if no dropout layer asks.

        Their places in the dataset, or in the global batch of a generator reader; neither depends on ranks.
        """
        data = self._run.data
        if self._run.samples.layers == 0:
            return None
        if isinstance(batch.names, SampleNames):
            numbers = torch.tensor(batch.names.samples, dtype=torch.int64) + data.first_sample
        elif isinstance(data.loader, ReaderLoader):
            numbers = data.loader.positions(len(batch.labels))
        else:
            return None
        return numbers.to(self._run.world.device, non_blocking=True)

    def _seed(self, part: int) -> None:
        """Seed torch's generators for a micro-batch of the step.

        The CPU's identically on all ranks and for every part, as the dropout layers need it, which tell
        samples apart by their numbers; a GPU's differently on each, for what a network draws there itself.
        """
        seed, step, world = self._options.seed, self._run.position.step, self._run.world
        torch.manual_seed(hash_key(seed, step))
        if world.device.type == "cuda":
            torch.cuda.manual_seed(hash_key(seed, step, world.rank, part))

    def _judge(self, output: HeadOutput) -> tuple[bool, bool]:
        """Return whether the step is to be skipped, and whether its loss may be bad; identical on all ranks.

        Divides the backbone's gradients by the loss scale. With a scale this waits for the device, once a
        step: rows must not be written before it is known.
        """
        run = self._run
        if run.scaler is None:
            return False, False
        gradients = (p.grad for p in run.network.parameters() if p.grad is not None)
        has_bad_gradient = unscale(gradients, run.scaler.scale).to(run.world.device)
        flags = torch.stack([~output.finite, has_bad_gradient]).float()
        overflowed = max_over_ranks(flags, run.world.head_group).tolist()
        return any(overflowed), bool(overflowed[0]) and run.scaler.scale > 1

    def _update(self) -> None:
        run = self._run
        with span("clip gradients"):
            clip = clip_gradients(run) if run.options.optim.clip_norm else 1.0
        with span("optimizer"):
            self._update_backbone()
        if run.row_optimizer is not None:
            with span("update class weights"):
                run.row_optimizer.step(clip=clip)

    def _update_backbone(self) -> None:
        """Let the optimizer make its step. Raises OptionError if it cannot where the backbone is sharded."""
        run = self._run
        try:
            run.optimizer.step()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # one of torch's, or of a user's, and of many kinds
            if self._has_updated or not is_sharded(run.network):
                raise
            raise cannot_update_sharded(run.options.optim.optimizer, error) from error
        self._has_updated = True

    def _skip(self) -> None:
        """Leave everything as it was before the step: the rows of the heads, and all running statistics."""
        if self._run.row_optimizer is not None:
            self._run.row_optimizer.skip()
        if self._before is not None:
            self._before.put_back()


def _of_part(sizes: list[int], part: int, parts: int) -> list[int]:
    """Return how many images each rank has in one of the micro-batches, as `Tensor.tensor_split` has it."""
    return [size // parts + (part < size % parts) for size in sizes]


def clip_gradients(run: Run) -> float | Tensor:
    """Scale the gradients down to `optim.clip_norm` if their norm is larger; return the factor for the rows.

    Scope backbone: its norm alone counts, and the class rows are not scaled. Scope all: the norm is that of
    all parameters, the rows of all ranks among them, which costs one more pass over the rows. A collective.

    On a GPU the factor is a tensor there, so that nothing waits for it.
    """
    limit, scope = run.options.optim.clip_norm, run.options.optim.clip_scope
    assert limit is not None  # see with_rate
    every = [p for group in run.optimizer.param_groups for p in group["params"]]
    wanted = every if scope == "all" else run.network.parameters()
    gradients = [p.grad for p in wanted if p.grad is not None]
    # The gradients are summed over the ranks by now; a sharded backbone's are split over them.
    norm = gradient_norm(gradients)
    if scope == "all" and run.row_optimizer is not None:
        norm = torch.hypot(norm, run.row_optimizer.gradient_norm().to(norm))
    # Gradients that are not finite stay as they are: `stop_at_bad_weights` names those alone.
    factor = torch.where(norm.isfinite(), (limit / (norm + 1e-6)).clamp(max=1.0), 1.0)
    if not factor.is_cuda and factor == 1:
        return 1.0
    if gradients:
        torch._foreach_mul_([local_part(gradient) for gradient in gradients], factor)
    if scope == "backbone" or run.row_optimizer is None:
        return 1.0
    return factor if factor.is_cuda else float(factor)


def _hopeless(scaler: LossScaler) -> TrainingError:
    """Return the error that ends a run of which no step comes through."""
    why = "cannot fall below 1" if scaler.is_dynamic else "is fixed"
    return TrainingError(
        f"{MOST_SKIPS} steps in a row had a nan or inf in their gradients or embeddings, with a loss scale "
        f"of {scaler.scale:g}, which {why}: float16 has too small a range for this network; use "
        "set_precision('bfloat16'), keep the layers that overflow in float32 (set_precision_black_list), or "
        "lower the learning rate, and resume from the last checkpoint"
    )


class BufferCopy:
    """A copy of the buffers of modules, running statistics among them, to put back if a step is skipped.

    A network with an inf in its activations has it in the statistics of its batch norms, too, from where it
    would never go away.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._copies: list[Tensor] = []

    @torch.no_grad()
    def take(self) -> None:
        """Copy the buffers as they are now."""
        buffers = self._buffers()
        self._copies = [torch.empty_like(buffer) for buffer in buffers]
        if buffers:
            torch._foreach_copy_(self._copies, buffers)

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the buffers the values that they had at the last `take`."""
        if self._copies:
            torch._foreach_copy_(self._buffers(), self._copies)

    def _buffers(self) -> list[Tensor]:
        return [buffer.detach() for module in self._modules for buffer in module.buffers()]


@dataclass
class _Coming:
    """The loss of a step, and what to say if it is bad. arrived: None where it is here already."""

    value: Tensor
    arrived: torch.cuda.Event | None
    images: int
    position: Position
    rate: float
    names: Sequence[str]
    is_excused: bool


class LossReader:
    """Takes the losses of steps and gives them back as numbers, in order.

    save_dir: for the names of a bad batch; is_late: whether a loss may be read a step after it was made.
    """

    def __init__(self, world: World, save_dir: Path, is_late: bool) -> None:
        self._world = world
        self._save_dir = save_dir
        self.is_late = is_late
        self._coming: deque[_Coming] = deque()
        self._read: list[tuple[float, int]] = []

    def note(
        self,
        loss: Tensor,
        images: int,
        position: Position,
        rate: float,
        names: Sequence[str],
        is_excused: bool = False,
    ) -> None:
        """Take the loss of a step over so many images, at a position; names: this rank's samples.

        is_excused: the step is skipped, and its loss need not be finite.
        """
        value, arrived = loss.detach(), None
        if loss.is_cuda:
            value = torch.empty((), dtype=loss.dtype, pin_memory=True)
            value.copy_(loss.detach(), non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._coming.append(_Coming(value, arrived, images, replace(position), rate, names, is_excused))

    def read(self, everything: bool) -> list[tuple[float, int]]:
        """Return losses with the images they are of: all of them, or those that may not come later.

        Raises TrainingError, identical on all ranks, for one that is not finite and not excused.
        """
        self.check(kept_back=1 if self.is_late and not everything else 0)
        losses, self._read = self._read, []
        return losses

    def check(self, kept_back: int = 0) -> None:
        """Look at the losses but for the last so many; they are still to be read. Raises as `read`."""
        while len(self._coming) > kept_back:
            coming = self._coming.popleft()
            if coming.arrived is not None:
                coming.arrived.synchronize()
            loss = float(coming.value)
            if not (math.isfinite(loss) or coming.is_excused):
                stop_at_bad_loss(
                    self._world,
                    self._save_dir,
                    coming.position,
                    loss,
                    coming.rate,
                    list(coming.names),
                )
            self._read.append((loss, coming.images))
