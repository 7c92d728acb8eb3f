"""Names in options: those that are known, of objects to import, and patterns of parameters.

The known names stand here without the modules that have what they name: those import torch.
tests/unit/test_config.py compares them with the owners' tables.
"""

from __future__ import annotations

import fnmatch
import importlib
import operator
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from plsc.errors import OptionError, did_you_mean, refusing

if TYPE_CHECKING:
    from torch import nn

NETWORKS = (
    "ResNet18", "ResNet34", "ResNet50", "ResNet101", "ResNet152",
    "IResNet18", "IResNet34", "IResNet50", "IResNet100", "IResNet200",
    "SmallResNet",
)  # fmt: skip
"""Of plsc/models/resnet.py."""

MARGINS = (
    "softmax", "arcface", "cosface", "sphereface", "combined", "adaface", "magface", "curricularface",
)  # fmt: skip
"""Of plsc/heads/margins.py."""

NO_MARGIN = ("softmax",)
"""Those without an argument named margin, margins or margin_range."""

LOSS_TYPES = tuple(f"dist_{name}" for name in MARGINS) + MARGINS

OPTIMIZERS = (
    "sgd", "adam", "adamw", "rmsprop", "adadelta", "adagrad", "sparse_adam", "adamax", "nadam", "radam",
    "asgd", "rprop", "adafactor",
)  # fmt: skip
"""Of plsc/optim.py."""

SCHEDULES = ("step", "polynomial", "cosine", "constant")
"""Of plsc/train/build.py."""

LOGGERS = ("jsonl", "tensorboard")
"""Of plsc/train/log.py."""

CALLBACKS = {
    "gradient_norm": "log the norm of the network's gradient",
    "check_shape": "print the shapes of parameters and outputs of each layer",
    "check_content": "also values and statistics",
    "profile": "trace steps 6 to 15 with torch.profiler",
}
"""Of plsc/train/run.py, and what they do."""

PROTOCOLS = {
    "pairs": ("images", "pairs", "groups"),
    "identify": ("images", "gallery", "distractors", "groups"),
    "templates": ("images", "templates"),
    "retrieval": ("images", "groups"),
}
"""Of plsc/predict/protocols.py, with the arguments that each takes."""

DEFAULT_NECK = "norm-dropout-linear-norm"
"""Of plsc/models/resnet.py: "option E" of ArcFace (Deng et al. 2019, section 3.1)."""


_SAME_NAME = (
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear",
    "batch_norm", "layer_norm", "group_norm", "instance_norm", "normalize", "softmax", "log_softmax", "prelu",
    "gelu", "silu", "sigmoid", "tanh", "exp", "log", "sum", "mean", "avg_pool2d", "adaptive_avg_pool2d",
    "max_pool2d", "interpolate",
)  # fmt: skip
OPERATORS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in _SAME_NAME},
    "matmul": ("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "einsum"),
    "attention": ("scaled_dot_product_attention",),
    "relu": ("relu", "relu_"),
    "pow": ("pow", "__pow__"),
    "add": ("add", "__add__", "__radd__"),
    "mul": ("mul", "__mul__", "__rmul__"),
}
"""Operators of the precision lists, and the torch functions and tensor methods they stand for."""


def name_of(function: Callable[..., Any]) -> str:
    """Return ``module:name`` of a function or class; of a functools.partial, that of its function."""
    inner = getattr(function, "func", function)
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    return f"{named.__module__}:{named.__qualname__}"


def load_function(reference: str, option: str) -> Callable[..., Any]:
    """Import ``package.module:function``, a function or class. This runs user code.

    Raises:
        OptionError: the module cannot be imported, or lacks the name, as of a function of the main script.
    """
    module_name, _, name = reference.partition(":")
    expected = "expected 'package.module:name', importable from the working directory"
    with refusing(f"cannot import {reference!r} of {option}", expected):
        function: Callable[..., Any] = operator.attrgetter(name)(importlib.import_module(module_name))
    return function


_TYPE = "type:"
_SHOWN = 12


def check_pattern(pattern: Any) -> str | None:
    """Return None for a valid pattern of `find_parameters`, else what was expected."""
    if not isinstance(pattern, str) or not pattern.strip():
        return "a string such as 'stem', '*.bias' or 'type:BatchNorm2d'"
    return None


def find_parameters(pattern: str, network: nn.Module, option: str) -> list[str]:
    """Return the names of the parameters that match a pattern, in the order of the network.

    A pattern is one of

    - the name of a parameter (``neck.fc.weight``, ``*.bias``) or of a module, which selects all parameters in
      it (``stem``, ``stages.0``); with shell wildcards ``*``, ``?``, ``[ab]``, where ``*`` also matches dots;
    - ``type:`` and the class of a module, with the same wildcards (``type:BatchNorm*``): selects all
      parameters in such modules.

    option: the option that holds the pattern, for the error. Raises OptionError, with similar names, if
    nothing matches.
    """
    matches = re.compile(fnmatch.translate(pattern)).fullmatch
    labels = _label_parameters(network)
    matching = [name for name, own in labels.items() if any(map(matches, own))]
    if not matching:
        known = list(dict.fromkeys(label for own in labels.values() for label in own))
        top = dict.fromkeys(name.partition(".")[0] for name in labels)
        raise OptionError(
            f"{option}: the pattern {pattern!r} matches no parameter of the network; its modules are "
            f"{', '.join([*top][:_SHOWN])}{did_you_mean(pattern.strip('*.'), known)}"
        )
    return matching


def _label_parameters(network: nn.Module) -> dict[str, list[str]]:
    """Return the labels of each parameter: its name, and names and types of the modules that contain it."""
    types = {name: type(module).__name__ for name, module in network.named_modules()}
    labels = {}
    for name, _ in network.named_parameters():  # a shared parameter appears once
        labels[name], module = [name], name
        while module := module.rpartition(".")[0]:
            labels[name] += [module, f"{_TYPE}{types[module]}"] if module in types else [module]
    return labels
