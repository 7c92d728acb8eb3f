import random

import numpy as np
import pytest
import torch

from plsc.data.augment import Operation, apply_transform, are_mirrored
from plsc.errors import DataError
from plsc.seeds import hash_key

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
        (fail, r"ValueError: no such colour .*test_augment.py:\d+"),
    ],
)
def test_an_invalid_result_of_a_transform_is_refused(transform, message):
    with pytest.raises(DataError, match=message):
        transformed(transform)
