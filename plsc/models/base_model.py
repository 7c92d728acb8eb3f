"""What every backbone is: an `nn.Module` that turns images into embeddings."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from plsc.errors import OptionError


class BaseModel(nn.Module):
    """Base of the networks here and of people's own.

    Make the layers in ``__init__`` and use them in `build_network`, which runs on every forward pass::

        class MyModel(BaseModel):
            def __init__(self, emb_size=512):
                super().__init__()
                self.conv = nn.Conv2d(3, 64, 3, stride=2)
                self.fc = nn.Linear(64, emb_size)

            def build_network(self, input, label, is_train=True):
                return self.fc(self.conv(input).mean((2, 3)))

    input_layout: the memory format in which the images reach `build_network`; see `use_channels_last`.
    frozen_by_run: the parameters that a run does not train; see `plsc.models.freezing`. unfolded_because: why
    its batch norms could not be folded, once that was said.

    Raises:
        OptionError: at construction, if the class does not implement `build_network`.
    """

    input_layout = torch.preserve_format
    kept_in_evaluation: tuple[nn.Module, ...] = ()
    frozen_by_run: tuple[nn.Parameter, ...] = ()
    unfolded_because: str = ""

    def __init__(self) -> None:
        super().__init__()
        if type(self).build_network is BaseModel.build_network:
            raise _not_implemented(type(self).__name__)

    def build_network(self, input: Tensor, label: Tensor | None, is_train: bool = True) -> Tensor:
        """Return the embeddings [b, D] of the images ``input`` [b, C, H, W].

        label: int64 [b], or None when the network predicts. is_train: whether this is a training step;
        ``self.training`` says the same unless the caller asks otherwise.
        """
        raise _not_implemented(type(self).__name__)

    def forward(
        self, input: Tensor, label: Tensor | None = None, is_train: bool | None = None
    ) -> Tensor:
        """Call `build_network` on the images in the network's own floating-point type and layout.

        ``is_train`` is ``self.training`` if not given.
        """
        first = next((p for p in self.parameters() if p.is_floating_point()), None)
        if first is not None:
            input = input.to(first.dtype, memory_format=self.input_layout)
        return self.build_network(input, label, self.training if is_train is None else is_train)

    def train(self, mode: bool = True) -> BaseModel:
        """Switch to training or evaluation, but for what `keep_in_evaluation` named."""
        super().train(mode)
        for module in self.kept_in_evaluation:
            module.train(False)
        return self

    def keep_in_evaluation(self, modules: Iterable[nn.Module]) -> None:
        """Leave these modules of the network in evaluation mode from now on: frozen batch norms."""
        self.kept_in_evaluation = tuple(modules)
        self.train(self.training)


def use_channels_last(network: BaseModel, *, weights: bool = True) -> None:
    """Have a network keep its images channels last in memory, [b, H, W, C], from its input on; in place.

    torch's convolutions, batch norms and element-wise operations hand the layout on. Shapes, names and
    numbers stay what they are. weights: lay out those of convolutions alike, so that none is re-ordered at
    each step.
    """
    network.input_layout = torch.channels_last
    if weights:
        network.to(memory_format=torch.channels_last)


def _not_implemented(name: str) -> OptionError:
    return OptionError(
        f"{name} has no build_network; implement build_network(self, input, label, is_train=True), "
        "which returns the embeddings [batch, emb_size]"
    )
