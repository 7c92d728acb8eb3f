"""Batches on their way to a GPU while it still computes the step before."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from contextlib import closing

import torch

from plsc.data.batch import Batch


def copied_aside(
    batches: Generator[Batch, None, None], device: torch.device
) -> Generator[Batch, None, None]:
    """Yield the batches of a generator with their images on a GPU; on a CPU, as they are.

    The copies run in a stream of their own, beside whatever the device was given before. So they cost
    nothing where the program is ahead of the device, as it is when nothing waits for losses; in the stream of
    the computation they would begin when the step before has ended. The images must be in page-locked
    memory, else the program waits for each copy. Labels stay where they are: the step looks at them.

    Reads no batch ahead: an error of the reader comes when it would have come, and the position in the data
    is the same. Closing it closes the generator.
    """
    with closing(batches):
        if device.type != "cuda":
            yield from batches
            return
        stream = torch.cuda.Stream(device)
        for batch in batches:
            copied = _copy(batch, device, stream)
            del batch  # page-locked memory is used again once its copy has ended: torch keeps count
            yield copied
            del copied


def _copy(batch: Batch, device: torch.device, stream: torch.cuda.Stream) -> Batch:
    """Return the batch on the device, ready for the current stream."""
    current = torch.cuda.current_stream(device)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.to(device, non_blocking=True)
        # It was allocated in the side stream, and is used in this one: its memory must not be given
        # out again before this one is done with it.
        moved.record_stream(current)
        return moved

    with torch.cuda.stream(stream):
        images = move(batch.images)
        mirrored = None if batch.mirrored is None else move(batch.mirrored)
    current.wait_stream(stream)
    return dataclasses.replace(batch, images=images, mirrored=mirrored)
