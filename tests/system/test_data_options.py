"""Effects of the data options on a whole run: bad samples on several ranks, transforms, orders, caches."""

from __future__ import annotations

from pathlib import Path

import pytest

from plsc.checkpoint import read_manifest
from tests.distributed.launch import run_ranks
from tests.images import write_dataset
from tests.overflowing import logged
from tests.resuming import losses_of
from tests.system.small_entry import entry

JOB = Path(__file__).resolve().parents[1] / "distributed" / "job.py"
pytestmark = pytest.mark.slow


@pytest.fixture
def damaged(tmp_path):
    folder = write_dataset(tmp_path / "set", classes=13, per_class=7)
    (folder / "images/4_2.png").unlink()
    (folder / "images/9_1.png").write_bytes(b"no image")
    return folder


def test_bad_samples_of_all_ranks_are_listed_once_and_the_steps_stay_equal(damaged, tmp_path):
    save_dir = tmp_path / "run"
    done = run_ranks(JOB, 2, str(damaged), str(save_dir), "set_train_epochs=2", "set_bad_images='skip'")
    assert done.stderr.count("skipped: images/4_2.png") in (1, 2)  # once per rank that reads it
    lines = sorted((save_dir / "bad_samples.txt").read_text().splitlines())
    assert [line.split(":")[0] for line in lines] == [
        "missing\timages/4_2.png (label.txt",
        "undecodable\timages/9_1.png (label.txt",
    ]
    assert "bad_samples.txt" in done.stdout
    found = logged(save_dir, "bad_samples", "skipped_images", "step")
    assert found["bad_samples"][-1] == 2
    assert sum(found["skipped_images"]) >= 4
    assert read_manifest(save_dir / "1").step == found["step"][-1]


def losses(dataset, save_dir, **settings):
    entry(dataset, save_dir, **settings).train()
    return losses_of(save_dir)


def test_loaders_and_caches_do_not_change_a_run_but_flips_and_order_do(tmp_path):
    dataset = write_dataset(tmp_path / "set", classes=6, per_class=8)
    plain = losses(dataset, tmp_path / "0")
    same = [{"set_num_workers": 0, "set_cache": "memory:1G"}, {"set_cache": f"{tmp_path}:1M"}]
    for number, settings in enumerate(same):
        assert losses(dataset, tmp_path / f"same{number}", **settings) == plain, settings
    other = [
        {"set_order": {"order": "block", "block_samples": 4, "pool_samples": 12}},
        {"set_flip": False},
    ]
    for number, settings in enumerate(other):
        assert losses(dataset, tmp_path / f"other{number}", **settings) != plain, settings


OWN = """
import sys
import numpy as np
import torch.distributed as dist
from plsc import Entry

dist.init_process_group("gloo")


def reader(rank, ranks):  # rank 0 has 20 samples, rank 1 has 12
    for value in range(20 - 8 * rank):
        yield np.full((3, 16, 16), value / 20, dtype=np.float32), value % 5


reader.shards_itself = True
ins = Entry()
ins.set_model_name("SmallResNet")
ins.set_image_shape((3, 16, 16))
ins.set_emb_size(8)
ins.set_global_batch_size(8)
ins.set_train_epochs(2)
ins.set_with_test(False)
ins.set_model_save_dir(sys.argv[1])
ins.train_reader = reader
ins.set_class_num(5)
ins.set_last_batch("keep")
print(f"READER {ins.train().steps}", flush=True)
"""


def test_ranks_read_only_their_own_generators(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(OWN)
    done = run_ranks(script, 2, str(tmp_path / "runs"))
    assert done.stdout.count("READER 6") == 2  # three steps of 4 until rank 1 ends, two epochs
