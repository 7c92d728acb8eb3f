"""Use any map-style torch Dataset that returns (image, label)."""

from __future__ import annotations

import operator
import traceback
from typing import Any

import numpy as np

from plsc.data.decode import Image
from plsc.errors import DataError, add_note


class TorchDatasetSource:
    """Wrap a dataset with ``len()`` and ``[index] -> (image, label)``.

    The image is a Pillow image, a uint8 array [H, W, C], or a tensor [C, H, W], uint8 or float (taken as
    normalised). Anything else raises DataError. An OSError, which image loaders raise for a bad file, becomes
    a DataError with the line of the dataset's code. Other exceptions are bugs of the dataset; they are raised
    with a note that names the sample.
    """

    def __init__(self, dataset: Any, title: str = "dataset") -> None:
        self.dataset = dataset
        self.title = title
        self._labels: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Image, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside 0..{len(self) - 1}")
        try:
            item = self.dataset[index]
        except OSError as error:
            reason = " ".join(str(error).split())
            place = _place_in_dataset(error)
            raise DataError(f"{self.name(index)}: cannot be read ({reason}){place}") from error
        except Exception as error:
            add_note(error, f"while reading {self.name(index)}")
            raise
        if not isinstance(item, (tuple, list)) or len(item) != 2:  # a dictionary, say
            raise DataError(f"{self.name(index)}: expected (image, label), got {type(item).__name__}")
        return item[0], whole_number(item[1], self.name(index))

    def name(self, index: int) -> str:
        """Return ``dataset[12]``."""
        return f"{self.title}[{index}]"

    def labels(self) -> np.ndarray:
        """Return all labels, int64 [N].

        Taken from the dataset's ``targets`` or ``labels`` if that is a flat list of N integers and no
        ``target_transform`` changes them. Otherwise every item is read once, including its image, which takes
        as long as an epoch; the result is cached.
        """
        if self._labels is None:
            self._labels = self._declared_labels()
        if self._labels is None:
            numbers = (self[index][1] for index in range(len(self)))
            self._labels = np.fromiter(numbers, dtype=np.int64, count=len(self))
        return self._labels

    def _declared_labels(self) -> np.ndarray | None:
        if getattr(self.dataset, "target_transform", None) is not None:
            return None
        for attribute in ("targets", "labels"):
            declared = getattr(self.dataset, attribute, None)
            if declared is None or callable(declared):
                continue
            try:
                values = np.asarray(declared)
            except (ValueError, TypeError, RuntimeError):
                continue
            if values.shape == (len(self),) and np.issubdtype(values.dtype, np.integer):
                return values.astype(np.int64)
        return None


def whole_number(label: Any, name: str) -> int:
    """Return a label as an integer; DataError, with the sample's name, if it is not one."""
    try:
        return operator.index(label)  # accepts int, numpy integer, integer tensor of one element
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"{name}: the label must be an integer, got {type(label).__name__}", kind="label"
        ) from None


def _place_in_dataset(error: Exception) -> str:
    """Return the location in the dataset's code, because the user does not see the traceback."""
    frames = traceback.extract_tb(error.__traceback__)[1:2]  # the first frame is in plsc
    return "".join(f" at {frame.filename}:{frame.lineno}" for frame in frames)
