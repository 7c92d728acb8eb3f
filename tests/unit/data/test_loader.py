from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from plsc.data.decode import decode_image
from plsc.data.loader import Batch, SourceLoader, to_input
from plsc.data.order import BatchPlan
from plsc.data.sources import TorchDatasetSource, open_source
from plsc.errors import DataError, OptionError

SHAPE = (3, 24, 20)


def loader(source, batch=4, rank=0, ranks=1, last_batch="keep", **options) -> SourceLoader:
    plan = BatchPlan(len(source), batch, ranks, 11, last_batch)
    return SourceLoader(source, plan, rank, SHAPE, **{"seed": 11, **options})


def same(left: list[Batch], right: list[Batch]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels) and a.names == b.names
        for a, b in zip(left, right, strict=True)
    )


def test_batches_hold_the_images_labels_and_names_of_the_plan(label_folder):
    source = open_source(label_folder(10))
    batches = loader(source, flip=False)
    assert batches.steps_per_epoch == 3
    for step, batch in enumerate(batches.epoch(5)):
        indices = batches.plan.global_indices(5, step).tolist()
        assert batch.names == [source.name(i) for i in indices]
        assert batch.labels.tolist() == [source[i][1] for i in indices]
        expected = torch.stack([decode_image(source[i][0], SHAPE) for i in indices])
        assert torch.equal(batch.images, expected)
        assert batch.skipped == 0


def test_ranks_together_read_what_one_rank_reads_with_the_same_flips(label_folder):
    source = open_source(label_folder(11))
    whole = list(loader(source, batch=4).epoch(1))
    parts = [list(loader(source, batch=4, rank=r, ranks=3).epoch(1)) for r in range(3)]
    assert {len(part) for part in parts} == {3}
    for step, batch in enumerate(whole):
        assert torch.equal(torch.cat([part[step].images for part in parts]), batch.images)
        assert [name for part in parts for name in part[step].names] == batch.names


def test_a_rank_without_samples_gets_an_empty_batch(label_folder):
    source = open_source(label_folder(3))
    (batch,) = loader(source, batch=5, rank=0, ranks=4).epoch(0)
    assert batch.images.shape == (0, *SHAPE)
    assert batch.labels.shape == (0,)


def test_a_small_set_is_padded_by_repeats(label_folder):
    source = open_source(label_folder(3))
    (batch,) = loader(source, batch=8, last_batch="pad").epoch(0)
    assert len(batch) == 8
    assert batch.names[3:6] == batch.names[:3]


def add_noise(image: torch.Tensor) -> torch.Tensor:
    return image.float() + torch.rand(image.shape)


@pytest.mark.parametrize("transform", [None, add_noise])
def test_worker_processes_change_nothing_in_any_epoch(label_folder, transform):
    source = open_source(label_folder(9))
    alone = loader(source, batch=2, transform=transform)
    helped = loader(source, batch=2, transform=transform, num_workers=2)
    for epoch in (0, 1):
        assert same(list(alone.epoch(epoch)), list(helped.epoch(epoch)))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_left_early_does_not_disturb_the_next(label_folder, num_workers):
    source = open_source(label_folder(9))
    expected = list(loader(source, batch=1).epoch(4, start_step=3))
    used = loader(source, batch=1, num_workers=num_workers)
    next(used.epoch(2))
    assert same(list(used.epoch(4, start_step=3)), expected)


def test_epochs_have_other_flips(label_folder):
    source = open_source(label_folder(10))

    def by_name(epoch: int) -> dict[str, torch.Tensor]:
        return {
            name: image
            for batch in loader(source).epoch(epoch)
            for name, image in zip(batch.names, batch.images, strict=True)
        }

    first, second = by_name(0), by_name(1)
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_reading_leaves_the_global_generators_alone(label_folder):
    batches = loader(open_source(label_folder(4)), transform=add_noise)
    before = torch.get_rng_state()
    list(batches.epoch(0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def damaged(label_folder, hostile_images) -> Path:
    """The first images are bad, each in its way; the last two are good."""
    folder = label_folder(len(hostile_images) + 5)
    for index, data in enumerate(hostile_images.values()):
        (folder / f"images/{index}.jpg").write_bytes(data)
    missing = folder / f"images/{len(hostile_images)}.jpg"
    missing.unlink()
    huge = folder / f"images/{len(hostile_images) + 1}.jpg"
    with huge.open("wb") as file:
        file.truncate(2**30)
    device = folder / f"images/{len(hostile_images) + 2}.jpg"
    device.unlink()
    os.mkfifo(device)
    return folder


@pytest.mark.parametrize("num_workers", [0, 1])
def test_skip_leaves_bad_images_out_counts_and_names_them(damaged, num_workers):
    source = open_source(damaged)
    batches = list(loader(source, on_bad_image="skip", num_workers=num_workers).epoch(0))
    good = [name for batch in batches for name in batch.names]
    problems = [problem for batch in batches for problem in batch.problems]
    assert sorted(good) == sorted(source.name(i) for i in range(len(source) - 2, len(source)))
    assert sum(batch.skipped for batch in batches) == len(problems) == len(source) - 2
    for index in range(len(source) - 2):
        assert sum(problem.startswith(source.name(index) + ": ") for problem in problems) == 1
    assert all(len(batch.images) == len(batch.labels) == len(batch.names) for batch in batches)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_stop_names_the_bad_image_and_its_line_in_one_line(label_folder, num_workers):
    folder = label_folder(5)
    (folder / "images/3.jpg").write_bytes((folder / "images/3.jpg").read_bytes()[:200])
    batches = loader(open_source(folder), batch=2, num_workers=num_workers)
    with pytest.raises(DataError, match=r"^images/3\.jpg \(label\.txt:4\): .*JPEG") as caught:
        list(batches.epoch(0))
    assert "\n" not in str(caught.value)


def test_a_transform_s_fault_is_never_skipped(label_folder):
    source = open_source(label_folder(3))
    batches = loader(source, on_bad_image="skip", transform=lambda image: image[:1])
    with pytest.raises(DataError, match="must keep the shape"):
        list(batches.epoch(0))


def test_float_images_of_a_dataset_stay_float():
    items = [(torch.full(SHAPE, float(i)), i) for i in range(3)]
    (batch,) = loader(TorchDatasetSource(items)).epoch(0)
    assert batch.images.dtype == torch.float32
    assert batch.images[:, 0, 0, 0].tolist() == batch.labels.tolist()


def test_a_mixture_of_floats_and_bytes_is_refused():
    items = [(torch.zeros(SHAPE), 0), (np.zeros((24, 20, 3), dtype=np.uint8), 1)]
    with pytest.raises(DataError, match="make them one"):
        list(loader(TorchDatasetSource(items)).epoch(0))


def test_bad_options_are_refused(label_folder):
    source = open_source(label_folder(3))
    with pytest.raises(OptionError, match="did you mean 'skip'"):
        loader(source, on_bad_image="skp")
    with pytest.raises(OptionError, match="rank 2"):
        loader(source, rank=2, ranks=2)


def test_bytes_are_normalised_and_floats_are_not():
    images = torch.tensor([0, 127, 128, 255], dtype=torch.uint8)
    assert to_input(images, "cpu").tolist() == [(x - 127.5) / 128 for x in (0, 127, 128, 255)]
    floats = torch.tensor([0.0, 300.0])
    assert to_input(floats, "cpu").tolist() == [0.0, 300.0]
    assert floats.tolist() == [0.0, 300.0]


INTERRUPTED = """
import signal, sys
from plsc.data.loader import SourceLoader
from plsc.data.order import BatchPlan
from plsc.data.sources import open_source

signals = []
source = open_source(sys.argv[1])
batches = SourceLoader(source, BatchPlan(len(source), 1, 1, 0), 0, (3, 24, 20), seed=0, num_workers=2)
count = 0
for batch in batches.epoch(0):
    if count == 0:  # the first worker runs by now, the second may be starting
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: signals.append(number))
        print("ready", flush=True)
        sys.stdin.readline()
    count += 1
print(count, len(signals))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_leave_a_signal_to_the_main_process(label_folder, number):
    command = [sys.executable, "-c", INTERRUPTED, str(label_folder(30))]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, number)  # as a terminal and torchrun do
        output, errors = process.communicate("go on\n", timeout=60)
    assert (process.returncode, output, errors) == (0, "30 1\n", "")


class DiesAtOne:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(SHAPE), 0


def test_a_worker_that_dies_ends_in_one_line():
    batches = loader(TorchDatasetSource(DiesAtOne()), batch=1, num_workers=1)
    with pytest.raises(DataError, match="a data worker process died") as caught:
        list(batches.epoch(0))
    assert "\n" not in str(caught.value)
