"""Compute embeddings of encoded images, and the top-1 and top-5 accuracy of a head on them, on all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from plsc.data.batch import Batch, copied_in_side_stream
from plsc.data.loader import BatchReader, Recipe, in_order
from plsc.data.sources.base import Source
from plsc.errors import DataError
from plsc.evaluate.identification import check_finite
from plsc.evaluate.report import Result
from plsc.heads import Head
from plsc.heads.base import REPORTED, count_hits
from plsc.machine import Counter
from plsc.models.base_model import evaluating
from plsc.parallel.failure import on_every_rank, own_result
from plsc.parallel.world import Arriving, World, class_range, sum_over_ranks


@dataclass(frozen=True)
class EvaluatedNetwork:
    """A network with all that its evaluation needs: how images are embedded, on the ranks of `world`."""

    network: nn.Module
    world: World
    image_shape: tuple[int, int, int]
    batch_size: int  # per rank
    num_threads: int  # that read and decode
    flip: bool  # of images: add the embedding of the mirror image

    def embed(self, images: Any, name: str, flip: bool | None = None, gather: bool = True) -> np.ndarray:
        """Return the embeddings of images; see `embed_images`. flip: None: as the network is evaluated."""
        takes_images = getattr(self.network, "example_input", None) is None
        return embed_images(
            self.network,
            images,
            self.image_shape,
            batch_size=self.batch_size,
            device=self.world.device,
            flip=(self.flip and takes_images) if flip is None else flip,
            world=self.world,
            name=name,
            num_threads=self.num_threads,
            gather=gather,
        )


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
        name: what error messages call the images, as in ``image 17 of <name>``, counted from 0, unless they
            are `ImagesOf` a source, which names them.
        num_threads: threads that read and decode images in the background; 0: none.
        gather: False: each rank embeds an equal part (`plsc.parallel.world.class_range`), and returns
            only its embeddings.

    Raises:
        DataError: an image cannot be decoded, or its embedding is not finite; raised on every rank. With
            several ranks also for any other failure, which it names.
    """
    rank, ranks = (world.rank, world.size) if world is not None else (0, 1)
    start, stop = class_range(len(images), rank, ranks)
    if gather:  # whole batches: the last bits of an embedding depend on the size of its batch
        batches = class_range(-(-len(images) // batch_size), rank, ranks)
        start, stop = (min(batch * batch_size, len(images)) for batch in batches)
    firsts = range(start, stop, batch_size)
    lazy = images if isinstance(images, ImagesOf) else ImagesOf(Listed(images, name), range(len(images)))
    parts = (lazy[first : min(first + batch_size, stop)] for first in firsts)

    progress = Counter(f"{name}: embedded about", len(images))

    def embed_range() -> np.ndarray:
        embedded = embed_batches(
            model,
            parts,
            image_shape,
            device=device,
            flip=flip,
            name=name,
            num_threads=num_threads,
        )
        with closing(embedded):
            found = []
            for _, embedding in embedded:
                found.append(embedding)
                if rank == 0:  # it stands for all ranks
                    progress.add(len(embedding) * ranks)
        return np.concatenate(found) if found else np.empty((0, 0), np.float32)

    with evaluating(model), torch.inference_mode():
        if world is None or world.size == 1:
            return embed_range()
        if not gather:
            return own_result(world, f"embed {name}", embed_range, DataError)
        parts_of_ranks = on_every_rank(world, f"embed {name}", embed_range, kind=DataError)
        return np.concatenate([part for part in parts_of_ranks if len(part)])


def embed_batches(
    model: nn.Module,
    parts: Iterable[ImagesOf],
    image_shape: tuple[int, int, int],
    *,
    device: torch.device | str,
    flip: bool = False,
    name: str = "the images",
    num_threads: int = 0,
    bad_images: str = "stop",
    is_late: bool = True,
) -> Generator[tuple[Batch, np.ndarray], None, None]:
    """Yield each part as a batch with its embeddings, float32 [b, D].

    Arguments as in `embed_images`. bad_images: ``stop`` or ``skip``, as in `Recipe`; it can empty a batch.
    is_late: on a GPU, yield a batch while the next one is computed. Call it in evaluation and inference mode,
    and close it.
    """
    layout = getattr(model, "input_layout", torch.contiguous_format)
    example = getattr(model, "example_input", None)
    if flip and example is not None:
        raise DataError(f"{name}: the network takes no images, so they cannot be flipped; set flip=False")
    recipe = Recipe(image_shape, 0, flip=False, bad_images=bad_images, example=example)
    device = torch.device(device)
    is_late = is_late and device.type == "cuda"
    coming: deque[tuple[Batch, Arriving]] = deque()

    def read(part: ImagesOf, stopped: Callable[[], bool]) -> Batch:
        reader = BatchReader(part.source, recipe, pin=device.type == "cuda")
        return reader.read((0, np.asarray(part.which)), stopped)

    def arrived() -> tuple[Batch, np.ndarray]:
        batch, embedding = coming.popleft()
        values = embedding.read().numpy()
        values = values.copy() if device.type == "cuda" else values  # frees the page-locked memory
        check_finite(values, "", batch.names)
        return batch, values

    with closing(copied_in_side_stream(in_order(read, parts, num_threads), device)) as batches:
        for batch in batches:
            embedding = torch.empty(0, 0)
            if len(batch):
                embedding = _embed(model, batch.input(device, layout), flip)
            coming.append((batch, Arriving(embedding)))
            if len(coming) > is_late:
                yield arrived()
        while coming:
            yield arrived()


class Listed:
    """Images in memory, read like a source; their numbers count from `first`. Without labels, each is -1."""

    def __init__(self, images: Sequence[Any], name: str, labels: Sequence[int] | None = None, first: int = 0):
        self._images, self._name, self._labels, self._first = images, name, labels, first

    def __getitem__(self, index: int) -> tuple[Any, int]:
        place = index - self._first
        return self._images[place], -1 if self._labels is None else self._labels[place]

    def name(self, index: int) -> str:
        """Return ``image 12 of <name>``."""
        return f"image {index} of {self._name}"


class ImagesOf(Sequence[Any]):
    """Images of a source without labels, read on access; which: their indices, a range or int64 [n]."""

    def __init__(self, source: Source | Listed, which: range | np.ndarray) -> None:
        self.source: Any = source
        self.which: Any = which

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, index: Any) -> Any:
        """Return an image; for a slice or an array of indices, a part of the images."""
        if isinstance(index, (slice, np.ndarray)):
            return ImagesOf(self.source, self.which[index])
        return self.source[int(self.which[index])][0]


def _embed(model: nn.Module, input: Any, flip: bool) -> Tensor:
    embedding = model(input, None, False).float()
    if flip:
        embedding = embedding + model(input.flip(-1), None, False).float()
    return embedding


@dataclass(frozen=True)
class ClassificationResult(Result):
    """The result of `classify`; accuracies are fractions, 0..1."""

    METRICS: ClassVar = ("top1", "top5")

    top1: float  # the label has the highest logit without margin
    top5: float  # the label has one of the five highest logits
    count: int  # number of images

    def summary(self) -> str:
        """Return the accuracies for the log."""
        return f"top-1 {self.top1:.4f} top-5 {self.top5:.4f} ({self.count:,} images)"


def classify(
    head: Head, embeddings: np.ndarray, labels: np.ndarray, *, batch_size: int, world: World
) -> ClassificationResult:
    """Return the accuracy of the head on the images of all ranks; a collective.

    Args:
        head: with the class weights, on the device of `world`.
        embeddings: [n, D], of the images of this rank, from `embed_images` with ``gather=False``.
        labels: int64 [N], class numbers of the images of all ranks.
        batch_size: images per rank for which logits are computed at a time.
    """
    mine = torch.from_numpy(labels[slice(*class_range(len(labels), world.rank, world.size))])
    x = torch.from_numpy(embeddings.reshape(-1, head.emb_size))
    hits = torch.zeros(2, dtype=torch.int64, device=world.device)
    # Every rank takes part equally often: rank 0 has the most images.
    for start in range(0, -(-len(labels) // world.size), batch_size):
        some = slice(start, start + batch_size)
        _, classes = head.topk(x[some].to(world.device), REPORTED)
        hits += count_hits(classes, mine[some].to(world.device))
    first, any_of_five = sum_over_ranks(hits, world.head_group).tolist()
    return ClassificationResult(first / len(labels), any_of_five / len(labels), len(labels))
