"""Layers whose results do not depend on the number of ranks: batch norm and dropout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from plsc.models.sync_batch_norm import (
    SampleDropout,
    SampleNumbers,
    keep_mask,
    use_sample_dropout,
)
from tests.distributed.launch import run_ranks

WORKER = Path(__file__).with_name("sync_batch_norm_worker.py")


@pytest.mark.slow
def test_output_gradients_and_statistics_equal_batch_norm_on_the_global_batch_of_one_to_four_ranks():
    assert run_ranks(WORKER, 4).stdout.count("passed on") == 4


def reference_mask(numbers, count, p, key):
    """The published hash with numpy's unsigned integers."""

    def mix(x):
        x = x ^ (x >> np.uint32(16))
        x = x * np.uint32(0x7FEB352D)
        x = x ^ (x >> np.uint32(15))
        x = x * np.uint32(0x846CA68B)
        return x ^ (x >> np.uint32(16))

    numbers = numbers.astype(np.uint64)
    low, high = numbers.astype(np.uint32), (numbers >> np.uint64(32)).astype(np.uint32)
    rows = mix(low ^ mix(high ^ np.uint32(key)))
    columns = np.arange(count, dtype=np.uint32) * np.uint32(0x9E3779B9)
    bits = mix(rows[:, None] ^ columns).view(np.int32)
    return bits >= min(int(p * 2**32) - 2**31, 2**31 - 1)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_elements_are_dropped_independently_with_probability_p(p):
    numbers = np.array([0, 1, 2, 77, 2**31, 2**33 + 5, 2**62])
    mask = keep_mask(torch.from_numpy(numbers), 40_003, p, 12345)
    np.testing.assert_array_equal(mask.numpy(), reference_mask(numbers, 40_003, p, 12345))
    deviation = (p * (1 - p) / 40_003) ** 0.5
    assert (mask.float().mean(dim=1) - (1 - p)).abs().max() < 5 * deviation
    both = np.corrcoef(mask.numpy())  # between samples
    assert np.abs(both - np.eye(len(numbers))).max() < 5 / 40_003**0.5
    shifted = np.corrcoef(mask[0, 1:], mask[0, :-1])[0, 1]
    assert abs(shifted) < 5 / 40_003**0.5
    other = keep_mask(torch.from_numpy(numbers), 40_003, p, 12346)
    assert abs(np.corrcoef(mask.flatten(), other.flatten())[0, 1]) < 5 / mask.numel() ** 0.5


def network_of(*layers):
    network = nn.Sequential(*layers).train()
    return network, use_sample_dropout(network)


def test_masks_do_not_depend_on_order_and_split_of_a_batch():
    network, samples = network_of(nn.Dropout2d(0.5), nn.Flatten(), nn.Dropout(0.3))
    assert samples.layers == 2
    images = torch.randn(12, 5, 4, 4)

    def run(chosen):
        torch.manual_seed(9)
        samples.numbers = chosen + 100
        return network(images[chosen])

    every = run(torch.arange(12))
    some = torch.tensor([7, 0, 11])
    assert run(some).equal(every[some])
    channels = every.view(12, 5, 16)
    assert (channels == 0).all(dim=2).any()  # the first layer drops channels, the second one elements
    assert ((channels == 0).any(dim=2) & ~(channels == 0).all(dim=2)).any()
    assert run(torch.empty(0, dtype=torch.int64)).shape == (0, 80)


def test_kept_elements_are_scaled_and_evaluation_is_the_identity():
    layer = SampleDropout(0.25, False, SampleNumbers())
    layer.samples.numbers = torch.arange(50)
    x = torch.randn(50, 40, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    stays = y != 0
    torch.testing.assert_close(y[stays], x[stays] / 0.75)
    y.sum().backward()
    torch.testing.assert_close(x.grad, stays / 0.75, check_dtype=False)
    assert layer.eval()(x) is x
    everything = SampleDropout(1.0, False, layer.samples)
    assert not everything(x).any()


def test_layers_have_different_masks_and_recomputation_repeats_them():
    network, samples = network_of(nn.Dropout(0.5), nn.Linear(30, 30), nn.Dropout(0.5))
    samples.numbers = torch.arange(20)
    assert network[0](torch.ones(20, 30)).ne(network[2](torch.ones(20, 30))).any()
    gradients = []
    for run in (network, lambda x: checkpoint(network, x, use_reentrant=False)):
        torch.manual_seed(2)
        x = torch.ones(20, 30, requires_grad=True)
        run(x).sum().backward()
        gradients.append(x.grad)
    assert gradients[0].equal(gradients[1])


def test_without_sample_numbers_dropout_is_ordinary():
    network, samples = network_of(nn.Dropout(0.5), nn.Dropout2d(0.5))
    for numbers, shape in ((None, (8, 3, 2, 2)), (torch.arange(4), (8, 3, 2, 2))):
        samples.numbers = numbers
        torch.manual_seed(3)
        assert (network(torch.ones(shape)) == 0).any()
