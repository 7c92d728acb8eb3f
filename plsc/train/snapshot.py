"""Collect the state of a run for a checkpoint without changing the run; restore the state of each rank.

The state of each rank consists of buffers that differ between ranks and of the global random generators. plsc
does not draw from these generators, but a custom network or reader may draw from `random`, numpy or torch. A
resumed run then draws the same numbers as an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import random
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plsc.checkpoint import Manifest, ShardedTensor, Snapshot
from plsc.checkpoint.manifest import (
    BACKBONE,
    CLASS_OPTIMIZER,
    CLASS_WEIGHTS,
    METRICS_KEY,
    OPTIMIZER,
    RANK,
    STATISTICS,
    HeadInfo,
    Role,
    TensorInfo,
    bytes_of,
    parse_manifest,
)
from plsc.checkpoint.save import class_name_tensors, info_of
from plsc.config.option import is_finite_number, names_code
from plsc.errors import CheckpointError
from plsc.heads import Head, RowOptimizer
from plsc.models.base_model import constructor_arguments
from plsc.optim import (
    FULL_RATE,
    ExpectedStates,
    StateInfo,
    has_own_state_dict,
)
from plsc.parallel.backbone import equal_buffers
from plsc.parallel.world import World, class_ranges
from plsc.seeds import hash_key
from plsc.storage.urls import without_secrets
from plsc.train.callbacks import Run
from plsc.values import decode, encode
from plsc.version import __version__

ARGUMENTS_KEY = "model_arguments"  # of the manifest's scalars
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


_PYTHON, _NUMPY = 0, 1  # parts of the hash keys


def take_snapshot(
    run: Run,
    metrics: dict[str, float],
    run_id: str = "",
    lineage: list[dict[str, Any]] | None = None,
    is_check: bool = False,
) -> Snapshot:
    """Return the state of the run without copying it; a collective. The run is unchanged.

    metrics: values for `Retention`. lineage: class changes of earlier checkpoints. is_check: without the
    state that plsc itself copies or gathers.
    """
    callbacks, more = run.callbacks.state(of_users=is_check)
    rest: dict[str, Any] = {}
    if names_code(run.options.optim.optimizer):  # those of torch have no other state
        rest, tensors = collect_rest(run)
        more |= tensors
    manifest = Manifest(
        plsc_version=__version__,
        step=run.position.step,
        epoch=run.position.epoch,
        step_in_epoch=run.position.step_in_epoch,
        world_size=run.world.size,
        emb_size=run.options.model.emb_size,
        heads={"": describe_head(run)},
        options=without_secrets(run.options.as_dict()),
        scalars={
            METRICS_KEY: metrics,
            ARGUMENTS_KEY: constructor_arguments(run.network),
            **_scalars(run),
            "callbacks": callbacks,
            **rest,
        },
        lineage=lineage or [],
        run_id=run_id,
    )
    own = collect_tensors(run.network, run.head, run.optimizer, run.rows) if is_check else _tensors(run)
    return Snapshot({**own, **more}, manifest)


def check_snapshot(run: Run) -> None:
    """Raise CheckpointError if the state cannot be saved, or not read again; no tensor is copied.

    The buffers must be those of the first call, at the start: a resumed run loads into no others.
    """
    snapshot = take_snapshot(run, {}, is_check=True)
    infos = {role.key: info_of(role, value) for role, value in snapshot.tensors.items()}
    parse_manifest(replace(snapshot.manifest, tensors=infos).to_json().encode(), "the checkpoint of this run")
    run.unsaved = check_attributes(run)
    buffers = {name: infos[Role(BACKBONE, name).key] for name in _buffers(run)}
    run.buffers = buffers if run.buffers is None else run.buffers
    if changed := dict(run.buffers.items() ^ buffers.items()):
        raise CheckpointError(
            f"the network's buffer {min(changed)} was created, removed, resized or converted by the first "
            "step; register it with its final shape and type, or with persistent=False"
        )


def describe_head(run: Run) -> HeadInfo:
    """Return what a checkpoint says about the head."""
    head = run.head
    return HeadInfo(
        head.class_num,
        class_ranges(head.class_num, run.world.size if head.is_sharded else 1),
        run.options.head.loss_type,
        run.data.num_samples,
        getattr(head, "computed_by", None),
    )


def _tensors(run: Run) -> dict[Role, Tensor | ShardedTensor]:
    """Return the tensors of a checkpoint; a collective.

    They are not copies, except for the network's buffers. Where buffers differ between ranks (batch norm that
    is not synchronised), ``backbone.<buffer>`` is their mean. The buffers of rank r are concatenated, in the
    order of `_buffers`, in ``rank<r>.buffers.<type>``, for a resume on the same number of ranks.
    ``rank<r>.random`` is the state of its random generators; `class_name_tensors` holds the class names.
    """
    tensors = collect_tensors(run.network, run.head, run.optimizer, run.rows)
    mine = pack_buffers(run)
    with equal_buffers(run.network, run.world.backbone_group):
        for name, buffer in _buffers(run).items():
            tensors[Role(BACKBONE, name)] = buffer.detach().clone()
        equal = pack_buffers(run)
    tensors[_own(run, "random")] = pack_generators(run.world.device)
    for kind, packed in mine.items():
        if not torch.equal(packed.view(torch.uint8), equal[kind].view(torch.uint8)):
            tensors[_own(run, f"buffers.{kind}")] = packed
    if run.world.is_main and run.data.class_names is not None:
        tensors |= class_name_tensors(run.data.class_names)
    return tensors


def _own(run: Run, name: str) -> Role:
    return Role(RANK, name, str(run.world.rank))


def _scalars(run: Run) -> dict[str, Any]:
    """Return the numbers and names of a checkpoint, as plain JSON."""
    return {
        "global_batch": run.global_batch,
        "steps_per_epoch": run.data.loader.steps_per_epoch,
        "length_step": run.length.step,
        "length_epoch": run.length.epoch,
        "optimizer": type(run.optimizer).__name__,
        "updates": run.position.updates,
        "loss_scaling": None if run.scaler is None else run.scaler.state(),
        "optimizer_numbers": collect_numbers(run.network, run.head, run.optimizer),
    }


def own_tensors(run: Run, manifest: Manifest) -> dict[Role, Tensor]:
    """Return empty tensors for the checkpoint's state of this rank; once loaded, pass them to `take_own`.

    Empty if the checkpoint was saved by another number of ranks.
    """
    if manifest.world_size != run.world.size:
        return {}
    own: dict[Role, Tensor] = {}
    for kind, packed in pack_buffers(run).items():
        role = _own(run, f"buffers.{kind}")
        if role.key in manifest.tensors:
            own[role] = torch.empty_like(packed)
    random = _own(run, "random")
    info = manifest.tensors.get(random.key)
    if info is not None:
        own[random] = torch.empty(info.shape, dtype=torch.uint8)
    return own


def take_own(run: Run, own: dict[Role, Tensor]) -> bool:
    """Restore the buffers and random generators of this rank; return whether there were generators."""
    for kind in pack_buffers(run):
        packed = own.get(_own(run, f"buffers.{kind}"))
        if packed is not None:
            _unpack_buffers(run, kind, packed)
    state = own.get(_own(run, "random"))
    if state is None:
        return False
    unpack_generators(state, run.world.device)
    return True


def pack_buffers(run: Run) -> dict[str, Tensor]:
    """Return copies of the network's saved buffers, concatenated to one tensor [n] per type."""
    kinds: dict[str, list[Tensor]] = {}
    for buffer in _buffers(run).values():
        kinds.setdefault(_kind(buffer), []).append(buffer.detach().flatten())
    return {kind: torch.cat(parts) for kind, parts in kinds.items()}


def _unpack_buffers(run: Run, kind: str, packed: Tensor) -> None:
    buffers = [buffer for buffer in _buffers(run).values() if _kind(buffer) == kind]
    parts = packed.split([buffer.numel() for buffer in buffers])
    with torch.no_grad():
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))


def _buffers(run: Run) -> dict[str, Tensor]:
    """Return the buffers in the network's state dict, by name, in its order."""
    saved = set(run.network.state_dict())
    every = run.network.named_buffers(remove_duplicate=False)
    return {name: buffer for name, buffer in every if name in saved}


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def seed_generators(world: World, *key: int) -> None:
    """Seed ``random`` and ``numpy.random`` with a key and the rank; torch is seeded at each step."""
    random.seed(hash_key(*key, world.rank, _PYTHON))
    np.random.seed(hash_key(*key, world.rank, _NUMPY) % 2**32)


def pack_generators(device: torch.device) -> Tensor:
    """Return the state of this rank's global random generators as JSON in a tensor, uint8 [n]."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
    }
    if device.type == "cuda":
        state["cuda"] = bytes(torch.cuda.get_rng_state(device).tolist()).hex()
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def unpack_generators(packed: Tensor, device: torch.device) -> None:
    """Restore the global random generators from the result of `pack_generators`.

    The state of a GPU generator is ignored on a CPU. Raises CheckpointError for an invalid state.
    """
    try:
        state = json.loads(bytes(packed.tolist()))
        version, words, gauss = state["python"]
        python = (version, tuple(words), gauss)
        name, keys, *rest = state["numpy"]
        if not 0 <= rest[0] <= len(keys):  # numpy does not check this index before it reads
            raise ValueError(f"position {rest[0]} of {len(keys)}")
        numpy_state = (name, np.array(keys, dtype=np.uint32), *rest)
        torch_state = _bytes(state["torch"])
        random.setstate(python)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(_bytes(state["cuda"]), device)
    except (ValueError, TypeError, LookupError, OverflowError, RuntimeError) as error:
        raise CheckpointError(
            f"the state of the random generators in the checkpoint is damaged: {error}"
        ) from error


def _bytes(text: Any) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
