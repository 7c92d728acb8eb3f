"""What the server does: embed, compare, search and enrol, in batches over all requests."""

from __future__ import annotations

import asyncio
import io
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from plsc.data.batch import to_input
from plsc.data.decode import decode_into, size_of
from plsc.errors import DataError, OptionError
from plsc.export import ServedModel, open_model
from plsc.gallery import Gallery, build_gallery, open_gallery
from plsc.serve.batching import Batcher
from plsc.serve.options import ServeOptions
from plsc.serve.store import Found, New, Store

MOST_FOUND = 100
_SMALL_BYTES, _SMALL_PIXELS = 2**17, 2**20  # larger images are decoded in another thread
_QUALITY = 90


class _LargeError(Exception):
    """An image is too large to be decoded between small ones."""


class Service:
    """A model, a gallery and a store behind batches. `close` finishes what has started."""

    def __init__(self, folder: str, options: ServeOptions) -> None:
        self.options = options
        threads = options.threads or max(1, (os.cpu_count() or 2) - 1)
        self.model: ServedModel = open_model(folder, threads)
        self.far = self.known_far(options.far) if self.model.thresholds else None
        self.gallery, self.is_classes = self._open_gallery()
        path = Path(options.store) if options.store else Path(f"{Path(folder).resolve()}.sqlite")
        self.store = Store(path, self.model.fingerprint, self.model.emb_size)
        largest, queue, timeout = options.batch_size, options.queue_size, options.timeout
        self.embeddings: Batcher[bytes | np.ndarray, np.ndarray] = Batcher(
            self._embed, largest, queue, timeout, wait=0.002
        )
        self._searches: Batcher[tuple[np.ndarray, int], list[dict[str, Any]]] = Batcher(
            self._search, largest, queue, timeout
        )
        self._writes: Batcher[New | int, int | bool] = Batcher(self.store.write, largest, queue, timeout)
        self._decoder = ThreadPoolExecutor(1)  # one large image at a time bounds the memory
        self._large = asyncio.Semaphore(16)

    def known_far(self, far: float) -> float:
        """Return the FAR of the model's thresholds that is equal. Raises OptionError if there is none."""
        for known in self.model.thresholds:
            if abs(known - far) <= 1e-6 * known:
                return known
        known = ", ".join(f"{one:g}" for one in self.model.thresholds) or "none"
        raise OptionError(f"the model has no threshold for FAR {far:g}; known: {known}")

    async def embed(self, data: bytes) -> np.ndarray:
        """Return the embedding, float32 [D], of an encoded image.

        Raises:
            DataError: the image is damaged or over the limits.
            Busy: too many requests are waiting.
        """
        if len(data) <= _SMALL_BYTES:
            try:
                return await self.embeddings.submit(data)
            except _LargeError:
                pass
        return await self.embeddings.submit(await self._decode(data))

    async def search(self, embedding: np.ndarray, k: int) -> list[dict[str, Any]]:
        """Return the k nearest entries of the gallery and of the store."""
        return await self._searches.submit((embedding, k))

    async def enrol(self, name: str, data: bytes) -> int:
        """Enrol an image, and return the id of the entry after it was written to disk."""
        image = await self._decode(data)
        embedding = await self.embeddings.submit(image)
        return int(await self._writes.submit(New(name, embedding, _as_jpeg(image))))

    async def delete(self, number: int) -> bool:
        """Delete an enrolled entry; return whether it existed."""
        return bool(await self._writes.submit(number))

    def close(self) -> None:
        """Stop all threads, and close the store."""
        for batcher in (self.embeddings, self._searches, self._writes):
            batcher.close()
        self._decoder.shutdown()
        self.store.close()

    def _open_gallery(self) -> tuple[Gallery | None, bool]:
        """Return the gallery, and whether its entries are the classes of the model."""
        if self.options.gallery is not None:
            gallery = open_gallery(self.options.gallery, self.model.fingerprint)
            if gallery.size != self.model.emb_size:
                raise DataError(
                    f"{self.options.gallery} has vectors of {gallery.size} values; the model has "
                    f"{self.model.emb_size}"
                )
            return gallery, False
        if "classes" not in self.model.about:
            return None, False
        weights, names = self.model.class_weights()
        return build_gallery(weights, names), True

    async def _decode(self, data: bytes) -> np.ndarray:
        """Decode an image of any size, float32 [C, H, W], in another thread."""
        loop = asyncio.get_running_loop()
        decode = self.model.preprocess
        async with self._large:
            return await loop.run_in_executor(
                self._decoder, decode, data, self.options.max_bytes, self.options.max_pixels
            )

    def _embed(self, items: list[bytes | np.ndarray]) -> list[np.ndarray | Exception]:
        """Decode the small images of a batch, and compute all embeddings in one forward pass."""
        channels, height, width = self.model.image_shape
        pixels = np.empty((len(items), height, width, channels), np.uint8)
        floats: dict[int, np.ndarray] = {}
        failed: dict[int, Exception] = {}
        for row, item in enumerate(items):
            if isinstance(item, np.ndarray):
                floats[row] = item
                continue
            try:
                if int(np.prod(size_of(item))) > min(_SMALL_PIXELS, self.options.max_pixels):
                    raise _LargeError
                decode_into(item, pixels[row])
            except (DataError, _LargeError) as error:
                failed[row] = error
        images = to_input(torch.from_numpy(pixels).permute(0, 3, 1, 2), "cpu").numpy()
        for row, image in floats.items():
            images[row] = image
        good = [row for row in range(len(items)) if row not in failed]
        found = self.model.embed(images if len(good) == len(items) else images[good])
        by_row: dict[int, np.ndarray | Exception] = {**dict(zip(good, found, strict=True)), **failed}
        return [by_row[row] for row in range(len(items))]

    def _search(self, items: list[tuple[np.ndarray, int]]) -> list[list[dict[str, Any]]]:
        queries, k = np.stack([query for query, _ in items]), max(k for _, k in items)
        enrolled = self.store.search(queries, k)
        if self.gallery is not None:
            scores, numbers = self.gallery.search(queries, k)
        results = []
        for row, (_, wanted) in enumerate(items):
            near = [self._of_store(found) for found in enrolled[row]]
            if self.gallery is not None:
                near += map(self._of_gallery, numbers[row].tolist(), scores[row].tolist())
            results.append(sorted(near, key=lambda one: -one["similarity"])[:wanted])
        return results

    def _of_store(self, found: Found) -> dict[str, Any]:
        return {
            "similarity": found.similarity,
            "name": found.name,
            "id": found.id,
            "source": "enrolled",
            "thumbnail": f"entries/{found.id}/thumbnail",
        }

    def _of_gallery(self, number: int, similarity: float) -> dict[str, Any]:
        assert self.gallery is not None
        has_picture = self.is_classes and "thumbnails" in self.model.about
        return {
            "similarity": similarity,
            "name": self.gallery.name(number),
            "id": number,
            "source": "class" if self.is_classes else "gallery",
            "thumbnail": f"classes/{number}/thumbnail" if has_picture else None,
        }


def _as_jpeg(image: np.ndarray) -> bytes:
    """Return the network's input, float32 [C, H, W], as a JPEG file."""
    pixels = np.clip(np.rint(image * 128 + 127.5), 0, 255).astype(np.uint8).transpose(1, 2, 0)
    stream = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(
        stream, "JPEG", quality=_QUALITY
    )
    return stream.getvalue()


def check_name(name: Any) -> str:
    """Return the name of an entry. Raises DataError unless it is a short line of text."""
    if not isinstance(name, str) or not 1 <= len(name.strip()) <= 200 or not name.isprintable():
        raise DataError("the name of an entry is a line of 1 to 200 printable characters; pass ?name=...")
    return name.strip()
