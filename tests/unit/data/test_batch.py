import random

import numpy as np
import pytest
import torch

from plsc.data.batch import BadSample, BadSampleList, Operation, apply_transform, are_mirrored, new_images
from plsc.errors import DataError
from plsc.seeds import hash_key
from tests.devices import GPU

IMAGE = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_the_flips_of_a_batch_are_those_of_its_samples():
    samples = np.array([0, 1, 7, 2**31, 2**62, *range(100, 300)])
    for seed, epoch in ((0, 0), (11, 3), (2**63 - 1, 10**6)):
        expected = [hash_key(seed, epoch, sample, Operation.FLIP) < 2**63 for sample in samples.tolist()]
        assert are_mirrored(seed, epoch, samples).tolist() == expected


def transformed(transform, sample: int = 3) -> torch.Tensor:
    return apply_transform(transform, IMAGE, seed=1, epoch=2, sample=sample)


def test_a_transform_is_seeded_by_sample_and_does_not_change_global_generators():
    def noise(image: torch.Tensor) -> torch.Tensor:
        assert torch.equal(image, torch.from_numpy(before).permute(2, 0, 1))
        return image.zero_().float() + sum(draws())

    before = IMAGE.copy()

    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    expected = draws()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    first = transformed(noise)
    assert draws() == expected
    assert torch.equal(first, transformed(noise))
    assert not torch.equal(first, transformed(noise, sample=4))
    assert np.array_equal(IMAGE, before)


def fail(image: torch.Tensor) -> torch.Tensor:
    raise ValueError("no such\ncolour")


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda image: image.numpy(), "ndarray"),
        (lambda image: image[:, 1:], "3, 3, 5"),
        (lambda image: image.int(), "int32"),
        (lambda image: image.float() / 0, "nan or inf"),
        (fail, r"ValueError: no such colour .*test_batch.py:\d+"),
    ],
)
def test_an_invalid_result_of_a_transform_is_refused(transform, message):
    with pytest.raises(DataError, match=message):
        transformed(transform)


@pytest.mark.parametrize("device", [GPU])
def test_page_locked_memory_is_not_reused_while_it_is_copied(device):
    shape = (3, 1024, 1024)
    arrived = []
    for value in range(30):
        pixels, images = new_images(8, shape, pin=True)
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
