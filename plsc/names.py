"""The names that options accept, without the modules that have what they name: those import torch.

tests/unit/test_names.py compares them with the owners' tables.
"""

from __future__ import annotations

NETWORKS = (
    "ResNet18", "ResNet34", "ResNet50", "ResNet101", "ResNet152",
    "IResNet18", "IResNet34", "IResNet50", "IResNet100", "IResNet200",
    "SmallResNet",
)  # fmt: skip
"""Of plsc/models/registry.py."""

MARGINS = (
    "softmax", "normface", "arcface", "cosface", "sphereface", "combined", "adaface", "magface",
    "curricularface",
)  # fmt: skip
"""Of plsc/heads/margins.py."""

NO_MARGIN = ("softmax", "normface")
"""Those without an argument named margin, margins or margin_range."""

LOSS_TYPES = tuple(f"dist_{name}" for name in MARGINS) + MARGINS

OPTIMIZERS = (
    "sgd", "adam", "adamw", "rmsprop", "adadelta", "adagrad", "sparse_adam", "adamax", "nadam", "radam",
    "asgd", "rprop", "adafactor",
)  # fmt: skip
"""Of plsc/optim/optimizers.py."""

SCHEDULES = ("step", "multi_step", "polynomial", "cosine", "exponential", "constant")
"""Of plsc/train/build.py."""

LOGGERS = ("jsonl", "tensorboard", "mlflow", "wandb")
"""Of plsc/train/log.py."""

CALLBACKS = ("gradient_norm", "images", "check_shape", "check_content", "profile")
"""Of plsc/train/run.py."""

PROTOCOLS = {
    "pairs": ("images", "pairs", "groups"),
    "all_pairs": ("images", "groups"),
    "identify": ("images", "gallery", "distractors", "groups"),
    "templates": ("images", "templates", "groups"),
    "retrieval": ("images", "groups"),
}
"""Of plsc/predict/protocols.py, with the arguments that each takes."""


def names_code(name: object) -> bool:
    """Return whether the value of an option is the name of code to import, ``package.module:name``."""
    return isinstance(name, str) and ":" in name[1:]
