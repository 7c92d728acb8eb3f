"""Measure memory and operations of a training step with fake tensors.

torch's FakeTensorMode computes only shapes and dtypes, so a network of any size is measured in seconds on any
machine. Workspaces of the kernels of a device are not included.
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
from plsc.inputs import Input, map_tensors
from plsc.models.checkpointing import checkpoint_activations, find_blocks
from plsc.models.layers import use_torch_layers


@dataclass
class Measured:
    """The measured requirements of a step, in bytes unless noted.

    Attributes:
        numbers: number of parameters.
        parameters: all parameters.
        trained: parameters with requires_grad.
        buffers: all buffers.
        largest_block, outside_blocks: parameters of the largest block, and outside of all blocks.
        kept: activations that the forward pass keeps for the backward pass.
        peak: peak memory including images and outputs, without parameters and their gradients.
        state: optimizer states.
        operations: floating point operations of the matrix products, forward and backward.
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
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> Measured:
    """Measure a training step of the network that `build` returns, on fake images [batch, C, H, W].

    Args:
        build: returns the network.
        image_shape: (C, H, W).
        batch: batch size.
        dtype: of autocast; None: no autocast.
        checkpoint: see `checkpoint_activations`.
        optimizer: builds the optimizer whose states are counted; None: no optimizer.

    Raises:
        OptionError: the network does not run with fake tensors.
    """
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        network = _build(build, fake)
        use_torch_layers(network)
        checkpoint_activations(network, checkpoint)
        with fake, torch.random.fork_rng(devices=[]):
            found = _sizes(network)
            with MemoryCount(network) as count:
                images: Input = torch.empty(batch, *image_shape)
                if (example := getattr(network, "example_input", None)) is not None:
                    images = map_tensors(lambda one: one.new_zeros(batch, *one.shape[1:]), example)
                with torch.autocast("cpu", dtype, enabled=dtype is not None):
                    embeddings = network(images)
                found.kept = count.live
                embeddings.float().backward(torch.ones_like(embeddings, dtype=torch.float32))
            found.peak, found.operations = count.peak, count.operations
    except PlscError:
        raise
    except Exception as error:  # networks may raise anything
        raise OptionError(
            f"the network cannot be planned, because it fails with fake tensors: {kind_and_line(error)[:200]}"
        ) from error
    if optimizer is not None:
        found.state = count_states(network, optimizer)
    return found


def _build(build: Callable[[], nn.Module], fake: FakeTensorMode) -> nn.Module:
    """Return the network with fake parameters and buffers."""
    try:
        with fake:
            return build().train()
    except PlscError:  # a constructor may need real values
        with FakeCopyMode(fake):
            return copy.deepcopy(build().train())


def _sizes(network: nn.Module) -> Measured:
    parameters = list(network.parameters())
    blocks = [_nbytes(network.get_submodule(name)) for name in find_blocks(network)]
    total = _nbytes(network)
    return Measured(
        numbers=sum(p.numel() for p in parameters),
        parameters=total,
        trained=sum(p.nbytes for p in parameters if p.requires_grad),
        buffers=sum(buffer.nbytes for buffer in network.buffers()),
        largest_block=max(blocks, default=0),
        outside_blocks=total - sum(blocks),
    )


def _nbytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def count_states(network: nn.Module, build: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> int:
    """Return the bytes of the states that an optimizer creates for a network's parameters.

    Uses real tensors, one shape after another, because many optimizers read their values.
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
    """A mode that counts allocated bytes and floating point operations; also works on real tensors.

    `live` and `peak` do not include the network's parameters, buffers and accumulated gradients.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.operations = 0
        self._sizes: dict[int, int] = {}  # bytes by storage; 0: excluded
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._exclude_gradient)
            for p in network.parameters()
            if p.requires_grad
        ]
        for tensor in (*network.parameters(), *network.buffers()):
            self._exclude(tensor)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._hooks:
            handle.remove()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count its allocations and operations."""
        named = kwargs or {}
        output = func(*args, **named)
        outputs = [one for one in tree_leaves(output) if isinstance(one, Tensor)]
        new = [one for one in outputs if self._add(one)]
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None and (new or func._schema.is_mutable):  # otherwise it returned views
            self.operations += int(formula(*args, **named, out_val=output))
        return output

    def _add(self, tensor: Tensor) -> bool:
        """Count a tensor's storage until it is freed; return whether the storage is new."""
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

    def _exclude(self, tensor: Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        if key not in self._sizes:
            weakref.finalize(tensor.untyped_storage(), self._drop, key)
        self.live -= self._sizes.get(key, 0)
        self._sizes[key] = 0

    def _exclude_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._exclude(parameter.grad)
