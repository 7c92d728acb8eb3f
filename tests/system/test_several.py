"""Several datasets with a head each, on several ranks."""

from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks
from tests.images import write_dataset


@pytest.mark.slow
def test_any_number_of_ranks_makes_the_same_losses_and_goes_on_from_any_others_checkpoint(tmp_path):
    for seed, (name, classes) in enumerate({"faces": 7, "glyphs": 4, "cars": 2}.items()):
        write_dataset(tmp_path / "sets" / name, classes, per_class=3 - seed, seed=seed)
    done = run_ranks(Path(__file__).with_name("several_worker.py"), 3, str(tmp_path))
    assert "last losses" in done.stdout, done.stdout
