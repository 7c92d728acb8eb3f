"""Train two steps with pairs of options on two ranks; exit with 1 if the results differ."""

from __future__ import annotations

from plsc.parallel.world import World
from tests.distributed.worker import run_worker
from tests.option_pairs import CHANGES, CHANGES_OF_RANKS, check_pair, pairs


def main() -> None:
    world = World.from_environment("cpu")
    assert world.size == 2
    for one, other in pairs(CHANGES | CHANGES_OF_RANKS):
        if {one, other} & set(CHANGES_OF_RANKS):
            check_pair(one, other, world)
    world.close()


if __name__ == "__main__":
    run_worker(main)
