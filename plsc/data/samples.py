"""From the indices of a batch to the batch: read, decode, augment, and what to do with bad samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from plsc.data.augment import Augmentation, Draws, Operation, augment, is_mirrored
from plsc.data.bad_samples import MAX_REPLACEMENTS, BadSample, replacement
from plsc.data.batch import Batch, NamesOf
from plsc.data.decode import Image, ImageShape, decode_into
from plsc.data.isolated import IsolatedRandom
from plsc.data.ring import BufferRing
from plsc.data.sources.base import Source
from plsc.data.threads import Stopped
from plsc.data.transform import Transform, apply_transform
from plsc.errors import DataError
from plsc.keys import hash_key

Request = tuple[int, np.ndarray]
"""An epoch, and the indices of the samples of one batch."""


@dataclass(frozen=True)
class Recipe:
    """How a sample becomes an image of a batch.

    bad_images: ``stop``, ``skip`` or ``replace``. class_num: labels outside 0..class_num - 1 are bad
    samples; None: they are not looked at. first_sample: added to the index wherever randomness depends on
    the sample. seed_reading: the source draws from global generators, which are seeded for each sample;
    for processes only, as threads share these.
    """

    image_shape: ImageShape
    seed: int
    augmentation: Augmentation = field(default_factory=Augmentation)
    transform: Transform | None = None
    bad_images: str = "stop"
    class_num: int | None = None
    first_sample: int = 0
    seed_reading: bool = False


class BatchReader:
    """Makes batches. It may be called by several threads, and a copy works in another process."""

    def __init__(self, source: Source, recipe: Recipe) -> None:
        self.source = source
        self.recipe = recipe

    def read(
        self, request: Request, ring: BufferRing, stopped: Callable[[], bool] = lambda: False
    ) -> Batch:
        """Return the batch of a request.

        Raises DataError, which names the sample, for a bad one if the recipe says stop, and for what is
        a fault of the code and not of a sample; Stopped once ``stopped()`` says so.
        """
        epoch, indices = request
        slots, images = ring.take(len(indices))
        mirrored = np.zeros(len(indices), dtype=bool)
        batch = Batch(images, torch.empty(0, dtype=torch.int64), [])
        labels: list[int] = []
        used: list[int] = []
        floats: list[torch.Tensor] = []
        for index in indices.tolist():
            if stopped():
                raise Stopped
            filled = len(used)
            sample = self._first_good(index, epoch, slots[filled], batch)
            if sample is None:
                continue
            chosen, label, image = sample
            image, mirrored[filled] = self._augmented(chosen, epoch, slots[filled], image)
            if image is not None:
                floats.append(image)
            if filled and len(floats) not in (0, filled + 1):
                mine, theirs = ("uint8", "float32") if image is None else ("float32", "uint8")
                raise DataError(
                    f"{self.source.name(chosen)}: is {mine}, others are {theirs}; make them one"
                )
            used.append(chosen)
            labels.append(label)
        batch.images = torch.stack(floats) if floats else images[: len(used)]
        batch.mirrored = torch.from_numpy(mirrored[: len(used)]) if mirrored.any() else None
        batch.labels = torch.tensor(labels, dtype=torch.int64)
        batch.names = NamesOf(used, self.source)
        return batch

    def _first_good(
        self, index: int, epoch: int, out: np.ndarray, batch: Batch
    ) -> tuple[int, int, torch.Tensor | None] | None:
        """Return (sample, label, image if it is of floats), or None if the sample is left out."""
        recipe, chosen = self.recipe, index
        for attempt in range(1, MAX_REPLACEMENTS + 2):
            try:
                return (chosen, *self._decoded(chosen, epoch, out))
            except DataError as error:
                if recipe.bad_images == "stop":
                    raise
                batch.problems.append(BadSample.from_error(error))
            if recipe.bad_images == "skip":
                batch.skipped += 1
                return None
            key = recipe.first_sample + index
            chosen = replacement(recipe.seed, epoch, key, attempt, len(self.source))
        raise DataError(
            f"{self.source.name(index)} is bad, and so are {MAX_REPLACEMENTS} samples drawn to replace "
            f"it, the last: {batch.problems[-1].text}; look after the dataset"
        )

    def _decoded(self, index: int, epoch: int, out: np.ndarray) -> tuple[int, torch.Tensor | None]:
        try:
            data, label = self._read_one(index, epoch)  # its errors name the sample
        except DataError:
            raise
        except Exception as error:  # a mistake of the source's: it keeps its traceback
            _note(error, f"while reading {self.source.name(index)}")
            raise
        class_num = self.recipe.class_num
        if class_num is not None and not 0 <= label < class_num:
            raise DataError(
                f"{self.source.name(index)}: label {label} is outside 0..{class_num - 1}",
                kind="label",
            )
        try:
            return label, decode_into(data, out)
        except DataError as error:
            raise error.at(self.source.name(index)) from error

    def _augmented(
        self, index: int, epoch: int, out: np.ndarray, image: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, bool]:
        """Augment the pixels in ``out``, or the float image.

        Returns the image if it is of floats, and whether it is still to be mirrored.
        """
        recipe = self.recipe
        key = recipe.first_sample + index
        draws = Draws(recipe.seed, epoch, key)
        pixels = out if image is None else image.numpy().transpose(1, 2, 0)
        flips = recipe.augmentation.flip and is_mirrored(draws)
        try:
            augment(pixels, recipe.augmentation, draws)
            if image is None and recipe.transform is None:
                return None, flips
            if flips:
                pixels[...] = pixels[:, ::-1].copy()
            if recipe.transform is None:
                return image, False
            result = apply_transform(
                recipe.transform, pixels, seed=recipe.seed, epoch=epoch, sample=key
            )
        except DataError as error:  # a fault of the code, not of this image: never skipped
            raise error.at(self.source.name(index)) from error
        if result.dtype != torch.uint8:
            return result, False
        np.copyto(out, result.permute(1, 2, 0).numpy())
        return None, False

    def _read_one(self, index: int, epoch: int) -> tuple[Image, int]:
        if not self.recipe.seed_reading:
            return self.source[index]
        key = self.recipe.first_sample + index
        with IsolatedRandom(hash_key(self.recipe.seed, epoch, key, Operation.READ)).active():
            return self.source[index]


def _note(error: Exception, text: str) -> None:
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(text)
