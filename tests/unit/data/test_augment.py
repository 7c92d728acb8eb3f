import random

import numpy as np
import pytest
import torch

from plsc.data.augment import (
    Augmentation,
    Draws,
    Operation,
    apply_transform,
    are_mirrored,
    augment,
)
from plsc.errors import DataError
from tests.unit.data.conftest import smooth_picture

IMAGE = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
PICTURE = np.array(smooth_picture(3, 40, 36))
EVERYTHING = Augmentation(
    flip=True, crop_padding=3, low_resolution=0.5, colour_jitter=(0.4, 0.3, 0.5), random_erasing=0.5
)


def augmented(image: np.ndarray, augmentation: Augmentation, sample: int, epoch: int = 0):
    pixels = image.copy()
    augment(pixels, augmentation, Draws(0, epoch, sample))
    return pixels


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_the_flips_of_a_batch_are_those_of_its_samples():
    samples = np.array([0, 1, 7, 2**31, 2**62, *range(100, 300)])
    for seed, epoch in ((0, 0), (11, 3), (2**63 - 1, 10**6)):
        expected = [Draws(seed, epoch, sample).uniform(Operation.FLIP) < 0.5 for sample in samples.tolist()]
        assert are_mirrored(seed, epoch, samples).tolist() == expected


@pytest.mark.parametrize("picture", [PICTURE, PICTURE[:, :, :1]])
def test_all_augmentations_depend_only_on_sample_and_epoch(picture):
    first = [augmented(picture, EVERYTHING, i) for i in range(12)]
    random.random(), np.random.rand()
    again = [augmented(picture, EVERYTHING, i) for i in range(12)]
    later = [augmented(picture, EVERYTHING, i, epoch=1) for i in range(12)]
    assert np.array_equal(first, again)
    assert sum(np.array_equal(a, b) for a, b in zip(first, later, strict=True)) <= 1
    assert (first[0].shape, first[0].dtype) == (picture.shape, np.uint8)
    assert not np.array_equal(first[3], picture)


def test_a_crop_shifts_by_at_most_the_padding_and_fills_with_black():
    shifts = set()
    for sample in range(200):
        result = augmented(IMAGE + 1, Augmentation(flip=False, crop_padding=2), sample)
        padded = np.pad(IMAGE + 1, ((2, 2), (2, 2), (0, 0)))
        found = [
            (row, column)
            for row in range(5)
            for column in range(5)
            if np.array_equal(padded[row : row + 4, column : column + 5], result)
        ]
        assert len(found) == 1
        shifts.update(found)
    assert len(shifts) == 25


def test_erasing_makes_one_rectangle_grey_in_the_requested_fraction_of_images():
    augmentation = Augmentation(flip=False, random_erasing=0.3)
    changed = 0
    for sample in range(400):
        result = augmented(PICTURE * 0 + 9, augmentation, sample)
        grey = (result == 127).all(axis=2)
        if not grey.any():
            continue
        changed += 1
        rows, columns = np.flatnonzero(grey.any(axis=1)), np.flatnonzero(grey.any(axis=0))
        assert grey[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
        assert grey.sum() == (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1)
        assert 0.01 < grey.mean() < 0.25
    assert abs(changed / 400 - 0.3) < 0.1


def test_low_resolution_removes_detail_and_keeps_the_mean():
    checks = ((np.indices((40, 36)).sum(axis=0) % 2) * 200).astype(np.uint8)
    checks = np.repeat(checks[:, :, None], 3, axis=2)
    results = [augmented(checks, Augmentation(False, low_resolution=1.0), i) for i in range(9)]
    assert all(result.std() < 0.9 * checks.std() for result in results)
    assert all(abs(result.mean() - checks.mean()) < 5 for result in results)


def test_colours_change_within_the_given_factors():
    flat = np.full((8, 8, 3), 100, dtype=np.uint8)
    values = [augmented(flat, Augmentation(False, colour_jitter=(0.2, 0, 0)), i)[0, 0, 0] for i in range(99)]
    assert 80 <= min(values) < 90
    assert 110 < max(values) <= 120
    grey = [augmented(PICTURE, Augmentation(False, colour_jitter=(0, 0, 1.0)), i) for i in range(50)]
    spread = [float(np.ptp(image.astype(int), axis=2).mean()) for image in grey]
    assert min(spread) < 0.3 * max(spread)


def test_floats_are_cropped_and_erased_but_not_coloured():
    floats = ((PICTURE - 127.5) / 128).astype(np.float32)
    cut = Augmentation(True, crop_padding=3, random_erasing=1.0)
    result = augmented(floats, cut, 1)
    expected = (augmented(PICTURE, cut, 1) - 127.5) / 128
    assert np.abs(result - expected).max() < 0.01
    with pytest.raises(DataError, match="need uint8"):
        augmented(floats, EVERYTHING, 1)


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
