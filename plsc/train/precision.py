"""The options of mixed precision, made to work in a run."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from plsc.checkpoint.manifest import Checker
from plsc.config import Config
from plsc.errors import OptionError, TrainingError
from plsc.models.autocast import PrecisionLists, apply_lists, autocast
from plsc.optim.loss_scaling import COUNTS, MOST_SKIPS, LossScaler


def check_precision(options: Config) -> None:
    """Raise OptionError for options of precision that contradict others."""
    precision = options.precision
    if options.speed.compile and (precision.white_list or precision.black_list):
        raise OptionError(
            "speed.compile cannot be used with precision.white_list and black_list: compiled code does not "
            "call the modules and operators that they name; leave one of the two out"
        )
    if precision.mode != "float32" and options.runtime.dtype == "float64":
        raise OptionError(
            f"precision.mode is {precision.mode}, but runtime.dtype is float64, which is for checks "
            "in full precision; leave one of the two out"
        )


def training_mode(options: Config, device: torch.device) -> str:
    """Return 'float32', 'float16' or 'bfloat16': a CPU has no use for float16, and gets bfloat16."""
    mode = options.precision.mode
    return "bfloat16" if mode == "float16" and device.type == "cpu" else mode


def mode_note(options: Config, device: torch.device) -> str:
    """Return what the user should know of the mode before training begins."""
    mode = options.precision.mode
    used = training_mode(options, device)
    if used == mode:
        return ""
    scaling = "" if options.precision.loss_scaling == "always" else ", without loss scaling"
    return (
        f"note: precision.mode is {mode}, which is for GPUs: this CPU computes in {used}{scaling}"
    )


def evaluation_context(options: Config, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a network is evaluated."""
    follows = options.precision.evaluation == "training"
    return autocast(training_mode(options, device) if follows else "float32", device)


def head_products(options: Config) -> str:
    """Return the type of the factors in the products of sharded heads: 'float32' or 'bfloat16'."""
    products = options.head.products
    if products != "auto":
        return products
    return "float32" if options.precision.mode == "float32" else "bfloat16"


def build_scaler(options: Config, device: torch.device) -> LossScaler | None:
    """Return what scales the loss, or None in a mode that needs no scaling."""
    is_needed = training_mode(options, device) == "float16"
    if not (is_needed or options.precision.loss_scaling == "always"):
        return None
    return LossScaler.of(options.precision)


def look_up_lists(network: nn.Module, options: Config) -> PrecisionLists:
    """Return what the names in the lists of the options mean; OptionError for one that means nothing."""
    precision = options.precision
    return PrecisionLists.look_up(network, precision.white_list, precision.black_list)


def use_lists(
    network: nn.Module, lists: PrecisionLists, options: Config, device: torch.device
) -> None:
    """Let a network compute as its lists say, if it computes in 16 bits at all."""
    mode = training_mode(options, device)
    if mode != "float32":
        apply_lists(network, lists, getattr(torch, mode), device)


def restore_scaler(scaler: LossScaler, saved: object, check: Checker) -> None:
    """Let the loss scale go on from a checkpoint's; CheckpointError if that is damaged."""
    values = check.mapping(saved, "the state of the loss scaling")
    scale = values.get("scale")
    if not isinstance(scale, (int, float)) or isinstance(scale, bool) or not 1 <= scale < 2**53:
        raise check.wrong(f"the loss scale is {str(scale)[:80]}, expected a number from 1")
    counts = {
        name: check.integer(check.item(values, name), f"{name} of the loss scaling")
        for name in COUNTS
    }
    scaler.load(float(scale), counts)


def hopeless(scaler: LossScaler) -> TrainingError:
    """Return the error that ends a run of which no step comes through."""
    why = "cannot fall below 1" if scaler.is_dynamic else "is fixed"
    return TrainingError(
        f"{MOST_SKIPS} steps in a row had a nan or inf in their gradients or embeddings, with a loss scale "
        f"of {scaler.scale:g}, which {why}: float16 has too small a range for this network; use "
        "set_precision('bfloat16'), keep the layers that overflow in float32 (set_precision_black_list), or "
        "lower the learning rate, and resume from the last checkpoint"
    )


class BufferCopy:
    """A copy of the buffers of modules, running statistics among them, to put back if a step is skipped.

    A network with an inf in its activations has it in the statistics of its batch norms, too, from where it
    would never go away.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._copies: list[Tensor] = []

    @torch.no_grad()
    def take(self) -> None:
        """Copy the buffers as they are now."""
        buffers = self._buffers()
        fits = len(buffers) == len(self._copies) and all(
            (mine.shape, mine.dtype, mine.device) == (theirs.shape, theirs.dtype, theirs.device)
            for mine, theirs in zip(self._copies, buffers, strict=True)
        )
        if not fits:
            self._copies = [torch.empty_like(buffer) for buffer in buffers]
        if buffers:
            torch._foreach_copy_(self._copies, buffers)

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the buffers the values that they had at the last `take`."""
        buffers = self._buffers()
        if buffers:
            torch._foreach_copy_(buffers, self._copies)

    def _buffers(self) -> list[Tensor]:
        return [buffer.detach() for module in self._modules for buffer in module.buffers()]
