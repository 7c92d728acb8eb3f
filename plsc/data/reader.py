"""Load batches from a generator reader: a function that returns a new generator of samples per epoch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
import torch

from plsc.data.batch import Batch, IsolatedRandom
from plsc.data.decode import ImageShape, decode_image
from plsc.data.loader import run_in_process
from plsc.data.order import count_steps, is_limited, limited
from plsc.data.sources.base import whole_number
from plsc.errors import DataError, OptionError, naming
from plsc.inputs import NO_IMAGE, Input, as_input, first_tensor, stack_inputs
from plsc.seeds import hash_key

Sample = tuple[Any, int, str]  # image or other input, label, name
_END = object()


def declares_shards(reader: Any) -> bool:
    """Return whether a reader must be called as ``reader(rank, ranks)`` and yields only that rank's samples.

    A reader declares this by the attribute ``reader.shards_itself = True``. It is seeded identically on all
    ranks, so it may shuffle a list and take every ranks-th entry.
    """
    return getattr(reader, "shards_itself", False) is True


def open_reader(
    reader: Callable[..., Any], example: Input | None, *arguments: int
) -> Generator[Any, None, None]:
    """Yield the samples of ``reader(*arguments)``, which may yield batches; example: of other input."""
    return _unbatched(iter(reader(*arguments)), 4 if example is None else first_tensor(example).ndim)


def _unbatched(items: Iterator[Any], dimensions: int) -> Generator[Any, None, None]:
    """Yield single samples; an item may be a list of samples, or (input, labels [B]).

    dimensions: of a batch of input.
    """
    for item in items:
        is_list = isinstance(item, (tuple, list)) and len(item) > 0
        if is_list and isinstance(item[0], (tuple, list)):
            yield from item
        elif is_list and len(item) == 2 and getattr(first_tensor(item[0]), "ndim", 0) == dimensions:
            inputs, labels = item
            if isinstance(inputs, dict):
                rows = zip(*inputs.values(), strict=True)
                inputs = [dict(zip(inputs, row, strict=True)) for row in rows]
            yield from zip(inputs, labels, strict=True)
        else:
            yield item


class ReaderLoader:
    """Yield this rank's batches of ``reader()``, which yields (image [C, H, W], label), or batches of these.

    With `example`, samples are tensors or dicts of tensors like it instead of images.

    Every rank runs the whole generator, unless it `declares_shards`. A global batch is the next
    ``global_batch`` samples; sample i of it goes to rank i mod ranks. The generators ``random``,
    ``numpy.random`` and ``torch`` are seeded from (seed, epoch), identically on all ranks, while the reader
    runs, and restored afterwards. All ranks see the same order if the reader draws only from these. A resumed
    epoch is replayed up to its step.

    Float images are used unchanged (the reader normalises them); uint8 images are normalised later. The last
    batch is padded with the first samples of the epoch, kept smaller (b may be 0 on some ranks) or dropped,
    as in BatchPlan.

    Args:
        limit: limit of the batches per epoch; see `limited`. The generator is closed there.
        ahead: run the generator in a forked process, a few batches ahead. (A thread would share the global
            generators with the training.) Changes it makes to variables of the script are lost.

    Raises:
        DataError: names the sample, such as ``sample 17 of epoch 0 of the train reader``. Each rank checks
            the samples that it uses.
    """

    def __init__(
        self,
        reader: Callable[..., Iterator[Any]],
        rank: int,
        ranks: int,
        image_shape: ImageShape,
        *,
        global_batch: int,
        seed: int,
        class_num: int | None = None,
        num_samples: int | None = None,
        limit: int | float = 1.0,
        last_batch: str = "pad",
        ahead: bool = False,
        pin_memory: bool = False,
        example: Input | None = None,
    ) -> None:
        self.example = example
        self.shards_itself = declares_shards(reader)
        if self.shards_itself and global_batch < ranks:
            raise OptionError(
                f"the global batch is {global_batch} for {ranks} ranks of a reader that shards itself"
            )
        self.reader = reader
        self.rank = rank
        self.ranks = ranks
        self.ahead = ahead
        self.pin_memory = pin_memory
        self.image_shape = image_shape
        self.global_batch = global_batch
        self.seed = seed
        self.class_num = class_num
        self.last_batch = last_batch
        self._steps: int | None = None
        if num_samples is not None:
            self._steps = limited(count_steps(num_samples, global_batch, last_batch), limit)
        elif isinstance(limit, int):
            self._steps = limit
        elif limit < 1:
            raise OptionError(
                f"train.limit_train_batches is {limit}, but the length of a generator reader is unknown; "
                "set a number of batches, or data.train_image_num"
            )
        self._limit = self._steps if is_limited(limit) else None

    @property
    def steps_per_epoch(self) -> int | None:
        """Number of steps, from ``num_samples`` if given; otherwise None until an epoch has ended."""
        return self._steps

    def expect_steps(self, steps: int) -> None:
        """Set the length of an epoch from an earlier run, unless it is known already."""
        if self._steps is None:
            self._steps = steps

    def epoch(self, epoch: int, start_step: int = 0) -> Generator[Batch, None, None]:
        """Yield the batches of an epoch from step ``start_step``."""
        batches = self._run(epoch, start_step)
        if self.ahead:
            batches = run_in_process(lambda: self._run(epoch, start_step), self.pin_memory)
        steps = start_step
        for batch in batches:
            steps += 1
            yield batch
        # A self-sharding reader may end earlier on another rank.
        if self._steps is None and not self.shards_itself:
            self._steps = steps

    def _run(self, epoch: int, start_step: int) -> Iterator[Batch]:
        randomness = IsolatedRandom(hash_key(self.seed, epoch))
        arguments = (self.rank, self.ranks) if self.shards_itself else ()
        with randomness.active():
            samples = open_reader(self.reader, self.example, *arguments)
        try:
            yield from self._batches(samples, randomness, epoch, start_step)
        finally:
            samples.close()

    def _batches(
        self, samples: Iterator[Any], randomness: IsolatedRandom, epoch: int, start_step: int
    ) -> Iterator[Batch]:
        first: dict[int, Sample] = {}  # the first global batch, which padding repeats
        step, whole = 0, self._samples_per_step
        size = whole
        while size == whole and step != self._limit:
            keep_all = step == 0 and self.last_batch == "pad"
            slots = range(0) if step < start_step else self._slots()
            kept: dict[int, Sample] = {}
            with randomness.active():
                for size in range(whole + 1):
                    if size == whole:
                        break
                    item = next(samples, _END)
                    if item is _END:
                        break
                    if keep_all or size in slots:
                        kept[size] = self._check(item, step * whole + size, epoch)
            if keep_all:
                first = kept
            if size == 0 or (size < whole and self.last_batch == "drop"):
                break
            if self.last_batch == "pad":
                # as in BatchPlan, padding repeats the order from its start
                kept |= {s: first[(s - size) % len(first)] for s in range(size, whole)}
            if step >= start_step:
                samples_here = [kept[slot] for slot in slots if slot in kept]
                yield self._collate(samples_here, epoch, step)
            step += 1
        if step < max(start_step, 1) and step != self._limit:
            raise DataError(
                f"epoch {epoch} of the train reader ended after {step} steps, before step {start_step}; is "
                "the generator new?"
            )

    @property
    def _samples_per_step(self) -> int:
        if not self.shards_itself:
            return self.global_batch
        first, stop = (self.global_batch * (self.rank + more) // self.ranks for more in (0, 1))
        return stop - first

    def _slots(self) -> range:
        if self.shards_itself:
            return range(self._samples_per_step)
        return range(self.rank, self.global_batch, self.ranks)

    def positions(self, count: int) -> torch.Tensor:
        """Return the positions of this rank's first ``count`` samples in the global batch, int64."""
        if self.shards_itself:
            return torch.arange(count) + self.global_batch * self.rank // self.ranks
        return torch.arange(count) * self.ranks + self.rank

    def _check(self, item: Any, ordinal: int, epoch: int) -> Sample:
        name = f"sample {ordinal} of epoch {epoch} of the train reader"
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise DataError(f"{name}: expected (image, label), got {type(item).__name__}")
        data, number = item[0], whole_number(item[1], name)
        if number < 0 or (self.class_num is not None and number >= self.class_num):
            upper = "" if self.class_num is None else self.class_num - 1
            raise DataError(
                f"{name}: label {number} is outside 0..{upper}; fix it or set head.class_num", kind="label"
            )
        shape = tuple(getattr(data, "shape", ()))
        if self.example is None and shape != self.image_shape:
            what = f"{type(data).__name__} {shape}"
            raise DataError(f"{name}: expected an array [C, H, W] {self.image_shape}, got {what}{NO_IMAGE}")
        with naming(str, name):
            if self.example is not None:
                return as_input(data, self.example), number, name
            # A copy, because readers reuse their buffers.
            pixels = torch.as_tensor(np.require(data, requirements="W"))
            return decode_image(pixels, self.image_shape), number, name

    def _collate(self, samples: list[Sample], epoch: int, step: int) -> Batch:
        labels = torch.tensor([label for _, label, _ in samples], dtype=torch.int64)
        names = [name for _, _, name in samples]
        if self.example is not None:
            inputs = stack_inputs((one for one, _, _ in samples), self.example)
            return Batch(inputs, labels, names, is_input=True)
        if not samples:
            empty = torch.empty((0, *self.image_shape), dtype=torch.float32)
            return Batch(empty, labels, names)
        if len({image.dtype for image, _, _ in samples}) > 1:
            raise DataError(f"step {step} of epoch {epoch} of the train reader mixes uint8 and float images")
        images = torch.stack([image for image, _, _ in samples])
        return Batch(images, labels, names)
