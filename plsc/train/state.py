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
from plsc.checkpoint.layout import DTYPES
from plsc.checkpoint.manifest import TensorInfo
from plsc.errors import CheckpointError
from plsc.heads import Head, RowOptimizer
from plsc.heads.joint import JointHead, JointRows, each_head
from plsc.optim.factory import FULL_RATE
from plsc.optim.states import ExpectedStates, StateInfo
from plsc.parallel.sharding import local_part, split_rows

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
) -> tuple[dict[str, Tensor], dict[str, ShardedTensor]]:
    """Return the replicated and the sharded tensors of a run, by checkpoint key; no copies.

    Keys: ``backbone.<state dict key>``, ``head.weight``, ``head.<buffer>`` for a margin's statistics,
    ``momentum.<key>`` and ``optimizer.<state>.<key>`` for the optimizer's, ``rows.<parameter>.<state>`` for
    the row optimizer's. A sharded backbone's parameters and states of their shape are among the sharded
    ones. Of several heads: ``heads.<name>.weight``, ``rows.<name>.<parameter>.<state>``.
    """
    backbone = {f"backbone.{key}": value for key, value in network.state_dict().items()}
    whole: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    sharded: dict[str, ShardedTensor] = {}
    for prefix, rows_prefix, one, optimizer_of_rows in each_head(head, rows):
        whole.update({f"{prefix}.{key}": buffer for key, buffer in one.named_buffers()})
        own: dict[str, Tensor] = {}
        for name, parameter in one.named_parameters():
            own[f"{prefix}.{name}"] = parameter
            states = {} if optimizer_of_rows is None else optimizer_of_rows.state[parameter]
            for state, tensor in states.items():
                own[f"{rows_prefix}.{name}.{state}"] = tensor
        if not one.is_sharded:
            dense.update(own)
            continue
        first = one.class_range[0]
        for key, tensor in own.items():
            sharded[key] = ShardedTensor(tensor.detach(), one.class_num, first)
    for key, parameter in _named_parameters(network, head).items():
        for state, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                backbone[_state_key(state, key)] = value
    for key, value in backbone.items():
        split = split_rows(value)
        if split is None:
            whole[key] = local_part(value)
        else:
            sharded[key] = ShardedTensor(local_part(value).detach(), value.shape[0], *split)
    whole.update(dense)
    return {key: tensor.detach() for key, tensor in whole.items()}, sharded


def collect_numbers(
    network: nn.Module, head: Head | JointHead, optimizer: torch.optim.Optimizer
) -> dict[str, float]:
    """Return what of the optimizer's state are plain numbers, such as a count of steps, by key, for JSON."""
    numbers = {}
    for key, parameter in _named_parameters(network, head).items():
        for state, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, (int, float)):
                numbers[_state_key(state, key)] = value
    return numbers


def is_optimizer_state(key: str) -> bool:
    """Whether a checkpoint's key is that of state of the optimizer, for one of its parameters."""
    return key.startswith(_PREFIXES)


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
    numbers: Mapping[str, float],
) -> None:
    """Give the optimizer the state that a checkpoint has: numbers, and empty tensors to be loaded into.

    tensors: the checkpoint's, of which those of the optimizer are looked at; numbers: of
    `collect_numbers`. Raises CheckpointError for state of a parameter that is not here, that is larger
    than it, or that is not what an optimizer of torch's keeps for it.
    """
    named = _named_parameters(network, head)
    expected = ExpectedStates(optimizer)
    given: dict[str, set[str]] = {}
    for key in sorted({key for key in (*tensors, *numbers) if is_optimizer_state(key)}):
        state, name = split_state_key(key)
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
        if wanted is not _ANY:
            _check_state(key, wanted, None if key in numbers else tensors[key])
        if key in numbers:
            optimizer.state[parameter][state] = numbers[key]
        else:
            empty = _empty_state(key, state, tensors[key], parameter, optimizer)
            optimizer.state[parameter][state] = empty
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


def check_counts(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse loaded counts of steps that are none: rates of Adam and its relatives are powers of them."""
    for key, tensor in tensors.items():
        if is_optimizer_state(key) and split_state_key(key)[0] == "step" and tensor.numel() == 1:
            count = float(tensor)
            if not 0 <= count < math.inf:
                raise CheckpointError(
                    f"{path}: the optimizer's count of steps {key} is {count}, expected a number from 0; "
                    "choose another checkpoint"
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
_MOMENTUM, _OTHER = "momentum.", "optimizer."
_PREFIXES = (_MOMENTUM, _OTHER)
_COUNTS = ("step", "mu_product")  # scalars that torch keeps on the CPU, as a rule
_SMALL = 4096  # numbers that a state may have though its parameter is smaller: a count, a table


def _state_key(state: str, key: str) -> str:
    return f"{_MOMENTUM}{key}" if state == "momentum_buffer" else f"{_OTHER}{state}.{key}"


def split_state_key(key: str) -> tuple[str, str]:
    """Return the name of the state and that of the parameter, of a key of the optimizer's state."""
    if key.startswith(_MOMENTUM):
        return "momentum_buffer", key.removeprefix(_MOMENTUM)
    state, _, name = key.removeprefix(_OTHER).partition(".")
    return state, name


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
        raise CheckpointError(
            f"the checkpoint's optimizer state {key} is of unknown type {info.dtype}"
        )
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
    named = {f"backbone.{name}": parameter for name, parameter in network.named_parameters()}
    for prefix, _, one, _ in each_head(head, None):
        named.update({f"{prefix}.{name}": parameter for name, parameter in one.named_parameters()})
    return named
