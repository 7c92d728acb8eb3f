"""Compare an exported graph, loaded in its own runtime, with the eager network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from plsc.errors import CheckpointError
from plsc.evaluate.curves import roc_curve
from plsc.export.folder import TORCH_NAME
from plsc.export.graph import Served
from plsc.export.served import open_model

BATCHES = (1, 3, 64)
TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}  # of a component of a unit vector
LOWEST_COSINE = 0.99  # decides for int8; others have it if their differences are small
MOST_ACCURACY_LOST = 0.003  # of int8

Embed = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Difference:
    """The embeddings of a graph compared with those of the eager network."""

    largest: float  # difference of a component
    lowest_cosine: float

    def summary(self) -> str:
        """Return one line for the log."""
        return f"largest difference {self.largest:.1e}, lowest cosine {self.lowest_cosine:.6f}"


def load_graph(folder: Path, kind: str) -> Embed:
    """Load the graph of a folder that this process has written, in its own runtime."""
    if kind == "onnx":
        return open_model(folder).embed
    program = torch.export.load(folder / TORCH_NAME).module()

    def embed(images: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            found: np.ndarray = program(torch.from_numpy(images)).numpy()
        return found

    return embed


def compare(served: Served, embed: Embed, images: np.ndarray, precision: str) -> Difference:
    """Return the differences over batches of BATCHES images.

    images: float32 [N, C, H, W]; repeated if there are fewer than the largest batch. Raises CheckpointError
    if the differences are too large.
    """
    largest, lowest = 0.0, 1.0
    for batch in BATCHES:
        some = np.resize(images, (batch, *images.shape[1:]))
        with torch.inference_mode():
            expected = served(torch.from_numpy(some)).numpy()
        found = embed(some)
        if found.shape != expected.shape:
            raise CheckpointError(
                f"the {precision} graph returns {list(found.shape)} for {batch} images; expected "
                f"{list(expected.shape)}: the network depends on the batch size"
            )
        # nan compares as the largest difference
        largest = float(np.maximum(largest, np.abs(found - expected).max()))
        lowest = float(np.minimum(lowest, (found * expected).sum(axis=1).min()))
    difference = Difference(largest, lowest)
    tolerance = TOLERANCES.get(precision, np.inf)
    if not (largest <= tolerance and lowest >= LOWEST_COSINE):
        limit = f"cosine {LOWEST_COSINE}" if largest <= tolerance else f"difference {tolerance:g}"
        raise CheckpointError(
            f"the {precision} graph differs from the network: {difference.summary()}; the limit is {limit}. "
            "Choose another precision"
        )
    return difference


def check_accuracy(name: str, eager: np.ndarray, found: np.ndarray, is_same: np.ndarray) -> str:
    """Return both accuracies on a pair file for the log, each at its best threshold.

    The ten-fold accuracy would not do: its thresholds, chosen on a grid, differ after any small change.

    eager, found: cosines of the pairs of the network and of the int8 graph. is_same: bool [P]. Raises
    CheckpointError if the graph loses too much.
    """
    ours, theirs = best_accuracy(eager, is_same), best_accuracy(found, is_same)
    text = f"accuracy at the best threshold: {theirs:.4f}, of the network {ours:.4f}"
    if ours - theirs > MOST_ACCURACY_LOST:
        raise CheckpointError(
            f"the int8 graph loses too much on {name}: {text}; at most {MOST_ACCURACY_LOST} may be lost. "
            "Choose another precision"
        )
    return f"{name}: {text}"


def best_accuracy(cosines: np.ndarray, is_same: np.ndarray) -> float:
    """Return the highest accuracy over all thresholds, 0..1."""
    far, tar = roc_curve(cosines, is_same)
    share = float(is_same.mean())
    return float((tar * share + (1 - far) * (1 - share)).max())
