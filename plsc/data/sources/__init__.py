"""Sources of labelled images: each answers ``len()``, ``source[i]``, ``name(i)`` and ``labels()``."""

from __future__ import annotations

from pathlib import Path

from plsc.data.sources.base import Source, check_labels
from plsc.data.sources.image_folder import ImageFolderSource, class_folders
from plsc.data.sources.label_file import LabelFileSource
from plsc.data.sources.torch_dataset import TorchDatasetSource
from plsc.errors import DataError

__all__ = [
    "ImageFolderSource",
    "LabelFileSource",
    "Source",
    "TorchDatasetSource",
    "check_labels",
    "open_source",
]

_LAYOUTS = (
    "expected a folder with label.txt (lines of '<path> <label>') and its images, "
    "or one with a folder of images for each class"
)


def open_source(dataset_dir: str | Path) -> Source:
    """Return the source for a folder: label.txt if it has one, else one folder for each class.

    Raises DataError, which says what is accepted, if the folder is missing or is neither.
    """
    folder = Path(dataset_dir)
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise DataError(f"the dataset folder {folder} {problem}; {_LAYOUTS}")
    if (folder / "label.txt").exists():
        return LabelFileSource(folder)
    # `images/` alone is the first layout with its label.txt forgotten, not a set of one class.
    if class_folders(folder) in ([], ["images"]):
        raise DataError(f"{folder} has no label.txt and no class folders; {_LAYOUTS}")
    return ImageFolderSource(folder)
