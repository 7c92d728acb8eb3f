"""Counts what a network's step needs by making the step on tensors that have no memory.

torch's FakeTensorMode runs every operation for shapes and types alone, so a network of any size is counted
in seconds on any machine. What the kernels of a device take besides (workspaces) is not seen.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from plsc.errors import OptionError, PlscError, kind_and_line
from plsc.models.checkpointing import checkpoint_activations, find_blocks
from plsc.models.layers import use_torchs_layers


@dataclass
class Measured:
    """What was counted, in bytes unless said otherwise.

    parameters, trained, buffers: bytes of the tensors, of those with gradients; numbers: how many numbers
    the parameters are. kept: what the forward pass leaves for the backward pass. peak: the most that is
    there at once, images and outputs included, parameters and their gradients not. state: the optimizer's.
    operations: of the products of both passes.
    largest_block, outside_blocks: parameters of the largest block, and of what is in none.
    """

    numbers: int
    parameters: int
    trained: int
    buffers: int
    largest_block: int
    outside_blocks: int
    kept: int = 0
    peak: int = 0
    state: int = 0
    operations: int = 0


def measure(
    build: Callable[[], nn.Module],
    image_shape: tuple[int, ...],
    batch: int,
    *,
    dtype: torch.dtype | None = None,
    checkpoint: str = "none",
    every: int = 1,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> Measured:
    """Make a training step of the network that `build` returns, over fake images [batch, C, H, W].

    dtype: of autocast, None without it. checkpoint, every: as `checkpoint_activations`. optimizer: makes one
    of the parameters with gradients; its states are counted.

    Raises:
        OptionError: the network cannot be run without data.
    """
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        network = _build(build, fake)
        use_torchs_layers(network)
        checkpoint_activations(network, checkpoint, every)
        with fake, torch.random.fork_rng(devices=[]):
            found = _sizes(network)
            with MemoryCount(network) as count:
                images = torch.empty(batch, *image_shape)
                with torch.autocast("cpu", dtype, enabled=dtype is not None):
                    embeddings = network(images)
                found.kept = count.live
                embeddings.float().backward(torch.ones_like(embeddings, dtype=torch.float32))
            found.peak, found.operations = count.peak, count.operations
    except PlscError:
        raise
    except Exception as error:  # whatever a network may do with its input
        raise OptionError(
            f"the network cannot be planned, for it does not run without data: {kind_and_line(error)[:200]}"
        ) from error
    if optimizer is not None:
        found.state = count_states(network, optimizer)
    return found


def _build(build: Callable[[], nn.Module], fake: FakeTensorMode) -> nn.Module:
    """Return the network with parameters and buffers that have no memory."""
    try:
        with fake:
            return build().train()
    except PlscError:  # a constructor may want real numbers
        with FakeCopyMode(fake):
            return copy.deepcopy(build().train())


def _sizes(network: nn.Module) -> Measured:
    parameters = list(network.parameters())
    blocks = [_nbytes(network.get_submodule(name)) for name in find_blocks(network)]
    whole = _nbytes(network)
    return Measured(
        numbers=sum(p.numel() for p in parameters),
        parameters=whole,
        trained=sum(p.nbytes for p in parameters if p.requires_grad),
        buffers=sum(buffer.nbytes for buffer in network.buffers()),
        largest_block=max(blocks, default=0),
        outside_blocks=whole - sum(blocks),
    )


def _nbytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def count_states(network: nn.Module, build: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> int:
    """Return the bytes of the states that an optimizer makes for a network's parameters.

    Real ones, for many optimizers look at their numbers: one shape after another, and it is forgotten again.
    """
    shapes = Counter((p.shape, p.dtype) for p in network.parameters() if p.requires_grad)
    total = 0
    for (shape, dtype), times in shapes.items():
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameter.grad = torch.zeros_like(parameter)
        optimizer = build([parameter])
        optimizer.step()
        states = optimizer.state[parameter].values()
        total += times * sum(state.nbytes for state in states if isinstance(state, Tensor))
    return total


class MemoryCount(TorchDispatchMode):
    """Counts the bytes that operators allocate while it is active, and the operations of their products.

    Parameters and buffers of the network, and the gradients that gather in ``grad``, are left out of `live`
    and `peak`. Works on real tensors, too.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.operations = 0
        self._sizes: dict[int, int] = {}  # by storage; 0 for what is left out
        self._watch = [
            p.register_post_accumulate_grad_hook(self._leave_gradient)
            for p in network.parameters()
            if p.requires_grad
        ]
        for tensor in (*network.parameters(), *network.buffers()):
            self._leave_out(tensor)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._watch:
            handle.remove()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count what it allocates and does."""
        named = kwargs or {}
        output = func(*args, **named)
        outputs = [one for one in tree_leaves(output) if isinstance(one, Tensor)]
        new = [one for one in outputs if self._add(one)]
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None and (new or func._schema.is_mutable):  # else it gave views
            self.operations += int(formula(*args, **named, out_val=output))
        return output

    def _add(self, tensor: Tensor) -> bool:
        """Count a tensor's storage until it is freed; return whether it is a new one."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return False
        self._sizes[key] = size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key)
        return True

    def _drop(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)

    def _leave_out(self, tensor: Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        if key not in self._sizes:
            weakref.finalize(tensor.untyped_storage(), self._drop, key)
        self.live -= self._sizes.get(key, 0)
        self._sizes[key] = 0

    def _leave_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._leave_out(parameter.grad)
