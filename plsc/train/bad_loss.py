"""Stop a run whose loss or weights are not finite: name the layer, save the batch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from plsc.data.batch import Batch
from plsc.errors import TrainingError
from plsc.inputs import Input
from plsc.parallel.world import World
from plsc.run.position import Position
from plsc.storage.publish import replacing
from plsc.train.watch.layers import tensors_of

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
