"""Helpers for scripts of several ranks."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

import torch.distributed as dist

from plsc.parallel.world import World


def run_worker(main: Callable[[], None]) -> None:
    """Run `main`; after a failure, print it and exit at once, because other ranks may wait."""
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def smaller_world(full: World, ranks: int) -> World | None:
    """Return a world of the first `ranks` ranks, None on the others; a collective."""
    if ranks == 1:
        return World(0, 1, 0, full.device) if full.is_main else None
    groups = [dist.new_group(list(range(ranks)), backend="gloo") for _ in range(5)]
    if full.rank >= ranks:
        return None
    return World(full.rank, ranks, full.local_rank, full.device, *groups)
