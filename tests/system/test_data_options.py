"""Effects of the data options on a whole run: bad samples on several ranks, transforms, orders, caches."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from plsc.checkpoint import read_manifest
from tests.distributed.launch import run_ranks
from tests.images import write_dataset
from tests.system.small_entry import entry

JOB = Path(__file__).resolve().parents[1] / "distributed" / "job.py"
pytestmark = pytest.mark.slow


@pytest.fixture
def damaged(tmp_path):
    folder = write_dataset(tmp_path / "set", classes=13, per_class=7)
    (folder / "images/4_2.png").unlink()
    (folder / "images/9_1.png").write_bytes(b"no image")
    return folder


def metrics_of(save_dir):
    entries = map(json.loads, (save_dir / "metrics.jsonl").read_text().splitlines())
    return [entry for entry in entries if "loss" in entry]


def test_bad_samples_of_all_ranks_are_listed_once_and_the_steps_stay_equal(damaged, tmp_path):
    save_dir = tmp_path / "run"
    done = run_ranks(JOB, 3, str(damaged), str(save_dir), "set_train_epochs=2", "set_bad_images='skip'")
    lines = sorted((save_dir / "bad_samples.txt").read_text().splitlines())
    assert [line.split(":")[0] for line in lines] == [
        "missing\timages/4_2.png (label.txt",
        "undecodable\timages/9_1.png (label.txt",
    ]
    assert re.search(r"bad samples: 1 \w+, 1 \w+; listed in .*bad_samples\.txt", done.stdout)
    last = metrics_of(save_dir)[-1]
    assert last["bad_samples"] == 2
    assert sum(metrics["skipped_images"] for metrics in metrics_of(save_dir)) >= 4
    assert read_manifest(save_dir / "1").step == last["step"]


def losses(dataset, save_dir, transform=None, **settings):
    ins = entry(dataset, save_dir, **settings)
    ins.train_transform = transform
    ins.train()
    return [metrics["loss"] for metrics in metrics_of(save_dir)]


def test_loaders_and_caches_do_not_change_a_run_but_augmentation_and_order_do(tmp_path, capsys):
    dataset = write_dataset(tmp_path / "set", classes=6, per_class=8)
    plain = losses(dataset, tmp_path / "0")
    assert "data: 2 threads per rank load images in the background" in capsys.readouterr().out
    same = [
        {"set_num_workers": 0},
        {"set_cache": "memory:1G"},
        {"set_cache": f"{tmp_path}:1M"},
    ]
    for number, settings in enumerate(same):
        assert losses(dataset, tmp_path / f"same{number}", **settings) == plain, settings
    other = [
        {"set_order": {"order": "block", "block_samples": 4, "pool_samples": 12}},
        {"set_augmentation": {"random_erasing": 1.0}},
    ]
    for number, settings in enumerate(other):
        assert losses(dataset, tmp_path / f"other{number}", **settings) != plain, settings


def test_a_run_with_random_torchvision_transforms_resumes_bit_for_bit_in_worker_processes(tmp_path):
    dataset = write_dataset(tmp_path / "set", classes=6, per_class=8)
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(16, scale=(0.5, 1)),
            v2.RandAugment(2, 5),
            v2.RandomApply([v2.GaussianBlur(3)], 0.5),
            v2.RandomChoice([v2.RandomGrayscale(0.5), v2.ColorJitter(0.3, 0.3, 0.3, 0.1)]),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5] * 3, [0.5] * 3),
            v2.RandomErasing(0.5),
        ]
    )
    often = {"set_save_every_n_steps": 3, "set_train_epochs": 2}
    whole = losses(dataset, tmp_path / "whole", transform, set_num_workers=2, **often)
    assert len(whole) == 8
    again = losses(
        dataset, tmp_path / "resumed", transform, set_num_workers=1,
        set_checkpoint_dir=tmp_path / "whole" / "0-step3", **often,
    )  # fmt: skip
    assert again == whole[3:]


PARTS = """
import base64, sys
from pathlib import Path
import numpy as np
import torch.distributed as dist
from plsc import Entry

dist.init_process_group("gloo")
folder, save_dir = map(Path, sys.argv[1:])


def entry(name):
    ins = Entry()
    ins.set_model_name("SmallResNet")
    ins.set_image_shape((3, 16, 16))
    ins.set_emb_size(8)
    ins.set_global_batch_size(8)
    ins.set_train_epochs(2)
    ins.set_log_period(1)
    ins.set_with_test(False)
    ins.set_dataset_dir(str(folder))
    ins.set_model_save_dir(str(save_dir / name))
    return ins


ins = entry("files")
ins.set_order("rank_files")
print(f"FILES {ins.train().steps}", flush=True)


def reader(rank, ranks):  # rank 0 has 20 samples, rank 1 has 12
    for value in range(20 - 8 * rank):
        yield np.full((3, 16, 16), value / 20, dtype=np.float32), value % 5


reader.shards_itself = True
ins = entry("reader")
ins.train_reader = reader
ins.set_class_num(5)
ins.set_last_batch("keep")
print(f"READER {ins.train().steps}", flush=True)

if dist.get_rank() == 0:
    with (folder / "part_1").open("a") as part:
        part.write((folder / "part_0").read_text().splitlines(keepends=True)[0])
dist.barrier()
ins = entry("uneven")
ins.set_order("rank_files")
ins.train()
"""


def test_ranks_read_only_their_own_files_and_generators(tmp_path):
    dataset = write_dataset(tmp_path / "set", classes=5, per_class=4)
    lines = []
    for line in (dataset / "label.txt").read_text().splitlines():
        name, label = line.split("\t")
        image = base64.b64encode((dataset / name).read_bytes()).decode()
        lines.append(f"{image}\t{label}\n")
    folder = tmp_path / "parts"
    folder.mkdir()
    for rank in range(2):
        (folder / f"part_{rank}").write_text("".join(lines[rank::2]))
    (folder / "file_list.txt").write_text("part_0\npart_1\n")
    script = tmp_path / "job.py"
    script.write_text(PARTS)
    done = run_ranks(script, 2, str(folder), str(tmp_path / "runs"), check=False)
    assert done.stdout.count("FILES 6") == 2  # 20 samples in global batches of 8, two epochs
    assert done.stdout.count("READER 6") == 2  # three steps of 4 until rank 1 ends, two epochs
    assert done.returncode != 0
    assert "rank 0 has 10 and rank 1 has 11; partition the data" in done.stdout + done.stderr


def test_a_wrong_num_samples_of_a_reader_is_reported_once(tmp_path, capsys):
    def reader():
        for number in range(20):
            yield np.full((3, 16, 16), number / 20, np.float32), number % 4

    def count_warnings(number):
        ins = entry(tmp_path, tmp_path / str(number), set_class_num=4, set_num_workers=0)
        ins.set_train_image_num(number)
        ins.set_train_epochs(2)
        ins.train_reader = reader
        ins.train()
        return capsys.readouterr().err.count("correct data.train_image_num")

    assert count_warnings(20) == 0
    assert count_warnings(100) == 1


def test_a_bad_sample_is_printed_only_in_its_first_epoch(tmp_path, capsys):
    dataset = write_dataset(tmp_path / "set", classes=4, per_class=3)
    (dataset / "images/1_0.png").unlink()
    entry(dataset, tmp_path / "run", set_bad_images="skip", set_train_epochs=2).train()
    assert capsys.readouterr().err.count("skipped: images/1_0.png") == 1
