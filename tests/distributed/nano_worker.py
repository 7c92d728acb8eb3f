"""Trains demo/nano_plsc.py and the library side by side in float64; exits 1 at a difference.

Arguments: sample ratio, empty folder for a checkpoint. Each step, the library draws the classes: those whose
weights it changed. The demo gets the same ones.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from demo import nano_plsc
from plsc.heads import RowSGD, Sampling, ShardedHead, build_margin
from tests.distributed.worker import run_worker

CLASSES, DIM, BATCH, STEPS = 50, 8, 24, 100
SCALE, MARGIN, RATE, MOMENTUM, DECAY = 32.0, 0.5, 0.05, 0.9, 5e-3


class Nano:
    """The demo's head behind a linear layer."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.net = nn.Linear(12, DIM)
        self.head = nano_plsc.ShardedArcFace(CLASSES, DIM, SCALE, MARGIN)
        self.head.tile = 7
        self.optimizer = sgd(self.net)

    def step(self, images: torch.Tensor, labels: torch.Tensor, drawn: torch.Tensor) -> tuple:
        mine = self.net(part(images))
        loss, _, gradient = self.head.forward(nano_plsc.gather(mine.detach()), labels, drawn)
        update(self.net, self.optimizer, lambda: mine.backward(part(gradient)))
        self.head.update(RATE, MOMENTUM, DECAY)
        return loss, part(gradient)

    def state(self) -> list[torch.Tensor]:
        return [self.head.weight, self.head.momentum, self.net.weight, self.net.bias]


class Library:
    """The library's head, from the same weights."""

    def __init__(self, nano: Nano, ratio: float) -> None:
        self.net = nn.Linear(12, DIM)
        self.net.load_state_dict(nano.net.state_dict())
        self.head = ShardedHead(
            CLASSES,
            DIM,
            build_margin("arcface", scale=SCALE, margin=MARGIN),
            sampling=Sampling(ratio),
            row_dtype=torch.float64,
            group=dist.group.WORLD,
        )
        assert self.head.class_range == (nano.head.start, nano.head.stop)
        with torch.no_grad():
            self.head.weight.copy_(nano.head.weight)
        self.rows = RowSGD(self.head, lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
        self.optimizer = sgd(self.net)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> tuple:
        before = self.head.weight.detach().clone()
        mine = self.net(part(images))
        mine.retain_grad()
        output = self.head(mine, part(labels))
        update(self.net, self.optimizer, output.loss.backward)
        self.rows.step()
        drawn = (self.head.weight != before).any(1).nonzero()[:, 0] + self.head.class_range[0]
        return output.mean_loss, mine.grad, drawn


def sgd(net: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)


def update(net: nn.Module, optimizer: torch.optim.SGD, backward) -> None:
    optimizer.zero_grad()
    backward()
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()


def part(x: torch.Tensor) -> torch.Tensor:
    """This rank's part of a global batch."""
    return x.detach().chunk(dist.get_world_size())[dist.get_rank()]


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy copies of one point per class."""
    points = torch.randn(CLASSES, 12, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(100 + step)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    return points[labels] + 0.2 * torch.randn(BATCH, 12, generator=generator), labels


def check_close(name: str, step: int, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    difference = float((ours - theirs).norm() / theirs.norm())
    assert difference < 1e-6, f"step {step}: {name} differs by {difference:.1e}"


def check_sample(ratio: float) -> None:
    """The demo draws as many classes as the library, the batch's among them, others each time."""
    head = nano_plsc.ShardedArcFace(CLASSES, DIM, ratio=ratio)
    labels = batch_of(0)[1]
    positive = {int(c) for c in labels if head.start <= c < head.stop}
    draws = [head.sample(labels, step).tolist() for step in range(20)]
    for drawn in draws:
        assert drawn == sorted(set(drawn))
        assert positive <= set(drawn) <= set(range(head.start, head.stop))
        wanted = -(-(head.stop - head.start) * int(100 * ratio) // 100)
        assert len(drawn) == max(wanted, len(positive))
    assert draws[0] == head.sample(labels, 0).tolist()
    assert ratio == 1 or len({tuple(drawn) for drawn in draws}) > 1


def main() -> None:
    ratio, folder = float(sys.argv[1]), Path(sys.argv[2])
    nano_plsc.start()
    torch.set_default_dtype(torch.float64)
    nano = Nano(seed=1)
    library = Library(nano, ratio)
    losses, draws = [], []
    for step in range(STEPS):
        images, labels = batch_of(step)
        loss, gradient, drawn = library.step(images, labels)
        our_loss, our_gradient = nano.step(images, labels, drawn)
        check_close("the loss", step, our_loss, loss)
        check_close("the embeddings' gradient", step, our_gradient, gradient)
        check_close("the network", step, nano.net.weight, library.net.weight)
        check_close("the class weights", step, nano.head.weight, library.head.weight)
        losses.append(float(loss))
        draws.append(drawn)
        if step + 1 == STEPS // 2:
            nano_plsc.save(folder, step + 1, nano.net, nano.optimizer, nano.head)
            dist.barrier()
    assert losses[-1] < losses[0] / 2, losses
    assert (ratio < 1) == any(len(d) < len(nano.head.weight) for d in draws)

    resumed = Nano(seed=2)
    saved = folder / f"step-{STEPS // 2:07d}"
    first = nano_plsc.load(saved, resumed.net, resumed.optimizer, resumed.head)
    for step in range(first, STEPS):
        resumed.step(*batch_of(step), draws[step])
    for ours, theirs in zip(resumed.state(), nano.state(), strict=True):
        assert torch.equal(ours, theirs)
    check_sample(ratio)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_worker(main)
