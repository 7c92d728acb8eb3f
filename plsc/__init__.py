"""Classifiers over very many classes: class weights sharded over the ranks.

`Entry` is the facade; every part is usable by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plsc.version import __version__

if TYPE_CHECKING:
    from plsc.entry import Entry
    from plsc.options.precision import AutoMixedPrecisionLists

__all__ = ["AutoMixedPrecisionLists", "Entry", "__version__"]


def __getattr__(name: str) -> Any:
    # Loaded when it is asked for: `import plsc` alone does not import torch.
    if name == "Entry":
        from plsc.entry import Entry

        return Entry
    if name == "AutoMixedPrecisionLists":
        from plsc.options.precision import AutoMixedPrecisionLists

        return AutoMixedPrecisionLists
    raise AttributeError(f"module 'plsc' has no attribute {name!r}")
