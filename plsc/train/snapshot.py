"""What a checkpoint of a run holds, taken without changing the run: saving leaves no trace in training."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from plsc import __version__
from plsc.checkpoint import Manifest, ShardedTensor, Snapshot
from plsc.checkpoint.load import class_name_tensors
from plsc.checkpoint.manifest import BACKBONE, RANK, Role
from plsc.checkpoint.retention import METRICS_KEY
from plsc.errors import CheckpointError
from plsc.heads.joint import JointHead
from plsc.models.base_model import constructor_arguments
from plsc.models.sync_batch_norm import equal_buffers
from plsc.optim.optimizers import describe_implementation
from plsc.parallel.collectives import class_ranges
from plsc.storage.urls import without_secrets
from plsc.train.adopt import ARGUMENTS_KEY, heads_to_save
from plsc.train.build import Run, global_batch_size
from plsc.train.randomness import LARGEST_STATE, pack_generators, unpack_generators
from plsc.train.state import collect_group_numbers, collect_numbers, collect_tensors


def take_snapshot(run: Run, metrics: dict[str, float]) -> Snapshot:
    """Return the run's state, without a copy of it; a collective.

    metrics: what the checkpoint is judged by. Nothing of the run is changed.
    """
    manifest = Manifest(
        plsc_version=__version__,
        step=run.position.step,
        epoch=run.position.epoch,
        step_in_epoch=run.position.step_in_epoch,
        world_size=run.world.size,
        class_num=run.head.class_num,
        emb_size=run.options.model.emb_size,
        class_ranges=_class_ranges(run),
        options=without_secrets(run.options.as_dict()),
        scalars={
            METRICS_KEY: metrics,
            ARGUMENTS_KEY: constructor_arguments(run.network),
            **_scalars(run),
        },
        lineage=run.lineage,
        run_id=run.run_id,
    )
    return Snapshot(_tensors(run), manifest)


def _class_ranges(run: Run) -> list[list[int]]:
    if isinstance(run.head, JointHead):
        return []  # those of each head are among the scalars
    ranks = run.world.size if run.head.is_sharded else 1
    return [list(pair) for pair in class_ranges(run.head.class_num, ranks)]


def _tensors(run: Run) -> dict[Role, Tensor | ShardedTensor]:
    """Return the tensors of a checkpoint; a collective.

    They are the run's own, not copies, but for the network's buffers: where ranks have different ones (batch
    norm that is not synchronised) ``backbone.<buffer>`` is their mean, and a rank's own are under
    ``rank<r>.buffers.<type>``, end to end in the order of `_buffers`, for a resume on as many ranks.
    ``rank<r>.random`` is the state of a rank's random generators; `class_name_tensors` names the classes.
    """
    found = collect_tensors(run.network, run.head, run.optimizer, run.rows)
    mine = pack_buffers(run)
    with equal_buffers(run.network, run.world.backbone_group):
        for name, buffer in _buffers(run).items():
            found[Role(BACKBONE, name)] = buffer.detach().clone()
        equal = pack_buffers(run)
    found[_own(run, "random")] = pack_generators(run.world.device)
    for kind, packed in mine.items():
        if not torch.equal(packed.view(torch.uint8), equal[kind].view(torch.uint8)):
            found[_own(run, f"buffers.{kind}")] = packed
    if run.world.is_main:
        for head, names in run.class_names.items():
            found |= class_name_tensors(names, head)
    return found


def _own(run: Run, name: str) -> Role:
    return Role(RANK, name, str(run.world.rank))


def _scalars(run: Run) -> dict[str, Any]:
    """Return the numbers and names of a checkpoint, as plain JSON."""
    return {
        **heads_to_save(run),
        "loss_type": run.options.head.loss_type,
        "global_batch": global_batch_size(run.options, run.world.size),
        "num_samples": run.num_samples,
        "steps_per_epoch": run.loader.steps_per_epoch,
        "head_computed_by": None if run.sets else getattr(run.head, "computed_by", None),
        "optimizer": type(run.optimizer).__name__,
        "updates": run.position.updates,
        "loss_scaling": None if run.scaler is None else run.scaler.state(),
        "optimizer_computed_by": describe_implementation(run.optimizer),
        "optimizer_groups": _changed_settings(run),
        "optimizer_numbers": collect_numbers(run.network, run.head, run.optimizer),
    }


def _changed_settings(run: Run) -> list[dict[str, float]]:
    """Return the numbers of each of the optimizer's groups that training has changed."""
    pairs = zip(collect_group_numbers(run.optimizer), run.settings, strict=True)
    changed = [
        {name: value for name, value in now.items() if value != before.get(name)}
        for now, before in pairs
    ]
    return changed if any(changed) else []


def own_tensors(run: Run, manifest: Manifest) -> dict[Role, Tensor]:
    """Return empty tensors for what the checkpoint has of this rank alone; loaded, they go to `take_own`.

    Nothing if it was saved on another number of ranks: then no rank is the same.
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
        if math.prod(info.shape) > LARGEST_STATE:
            raise CheckpointError(
                f"the checkpoint is damaged: {random.key} has {math.prod(info.shape)} bytes, expected at "
                f"most {LARGEST_STATE}; choose another one"
            )
        own[random] = torch.empty(info.shape, dtype=torch.uint8)
    return own


def take_own(run: Run, own: dict[Role, Tensor]) -> bool:
    """Put this rank's own buffers and generators in place; return whether generators were among them."""
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
    """Return copies of the network's saved buffers, end to end, one tensor [n] for each type."""
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
    """Return the buffers that the network's state dict holds, by name, in its order."""
    saved = set(run.network.state_dict())
    every = run.network.named_buffers(remove_duplicate=False)
    return {name: buffer for name, buffer in every if name in saved}


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
