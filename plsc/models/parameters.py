"""Parameters and buffers of a network before it is trained: first values by rule, freezing, own memory."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from plsc.config.model import Initialization
from plsc.config.patterns import find_parameters, label_parameters
from plsc.errors import OptionError, refusing
from plsc.models.base_model import BaseModel
from plsc.seeds import hash_key

_OPTION = "model.initialization"
_STREAM = 11  # a part of the key: other draws of the seed are not these


def initialise_by_rule(network: nn.Module, rules: Sequence[Initialization], seed: int) -> None:
    """Give the parameters that the rules match their first values; the first rule that matches counts.

    What a parameter gets depends on the seed, its name and shape alone: it is the same on every rank and
    device, and whatever other rules there are. Values are drawn in float32 on the CPU, by torch.nn.init.

    Raises OptionError for a pattern that matches no parameter, or none of two dimensions or more where the
    rule wants them, and for arguments that the rule cannot take.
    """
    labels = label_parameters(network)
    named = dict(network.named_parameters())
    taken: set[str] = set()
    for rule in rules:
        found = find_parameters(rule.pattern, labels, _OPTION)
        if rule.wants_matrices:
            found = [name for name in found if named[name].ndim > 1]
            if not found:
                raise OptionError(
                    f"{_OPTION}: the rule {rule.rule} is for parameters of two dimensions or more, and "
                    f"{rule.pattern!r} matches others alone; use normal, uniform or constant for them"
                )
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
    shape = list(drawn.shape)
    with refusing(f"{_OPTION}: the rule {rule.rule} cannot be used for {name} {shape}"):
        function(drawn, **arguments)
    with torch.no_grad():
        parameter.copy_(drawn)


def freeze(network: BaseModel, names: Collection[str]) -> None:
    """Train the named parameters no more; batch norms among them keep their statistics, too.

    A batch norm stays in evaluation mode, also after ``network.train()``, if its parameters are frozen, or,
    where it has none, if all those of the module around it are. Dropout stays on in frozen modules.
    Call it once batch norms are synchronised, and before the network is wrapped.
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


def thaw(network: BaseModel) -> None:
    """Train again what `freeze` froze; what its owner froze otherwise stays so."""
    if network.frozen_by_run:
        network.keep_in_evaluation(())
    for parameter in network.frozen_by_run:
        parameter.requires_grad_(True)
    network.frozen_by_run = ()


def _is_frozen(network: nn.Module, path: str, frozen: set[int]) -> bool:
    """Whether all parameters of the module are, or of the nearest module around it that has any."""
    while True:
        parameters = list(network.get_submodule(path).parameters())
        if parameters:
            return all(id(parameter) in frozen for parameter in parameters)
        if not path:
            return False
        path = path.rpartition(".")[0]


def separate_buffers(network: nn.Module) -> None:
    """Give each buffer memory of its own, in place, where its numbers share it (`Tensor.expand`).

    Such a buffer can be read, but not loaded or put back.
    """
    for module in network.modules():
        for name, buffer in module._buffers.items():
            strides = [] if buffer is None else zip(buffer.shape, buffer.stride(), strict=True)
            if buffer is not None and any(size > 1 and stride == 0 for size, stride in strides):
                module._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)
