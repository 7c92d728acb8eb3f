from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks


@pytest.mark.slow
def test_options_of_several_ranks_go_with_any_other_one():
    run_ranks(Path(__file__).with_name("option_pairs_worker.py"), 2)
