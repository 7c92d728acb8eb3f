"""Two steps with any two options on two ranks, one of them an option of several; exits 1 at a difference."""

from __future__ import annotations

import pytest

from plsc.errors import OptionError
from plsc.parallel.world import World
from tests.distributed.worker import run_worker
from tests.option_pairs import CHANGES, CHANGES_OF_RANKS, EXCLUDED, check_pair, pairs


def main() -> None:
    world = World.from_environment("cpu")
    assert world.size == 2
    for one, other in pairs(CHANGES | CHANGES_OF_RANKS):
        if {one, other} & set(CHANGES_OF_RANKS):
            check_pair(one, other, world)
    with pytest.raises(OptionError, match=r"the optimizer sgd cannot update a sharded backbone"):
        check_pair(*EXCLUDED, world)
    world.close()


if __name__ == "__main__":
    run_worker(main)
