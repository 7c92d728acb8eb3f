"""What every backbone is: an `nn.Module` that turns images into embeddings."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from plsc.config.option import is_finite_number
from plsc.errors import OptionError

_SHORT, _WORD = re.compile(r".{0,200}", re.DOTALL), re.compile(r"[\w-]{0,200}")


class BaseModel(nn.Module):
    """Base class of the networks of plsc and of users.

    Make the layers in ``__init__`` and use them in `build_network`, which runs on every forward pass::

        class MyModel(BaseModel):
            def __init__(self, emb_size=512):
                super().__init__()
                self.conv = nn.Conv2d(3, 64, 3, stride=2)
                self.fc = nn.Linear(64, emb_size)

            def build_network(self, input, label, is_train=True):
                return self.fc(self.conv(input).mean((2, 3)))

    input_layout: the memory format in which the images reach `build_network`; see `use_channels_last`.
    frozen_by_run: the parameters that a run does not train; see `plsc.models.parameters`. unfolded_because:
    why its batch norms could not be folded, once that was said.
    """

    input_layout = torch.preserve_format
    kept_in_evaluation: tuple[nn.Module, ...] = ()
    frozen_by_run: tuple[nn.Parameter, ...] = ()
    unfolded_because: str = ""
    _given: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> BaseModel:
        """Make an instance that has what its constructor is given, for `constructor_arguments`."""
        self = super().__new__(cls)
        object.__setattr__(self, "_given", (args, kwargs))
        return self

    def build_network(self, input: Tensor, label: Tensor | None, is_train: bool = True) -> Tensor:
        """Return the embeddings [b, D] of the images ``input`` [b, C, H, W].

        label: int64 [b], or None when the network predicts. is_train: whether this is a training step;
        ``self.training`` says the same unless the caller asks otherwise.
        """
        raise OptionError(
            f"{type(self).__name__} has no build_network; implement build_network(self, input, label, "
            "is_train=True), which returns the embeddings [batch, emb_size]"
        )

    def forward(self, input: Tensor, label: Tensor | None = None, is_train: bool | None = None) -> Tensor:
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


@contextlib.contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; every module goes back to its own mode, frozen ones included."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


class ForwardWrapper:
    """Takes the place of a module's `forward` on the object: hooks, type and names in state dicts stay.

    inner: the forward that was there before. Derived classes say what is done around it. An object, which a
    deep copy of the network follows, unlike a closure.
    """

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Call the module."""
        return self.inner(*inputs, **named)


def unwrap(network: nn.Module) -> None:
    """Take back all that wrappers of `forward` do in a network, in place."""
    for module in network.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, ForwardWrapper):
            while isinstance(forward, ForwardWrapper):
                forward = forward.inner
            del module.forward
            if forward != module.forward:  # set on the object by other code
                module.forward = forward


def constructor_arguments(model: BaseModel) -> dict[str, Any] | None:
    """Return the arguments that a network was made with, by name.

    None where one of them is more than numbers, switches, short strings, and lists and mappings of these.
    """
    args, kwargs = model._given
    signature = inspect.signature(type(model).__init__)
    given = dict(signature.bind(model, *args, **kwargs).arguments)
    given.pop(next(iter(signature.parameters)))
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL and name in given:
            return None
    return given if _holds(given, _SHORT) else None


def harmless_arguments(saved: Any) -> dict[str, Any]:
    """Return those arguments in a checkpoint that may be passed: without strings like a path or URL."""
    given = saved if isinstance(saved, dict) else {}
    return {name: value for name, value in given.items() if _holds(value, _WORD)}


def _holds(value: Any, strings: re.Pattern[str]) -> bool:
    """Whether a value is plain, and all strings in it match."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _holds([key, one], strings) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return all(_holds(one, strings) for one in value)
    if isinstance(value, str):
        return strings.fullmatch(value) is not None
    return value is None or isinstance(value, bool) or is_finite_number(value)


def use_channels_last(network: BaseModel, *, weights: bool = True) -> None:
    """Have a network keep its images channels last in memory, [b, H, W, C], from its input on; in place.

    torch's convolutions, batch norms and element-wise operations hand the layout on. Shapes, names and
    numbers stay what they are. weights: lay out those of convolutions in the same way, so that none is
    re-ordered at each step.
    """
    network.input_layout = torch.channels_last
    if weights:
        network.to(memory_format=torch.channels_last)
