"""A rank of test_sync_batch_norm.py: compare with batch norm on the global batch in one process.

Four ranks, of which the first one, two or three form groups of their own, too.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from plsc.models.sync_batch_norm import equalise_buffers, synchronise_batch_norm
from tests.distributed.worker import run_worker


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
    try:
        network(torch.zeros(1 if dist.get_rank() == 0 else 0, 3))
    except ValueError as error:
        assert "batch norm needs 2 or more" in str(error)  # noqa: PT017
    else:
        raise AssertionError("one value in the global batch was normalised")


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


def check(group: dist.ProcessGroup) -> None:
    ranks = group.size()
    if ranks == 1:
        network = make_network(2)
        assert type(synchronise_batch_norm(network, group)[0]) is nn.BatchNorm2d
        return
    for sizes in ([3] * ranks, list(range(2, ranks + 2)), [0, 5, 1, 2][:ranks]):
        for dims in range(4):
            compare(group, sizes, dims)
    check_far_from_zero(group)
    check_half_precision(group)
    check_too_little(group)
    check_equalise(group)


def main() -> None:
    dist.init_process_group("gloo")
    groups = [dist.new_group(list(range(ranks))) for ranks in range(1, 5)]
    for ranks, group in enumerate(groups, start=1):
        if dist.get_rank() < ranks:
            check(group)
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"passed on {ranks}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_worker(main)
