"""Train classifiers over very many classes, with class weights sharded over the ranks.

`Entry` trains, tests and predicts. `load_network` returns a trained network, and `open_embeddings` the output
of `Entry.predict`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plsc.config.train import AutoMixedPrecisionLists
    from plsc.entry import Entry
    from plsc.predict.embeddings import open_embeddings
    from plsc.predict.network import load_network
    from plsc.train.callbacks import Callback

from plsc.version import DISTRIBUTION, __version__

if Path(__file__).with_name("engine").exists():
    raise ImportError(
        f"PaddlePaddle's package plsc is installed over {DISTRIBUTION}; pip uninstall plsc {DISTRIBUTION}, "
        f"then install {DISTRIBUTION} again"
    )

__all__ = [
    "AutoMixedPrecisionLists",
    "Callback",
    "Entry",
    "__version__",
    "load_network",
    "open_embeddings",
]

# Imported on first use: `import plsc` alone does not import torch.
_MODULES = {
    "AutoMixedPrecisionLists": "plsc.config.train",
    "Callback": "plsc.train.callbacks",
    "Entry": "plsc.entry",
    "load_network": "plsc.predict.network",
    "open_embeddings": "plsc.predict.embeddings",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'plsc' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
