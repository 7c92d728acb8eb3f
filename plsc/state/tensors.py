"""The tensors and numbers that training changes, by their roles in a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
from plsc.config.option import is_finite_number
from plsc.errors import CheckpointError
from plsc.heads import Head, RowOptimizer
from plsc.optim.optimizers import ExpectedStates, StateInfo
from plsc.values import decode, encode

Numbers = Mapping[str, Any]
"""The optimizer state that is not a tensor, as JSON, by the key of the parameter."""
REST = "rest"
"""In place of the parameter in the roles of optimizer state that belongs to none."""
NEIGHBOURS = "neighbours"
"""Name of the lists of hard negatives, which belong to class weights as the states of their optimizer do."""


def collect_tensors(
    network: nn.Module,
    head: Head,
    optimizer: torch.optim.Optimizer,
    rows: RowOptimizer | None,
) -> dict[Role, Tensor | ShardedTensor]:
    """Return the replicated and sharded tensors of a run, by their roles in a checkpoint.

    rows: the optimizer of sharded class weights. Tensors are not copied. Class weights in a file are left
    out, with their states.
    """
    tensors: dict[Role, Tensor | ShardedTensor] = {}
    rest: dict[Role, Tensor] = {Role(BACKBONE, key): value for key, value in network.state_dict().items()}
    tensors |= {Role(STATISTICS, name): buffer for name, buffer in head.statistics().items()}
    for name, parameter in head.named_parameters():
        if head.file is not None and name == "weight":
            continue
        role = Role(CLASS_WEIGHTS, name)
        own: dict[Role, Tensor] = {role: parameter.detach()}
        states = {} if rows is None else rows.state[parameter]
        own |= {Role(CLASS_OPTIMIZER, state, role.key): tensor for state, tensor in states.items()}
        neighbours = getattr(head, "neighbours", None)
        if name == "weight" and neighbours is not None:
            own[Role(CLASS_OPTIMIZER, NEIGHBOURS, role.key)] = neighbours.lists
        for role, tensor in own.items():
            rows_of_rank = ShardedTensor(tensor, head.class_num, head.class_range[0])
            tensors[role] = rows_of_rank if head.is_sharded else tensor
    for role, value in rest.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"the network's {role.name} is a {type(value).__name__}; expected a tensor")
    for key, (_, states) in states_of(network, head, optimizer).items():
        rest |= {Role(OPTIMIZER, state, key): value for state, value in states.items()}
    return tensors | {role: value.detach() for role, value in rest.items()}


def collect_numbers(network: nn.Module, head: Head, optimizer: torch.optim.Optimizer) -> Numbers:
    """Return the optimizer state that is not a tensor, such as counts and lists, as JSON."""
    return {key: values for key, (values, _) in states_of(network, head, optimizer).items() if values}


def states_of(
    network: nn.Module, head: Head, optimizer: torch.optim.Optimizer
) -> dict[str, tuple[Any, dict[str, Tensor]]]:
    """Return the optimizer state as JSON, and its tensors, by the key of the parameter.

    Of torch's optimizers, JSON only if they keep more than tensors.
    """
    is_torchs, states = type(optimizer).__module__.startswith("torch.optim"), {}
    for key, parameter in named_parameters(network, head).items():
        own, tensors = optimizer.state.get(parameter, {}), dict[str, Tensor]()
        values = encode(own, f"the optimizer state of {key}", tensors)
        is_listed = own and not (is_torchs and len(tensors) == len(own))
        states[key] = values if is_listed else None, tensors
    return states


def make_state(
    network: nn.Module,
    head: Head,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, TensorInfo],
    numbers: Numbers,
) -> None:
    """Create the optimizer state of a checkpoint: its numbers, and empty tensors to load into.

    tensors: all tensors of the checkpoint; only those of the optimizer are used. Raises CheckpointError for
    state of an unknown parameter, state that is too large, or state that the torch optimizer does not keep.
    """
    named = named_parameters(network, head)
    expected = ExpectedStates(optimizer)
    saved: dict[str, dict[str, TensorInfo]] = {name: {} for name in numbers}
    for info in tensors.values():
        if info.role.kind == OPTIMIZER and info.role.of != REST:
            saved.setdefault(info.role.of, {})[info.role.name] = info
    for name, infos in sorted(saved.items()):
        parameter = named.get(name)
        if parameter is None:
            raise CheckpointError(
                f"the checkpoint has optimizer state for {name}, which this network does not have; use the "
                "saved network"
            )
        shapes = {info.shape for state, info in infos.items() if state not in _COUNTS}
        if not parameter.requires_grad and shapes - {tuple(parameter.shape)}:
            continue  # frozen here; a callback may train it later, and the optimizer does not check it
        wanted = expected.of(parameter) or {}
        own = {
            state: _empty_state(info.role.key, state, info, parameter, optimizer)
            for state, info in infos.items()
        }
        values = decode(numbers.get(name, {}), own)  # takes from `own` what is within lists
        states = {**own, **values}
        for state, needed in wanted.items():
            _check_state(Role(OPTIMIZER, state, name).key, needed, states.get(state))
        optimizer.state[parameter].update(states)


def _check_state(key: str, wanted: StateInfo | None, state: Any) -> None:
    """Raise CheckpointError for state of the wrong shape or type: the optimizer does not check it."""
    is_tensor = isinstance(state, Tensor)
    saved = (tuple(state.shape), state.dtype) if is_tensor else not is_finite_number(state) or None
    if saved != wanted:
        described = f"{state.dtype} {list(state.shape)}" if is_tensor else "missing, or not a tensor"
        expected = "a number"
        if wanted is not None:
            expected = f"{str(wanted[1]).removeprefix('torch.')} {list(wanted[0])}"
        raise CheckpointError(
            f"the optimizer state {key} in the checkpoint is {described}, but this optimizer expects "
            f"{expected}; use the network and optimizer that were saved, or load only the weights with "
            "model.pretrained"
        )


def check_counts(path: Path, tensors: Tensors) -> None:
    """Raise CheckpointError for invalid step counts: Adam and its variants compute powers with them."""
    for role, value in tensors.items():
        tensor = local_of(value)
        if role.kind == OPTIMIZER and role.name == "step" and tensor.numel() == 1:
            count = float(tensor)
            if not 0 <= count < math.inf:
                raise CheckpointError(
                    f"{path}: the optimizer's step count {role.key} is {count}, expected a finite number of "
                    "at least 0; choose another checkpoint"
                )


_COUNTS = ("step", "mu_product")  # scalars that torch usually keeps on the CPU
_SMALL = 4096  # elements that a state may have even if its parameter is smaller, such as counts and tables


def _empty_state(
    key: str, state: str, info: TensorInfo, parameter: nn.Parameter, optimizer: torch.optim.Optimizer
) -> Tensor:
    """Return zeros for a state: in the parameter's layout, but step counts on the device that torch uses."""
    if math.prod(info.shape) > max(parameter.numel() ** 2, _SMALL):  # of a preconditioner
        raise CheckpointError(
            f"the optimizer state {key} in the checkpoint has shape {list(info.shape)}, but its parameter "
            f"has {list(parameter.shape)}; use the network that was saved"
        )
    dtype: torch.dtype = getattr(torch, info.dtype)  # one of a few: see TensorInfo
    if state in _COUNTS and not _keeps_counts_on_device(parameter, optimizer):
        return torch.zeros(info.shape, dtype=dtype, device="cpu")
    if tuple(info.shape) == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(info.shape, dtype=dtype, device=parameter.device)


def _keeps_counts_on_device(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> bool:
    groups = optimizer.param_groups
    group = next((g for g in groups if any(p is parameter for p in g["params"])), groups[0])
    is_captured = bool(group.get("capturable") or group.get("fused"))
    return is_captured or isinstance(optimizer, torch.optim.ASGD)


def named_parameters(network: nn.Module, head: Head) -> dict[str, nn.Parameter]:
    """Return the parameters of the network and the head by the keys of their tensors."""
    named = {Role(BACKBONE, name).key: parameter for name, parameter in network.named_parameters()}
    return named | {Role(CLASS_WEIGHTS, name).key: p for name, p in head.named_parameters()}
