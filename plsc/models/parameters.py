"""Prepare parameters and buffers before training: initialisation rules, freezing, buffer memory."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from plsc.errors import OptionError, refusing, suggest
from plsc.models.base_model import BaseModel
from plsc.names import find_parameters
from plsc.seeds import hash_key

RULES = (
    "xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal", "orthogonal", "normal",
    "trunc_normal", "uniform", "constant",
)  # fmt: skip
"""The initialisation rules, all functions of torch.nn.init."""

_OF_MATRICES = ("xavier_", "kaiming_", "orthogonal")  # need parameters of two dimensions or more
_OPTION = "set_initialization"
_STREAM = 11  # part of the key, to separate these draws from other uses of the seed


@dataclass(frozen=True)
class Initialization:
    """An initialisation rule for the parameters that match a pattern (see `plsc.names.find_parameters`).

    rule: one of `RULES`; OptionError for any other. arguments: those of the function of torch.nn.init.
    """

    pattern: str
    rule: str
    arguments: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise OptionError(f"unknown initialisation rule {self.rule!r}; {suggest(str(self.rule), RULES)}")


def initialise_by_rule(network: nn.Module, rules: Sequence[Initialization], seed: int) -> None:
    """Initialise the parameters that the rules match; the first matching rule applies.

    Values depend only on the seed and the parameter's name and shape, not on rank, device or other rules.
    torch.nn.init draws them in float32 on the CPU.

    Raises OptionError for a pattern that matches no parameter (with 2 or more dimensions, if the rule needs
    that), and for invalid arguments of a rule.
    """
    named = dict(network.named_parameters())
    taken: set[str] = set()
    for rule in rules:
        found = find_parameters(rule.pattern, network, _OPTION)
        if rule.rule.startswith(_OF_MATRICES):
            # Without a matrix, torch refuses the first vector.
            found = [name for name in found if named[name].ndim > 1] or found
        for name in found:
            if name not in taken:
                _initialise(named[name], name, rule, seed)
        taken.update(found)


def _initialise(parameter: nn.Parameter, name: str, rule: Initialization, seed: int) -> None:
    function: Any = getattr(nn.init, f"{rule.rule}_")
    drawn = torch.empty(parameter.shape)
    arguments = dict(rule.arguments)
    if "generator" in inspect.signature(function).parameters:
        generator = torch.Generator().manual_seed(hash_key(seed, _STREAM, zlib.crc32(name.encode())))
        arguments["generator"] = generator
    with refusing(f"{_OPTION}: the rule {rule.rule} cannot be used for {name} {list(drawn.shape)}"):
        function(drawn, **arguments)
    with torch.no_grad():
        parameter.copy_(drawn)


def freeze(network: BaseModel, names: Collection[str]) -> None:
    """Freeze the named parameters, and the running statistics of frozen batch norms.

    A batch norm stays in evaluation mode, also after ``network.train()``, if all its parameters are frozen;
    one without parameters, if all those of the enclosing module are. Dropout stays active in frozen modules.
    Call this after batch norms are synchronised and before the network is wrapped.
    """
    if not names:
        return
    network.frozen_by_run = tuple(
        parameter
        for name, parameter in network.named_parameters()
        if name in names and parameter.requires_grad
    )
    for parameter in network.frozen_by_run:
        parameter.requires_grad_(False)
    frozen = {id(p) for name, p in network.named_parameters() if name in names}
    network.keep_in_evaluation(
        module
        for path, module in network.named_modules()
        if isinstance(module, _NormBase) and module.track_running_stats and _is_frozen(network, path, frozen)
    )


def unfreeze(network: BaseModel) -> None:
    """Undo `freeze`; parameters that were frozen by other code stay frozen."""
    if network.frozen_by_run:
        network.keep_in_evaluation(())
    for parameter in network.frozen_by_run:
        parameter.requires_grad_(True)
    network.frozen_by_run = ()


def _is_frozen(network: nn.Module, path: str, frozen: set[int]) -> bool:
    """Return whether all parameters of the module, or of its nearest parent with parameters, are frozen."""
    while True:
        parameters = list(network.get_submodule(path).parameters())
        if parameters:
            return all(id(parameter) in frozen for parameter in parameters)
        if not path:
            return False
        path = path.rpartition(".")[0]


def copy_expanded_buffers(network: nn.Module) -> None:
    """Copy buffers whose elements share memory (`Tensor.expand`), in place: torch cannot write to them."""
    for module in network.modules():
        for name, buffer in module._buffers.items():
            strides = [] if buffer is None else zip(buffer.shape, buffer.stride(), strict=True)
            if buffer is not None and any(size > 1 and stride == 0 for size, stride in strides):
                module._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)
