"""Try a network on blank images: does it fit the options, and what are its layers?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from plsc.errors import OptionError, PlscError, first_line
from plsc.models.modes import evaluating


def check_model(model: nn.Module, image_shape: tuple[int, ...], emb_size: int) -> None:
    """Run ``model`` on two blank images and see that embeddings [2, emb_size] come out.

    Parameters, buffers, training mode and the random generator are left as they were.

    Raises:
        OptionError: the network cannot take ``image_shape`` (C, H, W), or returns anything but floating
            point embeddings of that size.
    """
    name = type(model).__name__
    output = _dry_run(model, image_shape)
    if not isinstance(output, Tensor):
        raise OptionError(
            f"{name} returns a {type(output).__name__}; expected one tensor of embeddings "
            f"[batch, {emb_size}]"
        )
    if not output.is_floating_point():
        raise OptionError(f"{name} returns {output.dtype} embeddings; expected floating point")
    if output.shape != (2, emb_size):
        raise OptionError(
            f"{name} returns embeddings of shape {list(output.shape)} for 2 images; expected "
            f"[2, {emb_size}]; make its last layer {emb_size} wide, or set_emb_size to what it gives"
        )


def describe(model: nn.Module, image_shape: tuple[int, ...]) -> str:
    """Return a table of the layers in the order of their calls: name, kind, output shape, parameters.

    A layer that is called twice has two rows and is counted once.

    Raises:
        OptionError: the network cannot take ``image_shape`` (C, H, W).
    """
    rows: list[tuple[str, str, str, str]] = []
    counted: set[int] = set()

    def note(name: str, layer: nn.Module, output: Any) -> None:
        own = [p for p in layer.parameters(recurse=False) if id(p) not in counted]
        counted.update(id(p) for p in own)
        shape = str(["b", *output.shape[1:]]).replace("'", "") if _is_batch(output) else "-"
        rows.append((name, type(layer).__name__, shape, f"{sum(p.numel() for p in own):,}"))

    handles = [
        layer.register_forward_hook(
            lambda layer, _input, output, name=name: note(name, layer, output)
        )
        for name, layer in model.named_modules()
        if name and not any(layer.children())
    ]
    try:
        _dry_run(model, image_shape)
    finally:
        for handle in handles:
            handle.remove()
    return _table(rows) + "\n" + _totals(model)


def count_calls(model: nn.Module, image_shape: tuple[int, ...]) -> dict[str, int]:
    """Return how often a run on blank images calls each module, by name; those that it does not are absent.

    A module that has several names is counted under its first one.

    Raises:
        OptionError: the network cannot take ``image_shape`` (C, H, W).
    """
    calls: dict[str, int] = {}

    def note(name: str) -> None:
        calls[name] = calls.get(name, 0) + 1

    handles = [
        module.register_forward_hook(lambda *_, name=name: note(name))
        for name, module in model.named_modules()
    ]
    try:
        _dry_run(model, image_shape)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _is_batch(output: Any) -> bool:
    return isinstance(output, Tensor) and output.dim() > 0


def _table(rows: list[tuple[str, str, str, str]]) -> str:
    table = [("layer", "kind", "output", "parameters"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(4)]
    return "\n".join(
        f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {shape:<{widths[2]}}  {count:>{widths[3]}}"
        for name, kind, shape, count in table
    )


def _totals(model: nn.Module) -> str:
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    size = sum(p.numel() * p.element_size() for p in parameters) / 2**20
    return (
        f"{sum(p.numel() for p in parameters):,} parameters, {trained:,} of them trained, "
        f"{size:,.1f} MiB; {sum(b.numel() for b in model.buffers()):,} numbers in buffers"
    )


def _dry_run(model: nn.Module, image_shape: tuple[int, ...]) -> Any:
    first = next(model.parameters(), None)
    device = first.device if first is not None else torch.device("cpu")
    dtype = first.dtype if first is not None and first.is_floating_point() else torch.float32
    # no_grad, not inference_mode: a network that keeps a tensor from its first call (a position grid, a
    # lazy parameter) could not train with it later.
    with evaluating(model), torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            return model(torch.zeros((2, *image_shape), device=device, dtype=dtype))
        except PlscError:
            raise
        except Exception as error:  # whatever a user's network may throw
            raise OptionError(
                f"{type(model).__name__} cannot take images of shape {tuple(image_shape)}: "
                f"{type(error).__name__}: {first_line(error)}; change the network or set_image_shape"
            ) from error
