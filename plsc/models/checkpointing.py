"""Activation checkpointing: parts of a network are computed again in the backward pass, instead of kept.

Chen et al. 2016, "Training deep nets with sublinear memory cost". What is computed again has the same bits:
random draws, the samples' numbers, buffers and autocast are as they were, and running statistics move once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plsc.errors import OptionError, did_you_mean
from plsc.models.base_model import ForwardWrapper
from plsc.models.dropout import SampleDropout, SampleNumbers

NONE, ALL = "none", "all"
_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def checkpoint_activations(network: nn.Module, names: str, every: int = 1) -> list[str]:
    """Let parts of a network keep their inputs alone, and compute the rest again in the backward pass.

    In place; parameters, buffers and their names stay as they are. Call it when the network's layers are
    final, and once: `plsc.models.base_model.unwrap` takes it back.

    names: ``none``; ``all``, the network's blocks (see `find_blocks`); or patterns of module names
    (``*`` stands for anything), divided by commas. A module inside one that is chosen is not chosen again.
    every: of the modules in the network's order, each nth. Returns the names of those chosen.

    Raises:
        OptionError: a pattern that fits no module, a module that cannot be called, no blocks.
    """
    chosen = select_modules(network, names)[:: max(1, every)]
    for name in chosen:
        module = network.get_submodule(name)
        module.forward = _Recomputed(module)
    return chosen


def select_modules(network: nn.Module, names: str) -> list[str]:
    """Return the names of the modules that `checkpoint_activations` chooses among, in the network's order."""
    if names.strip() == NONE:
        return []
    parts = ", ".join(name for name, _ in network.named_children())
    if names.strip() == ALL:
        blocks = find_blocks(network)
        if not blocks:
            raise OptionError(
                f"memory.checkpoint_stages is 'all', but {type(network).__name__} has no lists of blocks; "
                f"name modules instead, among: {parts}"
            )
        return blocks
    known = [name for name, _ in network.named_modules() if name]
    patterns = [pattern.strip() for pattern in names.split(",") if pattern.strip()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            alone = f", and {pattern!r} stands alone" if pattern in (NONE, ALL) else ""
            raise OptionError(
                f"memory.checkpoint_stages has {pattern!r}, which fits no module of "
                f"{type(network).__name__}{alone}{did_you_mean(pattern, known)}; its parts are {parts}"
            )
    chosen: list[str] = []
    for name in known:
        is_inside = any(name.startswith(f"{outer}.") for outer in chosen)
        if not is_inside and any(fnmatchcase(name, pattern) for pattern in patterns):
            chosen.append(name)
    for name in chosen:
        if isinstance(network.get_submodule(name), (nn.ModuleList, nn.ModuleDict)):
            raise OptionError(
                f"memory.checkpoint_stages names {name!r}, a list that is not called itself; name its parts "
                f"instead: '{name}.*'"
            )
    return chosen


def find_blocks(network: nn.Module) -> list[str]:
    """Return the names of a network's blocks: what its lists hold, residual blocks for example.

    A block is a module of several layers, itself no list, that stands in a list (`nn.Sequential`,
    `nn.ModuleList`, `nn.ModuleDict`), unless it has a list of blocks of one type within: then those count.
    """
    found: list[str] = []

    def visit(prefix: str, module: nn.Module) -> None:
        for key, child in module.named_children():
            name = f"{prefix}{key}"
            if isinstance(module, _LISTS) and _is_block(child) and not _has_blocks(child):
                found.append(name)
            else:
                visit(f"{name}.", child)

    visit("", network)
    return found


def _is_block(module: nn.Module) -> bool:
    return not isinstance(module, _LISTS) and any(True for _ in module.children())


def _has_blocks(module: nn.Module) -> bool:
    for inner in module.modules():
        if isinstance(inner, _LISTS):
            kinds = [type(child) for child in inner.children() if _is_block(child)]
            if len(set(kinds)) < len(kinds):
                return True
    return False


class _Recomputed(ForwardWrapper):
    """The forward of a module that keeps its inputs alone where gradients are wanted."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.forward)
        self._module = module

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*inputs, **named)
        return checkpoint(self.inner, *inputs, use_reentrant=False, context_fn=self._contexts, **named)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of the forward pass, before which this is called, and of its repetition."""
        modules = list(self._module.modules())
        buffers = [
            (one._buffers, {name: _copy(value) for name, value in one._buffers.items()})
            for one in modules
            if one._buffers
        ]
        dropouts = [one for one in modules if isinstance(one, SampleDropout)]
        return nullcontext(), _repeating(buffers, [(one.samples, one.samples.numbers) for one in dropouts])


Buffers = dict[str, Tensor | None]


@contextmanager
def _repeating(
    buffers: list[tuple[Buffers, Buffers]],
    numbers: list[tuple[SampleNumbers, Tensor | None]],
) -> Iterator[None]:
    """Have the buffers and the samples' numbers of the forward pass; afterwards those of now again."""
    own = [(mine, dict(mine)) for mine, _ in buffers]
    seen = [(samples, samples.numbers) for samples, _ in numbers]
    try:
        for mine, then in buffers:
            mine.update(then)
        for samples, given in numbers:
            samples.numbers = given
        yield
    finally:
        for mine, now in own:
            mine.update(now)
        for samples, given in seen:
            samples.numbers = given


def _copy(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.clone()
