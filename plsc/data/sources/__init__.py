"""Sources of labelled images: each implements ``len()``, ``source[i]``, ``name(i)`` and ``labels()``."""

from __future__ import annotations

from plsc.data.sources.base import Source, check_labels
from plsc.data.sources.base64_lines import Base64Source
from plsc.data.sources.image_folders import ImageFolderSource, LabelFileSource
from plsc.data.sources.opening import open_source
from plsc.data.sources.torch_dataset import TorchDatasetSource

__all__ = [
    "Base64Source",
    "ImageFolderSource",
    "LabelFileSource",
    "Source",
    "TorchDatasetSource",
    "check_labels",
    "open_source",
]
