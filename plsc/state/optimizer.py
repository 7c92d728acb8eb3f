"""The state of an optimizer of other people, except what it keeps per parameter."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from plsc.checkpoint.manifest import OPTIMIZER, Role
from plsc.checkpoint.shard_file import bytes_of
from plsc.errors import CheckpointError
from plsc.optim.optimizers import FULL_RATE, has_own_state_dict
from plsc.run.run import Run
from plsc.state.tensors import REST, named_parameters, states_of
from plsc.values import decode, encode

# The schedule sets the rates; the others are attributes of torch.
_NOT_STATE = ("params", "lr", FULL_RATE, "state", "param_groups", "defaults", "found_inf", "grad_scale")
GROUPS, ATTRIBUTES, OWN = "optimizer_groups", "optimizer_attributes", "optimizer_own"


def collect_rest(run: Run) -> tuple[dict[str, Any], dict[Role, Tensor]]:
    """Return the state as JSON, and its tensors. Raises CheckpointError for what cannot be saved.

    GROUPS, ATTRIBUTES: what they did not have at the start. OWN: what its own ``state_dict`` returns.
    """
    optimizer, tensors = run.optimizer, dict[str, Tensor]()
    what, is_own = f"the optimizer {type(optimizer).__name__}", has_own_state_dict(optimizer)
    known: dict[int, Any] = {
        id(one): ["", key] for key, one in named_parameters(run.network, run.head).items()
    }
    for key, (_, states) in states_of(run.network, run.head, optimizer).items():
        known |= {id(one): [name, key] for name, one in states.items()}
    places = vars(optimizer), *optimizer.param_groups
    found, *groups = [_changed(*pair) for pair in zip(places, run.settings, strict=True)]
    own = optimizer.state_dict() if is_own else optimizer.state
    own = {name: one for name, one in own.items() if not isinstance(name, Tensor) and name != "param_groups"}
    attributes = {}
    for name, one in found.items():
        with suppress(CheckpointError):  # objects, such as other optimizers
            attributes[name] = encode(one, what, tensors, known, name)
    saved = {
        GROUPS: encode(groups, what, tensors, known, "group"),
        ATTRIBUTES: attributes,
        OWN: encode(own, what, tensors, known, "state"),
    }
    inner = [one.state for one in vars(optimizer).values() if isinstance(one, torch.optim.Optimizer)]
    kept = {id(t) for state in inner for one in state.values() for t in one.values() if torch.is_tensor(t)}
    if kept - {*known, *map(id, tensors.values())}:
        raise CheckpointError(f"the state_dict() of {what} lacks the state of an inner optimizer")
    return saved, {Role(OPTIMIZER, name, REST): one.detach() for name, one in tensors.items()}


def _changed(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the values that may differ from those at the start; some may have changed in place."""
    fixed = (int, float, str, tuple, type(None), torch.dtype)
    return {
        name: value
        for name, value in now.items()
        if name not in _NOT_STATE and not str(name).startswith("_optimizer") and not callable(value)
        if not (name in before and isinstance(value, fixed) and value == before[name])
    }


def check_attributes(run: Run) -> dict[str, bytes]:
    """Return a hash of each attribute that checkpoints lack, such as a deque, a generator or an object.

    Raises CheckpointError if one has changed since the last check; an optimizer with its own ``state_dict``
    knows which ones are state.
    """
    saved, found = collect_rest(run)[0][ATTRIBUTES], dict[str, bytes]()
    if has_own_state_dict(run.optimizer):
        return found
    for name in vars(run.optimizer).keys() - saved.keys() - {"state", "param_groups"}:
        content = _Content()
        with suppress(Exception):  # a lock, or a process group
            content.dump(getattr(run.optimizer, name))
            found[name] = content.hash.digest()
        if found.get(name) != run.unsaved.get(name, found.get(name)):
            raise CheckpointError(
                f"{name!r} of the optimizer {type(run.optimizer).__name__} changes in a step, but cannot be "
                "saved; return its content in state_dict(), or keep it outside of the optimizer"
            )
    return found


class _Content(pickle.Pickler):
    """Hashes the content of an object, to compare it with itself later, without other parts of the run."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self.write = self.hash.update
        super().__init__(self)

    def persistent_id(self, one: Any) -> str | None:
        if isinstance(one, Tensor):
            return f"{id(one)} {0 if isinstance(one, nn.Parameter) else one._version}"
        return str(id(one)) if isinstance(one, (nn.Module, torch.optim.Optimizer)) else None


def restore_rest(run: Run, scalars: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Restore the result of `collect_rest`, after the state of the parameters. Raises CheckpointError."""
    optimizer, what = run.optimizer, f"the state of the optimizer {type(run.optimizer).__name__}"
    states, named = states_of(run.network, run.head, optimizer), named_parameters(run.network, run.head)
    groups, attributes, own = decode(
        [scalars.get(GROUPS, []), scalars.get(ATTRIBUTES, {}), scalars.get(OWN, {})],
        dict(tensors),
        run.world.device,
        lambda name, key: states[key][1][name] if name else named[key],
    )
    places = zip(optimizer.param_groups, groups or [{}] * len(optimizer.param_groups), strict=True)
    for values, saved in ((vars(optimizer), attributes), *places):
        values.update(_changed(saved, {}))
    if not has_own_state_dict(optimizer):
        optimizer.state.update(own)
        return
    kept = {parameter: dict(values) for parameter, values in optimizer.state.items()}
    here = optimizer.state_dict()
    optimizer.load_state_dict({**here, **own})
    optimizer.state.update(kept)  # torch changes data types
    again, others = collect_rest(run)
    same = (bytes_of(one.cpu()).equal(bytes_of(tensors[role.name])) for role, one in others.items())
    if again[OWN] != scalars.get(OWN) or not all(same):
        raise CheckpointError(
            f"{what} is another one after load_state_dict(): the run would not resume exactly"
        )
