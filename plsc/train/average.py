"""Exponential moving average (EMA) of the network's weights, as a callback."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plsc.checkpoint.manifest import EMA
from plsc.models import BaseModel
from plsc.parallel.collectives import sum_over_ranks
from plsc.train.callbacks import Callback, Context


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
