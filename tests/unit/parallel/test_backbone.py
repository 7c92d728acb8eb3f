"""DDP of the backbone, and layers whose results do not depend on the number of ranks: batch norm, dropout."""

import gc
import sys
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from plsc.parallel.backbone import (
    SampleDropout,
    SampleNumbers,
    equalise_buffers,
    keep_mask,
    sum_gradients,
    synchronise_batch_norm,
    use_sample_dropout,
)
from plsc.parallel.world import World
from tests.devices import group_of_one
from tests.distributed.launch import run_ranks
from tests.distributed.worker import run_worker


@pytest.fixture
def group():
    """The process group of the first of four ranks; its collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.slow
def test_garbage_collection_in_another_thread_does_not_break_backward():
    """Without the reference in `sum_gradients` three of three runs failed, after 1,000 to 16,000 steps."""
    is_done = threading.Event()

    def collect() -> None:
        while not is_done.is_set():
            gc.collect()

    collector = threading.Thread(target=collect)
    interval = sys.getswitchinterval()
    with group_of_one("cpu") as group:
        wrapped = sum_gradients(nn.Linear(3, 3), World(0, 2, 0, torch.device("cpu"), backbone_group=group))
        gc.freeze()  # otherwise a collection takes long
        sys.setswitchinterval(1e-6)
        collector.start()
        try:
            for _ in range(10_000):
                (wrapped(torch.ones(2, 3)) * 1.0 * 1.0 * 1.0).sum().backward()
        finally:
            is_done.set()
            sys.setswitchinterval(interval)
            collector.join()
            gc.unfreeze()


def test_a_step_does_not_read_back_which_parameters_were_used(capfd):
    """A CUDA device would have to finish the backward pass first."""
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with group_of_one("cpu") as group:
        wrapped = sum_gradients(network, World(0, 2, 0, torch.device("cpu"), backbone_group=group))
        for _ in range(2):
            wrapped(torch.ones(2, 3)).sum().backward()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
            wrapped(torch.ones(2, 3)).sum().backward()
        # The map of used parameters, int32 [parameters]: written to the device, and not read.
        copies = [e for e in found.events() if e.name == "aten::copy_" and e.input_shapes[:1] == [[4]]]
        assert len(copies) == 1
    assert "find_unused_parameters" not in capfd.readouterr().err


def test_synchronised_batch_norms_match_the_target_device(group):
    for device in ("cuda", "cpu"):
        network = nn.Sequential(nn.BatchNorm2d(3))
        synchronise_batch_norm(network, group, torch.device(device))
        assert isinstance(network[0], nn.SyncBatchNorm) == (device == "cuda")
        assert type(network[0]) is not nn.BatchNorm2d
        network.eval()(torch.zeros(2, 3, 4, 4))  # a dry run on the CPU, where the network is


def make_network(dims: int) -> nn.Module:
    norm = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims]
    network = nn.Sequential(norm(5), nn.Sequential(nn.Tanh(), norm(5, momentum=None, eps=1e-3)))
    network.append(norm(5, affine=False)).append(norm(5, track_running_stats=False))
    generator = torch.Generator().manual_seed(7)
    network.double()
    for parameter in network.parameters():
        nn.init.normal_(parameter, generator=generator)
    return network


def compare(group: dist.ProcessGroup, sizes: list[int], dims: int) -> None:
    rank, total = dist.get_rank(), sum(sizes)
    generator = torch.Generator().manual_seed(dims)
    shape = (total, 5, 4, 3, 2)[: dims + 2]
    images = torch.randn(shape, dtype=torch.float64, generator=generator) + 3
    weights = torch.randn(shape, dtype=torch.float64, generator=generator)
    start = sum(sizes[:rank])
    mine = slice(start, start + sizes[rank])

    truth, network = make_network(dims), make_network(dims)
    keys = list(network.state_dict())
    assert synchronise_batch_norm(network, group) is network
    assert list(network.state_dict()) == keys
    for _ in range(2):
        truth.zero_grad()
        network.zero_grad()
        whole = images.clone().requires_grad_()
        part = images[mine].clone().requires_grad_()
        expected, output = truth(whole), network(part)
        (expected * weights).sum().backward()
        (output * weights[mine]).sum().backward()
        close(output, expected[mine])
        close(part.grad, whole.grad[mine])
        for parameter, true in zip(network.parameters(), truth.parameters(), strict=True):
            dist.all_reduce(parameter.grad, group=group)
            close(parameter.grad, true.grad)
    for key, buffer in network.state_dict().items():
        close(buffer, truth.state_dict()[key])
        first = buffer.clone()
        dist.broadcast(first, 0, group=group)
        assert torch.equal(first, buffer), f"{key} differs between ranks"
    network.eval()
    truth.eval()
    network[3], truth[3] = nn.Identity(), nn.Identity()  # the layer without running statistics
    close(network(images[mine]), truth(images)[mine])


def close(value: torch.Tensor, true: torch.Tensor) -> None:
    torch.testing.assert_close(value, true, rtol=1e-12, atol=1e-12)


def check_far_from_zero(group: dist.ProcessGroup) -> None:
    """With a mean of 3000, a sum of squares in fp32 would lose a variance of 1 completely."""
    images = torch.randn(64, 3, generator=torch.Generator().manual_seed(0)) + 3000
    network = synchronise_batch_norm(nn.BatchNorm1d(3), group)
    expected = nn.BatchNorm1d(3).double()(images.double())
    mine = slice(dist.get_rank() * 5, 64 if dist.get_rank() == group.size() - 1 else dist.get_rank() * 5 + 5)
    torch.testing.assert_close(network(images[mine]).double(), expected[mine], rtol=1e-3, atol=1e-3)


def check_half_precision(group: dist.ProcessGroup) -> None:
    network = synchronise_batch_norm(nn.BatchNorm2d(3), group)
    images = torch.randn(4, 3, 2, 2).bfloat16().requires_grad_()
    output = network(images)
    output.sum().backward()
    assert output.dtype == images.grad.dtype == torch.bfloat16
    assert network.weight.grad.dtype == torch.float32


def check_too_little(group: dist.ProcessGroup) -> None:
    network = synchronise_batch_norm(nn.BatchNorm1d(3), group)
    with pytest.raises(ValueError, match="batch norm"):
        network(torch.zeros(1 if dist.get_rank() == 0 else 0, 3))


def check_equalise(group: dist.ProcessGroup) -> None:
    rank, ranks = dist.get_rank(), group.size()
    module = nn.BatchNorm1d(3)
    module.running_mean.fill_(rank)
    module.running_var.copy_(torch.tensor([0.1, 1 / 3, 1e-30]))
    module.num_batches_tracked.fill_(10 + rank)
    module.register_buffer("scratch", torch.full((rank + 1,), rank), persistent=False)
    equalise_buffers(module, group)
    assert module.running_mean.tolist() == [(ranks - 1) / 2] * 3
    assert torch.equal(module.running_var, torch.tensor([0.1, 1 / 3, 1e-30]))
    assert int(module.num_batches_tracked) == 10
    assert module.scratch.tolist() == [rank] * (rank + 1)


def main() -> None:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    for sizes in ([3, 3, 3], [2, 3, 4], [0, 5, 1]):
        for dims in range(4):
            compare(group, sizes, dims)
    check_far_from_zero(group)
    check_half_precision(group)
    check_too_little(group)
    check_equalise(group)
    dist.barrier()
    print("passed", flush=True)
    dist.destroy_process_group()


@pytest.mark.slow
def test_output_gradients_and_statistics_equal_batch_norm_on_the_global_batch():
    assert run_ranks(__file__, 3).stdout.count("passed") == 3


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


def test_layers_have_different_masks():
    network, samples = network_of(nn.Dropout(0.5), nn.Dropout(0.5))
    samples.numbers = torch.arange(20)
    assert network[0](torch.ones(20, 30)).ne(network[1](torch.ones(20, 30))).any()


def test_without_sample_numbers_dropout_is_ordinary():
    network, samples = network_of(nn.Dropout(0.5), nn.Dropout2d(0.5))
    for numbers, shape in ((None, (8, 3, 2, 2)), (torch.arange(4), (8, 3, 2, 2))):
        samples.numbers = numbers
        torch.manual_seed(3)
        assert (network(torch.ones(shape)) == 0).any()


if __name__ == "__main__":
    run_worker(main)
