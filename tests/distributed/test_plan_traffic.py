from pathlib import Path

from tests.distributed.launch import run_ranks


def test_the_head_hands_to_the_network_what_the_plan_says():
    run_ranks(Path(__file__).with_name("plan_worker.py"), 2)
