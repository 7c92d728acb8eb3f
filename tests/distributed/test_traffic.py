from pathlib import Path

from tests.distributed.launch import run_ranks


def test_the_head_communicates_what_the_documentation_says():
    run_ranks(Path(__file__).with_name("traffic_worker.py"), 2)
