"""Train classifiers over very many classes, with class weights sharded over the ranks.

`Entry` trains, tests and predicts. `load_network` returns a trained network, and `open_embeddings` the output
of `Entry.predict`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plsc.actions.embeddings import open_embeddings
    from plsc.config.runtime import AutoMixedPrecisionLists
    from plsc.entry import Entry
    from plsc.run.callbacks import Callback, EarlyStopping
    from plsc.state.network import load_network
    from plsc.train.watch.limits import MaxTime

from plsc.version import __version__

__all__ = [
    "AutoMixedPrecisionLists",
    "Callback",
    "EarlyStopping",
    "Entry",
    "MaxTime",
    "__version__",
    "load_network",
    "open_embeddings",
]

# Imported on first use: `import plsc` alone does not import torch.
_MODULES = {
    "AutoMixedPrecisionLists": "plsc.config.runtime",
    "Callback": "plsc.run.callbacks",
    "EarlyStopping": "plsc.run.callbacks",
    "Entry": "plsc.entry",
    "MaxTime": "plsc.train.watch.limits",
    "load_network": "plsc.state.network",
    "open_embeddings": "plsc.actions.embeddings",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'plsc' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
