"""A loss that is not finite on several ranks: the rank, the layer and the image are named."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.distributed.launch import run_ranks
from tests.images import write_dataset

WORKER = Path(__file__).with_name("bad_loss_worker.py")
JOB = Path(__file__).with_name("job.py")


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["set_sync_batch_norm=True", "set_backbone_parallel='sharded'"])
def test_the_rank_with_the_bad_image_is_named_on_all_ranks(tmp_path, setting):
    dataset = write_dataset(tmp_path / "faces", classes=5, per_class=6)
    run_ranks(WORKER, 2, str(dataset), str(tmp_path), setting)
    (_, first), (bad, second) = ((tmp_path / f"{rank}.txt").read_text().split("\n", 1) for rank in range(2))
    assert first == second
    assert "the loss is nan at step 4 " in first
    assert f"the first layer with a nan or inf: block.1 (rank 1); samples: {bad}; the batch" in first
    images = load_file(tmp_path / "run/bad_batch.safetensors")["images"]
    assert len(images) == 4
    assert not images[1].any()


@pytest.mark.slow
def test_the_table_of_a_sharded_network_is_printed_once_with_whole_shapes(tmp_path):
    dataset = write_dataset(tmp_path / "faces", classes=5, per_class=6)
    done = run_ranks(
        JOB, 2, str(dataset), str(tmp_path / "run"), "set_callbacks='check_content'",
        "set_backbone_parallel='sharded'", "set_fast_dev_run=True",
    )  # fmt: skip
    title = "layers in the first batch: 8 images of rank 0; of parameters, the part of rank 0"
    assert done.stdout.count(title) == 1
    assert "weight [16, 3, 3, 3]" in done.stdout
    assert not (tmp_path / "run").exists()
