"""Modes of a whole network: evaluation for a while, and torch's own layers in place of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from plsc.models.activation import PReLU
from plsc.models.convolution import Conv2d


@contextlib.contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; every module goes back to its own mode, frozen ones included."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def use_torchs_layers(network: nn.Module) -> None:
    """Let the layers of ours that have ways of their own on a CPU go torch's way there, too, as on a GPU."""
    for module in network.modules():
        if isinstance(module, PReLU):
            module.forward = super(PReLU, module).forward  # type: ignore[method-assign]
        elif isinstance(module, Conv2d):
            module.forward = super(Conv2d, module).forward  # type: ignore[method-assign]
