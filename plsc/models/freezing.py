"""Parameters that are not trained, and the batch norms among them."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from plsc.models.base_model import BaseModel


def freeze(network: BaseModel, names: Collection[str]) -> None:
    """Train the named parameters no more; batch norms among them keep their statistics, too.

    A batch norm stays in evaluation mode, also after ``network.train()``, if its parameters are frozen, or,
    where it has none, if all those of the module around it are. Dropout goes on in frozen modules.
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
        if isinstance(module, _NormBase)
        and module.track_running_stats
        and _is_frozen(network, path, frozen)
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
