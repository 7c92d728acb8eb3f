"""What a run must remember: where it is, and the tensors that training changes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plsc.checkpoint import ShardedTensor
from plsc.checkpoint.manifest import (
    BACKBONE,
    CLASS_OPTIMIZER,
    CLASS_WEIGHTS,
    OPTIMIZER,
    STATISTICS,
    Role,
    TensorInfo,
)
from plsc.checkpoint.save import Tensors, local_of
from plsc.checkpoint.shard_file import DTYPES
from plsc.errors import CheckpointError
from plsc.heads import Head, RowOptimizer
from plsc.heads.joint import JointHead, JointRows, each_head
from plsc.optim.optimizers import FULL_RATE, ExpectedStates, StateInfo
from plsc.parallel.backbone import local_part, split_rows

Numbers = Mapping[str, Mapping[str, float]]
"""Plain numbers of the optimizer's state, by their names, by the key of the tensor that they belong to."""

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


@dataclass
class Position:
    """How far the run is: counts of steps made and of epochs finished.

    updates: the steps that changed the weights, which the learning rate follows; the others were skipped.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    updates: int = 0

    def advance(self, is_skipped: bool = False) -> None:
        """One more step is made."""
        self.step += 1
        self.step_in_epoch += 1
        self.updates += not is_skipped

    def next_epoch(self) -> None:
        """The epoch is finished."""
        self.epoch += 1
        self.step_in_epoch = 0


def collect_tensors(
    network: nn.Module,
    head: Head | JointHead,
    optimizer: torch.optim.Optimizer,
    rows: RowOptimizer | JointRows | None,
) -> dict[Role, Tensor | ShardedTensor]:
    """Return the tensors of a run, replicated and sharded ones, by their roles in a checkpoint.

    Nothing is copied. A sharded backbone's parameters and states of their shape are among the sharded ones.
    """
    found: dict[Role, Tensor | ShardedTensor] = {}
    rest: dict[Role, Tensor] = {Role(BACKBONE, key): value for key, value in network.state_dict().items()}
    for of, one, row_optimizer in each_head(head, rows):
        found |= {Role(STATISTICS, name, of): buffer for name, buffer in one.named_buffers()}
        for name, parameter in one.named_parameters():
            role = Role(CLASS_WEIGHTS, name, of)
            own: dict[Role, Tensor] = {role: parameter.detach()}
            states = {} if row_optimizer is None else row_optimizer.state[parameter]
            own |= {Role(CLASS_OPTIMIZER, state, role.key): tensor for state, tensor in states.items()}
            for role, tensor in own.items():
                rows_of_rank = ShardedTensor(tensor, one.class_num, one.class_range[0])
                found[role] = rows_of_rank if one.is_sharded else tensor
    for key, parameter in _named_parameters(network, head).items():
        for state, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                rest[Role(OPTIMIZER, state, key)] = value
    for role, value in rest.items():
        split, local = split_rows(value), local_part(value).detach()
        if split is None:
            found[role] = local
        else:
            start, mesh = split
            is_copy = mesh is not None and mesh.get_local_rank(0) > 0
            found[role] = ShardedTensor(local, value.shape[0], start, is_copy)
    return found


def collect_numbers(network: nn.Module, head: Head | JointHead, optimizer: torch.optim.Optimizer) -> Numbers:
    """Return what of the optimizer's state are plain numbers, such as a count of steps, for JSON."""
    numbers = {}
    for key, parameter in _named_parameters(network, head).items():
        states = optimizer.state.get(parameter, {})
        found = {name: value for name, value in states.items() if isinstance(value, (int, float))}
        if found:
            numbers[key] = found
    return numbers


def collect_group_numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, float]]:
    """Return the numbers among the settings of each of an optimizer's groups, but for its learning rates.

    Some optimizers outside of torch keep state there.
    """
    return [
        {
            name: value
            for name, value in group.items()
            if isinstance(value, (int, float)) and name not in ("lr", FULL_RATE)
        }
        for group in optimizer.param_groups
    ]


def make_state(
    network: nn.Module,
    head: Head | JointHead,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, TensorInfo],
    numbers: Numbers,
) -> None:
    """Give the optimizer the state that a checkpoint has: numbers, and empty tensors to be loaded into.

    tensors: the checkpoint's, of which those of the optimizer are looked at. Raises CheckpointError for
    state of a parameter that is not here, that is larger than it, or that is not what an optimizer of
    torch's keeps for it.
    """
    named = _named_parameters(network, head)
    expected = ExpectedStates(optimizer)
    given: dict[str, set[str]] = {}
    saved: dict[Role, TensorInfo | float] = {
        info.role: info for info in tensors.values() if info.role.kind == OPTIMIZER
    }
    for of, found in numbers.items():
        saved |= {Role(OPTIMIZER, state, of): number for state, number in found.items()}
    for role in sorted(saved, key=lambda role: role.key):
        key, state, name = role.key, role.name, role.of
        parameter = named.get(name)
        if parameter is None:
            raise CheckpointError(
                f"the checkpoint has optimizer state for {name}, which this model does not have; use the "
                "model that was saved"
            )
        if not parameter.requires_grad:  # frozen since
            continue
        given.setdefault(name, set()).add(state)
        wanted = (expected.of(parameter) or {}).get(state, _ANY)
        value: Any = saved[role]
        info = value if isinstance(value, TensorInfo) else None
        if wanted is not _ANY:
            _check_state(key, wanted, info)
        if info is not None:
            value = _empty_state(key, state, info, parameter, optimizer)
        optimizer.state[parameter][state] = value
    for name, states in given.items():
        _check_complete(name, states, expected.of(named[name]) or ())


def _check_state(key: str, wanted: StateInfo | None, info: TensorInfo | None) -> None:
    """Refuse a state of another shape or type than the optimizer's: its kernels would take it for that."""
    saved = None if info is None else (tuple(info.shape), _DTYPES.get(info.dtype))
    if saved != wanted:
        described = "a number" if info is None else f"{info.dtype} {list(info.shape)}"
        expected = "a number"
        if wanted is not None:
            expected = f"{str(wanted[1]).removeprefix('torch.')} {list(wanted[0])}"
        raise CheckpointError(
            f"the checkpoint's optimizer state {key} is {described}, the optimizer's is {expected}; use the "
            "model and the optimizer that were saved, or set_pretrained, which takes the weights alone"
        )


def check_counts(path: Path, tensors: Tensors) -> None:
    """Refuse loaded counts of steps that are none: rates of Adam and its relatives are powers of them."""
    for role, value in tensors.items():
        tensor = local_of(value)
        if role.kind == OPTIMIZER and role.name == "step" and tensor.numel() == 1:
            count = float(tensor)
            if not 0 <= count < math.inf:
                raise CheckpointError(
                    f"{path}: the optimizer's count of steps {role.key} is {count}, expected a number from "
                    "0; choose another checkpoint"
                )


def _check_complete(name: str, given: set[str], needed: Collection[str]) -> None:
    """Refuse a part of the states that the optimizer makes all at once."""
    missing = sorted(set(needed) - given)
    if missing:
        raise CheckpointError(
            f"the checkpoint has no optimizer state {', '.join(missing)} for {name}, which the optimizer "
            "keeps with this run's settings; leave the optimizer's settings as they were, or use "
            "set_pretrained, which takes the weights alone"
        )


_ANY: Any = object()
_COUNTS = ("step", "mu_product")  # scalars that torch keeps on the CPU, as a rule
_SMALL = 4096  # numbers that a state may have though its parameter is smaller: a count, a table


def _empty_state(
    key: str,
    state: str,
    info: TensorInfo,
    parameter: nn.Parameter,
    optimizer: torch.optim.Optimizer,
) -> Tensor:
    """Return zeros for a state: laid out as the parameter, but counts of steps where torch keeps them."""
    if math.prod(info.shape) > max(parameter.numel(), _SMALL):
        raise CheckpointError(
            f"the checkpoint's optimizer state {key} is {list(info.shape)}, its parameter "
            f"{list(parameter.shape)}; use the model that was saved"
        )
    dtype = _DTYPES.get(info.dtype)
    if dtype is None:
        raise CheckpointError(f"the checkpoint's optimizer state {key} is of unknown type {info.dtype}")
    if state in _COUNTS and not _keeps_counts_beside(parameter, optimizer):
        return torch.zeros(info.shape, dtype=dtype, device="cpu")
    if tuple(info.shape) == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(info.shape, dtype=dtype, device=parameter.device)


def _keeps_counts_beside(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> bool:
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    is_captured = bool(group.get("capturable") or group.get("fused"))
    return is_captured or isinstance(optimizer, torch.optim.ASGD)


def _named_parameters(network: nn.Module, head: Head | JointHead) -> dict[str, nn.Parameter]:
    named = {Role(BACKBONE, name).key: one for name, one in network.named_parameters()}
    for of, one, _ in each_head(head, None):
        named |= {Role(CLASS_WEIGHTS, name, of).key: p for name, p in one.named_parameters()}
    return named
