"""One step of training: forward, head, backward, clipping, update; and its loss, which may stop the run."""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from plsc.checkpoint.tensor_files import shorten
from plsc.data.batch import Batch, SampleNames
from plsc.data.reader import ReaderLoader
from plsc.errors import TrainingError
from plsc.heads import HeadOutput
from plsc.heads.base import join_outputs
from plsc.inputs import Input, split_input, split_sizes
from plsc.models.precision import MOST_SKIPS, LossScaler, autocast, scale_gradient, unscale
from plsc.optim import set_rates, sparse_parameters
from plsc.parallel.backbone import gradient_values, no_gradient_sync
from plsc.parallel.world import Arriving, World, max_over_ranks, span
from plsc.seeds import hash_key
from plsc.storage.publish import replacing
from plsc.train.callbacks import Position, Run
from plsc.train.watch import tensors_of


@dataclass
class StepResult:
    """The result of a training step.

    output: output of the head. rate: learning rate of the backbone. is_skipped: gradients overflowed, so the
    weights are unchanged.
    """

    output: HeadOutput
    rate: float
    is_skipped: bool


class Step:
    """Executes the training steps of a run, one per call of `make`; a collective.

    losses: the losses of the steps.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._options = run.options.train
        self.losses = LossReader(self._stop_at_bad_loss, is_late=run.world.device.type == "cuda")
        # torch's fused optimizers can skip an update without a synchronisation.
        is_fused = all(group.get("fused") for group in run.optimizer.param_groups)
        self._skips_bad_update = self.losses.is_late and is_fused and run.scaler is None
        self._before = BufferCopy([run.network, run.head]) if run.scaler else None
        self._sparse = sparse_parameters(run.network)
        self._trained = [p for p in run.network.parameters() if p.requires_grad]
        self._is_first = True

    def make(self, batch: Batch, sizes: list[int] | None, is_logged: bool) -> StepResult:
        """Run one step: update the weights, or skip the update after an overflow; add the loss to `losses`.

        sizes: those of `StepStatus`; the head then needs no synchronisation with the device. is_logged: also
        compute metrics that only log lines need. Raises TrainingError for a loss that is not finite; on a
        GPU without loss scaling, `losses` raises it one step later.
        """
        run = self._run
        self._check_parameters()
        rate = run.rate(run.position.updates)
        self._set_rates(run.rate.factor(run.position.updates))
        self._set_margins(run.position.updates)
        run.optimizer.zero_grad(set_to_none=True)
        if self._before is not None:
            self._before.take()
        with run.callbacks.keeping_outputs(run):
            output = self._forward_backward(batch, sizes, is_logged)
        if self._is_first:
            self._is_first = False
            run.world.log(idle_parameters(run.network), logging.WARNING)
        # DDP sums the backbone's gradients only; a replicated head is outside of it.
        run.head.sync_gradients()
        with span("clip gradients"):
            is_skipped, is_excused = self._find_overflow(output)
        run.current.output = output
        run.call("after_backward")
        self.losses.add(output.mean_loss, output.batch, run.position, rate, batch, is_excused)
        if self._skips_bad_update:
            is_bad = (output.mean_loss - output.mean_loss).ne(0)  # of nan and inf
            run.optimizer.found_inf = is_bad.float()  # type: ignore[attr-defined]
        if run.scaler is not None or not self.losses.is_late:
            self.losses.check()  # before any weight changes
        if is_skipped:
            self._skip()
        else:
            self._update()
        if run.scaler is not None:
            run.scaler.update(is_skipped)
            if run.scaler.is_hopeless:
                raise _too_many_skips(run.scaler)
        return StepResult(output, rate, is_skipped)

    def _check_parameters(self) -> None:
        """Raise TrainingError if a callback has made or replaced parameters: the optimizer lacks them."""
        if self._run.callbacks.are_ours:
            return
        known = set(map(id, self._trained))
        named = self._run.network.named_parameters()
        if new := [name for name, p in named if p.requires_grad and id(p) not in known]:
            raise TrainingError(
                f"a callback has made or replaced parameters, which the optimizer does not train: "
                f"{shorten(new)}; to train frozen ones, resume with another optim.freeze"
            )

    def _set_rates(self, factor: float) -> None:
        for optimizer in filter(None, (self._run.optimizer, self._run.rows)):
            set_rates(optimizer.param_groups, factor)

    def _set_margins(self, updates: int) -> None:
        """Set the margin warm-up for the step after `updates` updates."""
        steps = self._run.options.head.margin_warmup_steps
        self._run.head.margin.share = min(1.0, (updates + 1) / max(1, steps))

    def _forward_backward(self, batch: Batch, sizes: list[int] | None, is_logged: bool) -> HeadOutput:
        """Compute the gradients of the mean loss of the global batch, one micro-batch after another.

        Gradients of the backbone are multiplied by the loss scale, if there is one.
        """
        run, device, parts = self._run, self._run.world.device, self._options.micro_batches
        if sizes:  # a small last batch has fewer parts
            parts = max(1, min(parts, max(sizes)))
        scale = 1.0 if run.scaler is None else run.scaler.scale
        total = sum(sizes) if sizes else 0
        known = None  # labels of each rank's micro-batches
        if sizes and batch.all_labels is not None:
            known = [labels.tensor_split(parts) for labels in batch.all_labels.split(sizes)]
        outputs: list[HeadOutput] = []
        for part, (input, labels) in enumerate(self._micro_batches(batch, run.position.step, parts)):
            is_last = part == parts - 1
            # Gradients are summed over the ranks only in the last micro-batch.
            with nullcontext() if is_last else no_gradient_sync(run.trained_network):
                with span("forward"), autocast(run.mode, device):
                    embeddings = run.trained_network(input, labels, True)
                with span("head"):
                    output = run.head(
                        scale_gradient(embeddings, scale),
                        labels,
                        with_accuracy=is_logged and self._options.calc_acc,
                        sizes=[split_sizes(size, parts)[part] for size in sizes] if sizes else None,
                        all_labels=None if known is None else torch.cat([one[part] for one in known]),
                    )
                run.current.output = output
                run.call("after_forward")
                share = output.batch / total if total else 1.0
                with span("backward"):
                    (output.loss if parts == 1 else output.loss * share).backward()
            outputs.append(output)
        for parameter in self._sparse:  # add up the rows of repeated indices
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
        return outputs[0] if parts == 1 else join_outputs(outputs)

    def _micro_batches(self, batch: Batch, step: int, parts: int) -> Iterator[tuple[Input, Tensor]]:
        """Yield the input and labels of each micro-batch, for whose forward pass generators are seeded."""
        run, device = self._run, self._run.world.device
        with span("copy to device"):
            inputs = split_input(batch.input(device, run.network.input_layout), parts)
            labels = batch.labels.to(device, non_blocking=True).tensor_split(parts)
        numbers = self._number_samples(batch)
        split = None if numbers is None else numbers.tensor_split(parts)
        for part in range(parts):
            self._seed(step, part)
            run.samples.numbers = None if split is None else split[part]
            yield inputs[part], labels[part]

    def _number_samples(self, batch: Batch) -> Tensor | None:
        """Return the sample numbers of a batch for dropout, int64 [b]; None if no layer needs them.

        A number is the index in the dataset, or in the global batch of a generator reader. It does not depend
        on the number of ranks.
        """
        data = self._run.data
        if self._run.samples.layers == 0:
            return None
        if isinstance(batch.names, SampleNames):
            numbers = torch.tensor(batch.names.samples, dtype=torch.int64)
        elif isinstance(data.loader, ReaderLoader):
            numbers = data.loader.positions(len(batch.labels))
        else:
            return None
        return numbers.to(self._run.world.device, non_blocking=True)

    def _seed(self, step: int, part: int) -> None:
        """Seed torch's generators for a micro-batch of a step.

        The CPU generator gets the same seed on all ranks and for all micro-batches, as dropout layers expect:
        they distinguish samples by number. GPU generators get different seeds: only custom layers use them.
        """
        seed, world = self._options.seed, self._run.world
        torch.manual_seed(hash_key(seed, step))
        if world.device.type == "cuda":
            torch.cuda.manual_seed(hash_key(seed, step, world.rank, part))

    def _stop_at_bad_loss(self, coming: Pending, loss: float) -> NoReturn:
        """Raise TrainingError with the first layer whose output is not finite; a collective.

        A second forward pass finds the layer. The first rank that has it writes its batch to
        bad_batch.safetensors: images, labels, and as metadata the names, as JSON.
        """
        run, batch, position = self._run, coming.batch, coming.position
        world, path = run.world, run.folder / BAD_BATCH_NAME
        with torch.no_grad(), autocast(run.mode, world.device):
            parts = self._micro_batches(batch, position.step, self._options.micro_batches)
            layer = find_bad_layer(run.network, parts)
        names = list(batch.names)
        layers = world.all_gather_object((layer.order, layer.name, [names[index] for index in layer.images]))
        orders = [order for order, *_ in layers]
        rank = orders.index(min(orders))
        order, name, bad = layers[rank]
        if world.rank == rank:
            images = batch.final_images()
            tensors = images if isinstance(images, dict) else {"images": images}
            saved = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
            with replacing(path) as temporary:
                save_file({**saved, "labels": batch.labels}, temporary, {"names": json.dumps(names)})
        world.barrier()  # the launcher ends all ranks when one fails
        where = f"the first layer with a nan or inf: {name}" + f" (rank {rank})" * (world.size > 1)
        if order == _NO_LAYER:
            where = "no layer of the network has a nan or inf, so the head produced it"
        elif self.losses.is_late and not self._skips_bad_update:
            where += ", after an update with this loss"
        samples = f"samples: {shorten(bad)}; " if bad else ""
        raise TrainingError(
            f"the loss is {loss} at step {position.step + 1} (epoch {position.epoch + 1}, learning rate "
            f"{coming.rate:g}); {where}; {samples}the batch is saved to {path}. Lower the learning rate or "
            "use a longer warm-up, check these images, and resume from the last checkpoint"
        )

    def _find_overflow(self, output: HeadOutput) -> tuple[bool, bool]:
        """Return whether to skip the step, and whether its loss may be infinite; identical on all ranks.

        Divides the gradients of the backbone by the loss scale. With a scale, this synchronises with the
        device once per step: class weights must not change before the result is known.
        """
        run = self._run
        if run.scaler is None:
            return False, False
        gradients = (p.grad for p in run.network.parameters() if p.grad is not None)
        has_bad_gradient = unscale(gradients, run.scaler.scale).to(run.world.device)
        # The maximum over the ranks: if only one skipped, the copies of the backbone would differ from then
        # on.
        flags = torch.stack([~output.finite, has_bad_gradient]).float()
        overflowed = max_over_ranks(flags, run.world.head_group).tolist()
        return any(overflowed), bool(overflowed[0]) and run.scaler.scale > 1

    def _update(self) -> None:
        run = self._run
        with span("clip gradients"):
            clip_gradients(run)
        with span("optimizer"):
            run.optimizer.step()
        if run.rows is not None:
            with span("update class weights"):
                run.rows.step()

    def _skip(self) -> None:
        """Restore the state before the step: class weights and all running statistics."""
        if self._run.rows is not None:
            self._run.rows.skip()
        if self._before is not None:
            self._before.put_back()


def clip_gradients(run: Run) -> None:
    """Clip the gradients of the network to `optim.clip_norm`; class weights are not clipped."""
    limit = run.options.optim.clip_norm
    gradients = [p.grad for p in run.network.parameters() if p.grad is not None]
    if not limit or not gradients:
        return
    # The gradients are summed over the ranks by now.
    values = [gradient_values(gradient) for gradient in gradients]
    norm = get_total_norm(values)
    # Gradients that are not finite are not scaled, so that `stop_at_bad_weights` can name the parameters.
    factor = torch.where(norm.isfinite(), (limit / (norm + 1e-6)).clamp(max=1.0), 1.0)
    if factor.is_cuda or factor != 1:  # on a GPU, asking would wait for it
        torch._foreach_mul_(values, factor)


def _too_many_skips(scaler: LossScaler) -> TrainingError:
    """Return the error for a run in which every step overflows."""
    why = "cannot be lower than 1" if scaler.is_dynamic else "is constant"
    return TrainingError(
        f"{MOST_SKIPS} steps in a row had a nan or inf in their gradients or embeddings, with a loss scale "
        f"of {scaler.scale:g}, which {why}: the range of float16 is too small for this network. Use "
        "set precision.mode to bfloat16, compute the layers that overflow in float32 (precision.lists), "
        "or lower the learning rate, and resume from the last checkpoint"
    )


class BufferCopy:
    """A copy of the buffers of modules, to restore them if a step is skipped.

    An inf in the activations also enters the running statistics of batch norms, and would remain there.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._copies: list[Tensor] = []

    @torch.no_grad()
    def take(self) -> None:
        """Copy the current buffers."""
        buffers = self._buffers()
        self._copies = [torch.empty_like(buffer) for buffer in buffers]
        if buffers:
            torch._foreach_copy_(self._copies, buffers)

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the buffers from the last `take`."""
        if self._copies:
            torch._foreach_copy_(self._buffers(), self._copies)

    def _buffers(self) -> list[Tensor]:
        return [buffer.detach() for module in self._modules for buffer in module.buffers()]


@dataclass
class Mean:
    """The mean of losses over images; losses that are not finite are ignored."""

    images: int = 0
    total: float = 0.0

    def add(self, loss: float, images: int) -> None:
        """Add the mean loss of a step with this number of images."""
        if math.isfinite(loss):
            self.images += images
            self.total += loss * images

    @property
    def value(self) -> float | None:
        """The mean; None without a finite loss."""
        return self.total / self.images if self.images else None

    def take(self) -> float | None:
        """Return the mean, and start again."""
        value = self.value
        self.images, self.total = 0, 0.0
        return value


@dataclass
class Pending:
    """The loss of a step, with details for the error if it is not finite."""

    value: Arriving
    images: int
    position: Position
    rate: float
    batch: Batch
    is_excused: bool


class LossReader:
    """Queue of the losses of steps, which are read as numbers in order, and their means.

    Attributes:
        is_late: whether a loss may be read one step later.
        last: the last loss that is known.
        since_log, since_save: means since the last log line and the last checkpoint.

    stop: raises TrainingError for a loss that is not finite; called on all ranks.
    """

    def __init__(self, stop: Callable[[Pending, float], NoReturn], is_late: bool) -> None:
        self._stop = stop
        self.is_late = is_late
        self._coming: deque[Pending] = deque()
        self._read: list[tuple[float, int]] = []
        self.last = math.nan
        self.since_log, self.since_save = Mean(), Mean()

    def add(
        self,
        loss: Tensor,
        images: int,
        position: Position,
        rate: float,
        batch: Batch,
        is_excused: bool = False,
    ) -> None:
        """Add the mean loss of a step over so many images; batch: the batch of this rank.

        is_excused: the step is skipped, so its loss need not be finite.
        """
        value = Arriving(loss.detach())
        self._coming.append(Pending(value, images, replace(position), rate, batch, is_excused))

    def read(self, everything: bool) -> list[tuple[float, int]]:
        """Return (loss, images) of the steps; with `everything`, also of the last step if reading is late.

        Raises TrainingError on all ranks for a loss that is not finite and not excused.
        """
        self.check(kept_back=1 if self.is_late and not everything else 0)
        losses, self._read = self._read, []
        return losses

    def check(self, kept_back: int = 0) -> None:
        """Check all losses except the last `kept_back`, and keep them for `read`. Raises the same errors."""
        while len(self._coming) > kept_back:
            coming = self._coming.popleft()
            loss = float(coming.value.read())
            if not (math.isfinite(loss) or coming.is_excused):
                self._stop(coming, loss)
            self._read.append((loss, coming.images))
            self.last = loss
            self.since_log.add(loss, coming.images)
            self.since_save.add(loss, coming.images)


BAD_BATCH_NAME = "bad_batch.safetensors"
_NO_LAYER = 2**31


@dataclass
class BadLayer:
    """The first layer of this rank whose output has a nan or inf.

    order: number of the call in the forward pass; _NO_LAYER if all layers are finite. images: indices in the
    batch of the images with a nan or inf, if only some of them have one.
    """

    order: int = _NO_LAYER
    name: str = ""
    images: list[int] = field(default_factory=list)


def find_bad_layer(network: nn.Module, micro_batches: Iterable[tuple[Input, Tensor]]) -> BadLayer:
    """Run forward passes, watched by hooks, and return the first layer whose output has a nan or inf.

    micro_batches: input and labels of each pass; together the batch of this rank.
    """
    layer, calls, start, size = BadLayer(), 0, 0, 0

    def look(name: str, output: Any) -> None:
        nonlocal calls
        calls += 1
        bad = [tensor for tensor in tensors_of(output) if not tensor.isfinite().all()]
        if bad and layer.order == _NO_LAYER:
            layer.order, layer.name = calls, name or "the output of the network"
            if bad[0].shape[:1] == (size,):  # else its rows are not images
                rows = (~bad[0].isfinite()).reshape(size, -1).any(1)
                layer.images = [start + row for row in rows.nonzero()[:, 0].tolist() if not rows.all()]

    hooks = [
        module.register_forward_hook(lambda module, inputs, output, name=name: look(name, output))
        for name, module in network.named_modules()
    ]
    try:
        for input, labels in micro_batches:
            size = len(labels)
            network(input, labels, True)
            start += size
    finally:
        for hook in hooks:
            hook.remove()
    return layer


def stop_at_bad_weights(world: World, position: Position, network: nn.Module) -> None:
    """Raise TrainingError on all ranks for trained weights that are not finite; a collective.

    A gradient can be inf although the loss was finite. The next loss would show it, but a checkpoint saved
    before that would be unusable.
    """
    trained = [(name, p.detach()) for name, p in network.named_parameters() if p.requires_grad]
    finite = [part.isfinite().all() for _, part in trained]
    # One synchronisation with the device, not one per parameter.
    is_bad = bool(finite) and not bool(torch.stack(finite).all())
    if not world.all_reduce_max(int(is_bad))[0]:
        return
    mine = [name for (name, _), is_good in zip(trained, finite, strict=True) if not is_good]
    names = sorted({name for part in world.all_gather_object(mine) for name in part})
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    raise TrainingError(
        f"{names[0]}{more} of the network have a nan or inf after step {position.step}, although the loss "
        "was finite: a gradient overflowed, and this state is not saved. Lower the learning rate, use a "
        "longer warm-up or check the network's backward pass, and resume from the last checkpoint"
    )


def idle_parameters(network: nn.Module) -> str:
    """Return a warning if trainable parameters have no gradient, else an empty string."""
    trained = [(name, p.grad is None) for name, p in network.named_parameters() if p.requires_grad]
    idle = [name for name, is_idle in trained if is_idle]
    if not idle:
        return ""
    return (
        f"{len(idle)} of {len(trained)} trainable parameters have no gradient and are not trained, such as "
        f"{idle[0]}: the output of the network is detached, or does not use them"
    )
