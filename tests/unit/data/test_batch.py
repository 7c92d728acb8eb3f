import numpy as np
import pytest
import torch

from plsc.data.batch import BadSample, BadSampleList, Batch, BufferRing
from tests.devices import GPU

SHAPE = (3, 4, 5)


def address(images: torch.Tensor) -> int:
    return images.untyped_storage().data_ptr()


def test_memory_is_reused_once_nothing_refers_to_it():
    ring = BufferRing(8, SHAPE)
    _, images = ring.take(8)
    first = address(images)
    del images, _
    _, images = ring.take(5)
    assert address(images) == first


def test_a_reference_to_any_part_of_a_batch_keeps_its_memory():
    ring = BufferRing(2, SHAPE)
    holders = {
        "the batch": lambda images: Batch(images, torch.zeros(2), []),
        "one image": lambda images: images[1],
        "a numpy view": lambda images: images.numpy()[0, 1:],
        "a flattened view": lambda images: images.permute(0, 2, 3, 1).flatten(1),
        "a tensor in inference mode": lambda images: images.detach().view_as(images),
    }
    kept = {}
    for value, (name, hold) in enumerate(holders.items()):
        pixels, images = ring.take(2)
        pixels[...] = value
        kept[name] = hold(images)
        del pixels, images
    for _ in range(10):
        pixels, images = ring.take(2)
        pixels[...] = 99
        del pixels, images
    for value, held in enumerate(kept.values()):
        images = held.images if isinstance(held, Batch) else held
        assert np.asarray(images).min() == np.asarray(images).max() == value


@pytest.mark.parametrize("device", [GPU])
def test_page_locked_memory_is_not_reused_while_it_is_copied(device):
    shape = (3, 1024, 1024)
    ring = BufferRing(8, shape, pin=True)
    arrived = []
    for value in range(30):
        pixels, images = ring.take(8)
        assert images.is_pinned()
        pixels[...] = value
        arrived.append(images.to(device, non_blocking=True))
        del pixels, images
    for value, images in enumerate(arrived):
        assert (images == value).all()


def sample(number: int, kind: str = "undecodable") -> BadSample:
    return BadSample(kind, f"images/{number}.jpg (label.txt:{number + 1}): is damaged")


def test_each_bad_sample_is_listed_once_also_when_a_run_resumes_and_up_to_a_limit(tmp_path, monkeypatch):
    (tmp_path / "bad_samples.txt").write_bytes(b"\xff\xfe\x00 what is this\n")
    BadSampleList(tmp_path).add([sample(1), sample(2, "missing")])
    resumed = BadSampleList(tmp_path)
    resumed.add([sample(1), sample(3)])
    assert resumed.path.read_bytes().splitlines()[1:] == [
        b"undecodable\timages/1.jpg (label.txt:2): is damaged",
        b"missing\timages/2.jpg (label.txt:3): is damaged",
        b"undecodable\timages/3.jpg (label.txt:4): is damaged",
    ]
    assert (resumed.counts["undecodable"], resumed.counts["missing"]) == (2, 1)
    monkeypatch.setattr("plsc.data.batch.MAX_LISTED", 5)
    (tmp_path / "other").mkdir()
    limited = BadSampleList(tmp_path / "other")
    limited.add([sample(number) for number in range(20)])
    assert len(limited.path.read_text().splitlines()) == 5
    assert limited.counts["undecodable"] == 20
