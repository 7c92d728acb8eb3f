"""A corner of the rendezvous store that belongs to this start of the ranks alone.

torchrun hosts one store for all its attempts. What a group of dead ranks left there (the addresses at which
they listened) would be taken for that of the ranks that replace them, and nothing in the environment
tells one attempt from another on all machines alike: the count of restarts is each launcher's own. So the
ranks agree on a fresh prefix first, by numbers that only living processes know.
"""

from __future__ import annotations

import secrets
import time

import torch.distributed as dist

_POLL_SECONDS = 0.02


def fresh_store(store: dist.Store, rank: int, ranks: int, timeout_seconds: float) -> dist.Store:
    """Return a part of ``store`` that no earlier process has used, the same on all ranks; a collective.

    Rank 0 draws the name of the part. Every other rank leaves a number of its own and waits for an answer to
    just that number; rank 0 answers each number that it finds, those of dead processes too, until
    every rank has confirmed. Raises TimeoutError if some rank never comes.
    """
    deadline = time.monotonic() + timeout_seconds
    if rank == 0:
        name = secrets.token_hex(8)
        _answer(store, name, ranks, deadline)
    else:
        number = secrets.token_hex(8)
        store.set(f"plsc/hello/{rank}", number)
        _wait_for(store, f"plsc/answer/{number}", deadline, "rank 0 did not come")
        name = store.get(f"plsc/answer/{number}").decode()
        store.set(f"plsc/confirmed/{name}/{rank}", "1")
    return dist.PrefixStore(f"plsc/{name}", store)


def _answer(store: dist.Store, name: str, ranks: int, deadline: float) -> None:
    missing = set(range(1, ranks))
    answered: set[bytes] = set()
    while missing:
        for rank in sorted(missing):
            if store.check([f"plsc/confirmed/{name}/{rank}"]):
                missing.discard(rank)
            elif store.check([f"plsc/hello/{rank}"]):
                number = store.get(f"plsc/hello/{rank}")
                if number not in answered:
                    store.set(f"plsc/answer/{number.decode()}", name)
                    answered.add(number)
        if missing and time.monotonic() > deadline:
            raise TimeoutError(f"rank {min(missing)} did not come")
        time.sleep(_POLL_SECONDS if missing else 0)


def _wait_for(store: dist.Store, key: str, deadline: float, problem: str) -> None:
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise TimeoutError(problem)
        time.sleep(_POLL_SECONDS)
