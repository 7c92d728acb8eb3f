"""The table of `train.check_shape` and `train.check_content`: the layers in the first batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from plsc.run.callbacks import Callback, Context

_SHAPES = ("layer", "kind", "parameters", "output")
_VALUES = ("mean", "std", "zeros", "nan or inf", "first values")


class LayerTable(Callback):
    """Logs a table of the layers on rank 0: those that have parameters or no sublayers.

    It describes the first micro-batch of this run: the weights before the step, and the first output of each
    layer. Hooks exist only until the end of this forward pass. Of parameters that are sharded, the values are
    those of rank 0's part.

    with_content: add a row per parameter, and the columns mean, standard deviation, share of zeros, share of
    values that are not finite, and the first values.
    """

    def __init__(self, with_content: bool) -> None:
        self._with_content = with_content
        self._rows: dict[str, list[list[str]]] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def batch_start(self, context: Context) -> None:
        """Describe the parameters, and add the hooks."""
        if self._rows or not context.is_main:
            return
        for name, module in context.network.named_modules():
            own = dict(module.named_parameters(recurse=False))
            if not own and any(module.children()):
                continue
            shapes = ", ".join(f"{key} {list(value.shape)}" for key, value in own.items())
            row = [name or "(network)", type(module).__name__, shapes or "-", "-", *self._values(None)]
            details = [
                [f"  {key}", "", str(list(value.shape)), "", *self._values(value)]
                for key, value in own.items()
                if self._with_content
            ]
            self._rows[name] = [row, *details]
            self._hooks.append(module.register_forward_hook(self._noting(row)))

    def after_forward(self, context: Context) -> None:
        """Log the table, and remove the hooks."""
        if not self._hooks:
            return
        self.exception(context)
        parts = context.options.train.micro_batches
        of = f", micro-batch 1 of {parts}" if parts > 1 else ""
        rows = [[*_SHAPES, *(_VALUES if self._with_content else ())]]
        rows += [row for group in self._rows.values() for row in group]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        title = f"layers in the first batch: {len(context.batch)} images of rank 0{of}"
        context.world.log("\n".join([title, *lines]))

    def exception(self, context: Context) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _noting(self, row: list[str]) -> Any:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            first = next(iter(tensors_of(output)), None)
            if row[3] == "-" and first is not None:
                row[3:] = [str(list(first.shape)), *self._values(first)]

        return note

    def _values(self, tensor: Tensor | None) -> list[str]:
        if not self._with_content:
            return []
        if tensor is None or tensor.numel() == 0:
            return ["-"] * len(_VALUES)
        values = tensor.detach().float()
        mean, std = float(values.mean()), float(values.std(correction=0))
        shares = [float(chosen.float().mean()) for chosen in (values == 0, ~values.isfinite())]
        first = ", ".join(f"{value:.4g}" for value in values.flatten()[:3].tolist())
        return [f"{mean:.4g}", f"{std:.4g}", *(f"{share:.2%}" for share in shares), first]


def tensors_of(output: Any) -> list[Tensor]:
    """Return the tensors in the output of a module: a tensor, or nested lists, tuples and dicts of them."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    return [leaf for part in output for leaf in tensors_of(part)] if isinstance(output, (list, tuple)) else []
