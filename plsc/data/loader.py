"""Batches from an indexed source, in the order of a plan, decoded by worker processes if asked."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from plsc.data.augment import Transform, apply_transform, augment
from plsc.data.batch import Batch, to_input
from plsc.data.decode import ImageShape, decode_image
from plsc.data.order import BatchPlan
from plsc.data.reader import ReaderLoader
from plsc.data.sources.base import Source
from plsc.errors import DataError, OptionError, suggest

__all__ = ["Batch", "ReaderLoader", "SourceLoader", "to_input"]

BAD_IMAGE_CHOICES = ("stop", "skip")
Request = tuple[int, np.ndarray]  # an epoch and the sample indices of one batch


class SourceLoader:
    """Yields this rank's batches of an indexed source.

    Images become [b, C, H, W] of ``image_shape``, mirrored at random if ``flip``, then given to
    ``transform`` (a callable on the tensor [C, H, W], as in torchvision.transforms.v2), which sees
    them after resizing. A sample's randomness depends on (seed, epoch, sample) alone, so the number
    of ranks and workers does not change it.

    ``on_bad_image``: ``stop`` raises DataError that names the image; ``skip`` leaves it out of the
    batch and counts it in ``Batch.skipped``. With ``num_workers`` > 0 as many processes decode ahead;
    they live as long as the loader.
    """

    def __init__(
        self,
        source: Source,
        plan: BatchPlan,
        rank: int,
        image_shape: ImageShape,
        *,
        seed: int,
        flip: bool = True,
        num_workers: int = 0,
        on_bad_image: str = "stop",
        pin_memory: bool = False,
        transform: Transform | None = None,
    ) -> None:
        if on_bad_image not in BAD_IMAGE_CHOICES:
            known = suggest(on_bad_image, BAD_IMAGE_CHOICES)
            raise OptionError(f"unknown on_bad_image {on_bad_image!r}; {known}")
        if plan.num_samples != len(source):
            raise DataError(f"the plan is for {plan.num_samples} samples, not {len(source)}")
        if not 0 <= rank < plan.ranks:
            raise OptionError(f"rank {rank} is outside 0..{plan.ranks - 1}")
        self.plan = plan
        self._requests = _Requests(plan, rank)
        self._loader = DataLoader(
            _BatchReader(source, image_shape, seed, flip, on_bad_image == "skip", transform),
            batch_size=None,
            sampler=self._requests,
            collate_fn=_as_it_is,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=pin_memory,
            worker_init_fn=_start_worker,
            # Its own: else each epoch takes a number from the generator that dropout draws from.
            generator=torch.Generator().manual_seed(0),
        )

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches in an epoch, the same on every rank."""
        return self.plan.steps_per_epoch

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """Yield the batches of the steps ``start_step``.. of an epoch; one epoch at a time."""
        self._requests.epoch, self._requests.start_step = epoch, start_step
        try:
            with _starting_workers():
                results = iter(self._loader)
            for result in results:
                if isinstance(result, DataError):
                    raise result
                yield result
        except (RuntimeError, EOFError, OSError) as error:
            if not self._is_death_of_worker(error):
                raise
            reason = str(error).split("\n", 1)[0] or "it closed its connection"
            raise DataError(
                f"a data worker process died ({reason}); if memory ran out, lower num_workers"
            ) from error

    def _is_death_of_worker(self, error: Exception) -> bool:
        if isinstance(error, RuntimeError):
            return str(error).startswith("DataLoader worker")
        # A broken connection; what the dataset itself raised in a worker begins with "Caught".
        return self._loader.num_workers > 0 and not str(error).startswith("Caught ")


class _Requests(Sampler[Request]):
    """The batches of one epoch as requests. It runs in the main process, so the plan's order of
    (maybe) millions of samples exists once, and the epoch number reaches workers that outlive it.
    """

    def __init__(self, plan: BatchPlan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self.epoch = 0
        self.start_step = 0

    def __iter__(self) -> Iterator[Request]:
        epoch = self.epoch
        for step in range(self.start_step, self.plan.steps_per_epoch):
            yield epoch, self.plan.indices(epoch, step, self.rank)


class _BatchReader(Dataset[Any]):
    """Turns a request into a Batch, or into the DataError that stops the run.

    The error is returned and not raised: torch wraps what a worker raises into a long traceback.
    """

    def __init__(
        self,
        source: Source,
        image_shape: ImageShape,
        seed: int,
        flip: bool,
        skip_bad: bool,
        transform: Transform | None,
    ) -> None:
        self.source = source
        self.image_shape = image_shape
        self.seed = seed
        self.flip = flip
        self.skip_bad = skip_bad
        self.transform = transform

    def __getitem__(self, request: Request) -> Batch | DataError:
        epoch, indices = request
        images: list[torch.Tensor] = []
        labels: list[int] = []
        names: list[str] = []
        problems: list[str] = []
        for index in indices.tolist():
            try:
                image, label = self._decode(index)
            except DataError as error:
                if not self.skip_bad:
                    return DataError(str(error))
                problems.append(str(error))
                continue
            name = self.source.name(index)
            try:
                image = self._augment(image, epoch, index)
                if images and image.dtype != images[0].dtype:
                    raise DataError(
                        f"is {image.dtype}, others are {images[0].dtype}; make them one"
                    )
            except DataError as error:  # a fault of the code, not of this image: never skipped
                return DataError(f"{name}: {error}")
            images.append(image)
            labels.append(label)
            names.append(name)
        stacked = torch.stack(images) if images else self._no_images()
        label_tensor = torch.tensor(labels, dtype=torch.int64)
        return Batch(stacked, label_tensor, names, len(problems), problems)

    def _decode(self, index: int) -> tuple[torch.Tensor, int]:
        data, label = self.source[index]  # its errors name the sample
        try:
            return decode_image(data, self.image_shape), label
        except DataError as error:
            raise DataError(f"{self.source.name(index)}: {error}") from error

    def _augment(self, image: torch.Tensor, epoch: int, index: int) -> torch.Tensor:
        image = augment(image, seed=self.seed, epoch=epoch, sample=index, flip=self.flip)
        if self.transform is None:
            return image
        return apply_transform(self.transform, image, seed=self.seed, epoch=epoch, sample=index)

    def _no_images(self) -> torch.Tensor:
        return torch.empty((0, *self.image_shape), dtype=torch.uint8)


def _as_it_is(result: Any) -> Any:
    return result


def _start_worker(worker: int) -> None:
    # Ctrl-C and torchrun's SIGTERM reach the whole process group. The main process decides what they
    # mean; a worker ends on its request, or by torch's watchdog when the main process is gone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_main_process_asks, daemon=True).start()
    torch.set_num_threads(1)


def _end_when_main_process_asks() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


@contextmanager
def _starting_workers() -> Iterator[None]:
    """Keep signals out while workers start, and torch's SIGCHLD handler out for good.

    A worker inherits the blocked signals, so that none ends it before `_start_worker` has run; the main
    process gets them afterwards. torch's handler would raise anywhere in the program (in the middle of a
    save, say) when a worker dies; waiting for the next batch finds that out, too, within seconds.
    """
    before = signal.getsignal(signal.SIGCHLD)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGCHLD, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
