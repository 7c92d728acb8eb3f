"""Activation checkpointing: parts of a network are computed again in the backward pass, instead of kept.

Chen et al. 2016, "Training deep nets with sublinear memory cost". What is computed again has the same bits:
random draws, the samples' numbers and autocast are as they were, and running statistics move once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from plsc.errors import OptionError, did_you_mean
from plsc.models.dropout import SampleDropout

NONE, ALL = "none", "all"
_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def checkpoint_activations(network: nn.Module, names: str, every: int = 1) -> list[str]:
    """Let parts of a network keep their inputs alone, and compute the rest again in the backward pass.

    In place; parameters, buffers and their names stay as they are. Call it when the network's layers are
    final; a later call takes the place of an earlier one.

    names: ``none``; ``all``, the network's blocks (see `find_blocks`); or patterns of module names
    (``*`` stands for anything), divided by commas. A module inside one that is chosen is not chosen again.
    every: of the modules in the network's order, each nth. Returns the names of those chosen.

    Raises:
        OptionError: a pattern that fits no module, a module that cannot be called, no blocks.
    """
    chosen = select_modules(network, names)[:: max(1, every)]
    for module in network.modules():
        earlier = module.__dict__.get("forward")
        if isinstance(earlier, functools.partial) and earlier.func is _run:
            earlier.args[0].remove()
    for name in chosen:
        _Region(name, network.get_submodule(name)).install()
    return chosen


def select_modules(network: nn.Module, names: str) -> list[str]:
    """Return the names of the modules that `checkpoint_activations` chooses among, in the network's order."""
    if names.strip() == NONE:
        return []
    if names.strip() == ALL:
        return _blocks_or_error(network)
    known = [name for name, _ in network.named_modules() if name]
    patterns = [pattern.strip() for pattern in names.split(",") if pattern.strip()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            alone = f", and {pattern!r} stands alone" if pattern in (NONE, ALL) else ""
            raise OptionError(
                f"memory.checkpoint_stages has {pattern!r}, which fits no module of "
                f"{type(network).__name__}{alone}{did_you_mean(pattern, known)}; its parts are "
                f"{', '.join(name for name, _ in network.named_children())}"
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


def _blocks_or_error(network: nn.Module) -> list[str]:
    blocks = find_blocks(network)
    if not blocks:
        raise OptionError(
            f"memory.checkpoint_stages is 'all', but {type(network).__name__} has no lists of blocks; name "
            f"modules instead, among: {', '.join(name for name, _ in network.named_children())}"
        )
    return blocks


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


class _Region:
    """A module whose forward pass is computed again in the backward pass.

    Its `forward` is replaced on the object: hooks, the type and the state dict's keys stay.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        self._module = module
        self._plain: Callable[..., Any] = module.forward
        self._own_forward = module.__dict__.get("forward")  # where it was replaced before
        inner = list(module.modules())
        self._norms = [one for one in inner if isinstance(one, _NormBase)]
        self._dropouts = [one for one in inner if isinstance(one, SampleDropout)]
        self._others = [one for one in inner if not isinstance(one, _NormBase) and one._buffers]

    def install(self) -> None:
        """Replace the module's forward."""
        # A partial, which a deep copy of the network follows, unlike a closure.
        self._module.forward = functools.partial(_run, self)

    def remove(self) -> None:
        """Give the module its own forward again."""
        del self._module.forward
        if self._own_forward is not None:
            self._module.forward = self._own_forward

    def run(self, *inputs: Any, **named: Any) -> Any:
        """Call the module; where gradients are wanted, keep its inputs alone."""
        if not torch.is_grad_enabled():
            return self._plain(*inputs, **named)
        before = self._versions()
        output = checkpoint(
            self._plain, *inputs, use_reentrant=False, context_fn=self._contexts, **named
        )
        if before != self._versions():
            raise OptionError(
                f"memory.checkpoint_stages names {self._name!r}, which changes a buffer of its own whenever "
                "it is called, other than a norm's running statistics; leave it out"
            )
        return output

    def _versions(self) -> list[tuple[int, int]]:
        """Return the identity and version of each buffer, but of norms, which are handled apart."""
        return [
            (id(buffer), buffer._version)
            for module in self._others
            for buffer in module._buffers.values()
            if buffer is not None
        ]

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of the forward pass and of its repetition."""
        numbers = [layer.samples.numbers for layer in self._dropouts]
        return nullcontext(), self._repeating(numbers)

    @contextmanager
    def _repeating(self, numbers: list[Tensor | None]) -> Iterator[None]:
        """Let running statistics be, and the dropout layers see the samples of the forward pass."""
        own = [(norm, dict(norm._buffers)) for norm in self._norms]
        seen = [(layer.samples, layer.samples.numbers) for layer in self._dropouts]
        try:
            for norm, buffers in own:
                # Copies, not None: as many tensors must be saved as in the first pass. What a norm gives
                # in training does not depend on them.
                norm._buffers.update({key: _copy(value) for key, value in buffers.items()})
            for layer, then in zip(self._dropouts, numbers, strict=True):
                layer.samples.numbers = then
            yield
        finally:
            for norm, buffers in own:
                norm._buffers.update(buffers)
            for samples, now in seen:
                samples.numbers = now


def _run(region: _Region, *inputs: Any, **named: Any) -> Any:
    return region.run(*inputs, **named)


def _copy(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.clone()
