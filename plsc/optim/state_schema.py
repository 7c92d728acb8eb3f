"""What state an optimizer of torch's keeps for a parameter: names, shapes, types.

Some of torch's kernels (the fused ones) take a state for as large as its parameter and read and write beyond
its end otherwise; all of them take states for complete. So what comes from a file is compared with this.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from plsc.parallel.sharding import local_part

StateInfo = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of one state; of a split parameter the whole shape."""


class ExpectedStates:
    """The states that an optimizer makes, found by a step of its like over small tensors."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = {
            id(p): index
            for index, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        }
        self._found: dict[tuple[int, int, torch.dtype], dict[str, StateInfo | None] | None] = {}

    def of(self, parameter: nn.Parameter) -> dict[str, StateInfo | None] | None:
        """Return the states by name, None for one that is a plain number.

        None for all: the optimizer is not torch's, and its states are unknown.
        """
        group, shape = self._groups.get(id(parameter)), tuple(parameter.shape)
        if group is None or not _is_torchs(self._optimizer):
            return None
        key = (group, len(shape), parameter.dtype)
        if key not in self._found:
            self._found[key] = self._try(group, parameter)
        found = self._found[key]
        if found is None:
            return None
        return {
            name: None if info is None else (_enlarged(info[0], shape), info[1])
            for name, info in found.items()
        }

    def _try(self, group: int, like: nn.Parameter) -> dict[str, StateInfo | None]:
        """Return the states of a small parameter, after a step with the settings of the group."""
        small = _small_sizes(like.ndim)
        device = local_part(like).device
        number = nn.Parameter(torch.ones(small, dtype=like.dtype, device=device))
        number.grad = torch.ones_like(number)
        kind = type(self._optimizer)
        if kind is torch.optim.Adagrad:  # whose constructor makes the states
            return {"step": ((), torch.float32), "sum": (small, like.dtype)}
        trial = kind.__new__(kind)
        settings = {**self._optimizer.param_groups[group], "params": [number]}
        # As torch restores a pickled optimizer; the constructors take other arguments, each its own.
        trial.__setstate__(
            {
                "defaults": dict(self._optimizer.defaults),
                "state": defaultdict(dict),
                "param_groups": [settings],
            }
        )
        trial.step()
        return {name: _info(value) for name, value in trial.state[number].items()}


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def _info(value: Any) -> StateInfo | None:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None


def _small_sizes(ndim: int) -> tuple[int, ...]:
    return tuple(range(2, 2 + ndim))


def _enlarged(shape: tuple[int, ...], whole: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that a small parameter's state has for one of shape `whole`.

    A size is the parameter's, or 1 where the state has one number for many.
    """
    if len(shape) != len(whole):
        return shape
    small = _small_sizes(len(whole))
    return tuple(
        size if mine == theirs else mine
        for mine, theirs, size in zip(shape, small, whole, strict=True)
    )
