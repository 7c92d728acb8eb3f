"""Classifiers over very many classes: class weights sharded over the ranks.

`Entry` is the facade; every part is usable by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plsc.config.runtime import AutoMixedPrecisionLists
    from plsc.entry import Entry

__version__ = "0.1.0"

__all__ = ["AutoMixedPrecisionLists", "Entry", "__version__"]


def __getattr__(name: str) -> Any:
    # Loaded when it is asked for: `import plsc` alone does not import torch.
    if name == "Entry":
        from plsc.entry import Entry

        return Entry
    if name == "AutoMixedPrecisionLists":
        from plsc.config.runtime import AutoMixedPrecisionLists

        return AutoMixedPrecisionLists
    raise AttributeError(f"module 'plsc' has no attribute {name!r}")
