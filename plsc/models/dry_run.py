"""Run a network on blank images, or its example input, to check its output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from plsc.errors import OptionError, refusing
from plsc.models.base_model import BaseModel, evaluating
from plsc.values import Input, check_example, map_tensors


def blank_input(model: nn.Module, image_shape: tuple[int, ...]) -> Input:
    """Return two blank images [2, C, H, W], or the example input of a network that takes no images."""
    first = next(model.parameters(), None)
    device = first.device if first is not None else torch.device("cpu")
    example = getattr(model, "example_input", None)
    if example is not None:
        check_example(example, f"example_input of {type(model).__name__}")
        return map_tensors(lambda one: one.to(device), example)
    dtype = first.dtype if first is not None and first.is_floating_point() else torch.float32
    return torch.zeros((2, *image_shape), device=device, dtype=dtype)


def dry_run(model: nn.Module, image_shape: tuple[int, ...], *, with_graph: bool = False) -> Any:
    """Return a network's output for `blank_input`; in evaluation mode, without side effects.

    Raises:
        OptionError: the network fails for images of ``image_shape`` (C, H, W), or its example input.
    """
    input = blank_input(model, image_shape)
    # Not in inference_mode: a network that caches a tensor in its first call (a position grid, a lazy
    # parameter) could not train with it later.
    graph = torch.enable_grad() if with_graph else torch.no_grad()
    name = type(model).__name__
    if getattr(model, "example_input", None) is None:
        way_out = "change the network or model.image_shape, or set its example_input if it takes no images"
        refused = refusing(f"{name} fails for images of shape {tuple(image_shape)}", way_out)
    else:
        refused = refusing(f"{name} fails for its example_input", "change the network or example_input")
    with evaluating(model), torch.random.fork_rng(devices=[]), graph, refused:
        return model(input)


def check_model(model: nn.Module, image_shape: tuple[int, ...], emb_size: int) -> None:
    """Check that ``model`` maps two blank images to embeddings [2, emb_size], without side effects.

    Raises:
        OptionError: the network fails for images of ``image_shape`` (C, H, W), does not return floating
            point embeddings of that size, or creates parameters in each call.
    """
    name = type(model).__name__
    output = dry_run(model, image_shape)
    is_embedding = isinstance(output, Tensor) and output.is_floating_point()
    if not is_embedding or output.shape != (2, emb_size):
        kind = f"{output.dtype} {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise OptionError(
            f"{name} returns {kind} for 2 samples; expected floating point embeddings [2, {emb_size}]; "
            "change its last layer or model.emb_size"
        )
    _check_no_new_parameters(model, image_shape)


def _check_no_new_parameters(model: nn.Module, image_shape: tuple[int, ...]) -> None:
    """Raise OptionError if a second call registers or uses a parameter that did not exist before it.

    Parameters that the first call created once (nn.LazyLinear) are allowed.
    """
    before = {id(p): p for p in model.parameters()}  # references keep the ids unique
    output = dry_run(model, image_shape, with_graph=True)
    after = {id(p): (name, p) for name, p in model.named_parameters()}
    used = {id(leaf): ("", leaf) for leaf in _leaves(output)}
    fresh = next((found for key, found in {**used, **after}.items() if key not in before), None)
    if fresh is None:
        return
    name, parameter = fresh
    what = f"creates the parameter {name} in each call" if name else "uses a parameter that is not registered"
    raise OptionError(
        f"{type(model).__name__} {what} (shape {list(parameter.shape)}), so it is never trained; create the "
        "layer in __init__, as an attribute or in an nn.ModuleList"
    )


def _leaves(output: Tensor) -> Iterator[Tensor]:
    """Yield the tensors to which backward() of ``output`` would add gradients."""
    seen: set[Any] = set()
    nodes: list[Any] = [output.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable
        nodes.extend(previous for previous, _ in node.next_functions)


def choose_memory_format(
    network: BaseModel, image_shape: tuple[int, ...], device: torch.device, in_16_bits: bool
) -> None:
    """Switch a network to channels last, in place, if that is faster and the network supports it.

    It is faster for convolutions on CPUs, and on GPUs in 16 bits. A network that calls `view` on feature maps
    does not support it. Shapes and names do not change.
    """
    has_maps = network.example_input is None and any(isinstance(m, nn.Conv2d) for m in network.modules())
    if not has_maps or not (device.type == "cpu" or in_16_bits):
        return
    network.input_layout = torch.channels_last
    network.to(memory_format=torch.channels_last)
    try:
        dry_run(network, image_shape)
    except OptionError:
        network.input_layout = torch.preserve_format
        network.to(memory_format=torch.contiguous_format)
