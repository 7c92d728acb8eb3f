"""Collect the state of a run for a checkpoint without changing the run; restore the state of each rank.

The state of each rank consists of buffers that differ between ranks and of the global random generators. plsc
does not draw from these generators, but a custom network or reader may draw from `random`, numpy or torch. A
resumed run then draws the same numbers as an uninterrupted one.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plsc.checkpoint import Manifest, ShardedTensor, Snapshot
from plsc.checkpoint.load import class_name_tensors
from plsc.checkpoint.manifest import BACKBONE, RANK, HeadInfo, Role, parse_manifest
from plsc.checkpoint.retention import METRICS_KEY
from plsc.checkpoint.save import info_of
from plsc.errors import CheckpointError
from plsc.models.base_model import constructor_arguments
from plsc.models.sync_batch_norm import equal_buffers
from plsc.optim.optimizers import describe_implementation
from plsc.parallel.collectives import class_ranges
from plsc.parallel.world import World
from plsc.run.run import Run, global_batch_size
from plsc.run.settle import ARGUMENTS_KEY
from plsc.seeds import hash_key
from plsc.state.optimizer import check_attributes, collect_rest
from plsc.state.tensors import collect_numbers, collect_tensors
from plsc.storage.urls import without_secrets
from plsc.version import __version__

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
    if ":" in run.options.optim.optimizer:  # those of torch have no other state
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
        "global_batch": global_batch_size(run.options, run.world.size),
        "steps_per_epoch": run.data.loader.steps_per_epoch,
        "length_step": run.length.step,
        "length_epoch": run.length.epoch,
        "optimizer": type(run.optimizer).__name__,
        "updates": run.position.updates,
        "loss_scaling": None if run.scaler is None else run.scaler.state(),
        "optimizer_computed_by": describe_implementation(run.optimizer),
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
        random.Random().setstate(python)  # try on other generators first: restore all or none
        np.random.RandomState().set_state(numpy_state)
        torch.Generator().set_state(torch_state)
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
