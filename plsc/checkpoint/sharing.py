"""Which ranks share a disk, and which runs want the same folder."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import time
from pathlib import Path

from plsc.checkpoint.agree import on_every_rank
from plsc.errors import CheckpointError
from plsc.parallel.world import World

LOCK_NAME = ".lock"
_PATIENCE = 3.0  # seconds; a run that was just killed may be on its way out


def neighbours(folder: Path, world: World) -> tuple[int, int]:
    """Return this rank's place among those that see the same `folder`, and how many they are. Collective.

    The folder is made. Raises CheckpointError, on all ranks, if some rank cannot write there.
    """
    doing = f"write to {folder}"
    mark = f".rank-{secrets.token_hex(8)}"

    def leave() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / mark).touch()
        return mark

    marks = on_every_rank(world, doing, leave)

    def look() -> list[int]:
        return [rank for rank, one in enumerate(marks) if (folder / one).exists()]

    mine = on_every_rank(world, doing, look)[world.rank]
    on_every_rank(world, doing, (folder / mark).unlink)
    return mine.index(world.rank), len(mine)


class FolderLock:
    """Keeps a second run out of a folder of checkpoints while this process lives.

    The operating system drops the lock with its process, so that a run that was killed leaves none. It is a
    record lock, which children that were forked do not inherit.
    """

    def __init__(self, folder: Path) -> None:
        """Raise CheckpointError, naming the other run, if there is one."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / LOCK_NAME
        self._descriptor = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666
        )
        give_up = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() > give_up:
                    holder = _read_holder(self._descriptor)
                    os.close(self._descriptor)
                    raise CheckpointError(
                        f"another run{holder} is saving to {folder}; wait for it, stop it, or save elsewhere "
                        "(set_model_save_dir)"
                    ) from None
                time.sleep(0.1)
            except OSError:  # a file system that knows no locks
                break
        me = {"host": socket.gethostname(), "pid": os.getpid()}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(me).encode(), 0)

    def release(self) -> None:
        """Let others in."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _read_holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 1000, 0))
        return f" (process {int(holder['pid'])} on {holder['host']!s:.100})"
    except (ValueError, KeyError, TypeError, OSError):
        return ""
