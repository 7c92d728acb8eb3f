"""Change the classes of a checkpoint: add, drop, merge or reorder them.

The result is a new checkpoint; the old one is unchanged. All tensors with one row per class are converted:
weights, biases and their optimizer state. Other tensors are copied. Rows are processed a few MiB at a time.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from pathlib import Path
from typing import Annotated, Any, TypedDict

from torch import Tensor

from plsc.checkpoint.class_plan import (
    Change,
    ClassNumbers,
    Plan,
    average_merged,
    initialise_new,
    make_plan,
    rows_of,
)
from plsc.checkpoint.load import (
    OpenCheckpoint,
    check_checksums,
    read_class_names,
)
from plsc.checkpoint.manifest import (
    CLASS_OPTIMIZER,
    CLASS_WEIGHTS,
    MANIFEST_NAME,
    METRICS_KEY,
    Entry,
    FileInfo,
    Manifest,
    Role,
    TensorInfo,
    checksum,
    tensor_chunks,
)
from plsc.checkpoint.save import check_destination, class_name_tensors, info_of, write_shards
from plsc.errors import CheckpointError, OptionError
from plsc.parallel.world import class_ranges
from plsc.seeds import hash_key
from plsc.storage.publish import publishing_folder
from plsc.storage.regular import read_record
from plsc.version import __version__

MAP_NAME = "classes.tsv"  # a line old<TAB>new per remaining class, as the format argument label_map reads

_WEIGHT, _BIAS = (Role(CLASS_WEIGHTS, name).key for name in ("weight", "bias"))


def change_classes(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    grow: int | None = None,
    drop: ClassNumbers | None = None,
    merge: ClassNumbers | None = None,
    reorder: ClassNumbers | None = None,
) -> Manifest:
    """Write the checkpoint `source` with changed classes to `destination`; return the new manifest.

    Give exactly one of `grow`, `drop`, `merge` and `reorder`. A list of classes is a text file with one
    number per line (`merge`: two), or a Python sequence (`merge`: also a mapping). The training position is
    kept, so a run can resume from the new checkpoint. If class numbers changed, the new checkpoint has a file
    ``classes.tsv`` with a line ``old<TAB>new`` per remaining class.

    Args:
        grow: number of classes to append, initialised as in a new head. Their optimizer state is zero.
        drop: classes to remove. The others are renumbered densely, in their order.
        merge: pairs (from, to) of classes; each `from` is merged into `to`, which keeps its optimizer state.
            Its row becomes the mean of the normalised rows, scaled to their mean norm; sub-centres are kept.
            The others are renumbered densely, in their order.
        reorder: for each new class 0, 1, ... its old number; every class once.

    Raises:
        OptionError: an argument is invalid.
        DataError: a list is invalid.
        CheckpointError: `source` is damaged, or `destination` cannot be written. Nothing is published.
    """
    wanted: dict[str, Any] = {"grow": grow, "drop": drop, "merge": merge, "reorder": reorder}
    given = [name for name, value in wanted.items() if value is not None]
    if len(given) != 1:
        raise OptionError(
            f"{' and '.join(given) or 'no change'} given; expected one of grow, drop, merge and reorder"
        )
    old, new = Path(source), Path(destination)
    check_destination(old, new)
    opened = OpenCheckpoint(old)
    manifest = opened.manifest
    classes = manifest.head.class_num
    moved = _with_class_rows(old, manifest)
    plan = make_plan(given[0], classes, wanted[given[0]])
    changes = _changes(opened, plan)
    check_checksums(old, manifest, sorted(manifest.files))
    named = _new_names(old, manifest, plan)
    tensors = _new_tensors(manifest, plan, moved)
    tensors |= {role.key: info_of(role, tensor) for role, tensor in named.items()}
    replaced = {role.key: tensor for role, tensor in named.items()}
    entry = {
        "what": plan.what,
        "source": old.resolve().name,
        "classes_before": plan.before,
        "classes_after": plan.after,
        "plsc_version": __version__,
    }
    with publishing_folder(new) as temporary:
        shards = _entries(opened, tensors, plan, moved, changes, replaced)
        files = write_shards(temporary, shards)
        if plan.what != "grow":
            with (temporary / MAP_NAME).open("xb") as file:
                file.writelines(plan.label_map())
            files[MAP_NAME] = checksum(temporary / MAP_NAME)
        result = _new_manifest(manifest, plan, tensors, files, entry)
        (temporary / MANIFEST_NAME).write_text(result.to_json(), encoding="utf-8")
    return result


def _with_class_rows(folder: Path, manifest: Manifest) -> set[str]:
    """Return the keys of the tensors with one row per class: class weights, and their optimizer state."""
    weight = manifest.tensors.get(_WEIGHT)
    keys = set()
    for key, info in manifest.tensors.items():
        owner = manifest.tensors.get(info.role.of)
        is_of_rows = owner is not None and owner.role.kind == CLASS_WEIGHTS
        is_whole = info.shape[:1] == (manifest.class_num,)
        if info.role.kind in (CLASS_WEIGHTS, CLASS_OPTIMIZER) or (is_of_rows and is_whole):
            keys.add(key)
    odd = [key for key in keys if manifest.tensors[key].shape[:1] != (manifest.class_num,)]
    if weight is None or len(weight.shape) not in (2, 3) or odd:
        raise CheckpointError(
            f"{folder} has no class weights ({_WEIGHT}), or {odd[:3]} do not have {manifest.class_num} rows"
        )
    return keys


def _changes(opened: OpenCheckpoint, plan: Plan) -> dict[str, tuple[Change, ...]]:
    """Return the changes to tensors other than moving rows, by key."""
    weight = opened.tensors[_WEIGHT]
    changes: dict[str, tuple[Change, ...]] = {}
    if plan.added:
        changes[_WEIGHT] = (initialise_new(weight, plan, _seed(opened.manifest)),)
    if plan.what == "merge" and len(weight.shape) == 2:
        for key in {_WEIGHT, _BIAS} & opened.tensors.keys():
            changes[key] = (average_merged(opened.tensors[key], plan),)
    return changes


class _Seeded(TypedDict, total=False):
    seed: Annotated[int, (0, 2**31 - 1)] | None


def _seed(manifest: Manifest) -> int:
    """Return the seed for new rows: the run's seed, so that they equal those of a larger new head.

    After an earlier change it differs, because a dropped class may have had the same number.
    """
    saved = read_record(_Seeded, manifest.options.get("train", {}), "the group train in the checkpoint")
    seed, changes = saved.get("seed") or 0, len(manifest.lineage)
    return hash_key(seed, changes) if changes else seed


def _new_names(folder: Path, manifest: Manifest, plan: Plan) -> dict[Role, Tensor]:
    """Return the tensors of class names, if the checkpoint has some; new classes have no names."""
    names = read_class_names(folder, manifest)
    return {} if names is None else class_name_tensors(names.take(plan.sources(0, plan.after)))


def _new_tensors(manifest: Manifest, plan: Plan, moved: set[str]) -> dict[str, TensorInfo]:
    return {
        key: dataclasses.replace(info, shape=(plan.after, *info.shape[1:]))
        if key in moved
        else dataclasses.replace(info, sharded=False)  # of former versions
        for key, info in manifest.tensors.items()
    }


def _entries(
    opened: OpenCheckpoint,
    tensors: dict[str, TensorInfo],
    plan: Plan,
    moved: set[str],
    changes: dict[str, tuple[Change, ...]],
    replaced: dict[str, Tensor],
) -> list[list[Entry]]:
    """Return the entries of each file: as many files as before, whole tensors in the same file."""
    names = opened.manifest.shards
    files: dict[str, list[Entry]] = {name: [] for name in names}
    for key, info in tensors.items():
        stored = opened.tensors[key]
        if not info.sharded:
            chunks = tensor_chunks(replaced[key]) if key in replaced else stored.bytes
            if key in moved:
                chunks = rows_of(stored, plan, 0, plan.after, changes.get(key, ()))
            files[stored.shard].append(Entry(key, stored.dtype, info.shape, 0, chunks))
            continue
        for name, (start, stop) in zip(names, class_ranges(plan.after, len(names)), strict=True):
            chunks = rows_of(stored, plan, start, stop, changes.get(key, ()))
            files[name].append(Entry(key, stored.dtype, (stop - start, *info.shape[1:]), start, chunks))
    return list(files.values())


def _new_manifest(
    manifest: Manifest,
    plan: Plan,
    tensors: dict[str, TensorInfo],
    files: dict[str, FileInfo],
    entry: dict[str, Any],
) -> Manifest:
    options, scalars = copy.deepcopy(manifest.options), copy.deepcopy(manifest.scalars)
    options.setdefault("head", {})["class_num"] = plan.after
    scalars[METRICS_KEY] = {}  # they were measured with the old classes
    if not manifest.step_in_epoch and "steps_per_epoch" in scalars:
        scalars["steps_per_epoch"] = None  # the number of images may change with the classes
    ranks = len(manifest.shards) if tensors[_WEIGHT].sharded else 1
    return dataclasses.replace(
        manifest,
        run_id="",  # so that no run deletes it
        heads={
            "": dataclasses.replace(
                manifest.head,
                class_num=plan.after,
                class_ranges=class_ranges(plan.after, ranks),
            )
        },
        options=options,
        scalars=scalars,
        tensors=tensors,
        files=files,
        lineage=[*manifest.lineage, entry],
    )
