"""Save a run: collect its state without changing it, copy it at a step boundary, write it in the background.

The state of each rank consists of buffers that differ between ranks and of the global random generators. plsc
does not draw from these generators, but a custom network or reader may draw from `random`, numpy or torch. A
resumed run then draws the same numbers as an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import pickle
import random
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plsc.checkpoint import Manifest, ShardedTensor, Snapshot, read_manifest, save_checkpoint
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
    checkpoints_in,
    parse_manifest,
)
from plsc.checkpoint.remote import Uploader
from plsc.checkpoint.rollback import mark_of
from plsc.checkpoint.save import best_in, class_name_tensors, info_of, prune
from plsc.checkpoint.weights_file import WeightsFile
from plsc.config.option import names_code
from plsc.data.batch import LIST_NAME
from plsc.errors import CheckpointError, NotSavedError, PlscError
from plsc.heads import Head, RowOptimizer
from plsc.machine import BackgroundThread, available_memory
from plsc.models.base_model import constructor_arguments
from plsc.optim import FULL_RATE, has_own_state_dict
from plsc.parallel.backbone import equal_buffers
from plsc.parallel.failure import on_every_rank, on_main_rank
from plsc.parallel.world import World, class_ranges
from plsc.seeds import hash_key
from plsc.storage.store import Store, format_bytes
from plsc.storage.urls import without_secrets
from plsc.train.callbacks import Run
from plsc.train.folder import RunFolder
from plsc.train.log import METRICS_NAME, PLOT_NAME
from plsc.values import encode
from plsc.version import __version__

ARGUMENTS_KEY = "model_arguments"  # of the manifest's scalars
_SHARE_OF_MEMORY = 0.8  # maximum share of the available memory for a copy of the state
_SHORTEST_STALL = 0.1  # seconds; shorter pauses are not logged
_SMALL_FILES = (METRICS_NAME, PLOT_NAME, LIST_NAME)  # next to the checkpoints


@dataclass
class _Save:
    """A save: seconds that training waited for it, and what the background thread has done so far."""

    path: Path
    stall: float = 0.0
    size: int = 0
    seconds: float = 0.0
    best: tuple[str, float] | None = None
    problem: str | None = None


class Saver:
    """Saves the checkpoints of a run. All ranks call its methods, which are collectives, at the same step.

    Attributes:
        last: the newest published checkpoint; before the first save, the one that the run resumes.
        best: name and metric value of the best checkpoint in the run's folder, by the metric of
            `retention`; None if no checkpoint has this metric.
        unsent: after `close`, the complete checkpoints that were not uploaded, oldest first.
    """

    unsent: Sequence[Path] = ()
    _pending: tuple[_Save, Future[None]] | None = None
    _uploader: Uploader | None = None
    _has_warned = False

    def __init__(self, run: Run, folder: RunFolder) -> None:
        self.last = None if folder.checkpoint is None else folder.checkpoint[0]
        self.folder, self.retention = folder, run.retention
        self._lineage = [] if folder.checkpoint is None else folder.checkpoint[1].lineage
        self._run = run
        self._file = run.head.file if isinstance(run.head.file, WeightsFile) else None
        # Its own group: the thread's collectives would meet those of the training steps in the other one.
        self._world = run.world.in_background(run.world.save_group)
        self._background = BackgroundThread("plsc-save")
        if folder.store is not None:
            self._uploader = Uploader(
                run.world,
                folder.path,
                folder.store,
                run.retention,
                folder.run_id,
                folder.resumed,
                _SMALL_FILES,
            )
            on_main_rank(
                run.world, f"look into {folder.store.shown}", partial(folder.check_newest, folder.store)
            )
            for path in self._left_unsent(folder.store):
                self._uploader.add(path)
        self.best = on_main_rank(run.world, f"look into {folder.path}", self._find_best)

    def _left_unsent(self, store: Store) -> list[Path]:
        """Return what this run had not uploaded when it was killed, unless it was continued elsewhere."""
        world, folder = self._run.world, self.folder
        if self.last is None or folder.is_fetched or self.last.resolve().parent != folder.path.resolve():
            return []

        def names(place: Store) -> list[str]:
            there = checkpoints_in(place)  # what is resumed may be from before runs had ids
            return [name for name, one in there if one.run_id == folder.run_id or name == folder.resumed]

        sent = on_main_rank(world, f"look into {store.shown}", partial(names, store))
        here = on_every_rank(world, f"look into {folder.path}", partial(names, Store(folder.path)))
        # A new machine does not have the files of all. Nothing in the store is replaced.
        left = [name for name in here[0] if name not in sent and all(name in one for one in here)]
        return [folder.path / name for name in left if not (folder.path / name).is_symlink()]

    def check(self) -> None:
        """Raise CheckpointError, on all ranks, for state that cannot be saved; a collective."""
        on_every_rank(self._run.world, "save this run", partial(check_snapshot, self._run))

    def save(self, name: str, metrics: dict[str, float], *, wait: bool = False) -> None:
        """Save the state of the run as the checkpoint `name`, in the background unless `wait` is set.

        metrics: values for `Retention`. Raises CheckpointError, also for the previous save.
        """
        began = time.monotonic()
        self.finish_save()  # at most one copy is in memory
        if self._file is not None:
            self._file.begin(mark_of(self._run.position.step, self.folder.run_id))
        state = take_snapshot(self._run, metrics, self.folder.run_id, self._lineage)
        wait = wait or not self._can_copy(state)
        if not wait:
            state = state.copy_to_host()
        save = _Save(self.folder.path / name)
        self._pending = save, self._background.submit(lambda: self._publish(save, state))
        save.stall = time.monotonic() - began
        if wait:
            self.finish_save()

    def _can_copy(self, state: Snapshot) -> bool:
        """Return whether memory suffices for a copy; log once if it does not."""
        # Offloaded class weights already fill this machine's memory.
        is_offloaded = self._run.options.head.offload
        free = 0 if is_offloaded else available_memory()
        if free is None or state.nbytes < _SHARE_OF_MEMORY * free:
            return True
        why = f"a copy of {format_bytes(state.nbytes)} does not fit into CPU memory"
        if is_offloaded:
            why = "head.offload is set, so class weights are not copied"
        if not self._has_warned:
            self._world.log(f"{why}: training pauses while a checkpoint is written")
        self._has_warned = True
        return False

    def _publish(self, save: _Save, state: Snapshot) -> None:
        """Write, publish and prune, in the background thread."""
        began, folder = time.monotonic(), self.folder
        is_shared = folder.is_shared or folder.store is None
        save_checkpoint(folder.path, save.path.name, state, self._world, is_shared=is_shared)
        if self._file is not None:
            self._file.forget(mark_of(state.manifest.step, state.manifest.run_id))
        save.seconds = time.monotonic() - began
        doing = f"prune {folder.path}"
        save.best = on_every_rank(self._world, doing, lambda: self._prune_and_find_best(save))[0]

    def _prune_and_find_best(self, save: _Save) -> tuple[str, float] | None:
        """Delete old checkpoints on the disk of this machine; on rank 0, return the best.

        A failure to delete is only a problem to log: the newest checkpoint is saved.
        """
        best = None
        if self.folder.is_owner:
            uploader = self._uploader
            # No other upload starts while this lock is held.
            with contextlib.nullcontext() if uploader is None else uploader.lock:
                keep = {save.path.name, self.folder.resumed, "" if uploader is None else uploader.uploading}
                store = Store(self.folder.path)
                try:
                    best = prune(store, self.retention, self.folder.run_id, keep)
                except (PlscError, OSError) as error:
                    save.problem, best = str(error), self._find_best()
        if self._world.is_main:
            save.size = sum(file.bytes for file in read_manifest(save.path).files.values())
        return best

    def _find_best(self) -> tuple[str, float] | None:
        return best_in(Store(self.folder.path), self.retention, self.folder.run_id)

    def is_done(self) -> bool:
        """Return whether no save is running on this rank."""
        return self._pending is None or self._pending[1].done()

    def finish_save(self) -> None:
        """Wait for the running save, if any, and log its result. Raises the same errors as `save`."""
        if self._pending is None:
            return
        (save, future), self._pending = self._pending, None
        began = time.monotonic()
        try:
            future.result()
        except CheckpointError as error:
            error.exit_code = NotSavedError.exit_code
            raise
        self.last, self.best = save.path, save.best
        stall = save.stall + time.monotonic() - began
        stalled = f", training stalled {stall:.1f} s" if stall >= _SHORTEST_STALL else ""
        speed = format_bytes(save.size / max(save.seconds, 1e-3))
        size = format_bytes(save.size)
        self._world.log(f"saved {save.path}: {size} in {save.seconds:.1f} s ({speed}/s){stalled}")
        self._world.log(save.problem, logging.WARNING)
        if self._uploader is not None:
            self._uploader.add(save.path)

    def wait(self, seconds: float) -> None:
        """Wait for the running save, at most so long; its result is ignored."""
        if self._pending is not None:
            futures.wait([self._pending[1]], seconds)

    def close(self, seconds: float | None = None) -> str:
        """Wait for the running save and all uploads; return what is not uploaded and where it is, or ''.

        seconds: deadline for the uploads; None: wait until each has succeeded or failed.
        """
        self.finish_save()
        self._background.close()
        self.unsent = [] if self._uploader is None else self._uploader.close(seconds)
        if not self.unsent or self.folder.store is None:
            return ""
        names, here, there = ", ".join(p.name for p in self.unsent), self.folder.path, self.folder.store.shown
        return (
            f"not uploaded to {there}: {names} (complete in {here}); when the store is available again, "
            f"run: plsc checkpoint push {here} {there}"
        )


def check_snapshot(run: Run) -> None:
    """Raise CheckpointError if the state cannot be saved, or not read again; no tensor is copied.

    The buffers must be those of the first call, at the start: a resumed run loads into no others.
    """
    snapshot = take_snapshot(run, {}, is_check=True)
    infos = {role.key: info_of(role, value) for role, value in snapshot.tensors.items()}
    parse_manifest(replace(snapshot.manifest, tensors=infos).to_json().encode(), "the checkpoint of this run")
    run.unsaved = check_attributes(run)
    buffers = {name: infos[Role(BACKBONE, name).key] for name in saved_buffers(run)}
    run.buffers = buffers if run.buffers is None else run.buffers
    if changed := dict(run.buffers.items() ^ buffers.items()):
        raise CheckpointError(
            f"the network's buffer {min(changed)} was created, removed, resized or converted by the first "
            "step; register it with its final shape and type, or with persistent=False"
        )


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
    states = states_of(run.network, run.head, run.optimizer)
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
            "global_batch": run.global_batch,
            "steps_per_epoch": run.data.loader.steps_per_epoch,
            "length_step": run.length.step,
            "length_epoch": run.length.epoch,
            "optimizer": type(run.optimizer).__name__,
            "updates": run.position.updates,
            "loss_scaling": None if run.scaler is None else run.scaler.state(),
            "optimizer_numbers": {key: values for key, (values, _) in states.items() if values},
            "callbacks": callbacks,
            **rest,
        },
        lineage=lineage or [],
        run_id=run_id,
    )
    own = collect_tensors(run.network, run.head, run.optimizer, run.rows)
    if not is_check:
        own |= _copied_tensors(run)
    return Snapshot({**own, **more}, manifest)


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


def _copied_tensors(run: Run) -> dict[Role, Tensor]:
    """Return the tensors of a checkpoint that are copied or gathered; a collective.

    Where buffers differ between ranks (batch norm that is not synchronised), ``backbone.<buffer>`` is their
    mean. The buffers of rank r are concatenated, in the order of `saved_buffers`, in
    ``rank<r>.buffers.<type>``, for a resume on the same number of ranks. ``rank<r>.random`` is the state of
    its random generators; `class_name_tensors` holds the class names.
    """
    mine = pack_buffers(run)
    with equal_buffers(run.network, run.world.backbone_group):
        tensors = {Role(BACKBONE, name): one.detach().clone() for name, one in saved_buffers(run).items()}
        equal = pack_buffers(run)
    tensors[own_role(run, "random")] = pack_generators(run.world.device)
    for role, packed in mine.items():
        if not torch.equal(packed.view(torch.uint8), equal[role].view(torch.uint8)):
            tensors[role] = packed
    if run.world.is_main and run.data.class_names is not None:
        tensors |= class_name_tensors(run.data.class_names)
    return tensors


NEIGHBOURS = "neighbours"
"""Name of the lists of hard negatives, which belong to class weights as the states of their optimizer do."""
REST = "rest"
"""In place of the parameter in the roles of optimizer state that belongs to none."""


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


def named_parameters(network: nn.Module, head: Head) -> dict[str, nn.Parameter]:
    """Return the parameters of the network and the head by the keys of their tensors."""
    named = {Role(BACKBONE, name).key: parameter for name, parameter in network.named_parameters()}
    return named | {Role(CLASS_WEIGHTS, name).key: p for name, p in head.named_parameters()}


def own_role(run: Run, name: str) -> Role:
    """Return the role of state that this rank alone has."""
    return Role(RANK, name, str(run.world.rank))


def pack_buffers(run: Run) -> dict[Role, Tensor]:
    """Return copies of the network's saved buffers, concatenated to one tensor [n] per type."""
    kinds: dict[str, list[Tensor]] = {}
    for buffer in saved_buffers(run).values():
        kinds.setdefault(str(buffer.dtype).removeprefix("torch."), []).append(buffer.detach().flatten())
    return {own_role(run, f"buffers.{kind}"): torch.cat(parts) for kind, parts in kinds.items()}


def saved_buffers(run: Run) -> dict[str, Tensor]:
    """Return the buffers in the network's state dict, by name, in its order."""
    saved = set(run.network.state_dict())
    every = run.network.named_buffers(remove_duplicate=False)
    return {name: buffer for name, buffer in every if name in saved}


_PYTHON, _NUMPY = 0, 1  # parts of the hash keys


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


# The schedule sets the rates; the others are attributes of torch.
_NOT_STATE = ("params", "lr", FULL_RATE, "state", "param_groups", "defaults", "found_inf", "grad_scale")
GROUPS, ATTRIBUTES, OWN = "optimizer_groups", "optimizer_attributes", "optimizer_own"


def collect_rest(run: Run) -> tuple[dict[str, Any], dict[Role, Tensor]]:
    """Return the optimizer state that belongs to no parameter, as JSON, and its tensors.

    GROUPS, ATTRIBUTES: what they did not have at the start. OWN: what its own ``state_dict`` returns.
    Raises CheckpointError for what cannot be saved.
    """
    optimizer, tensors = run.optimizer, dict[str, Tensor]()
    what, is_own = f"the optimizer {type(optimizer).__name__}", has_own_state_dict(optimizer)
    known: dict[int, Any] = {
        id(one): ["", key] for key, one in named_parameters(run.network, run.head).items()
    }
    for key, (_, states) in states_of(run.network, run.head, optimizer).items():
        known |= {id(one): [name, key] for name, one in states.items()}
    places = vars(optimizer), *optimizer.param_groups
    found, *groups = [changed_values(*pair) for pair in zip(places, run.settings, strict=True)]
    own = optimizer.state_dict() if is_own else optimizer.state
    own = {name: one for name, one in own.items() if not isinstance(name, Tensor) and name != "param_groups"}
    attributes = {}
    for name, one in found.items():
        with contextlib.suppress(CheckpointError):  # objects, such as other optimizers
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


def changed_values(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> dict[Any, Any]:
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
        with contextlib.suppress(Exception):  # a lock, or a process group
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
