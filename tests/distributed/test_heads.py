from pathlib import Path

from tests.distributed.launch import run_ranks


def test_every_head_equals_the_reference_on_uneven_shards_and_batches_of_one_to_four_ranks():
    output = run_ranks(Path(__file__).with_name("heads_worker.py"), 4).stdout
    assert [f"passed on {ranks}" in output for ranks in range(1, 5)] == [True] * 4, output
