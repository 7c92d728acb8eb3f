"""Verification on the run's pair files: loaded before training, judged during and after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plsc.config import Config
from plsc.data.pairs import read_pairs
from plsc.errors import DataError
from plsc.evaluate.embed import embed_images
from plsc.evaluate.verification import VerificationResult, verify
from plsc.models import BaseModel
from plsc.parallel.world import World
from plsc.train.network import evaluated, evaluation_context

_DEFAULT_TARGET = "lfw"
_FOLDS = 10

TestReader = Callable[[str, str], tuple[Sequence[Any], Sequence[str]]]
"""``reader(dataset_dir, val_targets)`` gives what plsc.utils.jpeg_reader.test gives."""


@dataclass(frozen=True)
class Target:
    """A set of pairs: images 2p and 2p + 1 are pair p.

    images: [2P] encoded, or arrays as a reader gave them; is_same: bool [P].
    """

    name: str
    images: Sequence[Any]
    is_same: np.ndarray


def load_targets(options: Config, test_reader: TestReader | None = None) -> list[Target]:
    """Return the pair files that `data.val_targets` names, in order.

    When nothing was named, lfw.bin is taken if it is there. Raises DataError for a file that is
    missing or broken, or has too few pairs for ten folds.
    """
    names = options.data.val_targets
    folder = Path(options.data.dataset_dir)
    if test_reader is not None:
        pair_sets, found = test_reader(str(folder), names or _DEFAULT_TARGET)
        targets = [
            Target(name, list(arrays[0]), np.asarray(is_same, dtype=bool))
            for name, (arrays, is_same) in zip(found, pair_sets, strict=True)
        ]
    else:
        folder = folder.parent if folder.is_file() else folder  # beside a train.rec, say
        if names is None:
            names = _DEFAULT_TARGET if (folder / f"{_DEFAULT_TARGET}.bin").exists() else ""
        targets = []
        for name in filter(None, (part.strip() for part in names.split(","))):
            pairs = read_pairs(folder / f"{name}.bin")
            targets.append(Target(name, pairs.images, pairs.is_same))
    for target in targets:
        same = int(target.is_same.sum())
        if len(target.is_same) < _FOLDS or same in (0, len(target.is_same)):
            raise DataError(
                f"{target.name} has {len(target.is_same)} pairs, {same} of them same; expected at "
                f"least {_FOLDS} pairs, both same and different ones"
            )
    return targets


def evaluate_targets(
    network: BaseModel, targets: Sequence[Target], options: Config, world: World
) -> dict[str, VerificationResult]:
    """Return the ten-fold verification of every target, the same on all ranks; a collective."""
    results = {}
    network = evaluated(network, options, world)
    for target in targets:
        with evaluation_context(options, world.device):
            embeddings = embed_images(
                network,
                target.images,
                options.model.image_shape,
                batch_size=options.train.test_batch_size,
                device=world.device,
                flip=options.data.flip,
                world=world,
                name=target.name,
                num_threads=options.data.num_workers,
            )
        # Every rank has all embeddings; one judges them, so that all report the same bits.
        result = verify(embeddings, target.is_same, _FOLDS) if world.is_main else None
        results[target.name] = world.broadcast_object(result)
    return results
