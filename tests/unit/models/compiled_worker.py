"""Ranks of test_compiled.py: either all ranks compile the network or none."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plsc.models import BaseModel
from plsc.models.compiled import CompiledNetwork
from plsc.parallel.backbone import sum_gradients
from plsc.parallel.world import World
from tests.distributed.worker import run_worker

SIZES = [[2, 2], [2, 1]]  # seven images in two micro-batches, per rank
STEPS = 2


class Tiny(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.dropout, self.fc = nn.Dropout(0.5), nn.Linear(8, 4)

    def build_network(self, input, label, is_train=True):
        return self.fc(self.dropout(self.norm(self.conv(input)).relu().mean((2, 3))))


class Failing:
    """A compiler that returns its input, and fails in some of its calls, counted from 0."""

    def __init__(self, failures: Sequence[int]) -> None:
        self._failures = failures
        self._calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self._calls += 1
        if self._calls - 1 in self._failures:
            raise RuntimeError("no compiler here\nand more of it")
        return graph.forward


def learn(world: World, network: nn.Module, forward: nn.Module) -> list[Tensor]:
    """Return all embeddings and gradients of some steps, and the final statistics."""
    summing = sum_gradients(forward, world)
    found = []
    torch.manual_seed(7)
    for step in range(STEPS):
        network.zero_grad()
        for part, size in enumerate(SIZES[world.rank]):
            generator = torch.Generator().manual_seed(10 * step + part)
            output = summing(torch.randn(size, 3, 8, 8, generator=generator), None, True)
            output.square().sum().backward()
            found.append(output.detach())
        found += [p.grad.clone() for p in network.parameters() if p.grad is not None]
    return [*found, *network.buffers()]


def check(world: World, failures: Sequence[int]) -> None:
    """Compile on both ranks, with failures on the second rank."""
    torch._dynamo.reset()
    plain, network = Tiny(), Tiny()
    expected = learn(world, plain, plain)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("plsc")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    backend = Failing(failures if world.rank == 1 else ())
    sizes = set(SIZES[world.rank])
    compiled = CompiledNetwork(network, sizes, world, backend)
    found = learn(world, network, compiled)
    # This compiler gives the bits of the uncompiled network.
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))
    if not failures:
        assert compiled._compiled is not None
        assert not compiled._missing
        assert compiled._is_compiled_everywhere
        return
    assert compiled._compiled is None
    if world.rank == 1:
        assert not messages
        return
    start, _, reason = messages[-1].partition("rank 1: ")
    assert start == "the network cannot be compiled and trains uncompiled: "
    assert reason.endswith("RuntimeError: no compiler here"), reason
    assert "the network is compiled" not in messages


def main() -> None:
    world = World.from_environment("cpu")
    for failures in ((), (0,), (1,)):
        check(world, failures)
    world.close()


if __name__ == "__main__":
    run_worker(main)
