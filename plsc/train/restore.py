"""Restore a run from a checkpoint, or start it from pretrained weights."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plsc.checkpoint import Manifest, load_tensors
from plsc.checkpoint.load import OpenCheckpoint, StoredTensor, read_class_names
from plsc.checkpoint.manifest import (
    BACKBONE,
    CALLBACK,
    CLASS_WEIGHTS,
    OPTIMIZER,
    STATISTICS,
    Role,
    TensorInfo,
    bytes_of,
)
from plsc.checkpoint.remote import fetch
from plsc.checkpoint.save import info_of
from plsc.checkpoint.tensor_files import (
    Match,
    RowParts,
    converted,
    join_rows,
    match_into,
    read_state_dict,
    refuse_no_match,
    shorten,
    shortened,
)
from plsc.config.option import is_finite_number, names_code, shown_value
from plsc.data.reader import ReaderLoader
from plsc.errors import CheckpointError
from plsc.heads import Head, ShardedHead
from plsc.heads.weights import SCALE_BYTES, decode_rows, encode_rows, scale_bytes
from plsc.optim import ExpectedStates, StateInfo, has_own_state_dict
from plsc.parallel.failure import own_result
from plsc.storage.urls import is_url, shown
from plsc.train.callbacks import Run
from plsc.train.saving import (
    ATTRIBUTES,
    GROUPS,
    NEIGHBOURS,
    OWN,
    REST,
    changed_values,
    collect_rest,
    collect_tensors,
    describe_head,
    named_parameters,
    own_role,
    pack_buffers,
    saved_buffers,
    seed_generators,
    states_of,
)
from plsc.values import decode


def restore(run: Run, path: Path, manifest: Manifest) -> list[str]:
    """Load the state of the checkpoint `path` into the run; a collective.

    Returns log lines about the optimizer.
    """
    _check_fits(run, path, manifest)
    scalars = manifest.scalars
    _make_state(run, manifest.tensors, scalars.get("optimizer_numbers", {}))
    tensors = collect_tensors(run.network, run.head, run.optimizer, run.rows)
    fresh = {
        role
        for role, value in tensors.items()
        if ((role.kind == OPTIMIZER and isinstance(value, Tensor)) or role.name == NEIGHBOURS)
        and role.key not in manifest.tensors
    }
    wanted = {role: value for role, value in tensors.items() if role not in fresh and not _is_extra(role)}
    own = _own_tensors(run, manifest)
    of_callbacks = {}
    for role, value in run.callbacks.state()[1].items():  # filled in place, if shape and type are those saved
        saved_info = manifest.tensors.get(role.key)
        if saved_info is not None and replace(info_of(role, value), sharded=saved_info.sharded) == saved_info:
            of_callbacks[role] = value
    load_tensors(path, {**wanted, **own, **of_callbacks}, run.world)
    if isinstance(run.head, ShardedHead):
        run.head.step = manifest.step  # seeds sampling and rounding
        run.head.computed_by = manifest.head.computed_by
        if manifest.world_size == run.world.size:  # otherwise, the last bits differ in any case
            run.head.resumed_from = run.head.computed_by
    position = run.position
    position.step, position.updates = manifest.step, scalars.get("updates", manifest.step)
    position.epoch, position.step_in_epoch = manifest.epoch, manifest.step_in_epoch
    if run.scaler is not None and (scale := scalars.get("loss_scaling")) is not None:
        run.scaler.load(scale)
    others = _other_tensors(run, path, manifest, of_callbacks)
    run.callbacks.load_state(scalars.get("callbacks", {}), {**others, **of_callbacks})
    length = scalars.get("steps_per_epoch")
    loader = run.data.loader
    if isinstance(loader, ReaderLoader) and manifest.epoch and length is not None:
        loader.expect_steps(length)
    if names_code(run.options.optim.optimizer):
        _restore_rest(run, scalars, others)
    if extra := {role.name: one for role, one in others.items() if role.kind == BACKBONE}:
        run.network.load_state_dict(extra, strict=False)
    _take_own(run, own)
    new = {role.of for role in fresh if role.kind == OPTIMIZER}
    return [f"the checkpoint has no optimizer state for {len(new)} parameters: it is initialised"] * bool(new)


def _is_extra(role: Role) -> bool:
    """Return whether a tensor is from a module's ``get_extra_state``, and goes to its ``set_extra_state``."""
    return role.kind == BACKBONE and role.name.rpartition(".")[2] == "_extra_state"


def _other_tensors(run: Run, path: Path, manifest: Manifest, loaded: Collection[Role]) -> dict[Role, Tensor]:
    """Return the tensors that the parts of this run do not have yet, or do not give away."""
    names, roles = run.callbacks.names, {info.role for info in manifest.tensors.values()}
    of_callbacks = {role for role in roles - {*loaded} if role.kind == CALLBACK and role.of in names}
    wanted = of_callbacks | {role for role in roles if role.of == REST or _is_extra(role)}
    if not wanted:
        return {}
    tensors = OpenCheckpoint(path, manifest).select({role.kind for role in wanted})
    return {role: tensors[role].read() for role in wanted}


def _check_fits(run: Run, path: Path, manifest: Manifest) -> None:
    """Raise CheckpointError for another network, head, optimizer or batch, or within an epoch other data."""
    options, scalars = run.options, manifest.scalars
    optimizer, before, now = type(run.optimizer).__name__, manifest.head, describe_head(run)
    expected: dict[str, Any] = {
        "number of classes": (before.class_num, now.class_num),
        "loss type": (before.loss_type, now.loss_type),
        "embedding size": (manifest.emb_size, options.model.emb_size),
        "optimizer": (scalars.get("optimizer", optimizer), optimizer),
        "global batch": (scalars.get("global_batch"), run.global_batch),
        "updates": (min(scalars.get("updates", 0), manifest.step), scalars.get("updates", 0)),
        "network": (manifest.options.get("model", {}).get("name"), options.model.name),
    }
    saved = {info.role.name: info.shape for info in manifest.tensors.values() if info.role.kind == BACKBONE}
    own = {name: tuple(value.shape) for name, value in run.network.state_dict().items()}
    names = [name for name in own | saved if not _is_extra(Role(BACKBONE, name))]
    odd = [name for name in names if saved.get(name) != own.get(name)]
    if odd and expected["network"][0] == expected["network"][1]:
        expected["network"] = tuple(f"{odd[0]} of shape {shapes.get(odd[0])}" for shapes in (saved, own))
    elif not odd:
        del expected["network"]
    if manifest.step_in_epoch:
        expected["images in the interrupted epoch"] = before.num_samples, now.num_samples
    if manifest.step_in_epoch and run.data.is_of_ranks:
        expected["ranks with their own data in the epoch:"] = manifest.world_size, run.world.size
    for what, (theirs, mine) in expected.items():
        if theirs != mine:
            raise CheckpointError(
                f"{path} was saved with {what} {shown_value(theirs)}, but this run has {shown_value(mine)}; "
                "use the saved value to resume, or load only the weights that fit with model.pretrained"
            )


def _make_state(run: Run, tensors: Mapping[str, TensorInfo], numbers: Mapping[str, Any]) -> None:
    """Create the optimizer state of a checkpoint: its numbers, and empty tensors to load into.

    tensors: all tensors of the checkpoint; only those of the optimizer are used. numbers: the state that is
    not a tensor, as JSON, by the key of the parameter. Raises CheckpointError for state of an unknown
    parameter, state that is too large, or state that the torch optimizer does not keep.
    """
    named, optimizer = named_parameters(run.network, run.head), run.optimizer
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


_COUNTS = ("step", "mu_product")  # scalars that torch usually keeps on the CPU


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


def _restore_rest(run: Run, scalars: dict[str, Any], others: Mapping[Role, Tensor]) -> None:
    """Restore the result of `collect_rest`, after the state of the parameters. Raises CheckpointError."""
    tensors = {role.name: tensor for role, tensor in others.items() if role.kind == OPTIMIZER}
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
        values.update(changed_values(saved, {}))
    if not has_own_state_dict(optimizer):
        optimizer.state.update(own)
        return
    kept = {parameter: dict(values) for parameter, values in optimizer.state.items()}
    here = optimizer.state_dict()
    optimizer.load_state_dict({**here, **own})
    optimizer.state.update(kept)  # torch changes data types
    again, now = collect_rest(run)
    same = (bytes_of(one.cpu()).equal(bytes_of(tensors[role.name])) for role, one in now.items())
    if again[OWN] != scalars.get(OWN) or not all(same):
        raise CheckpointError(
            f"{what} is another one after load_state_dict(): the run would not resume exactly"
        )


def _own_tensors(run: Run, manifest: Manifest) -> dict[Role, Tensor]:
    """Return tensors for the checkpoint's state of this rank; once loaded, pass them to `_take_own`.

    Empty if the checkpoint was saved by another number of ranks.
    """
    own = pack_buffers(run)
    generators = manifest.tensors.get(own_role(run, "random").key)
    if generators is not None:
        own[generators.role] = torch.empty(generators.shape, dtype=torch.uint8)
    is_same = manifest.world_size == run.world.size
    return {role: tensor for role, tensor in own.items() if is_same and role.key in manifest.tensors}


def _take_own(run: Run, own: dict[Role, Tensor]) -> None:
    """Restore the buffers and random generators of this rank; seed generators that were not saved."""
    generators = own.pop(own_role(run, "random"), None)
    for packed in own.values():
        buffers = [buffer for buffer in saved_buffers(run).values() if buffer.dtype == packed.dtype]
        parts = packed.split([buffer.numel() for buffer in buffers])
        with torch.no_grad():
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view_as(buffer))
    if generators is None:
        seed_generators(run.world, run.options.train.seed, run.position.step)
    else:
        unpack_generators(generators, run.world.device)


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


@dataclass
class WarmStart:
    """The weights that a run started from.

    source: path or URL. backbone: which tensors of the network matched. head: names of the head's tensors
    that were loaded. head_left: tensors that were not loaded, with the reasons.
    """

    source: str
    backbone: Match
    head: list[str] = field(default_factory=list)
    head_left: dict[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return a summary for the log, a few lines of limited length."""
        lines = [f"starting from the weights of {self.source}:", *self.backbone.lines()]
        if self.head:
            lines.append(f"loaded into the head: {shorten(self.head)}")
        left = [f"{shortened(name)} {why}" for name, why in self.head_left.items()]
        if left:
            lines.append(f"not loaded into the head: {shorten(left, longest=240)}")
        return lines


def start_from_pretrained(run: Run, location: str) -> WarmStart:
    """Load the weights at `location` (see `model.pretrained`) into network and head; a collective.

    Optimizer, schedule and position are unchanged; also the head's margin statistics if the file has none.

    Raises:
        CheckpointError: on all ranks, if the file is missing, damaged or malicious, or nothing matches.
    """
    path = fetch(location, run.world) if is_url(location) else Path(location)

    def load() -> WarmStart:
        with torch.no_grad():
            return _load(run, path, shown(location))

    return own_result(run.world, f"start from {shown(location)}", load)


def _load(run: Run, path: Path, source: str) -> WarmStart:
    backbone: Mapping[str, Tensor | StoredTensor]
    head: Mapping[str, RowParts | StoredTensor]
    names, order = run.data.class_names, None
    if path.is_dir():
        opened = OpenCheckpoint(path)
        kinds = (BACKBONE, CLASS_WEIGHTS, STATISTICS)
        stored = opened.averaged(opened.select(kinds, run.world.rank, run.world.size))
        backbone = {role.name: tensor for role, tensor in stored.items() if role.kind == BACKBONE}
        head = {role.key: tensor for role, tensor in stored.items() if role.kind != BACKBONE}
        saved = None if names is None else read_class_names(path, opened.manifest)
        order = None if names is None or saved is None else saved.numbered(names)
    else:
        backbone, tensors = read_state_dict(path, follow_links=True)
        head = {name: join_rows([t], name) for name, t in tensors.items() if len(t.shape)}
    started = WarmStart(source, match_into(run.network.state_dict(), backbone, source))
    _take_head(run.head, head, order, started)
    if not started.head:
        advice = "use the network and embedding size that were saved (model.name, model.emb_size)"
        refuse_no_match(started.backbone, source, advice)
    return started


def _take_head(
    head: Head,
    tensors: Mapping[str, RowParts | StoredTensor],
    order: np.ndarray | None,
    started: WarmStart,
) -> None:
    """Load class weights and margin statistics if the classes are the same.

    order: the index of each class in the checkpoint; None unless both have class names. Classes without names
    are the same if their number is equal.
    """
    order = np.arange(head.class_num) if order is None else order
    rows = {f"head.{name}": parameter.detach() for name, parameter in head.named_parameters()}
    ours = rows | {f"head.{name}": tensor for name, tensor in head.statistics().items()}
    for name, parts in tensors.items():
        here, is_row = ours.get(name), name in rows
        if here is None:
            started.head_left[name] = "does not exist in this head"
            continue
        shape, added = parts.shape, scale_bytes(here.dtype) if is_row else 0
        if getattr(parts, "is_coded", False):
            shape = (*shape[:-1], shape[-1] - SCALE_BYTES)
        wanted = (*here.shape[:-1], here.shape[-1] - added) if here.ndim else ()
        wanted = (head.class_num, *wanted[1:]) if is_row else wanted
        if shape != wanted:
            started.head_left[name] = f"has shape {str(list(shape))[:80]}, expected {list(wanted)}"
        elif is_row and (order >= head.class_num).any():
            started.head_left[name] = "has classes with other names"
        elif is_row:
            _copy_rows(parts, order[slice(*head.class_range)], here, started.source, name)
            started.head.append(name)
        else:
            here.copy_(converted(parts.read(), here.dtype, f"{started.source}: {name}"))
            started.head.append(name)


def _copy_rows(
    parts: RowParts | StoredTensor, order: np.ndarray, here: Tensor, source: str, name: str
) -> None:
    """Copy the rows of `parts` with the indices `order`, int64 [rows of `here`], to `here`."""
    if not len(order):
        return
    places = np.argsort(order)
    numbers = order[places]
    for row, piece in parts.pieces(int(numbers[0]), int(numbers[-1]) + 1):
        piece = decode_rows(piece) if getattr(parts, "is_coded", False) else piece
        dtype = torch.float32 if here.dtype is torch.int8 else here.dtype
        piece = converted(piece, dtype, f"{source}: {name}")
        low, high = np.searchsorted(numbers, [row, row + len(piece)])
        values = piece[torch.from_numpy(numbers[low:high] - row)]
        values = encode_rows(values) if here.dtype is torch.int8 else values
        here[torch.from_numpy(places[low:high]).to(here.device)] = values.to(here)
