"""Which checkpoint is meant: a path, or "last" or "best" of the folder that the run saves in."""

from __future__ import annotations

import json
from pathlib import Path, PurePath
from typing import Any

from plsc.checkpoint import Manifest, clean_leftovers, list_checkpoints
from plsc.checkpoint.agree import on_every_rank
from plsc.config import Options
from plsc.errors import CheckpointError, OptionError
from plsc.parallel.world import World
from plsc.train.checkpointing import open_checkpoint

LAST, BEST = "last", "best"
BEST_NAME = "best.json"
_LARGEST_BEST = 2**16  # bytes


def open_load_dir(options: Options, world: World) -> tuple[Path, Manifest]:
    """Return the checkpoint of `checkpoint.load_dir` and its manifest; a collective.

    Raises OptionError if it is not set, CheckpointError if it is not there.
    """
    if options.checkpoint.load_dir is None:
        raise OptionError(
            "there is no checkpoint to load; call set_checkpoint_dir, or give --checkpoint.load_dir"
        )
    path = _find(options, world)
    if path is None:
        raise CheckpointError(
            f"checkpoint.load_dir is {LAST!r}, but {options.checkpoint.save_dir} holds no checkpoint; train "
            "first, or give the path of one"
        )
    return path, open_checkpoint(path)


def open_to_resume(options: Options, world: World) -> tuple[Path, Manifest] | None:
    """Return the checkpoint that training goes on from, and its manifest; None to begin anew; a collective.

    That is what a run with "last" does where nothing was saved yet: so the same script starts, and is
    started again. What a killed run left half done is cleared first.
    """
    if options.checkpoint.load_dir is None:
        return None
    if options.checkpoint.load_dir != LAST:
        return open_load_dir(options, world)
    path = _find(options, world, is_cleaning=True)
    return None if path is None else (path, open_checkpoint(path))


def _find(options: Options, world: World, is_cleaning: bool = False) -> Path | None:
    """Return what `checkpoint.load_dir` means; rank 0 looks, for all of them to take the same."""
    wanted, save_dir = options.checkpoint.load_dir, Path(options.checkpoint.save_dir)
    if wanted not in (LAST, BEST):
        return Path(str(wanted))

    def find() -> str | None:
        if not world.is_main:
            return None
        if is_cleaning:
            clean_leftovers(save_dir)
        found = _newest(save_dir) if wanted == LAST else _best(save_dir)
        return None if found is None else str(found)

    name = on_every_rank(world, f"find the {wanted} checkpoint of {save_dir}", find)[0]
    return None if name is None else Path(name)


def _newest(save_dir: Path) -> Path | None:
    found = list_checkpoints(save_dir)
    return found[-1][0] if found else None


def _best(save_dir: Path) -> Path:
    """Return the best checkpoint, as best.json says or, without it, the newest checkpoint."""
    name = _name_of_best(save_dir / BEST_NAME)
    if name is None:
        found = list_checkpoints(save_dir)
        saved = found[-1][1].scalars.get("best") if found else None
        name = saved.get("name") if isinstance(saved, dict) else None
    # Its last part alone counts: the folder may have moved, and what is outside of it is not meant.
    name = PurePath(name).name if isinstance(name, str) else ""
    if not name or name == ".." or not (save_dir / name).is_dir():
        raise CheckpointError(
            f"{save_dir} does not say which checkpoint is its best{f': {name} is not there' * bool(name)}; "
            "give the path of one"
        )
    return save_dir / name


def _name_of_best(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_BEST + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    try:
        content = json.loads(data) if len(data) <= _LARGEST_BEST else None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or not isinstance(content.get("path"), str):
        raise CheckpointError(
            f"{path} is damaged: expected an object with the path of a checkpoint; give the path of one"
        )
    return content["path"]
