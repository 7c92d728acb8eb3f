"""Train classifiers over very many classes, with class weights sharded over the ranks.

`Entry` is the high-level interface; all parts can also be used on their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plsc.config.runtime import AutoMixedPrecisionLists
    from plsc.entry import Entry

__version__ = "0.1.0"

__all__ = ["AutoMixedPrecisionLists", "Entry", "__version__"]


def __getattr__(name: str) -> Any:
    # Import on access, so that `import plsc` does not import torch.
    if name == "Entry":
        from plsc.entry import Entry

        return Entry
    if name == "AutoMixedPrecisionLists":
        from plsc.config.runtime import AutoMixedPrecisionLists

        return AutoMixedPrecisionLists
    raise AttributeError(f"module 'plsc' has no attribute {name!r}")
