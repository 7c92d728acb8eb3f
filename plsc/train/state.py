"""What a run must remember: where it is, and the tensors that training changes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plsc.checkpoint import ShardedTensor
from plsc.errors import CheckpointError
from plsc.heads import Head, RowOptimizer


@dataclass
class Position:
    """How far the run is: counts of steps made and of epochs finished."""

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0

    def advance(self) -> None:
        """One more step is made."""
        self.step += 1
        self.step_in_epoch += 1

    def next_epoch(self) -> None:
        """The epoch is finished."""
        self.epoch += 1
        self.step_in_epoch = 0


def collect_tensors(
    network: nn.Module,
    head: Head,
    optimizer: torch.optim.Optimizer,
    rows: RowOptimizer | None,
) -> tuple[dict[str, Tensor], dict[str, ShardedTensor]]:
    """Return the replicated and the sharded tensors of a run, by checkpoint key; no copies.

    Keys: ``backbone.<state dict key>``, ``head.weight``, ``head.<buffer>`` for a margin's statistics,
    ``momentum.<key>`` for the optimizer's, ``rows.<parameter>.<state>`` for the row optimizer's.
    """
    whole = {f"backbone.{key}": value for key, value in network.state_dict().items()}
    whole.update({f"head.{key}": buffer for key, buffer in head.named_buffers()})
    split: dict[str, Tensor] = {}
    for name, parameter in head.named_parameters():
        split[f"head.{name}"] = parameter
        for state, tensor in (rows.state[parameter] if rows is not None else {}).items():
            split[f"rows.{name}.{state}"] = tensor
    for key, parameter in _named_parameters(network, head).items():
        buffer = optimizer.state.get(parameter, {}).get("momentum_buffer")
        if buffer is not None:
            whole[f"momentum.{key}"] = buffer
    if not head.is_sharded:
        whole.update(split)
        split = {}
    first = head.class_range[0]
    sharded = {key: ShardedTensor(t.detach(), head.class_num, first) for key, t in split.items()}
    return {key: tensor.detach() for key, tensor in whole.items()}, sharded


def make_momentum(
    network: nn.Module, head: Head, optimizer: torch.optim.Optimizer, keys: set[str]
) -> None:
    """Give the optimizer empty momentum buffers where the checkpoint has some, to be loaded into.

    keys: the checkpoint's. Raises CheckpointError for momentum of a parameter that is not here.
    """
    named = _named_parameters(network, head)
    for key in sorted(keys):
        if not key.startswith("momentum."):
            continue
        parameter = named.get(key.removeprefix("momentum."))
        if parameter is None:
            raise CheckpointError(
                f"the checkpoint has optimizer state for {key.removeprefix('momentum.')}, which this "
                "model does not have; use the model that was saved"
            )
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _named_parameters(network: nn.Module, head: Head) -> dict[str, nn.Parameter]:
    named = {f"backbone.{name}": parameter for name, parameter in network.named_parameters()}
    named.update({f"head.{name}": parameter for name, parameter in head.named_parameters()})
    return named
