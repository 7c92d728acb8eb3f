"""Where a run's checkpoints go: a folder of this machine, and a store if there is one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from plsc.checkpoint import clean_leftovers
from plsc.checkpoint.agree import on_every_rank
from plsc.checkpoint.remote import clean_remote
from plsc.checkpoint.sharing import FolderLock, neighbours
from plsc.config import Config
from plsc.errors import CheckpointError
from plsc.parallel.world import World
from plsc.storage.cache_folder import folder_for
from plsc.storage.names import join
from plsc.storage.store import Store
from plsc.storage.urls import is_url, shown

_VERSION = re.compile(r"version_(\d+)")
START_SECONDS = 20.0  # for a store to answer before training begins


@dataclass
class Places:
    """local: the folder of checkpoints, metrics and plots. store: where each checkpoint is sent, too.

    is_shared: all ranks see the same `local`. is_owner: this rank tidies it on its machine.
    """

    local: Path
    store: Store | None
    is_shared: bool
    is_owner: bool
    lock: FolderLock | None

    def release(self) -> None:
        """Let other runs save here."""
        if self.lock is not None:
            self.lock.release()


def open_places(options: Config, world: World, say: Callable[[str], None]) -> Places:
    """Return the places of a run that is about to begin: tidied after a kill, and locked. Collective.

    Raises CheckpointError on all ranks: another run saves there, no permission, a store that does not answer
    (within a minute).
    """
    save_dir, upload_dir = options.checkpoint.save_dir, options.checkpoint.upload_dir
    if is_url(save_dir) and upload_dir is not None:
        raise CheckpointError(
            f"save_dir is a URL, and upload_dir is set, too ({shown(upload_dir)}); checkpoints are sent "
            "to one store: leave one of the two out"
        )
    if options.checkpoint.new_version:
        version = on_every_rank(
            world,
            f"find a new version in {shown(save_dir)}",
            lambda: f"version_{_next_version(save_dir)}" if world.is_main else "",
        )[0]
        save_dir = join(save_dir, version)
        upload_dir = join(upload_dir, version) if upload_dir else None
    url = save_dir if is_url(save_dir) else upload_dir
    local = local_folder(options, save_dir)
    index, count = neighbours(local, world)
    is_owner = index == 0
    locks: list[FolderLock] = []

    def claim() -> None:
        if is_owner:
            locks.append(FolderLock(local))
            restored = clean_leftovers(local)
            for path in restored:
                say(f"{path} was being replaced when a run was killed; it is back")

    on_every_rank(world, f"save to {local}", claim)
    is_shared = min(on_every_rank(world, "count ranks", lambda: count)) == world.size
    lock = locks[0] if locks else None
    store = None if url is None else _open_store(url, options, world)
    return Places(local, store, is_shared, is_owner, lock)


def local_folder(options: Config, save_dir: str) -> Path:
    """Return the folder of this machine for a save_dir, which may be a URL."""
    if not is_url(save_dir):
        return Path(save_dir)
    if options.checkpoint.local_dir is not None:
        return Path(options.checkpoint.local_dir)
    return folder_for("runs", save_dir)


def versions(names: list[str]) -> list[str]:
    """Return the version folders among some names, the newest last."""
    return sorted(filter(_VERSION.fullmatch, names), key=lambda name: int(name.split("_")[1]))


def _next_version(save_dir: str) -> int:
    if is_url(save_dir):
        names = Store(save_dir, total_seconds=START_SECONDS).names()
    else:
        folder = Path(save_dir)
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    last = versions(names)[-1:]
    return int(last[0].split("_")[1]) + 1 if last else 0


def _open_store(url: str, options: Config, world: World) -> Store:
    """Return the store, once it has answered."""
    opened: list[Store] = []

    def reach() -> None:
        store = Store(url, total_seconds=START_SECONDS, silence=START_SECONDS)
        if world.is_main:
            store.make_folder()
            clean_remote(store)
        else:
            store.exists()
        opened.append(Store(url, total_seconds=options.checkpoint.store_timeout))

    on_every_rank(world, f"reach {shown(url)}", reach)
    return opened[0]
