from pathlib import Path

from tests.distributed.launch import run_ranks


def test_network_traffic_of_the_head_equals_the_plan():
    run_ranks(Path(__file__).with_name("plan_worker.py"), 2)
