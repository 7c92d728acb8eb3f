"""The losses of steps, read without waiting for the device; a loss that is not finite stops the run."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from plsc.data.batch import Batch
from plsc.errors import TrainingError
from plsc.inputs import Input
from plsc.parallel.collectives import Arriving
from plsc.parallel.world import World
from plsc.storage.publish import replacing
from plsc.train.callbacks import Position
from plsc.train.layers import tensors_of


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


BAD_BATCH_NAME = "bad_batch.json"
BAD_IMAGES_NAME = "bad_batch.safetensors"
_NAMES_SHOWN = 4
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


def stop_at_bad_loss(
    world: World,
    folder: Path,
    position: Position,
    loss: float,
    rate: float,
    batch: Batch,
    layer: BadLayer,
    note: str = "",
) -> NoReturn:
    """Raise TrainingError with the step, the learning rate, the layer and the samples; a collective.

    position: before the step; the message counts the step, as log lines do. batch, layer: of this rank.
    note: about the layer. Writes the names of the global batch to bad_batch.json, and the images and labels
    of the first rank with the layer to bad_batch.safetensors.
    """
    names, step = list(batch.names), position.step + 1
    mine = layer.order, layer.name, names, [names[index] for index in layer.images]
    orders, layers, all_names, bad_names = zip(*world.all_gather_object(mine), strict=True)
    ranks = [rank for rank, order in enumerate(orders) if order == min(orders)]
    name = layers[ranks[0]]
    everywhere = [sample for part in all_names for sample in part]
    bad = [sample for rank in ranks for sample in bad_names[rank]] if min(orders) < _NO_LAYER else []
    if world.is_main:
        report = {
            "step": step, "loss": str(loss), "lr": rate, "layer": name, "ranks": ranks,
            "bad_samples": bad, "samples": everywhere,
        }  # fmt: skip
        with replacing(folder / BAD_BATCH_NAME) as temporary:
            temporary.write_text(json.dumps(report, indent=1), encoding="utf-8")
    if world.rank == ranks[0]:
        images = batch.final_images()
        tensors = images if isinstance(images, dict) else {"images": images}
        saved = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        with replacing(folder / BAD_IMAGES_NAME) as temporary:
            save_file({**saved, "labels": batch.labels}, temporary)
    world.barrier()  # the launcher ends all ranks when one fails
    of = f" (rank {', '.join(map(str, ranks))})" if world.size > 1 else ""
    where = f"the first layer with a nan or inf: {name}{of}{note}"
    if min(orders) == _NO_LAYER:
        where = "no layer of the network has a nan or inf, so the head produced it"
    shown = ", ".join((bad or everywhere)[:_NAMES_SHOWN])
    more = len(bad or everywhere) - _NAMES_SHOWN
    raise TrainingError(
        f"the loss is {loss} at step {step} (epoch {position.epoch + 1}, learning rate "
        f"{rate:g}); {where}; samples{'' if bad else ' of the batch'}: {shown}"
        f"{f' and {more} more' if more > 0 else ''}; the batch is saved to {folder / BAD_IMAGES_NAME}, its "
        f"names to {BAD_BATCH_NAME}. Lower the learning rate or use a longer warm-up, check these images, "
        "and resume from the last checkpoint"
    )


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
