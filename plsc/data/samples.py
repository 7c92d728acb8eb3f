"""Make batches: read, decode and augment the samples, and handle bad ones."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plsc.data.augment import (
    Augmentation,
    Draws,
    IsolatedRandom,
    Operation,
    Transform,
    apply_transform,
    are_mirrored,
    augment,
)
from plsc.data.batch import BadSample, Batch, BufferRing, SampleNames
from plsc.data.decode import Image, ImageShape, decode_into
from plsc.data.sources.base import Source, printable
from plsc.data.workers import Stopped
from plsc.errors import DataError, add_note, naming
from plsc.inputs import Input, as_input, stack_inputs
from plsc.seeds import hash_key
from plsc.storage.regular import open_regular, read_regular

Request = tuple[int, np.ndarray]
"""The epoch, and the sample indices of one batch."""
Sample = tuple[Image, int]
"""An image and its label."""

MAX_REPLACEMENTS = 16  # if a tenth of the samples is bad, all of them fail with probability 1e-16
LIST_NAME = "bad_samples.txt"
MAX_LISTED = 100_000  # lines; further bad samples are only counted

_UNREADABLE_LIST = 64 * 2**20


@dataclass(frozen=True)
class Recipe:
    """How samples become images of a batch.

    Attributes:
        bad_images: ``stop``, ``skip`` or ``replace``.
        class_num: samples with labels outside 0..class_num - 1 are bad; None disables the check.
        first_sample: offset added to the index of a sample wherever randomness depends on it.
        seed_reading: seed the global generators for each sample, for a source that draws from them. Not in
            threads, which share these generators.
        example: the `BaseModel.example_input` of a network that takes no images; None: images.
    """

    image_shape: ImageShape
    seed: int
    augmentation: Augmentation = field(default_factory=Augmentation)
    transform: Transform | None = None
    bad_images: str = "stop"
    class_num: int | None = None
    first_sample: int = 0
    seed_reading: bool = False
    example: Input | None = None


class BatchReader:
    """Make batches. Thread-safe; a copy works in another process."""

    def __init__(self, source: Source, recipe: Recipe) -> None:
        self.source = source
        self.recipe = recipe
        self._changes_pixels = recipe.augmentation.changes_pixels or recipe.transform is not None

    def read(self, request: Request, ring: BufferRing, stopped: Callable[[], bool] = lambda: False) -> Batch:
        """Return the batch of a request.

        Raises:
            DataError: names the sample; for a bad sample if ``bad_images`` is ``stop``, and for an error of
                the transform or augmentation.
            Stopped: ``stopped()`` returned True.
        """
        epoch, indices = request
        example = self.recipe.example
        slots, images = ring.take(len(indices) if example is None else 0)
        batch = Batch(images, torch.empty(0, dtype=torch.int64), [], is_input=example is not None)
        labels: list[int] = []
        used: list[int] = []
        floats: list[Any] = []  # float images, or samples that are not images
        samples: Iterator[Sample | DataError] = (self._read_one(index, epoch) for index in indices.tolist())
        read_many = getattr(self.source, "read_many", None)
        if read_many is not None and not self.recipe.seed_reading:
            samples = read_many(indices)
        for index, sample in zip(indices.tolist(), samples, strict=False):
            if stopped():
                raise Stopped
            filled = len(used)
            out = slots[filled] if example is None else slots
            good = self._first_good(index, sample, epoch, out, batch)
            if good is None:
                continue
            chosen, label, image = good
            if example is None and (image is not None or self._changes_pixels):
                image = self._augmented(chosen, epoch, out, image)
            if image is not None:
                floats.append(image)
            if filled and len(floats) not in (0, filled + 1):
                raise DataError(f"{self.source.name(chosen)}: the batch has uint8 and float32 images")
            used.append(chosen)
            labels.append(label)
        if example is not None:
            batch.images = stack_inputs(floats, example)
        else:
            batch.images = torch.stack(floats) if floats else images[: len(used)]
            if self.recipe.augmentation.flip:
                keys = np.array(used, np.int64) + self.recipe.first_sample
                mirrored = are_mirrored(self.recipe.seed, epoch, keys)
                batch.mirrored = torch.from_numpy(mirrored) if mirrored.any() else None
        batch.labels = torch.tensor(labels, dtype=torch.int64)
        batch.names = SampleNames(used, self.source)
        return batch

    def _first_good(
        self, index: int, sample: Sample | DataError, epoch: int, out: np.ndarray, batch: Batch
    ) -> tuple[int, int, Any] | None:
        """Return (index, label, image if it is float or no image), or None if the sample is skipped."""
        recipe, chosen = self.recipe, index
        for attempt in range(1, MAX_REPLACEMENTS + 2):
            try:
                if isinstance(sample, DataError):
                    raise sample
                data, label = sample
                with naming(self.source.name, chosen):
                    if recipe.class_num is not None and not 0 <= label < recipe.class_num:
                        raise DataError(f"label {label} is outside 0..{recipe.class_num - 1}", kind="label")
                    if recipe.example is None:
                        return chosen, label, decode_into(data, out)
                    return chosen, label, as_input(data, recipe.example)
            except DataError as error:
                if recipe.bad_images == "stop":
                    raise
                batch.problems.append(BadSample.from_error(error))
            if recipe.bad_images == "skip":
                batch.skipped += 1
                return None
            key = recipe.first_sample + index
            chosen = replacement(recipe.seed, epoch, key, attempt, len(self.source))
            sample = self._read_one(chosen, epoch)
        raise DataError(
            f"{self.source.name(index)} is bad, and so are its {MAX_REPLACEMENTS} replacements: "
            f"{batch.problems[-1].text}"
        )

    def _augmented(
        self, index: int, epoch: int, out: np.ndarray, image: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Augment the pixels in ``out`` or the float image, without the flip; return a float image."""
        recipe = self.recipe
        key = recipe.first_sample + index
        draws = Draws(recipe.seed, epoch, key)
        pixels = out if image is None else image.numpy().transpose(1, 2, 0)
        with naming(self.source.name, index):  # an error in the transform, not in the image: never skipped
            augment(pixels, recipe.augmentation, draws)
            if recipe.transform is None:
                return image
            result = apply_transform(recipe.transform, pixels, seed=recipe.seed, epoch=epoch, sample=key)
        if result.dtype != torch.uint8:
            return result
        np.copyto(out, result.permute(1, 2, 0).numpy())
        return None

    def _read_one(self, index: int, epoch: int) -> Sample | DataError:
        try:
            if not self.recipe.seed_reading:
                return self.source[index]
            key = self.recipe.first_sample + index
            with IsolatedRandom(hash_key(self.recipe.seed, epoch, key, Operation.READ)).active():
                return self.source[index]
        except DataError as error:
            return error
        except Exception as error:  # a bug in the source: keep the traceback
            add_note(error, f"while reading {self.source.name(index)}")
            raise


def replacement(seed: int, epoch: int, sample: int, attempt: int, num_samples: int) -> int:
    """Return the index of the sample that replaces a bad one; attempt: counts from 1."""
    return hash_key(seed, epoch, sample, Operation.REPLACE, attempt) % num_samples


class BadSampleList:
    """The file ``bad_samples.txt``: one line ``kind<tab>name: reason`` per bad sample, without duplicates.

    An existing file is continued, so that a resumed run does not list a sample twice.
    """

    def __init__(self, folder: Path, name: str = LIST_NAME) -> None:
        self.path = folder / name
        self.counts: Counter[str] = Counter()
        self._seen: set[int] = set()
        with contextlib.suppress(OSError):
            before = read_regular(self.path, _UNREADABLE_LIST, self.path.parent)
            for line in before.decode(errors="replace").splitlines():
                self._seen.add(hash(line))
                self.counts[printable(line.split("\t", 1)[0])[:40]] += 1

    def add(self, problems: list[BadSample]) -> None:
        """Append new entries."""
        lines = []
        for problem in problems:
            line = f"{problem.kind}\t{problem.text}"
            if hash(line) in self._seen:
                continue
            self.counts[problem.kind] += 1
            if len(self._seen) < MAX_LISTED:
                self._seen.add(hash(line))
                lines.append(line + "\n")
        if not lines:
            return
        with open_regular(self.path, mode="ab") as file:
            file.write("".join(lines).encode())

    def summary(self) -> str:
        """Return a summary such as ``3 undecodable, 1 missing``; empty if there are none."""
        return ", ".join(f"{count} {kind}" for kind, count in self.counts.most_common())
