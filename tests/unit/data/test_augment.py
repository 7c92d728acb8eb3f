from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from plsc.data.augment import apply_transform, augment
from plsc.data.isolated import IsolatedRandom
from plsc.errors import DataError
from plsc.keys import splitmix64, uniform

IMAGE = torch.arange(2 * 3 * 4, dtype=torch.uint8).reshape(2, 3, 4)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_splitmix64_gives_the_published_sequence():
    # The first outputs of the reference generator for seed 1234567.
    gamma = 0x9E3779B97F4A7C15
    found = [splitmix64((1234567 + step * gamma) % 2**64) for step in range(3)]
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_about_half_of_the_images_are_flipped_and_each_epoch_others():
    flips = np.array([[uniform(1, epoch, i, 1) < 0.5 for i in range(4000)] for epoch in (0, 1)])
    assert abs(flips.mean() - 0.5) < 0.03
    assert abs((flips[0] == flips[1]).mean() - 0.5) < 0.05


def test_a_flip_mirrors_the_columns_and_depends_on_its_arguments_alone():
    results = [augment(IMAGE, seed=0, epoch=0, sample=i, flip=True) for i in range(40)]
    random.random()
    again = [augment(IMAGE, seed=0, epoch=0, sample=i, flip=True) for i in range(40)]
    mirrored = [torch.equal(result, IMAGE.flip(-1)) for result in results]
    assert 0 < sum(mirrored) < 40
    assert all(
        torch.equal(result, IMAGE) != is_mirrored
        for result, is_mirrored in zip(results, mirrored, strict=True)
    )
    assert all(torch.equal(a, b) for a, b in zip(results, again, strict=True))


def test_without_flip_the_image_is_untouched():
    assert all(
        torch.equal(augment(IMAGE, seed=0, epoch=0, sample=i, flip=False), IMAGE) for i in range(9)
    )


def test_a_transform_draws_by_sample_and_leaves_the_global_generators_alone():
    def noise(image: torch.Tensor) -> torch.Tensor:
        return image.float() + sum(draws())

    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    expected = draws()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    first = apply_transform(noise, IMAGE, seed=1, epoch=2, sample=3)
    assert draws() == expected
    again = apply_transform(noise, IMAGE, seed=1, epoch=2, sample=3)
    other = apply_transform(noise, IMAGE, seed=1, epoch=2, sample=4)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda image: image.numpy(), "ndarray"),
        (lambda image: image[:, 1:], "keep the shape"),
        (lambda image: image.int(), "int32"),
        (lambda image: image.float() / 0, "NaN or infinite"),
    ],
)
def test_a_transform_that_gives_something_else_is_refused(transform, message):
    with pytest.raises(DataError, match=message):
        apply_transform(transform, IMAGE, seed=0, epoch=0, sample=0)


def test_an_isolated_stream_continues_where_it_stopped_also_after_an_error():
    whole, parts = IsolatedRandom(9), IsolatedRandom(9)
    with whole.active():
        expected = [draws(), draws()]
    found = []

    def draw_and_fail() -> None:
        with parts.active():
            found.append(draws())
            raise KeyError

    with pytest.raises(KeyError):
        draw_and_fail()
    random.random()
    with parts.active():
        found.append(draws())
    assert found == expected
