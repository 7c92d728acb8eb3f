"""A loss that is not finite on several ranks: the rank, the layer and the image are named."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.distributed.launch import run_ranks
from tests.images import write_dataset

WORKER = Path(__file__).with_name("bad_loss_worker.py")


@pytest.mark.slow
def test_the_rank_with_the_bad_image_is_named_on_all_ranks(tmp_path):
    dataset = write_dataset(tmp_path / "faces", classes=5, per_class=6)
    run_ranks(WORKER, 2, str(dataset), str(tmp_path), "set_sync_batch_norm=True")
    (_, first), (bad, second) = ((tmp_path / f"{rank}.txt").read_text().split("\n", 1) for rank in range(2))
    assert first == second
    assert "the loss is nan at step 4 " in first
    assert f"the first layer with a nan or inf: block.1 (rank 1); samples: {bad}; the batch" in first
    images = load_file(tmp_path / "run/bad_batch.safetensors")["images"]
    assert len(images) == 4
    assert not images[1].any()
