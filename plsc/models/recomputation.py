"""Other ways to run a network in training: recompute activations in the backward pass, or torch.compile.

Recomputation (activation checkpointing; Chen et al. 2016, "Training deep nets with sublinear memory cost")
gives the same bits: it uses the same random state, sample numbers, buffers and autocast state, and updates
running statistics only once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plsc.errors import OptionError
from plsc.models.base_model import ForwardWrapper
from plsc.parallel.backbone import SampleDropout, SampleNumbers
from plsc.storage.urls import own_folder
from plsc.values import Input, first_tensor

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def recompute_activations(network: nn.Module) -> None:
    """Recompute the blocks of a network (`find_blocks`) in the backward pass, in place.

    Parameters, buffers and their names do not change. Call it once, after all changes of layers;
    `plsc.models.base_model.unwrap` reverts it. Raises OptionError if there are no blocks.
    """
    blocks = find_blocks(network)
    if not blocks:
        raise OptionError(
            f"memory.recompute is 'all', but {type(network).__name__} has no blocks; make them items of an "
            "nn.Sequential or nn.ModuleList"
        )
    for name in blocks:
        module = network.get_submodule(name)
        module.forward = _Recomputed(module)


def find_blocks(network: nn.Module) -> list[str]:
    """Return the names of a network's blocks, such as residual blocks or transformer layers.

    A block is an item with child modules of an `nn.Sequential`, `nn.ModuleList` or `nn.ModuleDict`, and not
    such a container itself. If it contains a list with blocks of the same type, those are the blocks instead.
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
    """The forward of a recomputed module; without gradients it calls the module normally."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.forward)
        self._module = module

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*inputs, **named)
        return checkpoint(self.inner, *inputs, use_reentrant=False, context_fn=self._contexts, **named)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of the forward pass, which follows this call, and of its recomputation."""
        modules = list(self._module.modules())
        mine = [one._buffers for one in modules if one._buffers]
        buffers = [(one, {name: t if t is None else t.clone() for name, t in one.items()}) for one in mine]
        dropouts = [one for one in modules if isinstance(one, SampleDropout)]
        return nullcontext(), _restored(buffers, [(one.samples, one.samples.numbers) for one in dropouts])


Buffers = dict[str, Tensor | None]


@contextmanager
def _restored(
    buffers: list[tuple[Buffers, Buffers]], numbers: list[tuple[SampleNumbers, Tensor | None]]
) -> Iterator[None]:
    """Restore the forward pass's buffers and sample numbers inside, and the current ones afterwards."""
    current_buffers = [(mine, dict(mine)) for mine, _ in buffers]
    current_numbers = [(samples, samples.numbers) for samples, _ in numbers]
    try:
        for mine, saved in buffers:
            mine.update(saved)
        for samples, given in numbers:
            samples.numbers = given
        yield
    finally:
        for mine, current in current_buffers:
            mine.update(current)
        for samples, given in current_numbers:
            samples.numbers = given


class CompiledNetwork(nn.Module):
    """A network that is compiled for training batches, and uncompiled for everything else.

    Use `network` for evaluation and saving: it holds the parameters and buffers. Random numbers equal those
    of the uncompiled network.

    Args:
        network: called as ``network(images, labels, is_train)``.
        sizes: the batch sizes to compile for on this rank. Other sizes, such as a smaller last batch, use the
            uncompiled network, because each size takes minutes to compile.
        backend: of torch.compile.
    """

    def __init__(
        self, network: nn.Module, sizes: Collection[int], backend: str | Callable[..., Any] = "inductor"
    ) -> None:
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # takes seconds

        super().__init__()
        self.network = network
        self._sizes = frozenset(sizes)
        # inductor runs what it finds there, also if TORCHINDUCTOR_CACHE_DIR names another folder: by default
        # it is one of /tmp, which any user could have created.
        own_folder(Path(default_cache_dir()), "TMPDIR")
        # Only inductor has its own random numbers.
        options: Any = {"fallback_random": True} if backend == "inductor" else None
        compiled = torch.compile(network, dynamic=False, backend=backend, options=options)
        # A closure, because a submodule would register every parameter a second time.
        self._compiled: Callable[..., Tensor] = lambda *inputs: compiled(*inputs)

    def forward(self, input: Input, *others: Any) -> Tensor:
        """Return the embeddings [b, D] of the images [b, C, H, W]."""
        is_compiled = self.network.training and len(first_tensor(input)) in self._sizes
        return (self._compiled if is_compiled else self.network)(input, *others)
