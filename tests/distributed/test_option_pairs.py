from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks


@pytest.mark.slow
def test_options_for_several_ranks_work_with_any_other_option():
    run_ranks(Path(__file__).with_name("option_pairs_worker.py"), 2)
