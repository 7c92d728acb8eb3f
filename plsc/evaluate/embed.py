"""Compute embeddings of encoded images, distributed over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from plsc.data.batch import Batch, BufferRing
from plsc.data.decode import decode_into
from plsc.data.sources.base import Source
from plsc.data.workers import Stopped, in_order
from plsc.errors import DataError, DistributedError
from plsc.inputs import Input, as_input, stack_inputs
from plsc.models.base_model import evaluating
from plsc.parallel.collectives import class_range

if TYPE_CHECKING:
    from plsc.parallel.world import World


def embed_images(
    model: nn.Module,
    images: Sequence[bytes],
    image_shape: tuple[int, int, int],
    *,
    batch_size: int,
    device: torch.device | str,
    flip: bool = True,
    world: World | None = None,
    name: str = "the images",
    num_threads: int = 0,
    gather: bool = True,
) -> np.ndarray:
    """Return the embeddings of all images, float32 [N, D], not normalised.

    The model runs in evaluation mode; its previous mode is restored. With several ranks this is a collective:
    each rank embeds contiguous batches, the same ones for any number of ranks, and every rank returns all
    embeddings.

    Args:
        model: called as ``model(input [b, C, H, W], None, False)``, returns [b, D].
        images: N encoded images, the same on every rank.
        image_shape: (C, H, W), the input shape of the network.
        batch_size: batch size per rank.
        device: where the model is.
        flip: return the sum of the embeddings of the image and of its mirror image.
        world: the ranks that share the work; None: this process only.
        name: what error messages call the images, as in ``image 17 of <name>``, counted from 0.
        num_threads: threads that read and decode images in the background; 0: none.
        gather: False: each rank embeds an equal part (`plsc.parallel.collectives.class_range`), and returns
            only its embeddings.

    Raises:
        DataError: an image cannot be decoded, or its embedding is not finite; raised on every rank.
        DistributedError: another rank failed for a reason other than the data.
    """
    if not len(images):
        raise DataError(f"{name}: there are no images to embed")
    rank, ranks = (world.rank, world.size) if world is not None else (0, 1)
    start, stop = class_range(len(images), rank, ranks)
    if gather:  # whole batches: the last bits of an embedding depend on the size of its batch
        batches = class_range(-(-len(images) // batch_size), rank, ranks)
        start, stop = (min(batch * batch_size, len(images)) for batch in batches)
    firsts = range(start, stop, batch_size)
    chunks = (Chunk(first, images[first : min(first + batch_size, stop)]) for first in firsts)

    def embed_range() -> np.ndarray:
        embedded = embed_chunks(
            model,
            chunks,
            image_shape,
            batch_size=min(batch_size, stop - start),
            device=device,
            flip=flip,
            name=name,
            num_threads=num_threads,
        )
        with closing(embedded):
            parts = [embedding for _, embedding in embedded]
        return np.concatenate(parts) if parts else np.empty((0, 0), np.float32)

    with evaluating(model), torch.inference_mode():
        if world is None or world.size == 1:
            return embed_range()
        return _share(world, embed_range, gather)


@dataclass(frozen=True)
class Chunk:
    """Consecutive images, read on access. first: number of the first. labels: int64 [b], or None."""

    first: int
    images: Sequence[Any]
    labels: np.ndarray | None = None


def embed_chunks(
    model: nn.Module,
    chunks: Iterable[Chunk],
    image_shape: tuple[int, int, int],
    *,
    batch_size: int,
    device: torch.device | str,
    flip: bool = False,
    name: str = "the images",
    num_threads: int = 0,
) -> Generator[tuple[Chunk, np.ndarray], None, None]:
    """Yield each chunk of at most `batch_size` images with its embeddings, float32 [b, D].

    Arguments as in `embed_images`. Call it in evaluation and inference mode, and close it.
    """
    layout = getattr(model, "input_layout", torch.contiguous_format)
    example = getattr(model, "example_input", None)
    if flip and example is not None:
        raise DataError(f"{name}: the network takes no images, so they cannot be flipped; set flip=False")
    with closing(_decode_ahead(chunks, batch_size, image_shape, name, num_threads, example)) as decoded:
        for chunk, batch in decoded:
            embedding = _embed(model, batch.input(device, layout), flip)
            finite = np.isfinite(embedding).all(axis=1)
            if not finite.all():
                raise DataError(
                    f"the embedding of image {chunk.first + int(np.argmin(finite))} of {name} is not finite; "
                    "the training has diverged, or the weights are damaged"
                )
            yield chunk, embedding


class ImagesOf(Sequence[Any]):
    """Images of a source without labels, read on access; which: their indices, a range or int64 [n]."""

    def __init__(self, source: Source, which: range | np.ndarray) -> None:
        self._source = source
        self._which = which

    def __len__(self) -> int:
        return len(self._which)

    def __getitem__(self, index: Any) -> Any:
        """Return an image; for a slice, a part of the images."""
        if isinstance(index, slice):
            return ImagesOf(self._source, self._which[index])
        return self._source[int(self._which[index])][0]


def _decode_ahead(
    chunks: Iterable[Chunk],
    batch_size: int,
    image_shape: tuple[int, int, int],
    name: str,
    num_threads: int,
    example: Input | None = None,
) -> Generator[tuple[Chunk, Batch], None, None]:
    """Yield each chunk with its images, or its samples like `example`, as a batch without labels."""
    ring = BufferRing(batch_size, image_shape)
    no_labels = torch.empty(0, dtype=torch.int64)

    def decode(chunk: Chunk, stopped: Callable[[], bool]) -> tuple[Chunk, Batch]:
        slots, pixels = ring.take(len(chunk.images) if example is None else 0)
        floats: list[Any] = []
        for index in range(len(chunk.images)):
            if stopped():
                raise Stopped
            try:
                data = chunk.images[index]
                image = decode_into(data, slots[index]) if example is None else as_input(data, example)
            except DataError as error:
                raise error.at(f"image {chunk.first + index} of {name}") from error
            if image is not None:
                floats.append(image)
        if example is not None:
            return chunk, Batch(stack_inputs(floats, example), no_labels, [], is_input=True)
        if floats and len(floats) < len(chunk.images):
            raise DataError(f"{name}: some images are arrays of floats, others are not; use one kind")
        return chunk, Batch(torch.stack(floats) if floats else pixels, no_labels, [])

    return in_order(decode, chunks, num_threads)


def _embed(model: nn.Module, input: Any, flip: bool) -> np.ndarray:
    embedding = model(input, None, False).float()
    if flip:
        embedding = embedding + model(input.flip(-1), None, False).float()
    return embedding.cpu().numpy()


def _share(world: World, embed_range: Callable[[], np.ndarray], gather: bool) -> np.ndarray:
    """Return the parts of all ranks (`gather`) or that of this rank; if a rank fails, all ranks raise."""
    error: Exception | None = None
    part = np.empty((0, 0), np.float32)
    try:
        part = embed_range()
    except Exception as caught:
        error = caught
    # A DataError is raised on all ranks; any other error is raised, with its traceback, on its own rank.
    description = None if error is None else (isinstance(error, DataError), str(error) or repr(error))
    gathered = world.all_gather_object((part if gather else None, description))
    if error is not None:
        raise error
    for rank, (_, failure) in enumerate(gathered):
        if failure is not None:
            is_data_error, text = failure
            if is_data_error:
                raise DataError(text)
            raise DistributedError(f"rank {rank} failed while embedding images: {text}")
    return np.concatenate([part for part, _ in gathered if len(part)]) if gather else part
