"""What the server does: embed, compare, search and enrol, in batches over all requests."""

from __future__ import annotations

import asyncio
import io
import logging
import re
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from PIL import Image, PngImagePlugin

from plsc.data.batch import to_input
from plsc.data.decode import count_pixels, decode_into, decode_jpeg_of_size
from plsc.errors import DataError, OptionError, check_name
from plsc.evaluate.capacity import capacity_of_search
from plsc.export import ServedModel, open_model
from plsc.export.served import are_normalised
from plsc.gallery import Gallery, build_gallery, open_gallery
from plsc.gallery.gallery import open_store
from plsc.gallery.store import Change, Found, New, Store
from plsc.machine import usable_cores
from plsc.serve import ServeOptions

logger = logging.getLogger(__name__)
MOST_FOUND = 100
# BMP and TIFF: 1 kB can take Pillow 12 s, and 1 MB a gigabyte of memory. GIF: Pillow before 13, which needs
# Python 3.11, joins comments in quadratic time. AVIF: its header may understate the size of what is decoded.
_PPM = re.compile(rb"P[56]\s\d{1,9}\s\d{1,9}\s\d{1,9}\s")
_SLOW = (b"BM", b"II", b"MM", b"GI")
# Chunks of a PNG: each may have 1 MB, of which Pillow does not count the sum, as of texts that it drops.
_COMPRESSED, _MOST_CHUNKS = (b"iCCP", b"iTXt", b"zTXt"), 8
# Few images at a time bound the memory; the other threads are those of images that exceeded the timeout.
_DECODED, _THREADS = 2, 8
_QUALITY = 90
Item = TypeVar("Item")
Result = TypeVar("Result")


class Busy(Exception):
    """The queue is full, or a request has waited for too long."""


class Batcher(Generic[Item, Result]):
    """Call a function on batches of the items that are submitted to an event loop.

    A batch starts when the previous one has finished. If that one had several items, the next one first waits
    for as many, for at most `wait` seconds: a single client is not delayed.

    Args:
        run: is called in a thread with up to `largest` items; returns a result, or an exception, per item.
        largest: items per batch.
        queue: most items waiting; `submit` raises Busy for further ones.
        wait: seconds to wait for more items.
        timeout: seconds after which a waiting item gets Busy instead of a result.
    """

    def __init__(
        self,
        run: Callable[[list[Item]], Sequence[Result | Exception]],
        largest: int,
        queue: int,
        timeout: float,
        wait: float = 0.0,
    ) -> None:
        self._run = run
        self._largest = largest
        self._queue = queue
        self._timeout = timeout
        self._wait = wait
        self._waiting: deque[tuple[Item, asyncio.Future[Result], float]] = deque()
        self._thread = ThreadPoolExecutor(1)
        self._timer: asyncio.TimerHandle | None = None
        self._is_running = False
        self._last = 0  # size of the last batch

    def __len__(self) -> int:
        """Return the number of items waiting."""
        return len(self._waiting)

    async def submit(self, item: Item) -> Result:
        """Return the result for an item. Raises Busy, or the exception that `run` returned or raised."""
        if len(self._waiting) >= self._queue:
            raise Busy(f"{self._queue} requests are waiting")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._waiting.append((item, future, loop.time() + self._timeout))
        self._start_or_wait()
        return await future

    def close(self) -> None:
        """Stop the thread after its batch."""
        self._thread.shutdown()

    def _start_or_wait(self) -> None:
        if self._is_running or not self._waiting:
            return
        if not self._wait or len(self._waiting) >= min(self._last, self._largest):
            self._start()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._wait, self._start)

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        items: list[Item] = []
        futures: list[asyncio.Future[Result]] = []
        while self._waiting and len(items) < self._largest:
            item, future, deadline = self._waiting.popleft()
            if deadline < now:
                _resolve(future, Busy(f"the request has waited for {self._timeout:g} seconds"))
            elif not future.done():  # otherwise its task was cancelled
                items.append(item)
                futures.append(future)
        if not items:
            return
        self._is_running, self._last = True, len(items)

        def finish(results: Sequence[Result | Exception]) -> None:
            self._is_running = False
            for future, result in zip(futures, results, strict=True):
                _resolve(future, result)
            self._start_or_wait()

        def work() -> None:
            try:
                results = self._run(items)
            except Exception as error:
                results = [error] * len(items)
            loop.call_soon_threadsafe(finish, results)

        self._thread.submit(work)


def _resolve(future: asyncio.Future[Result], result: Result | Exception) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


class Service:
    """A model, a gallery and a store behind batches. `close` finishes what has started."""

    def __init__(self, folder: str, options: ServeOptions) -> None:
        self.options = options
        self.model: ServedModel = open_model(folder, options.threads or usable_cores())
        self.far = self.model.default_far if options.far is None else self.known_far(options.far)
        self.gallery, self.is_classes = self._open_gallery()
        self.capacity = capacity_of_search(self.model.capacity, self.is_classes, options.fpir)
        place = options.store or f"{Path(folder).resolve()}.sqlite"
        self.store = open_store(place, self.model.fingerprint, self.model.emb_size, timeout=20)
        if not isinstance(self.store, Store) and self.store.build_index():
            logger.info(f"built the index; it finds {self.store.measure_recall():.2%} of the 10 nearest")
        largest, queue, timeout = options.batch_size, options.queue_size, options.timeout
        self.embeddings: Batcher[np.ndarray, np.ndarray] = Batcher(
            self._embed, largest, queue, timeout, wait=0.002
        )
        self._searches: Batcher[tuple[np.ndarray, int], list[dict[str, Any]]] = Batcher(
            self._search, largest, queue, timeout
        )
        self._writes: Batcher[Change, int | bool] = Batcher(self.store.write, largest, queue, timeout)
        PngImagePlugin.MAX_TEXT_MEMORY = options.max_bytes  # of the texts of an image, decompressed
        self._decoder, self._places = ThreadPoolExecutor(_THREADS), asyncio.Semaphore(_DECODED)
        self._decoding = 0
        self._threshold: tuple[int, tuple[float, dict[str, Any]]] | None = None  # of so many entries
        self._was_warned = False
        self._warn()

    def __len__(self) -> int:
        """Return the number of entries that are searched: of the gallery and of the store."""
        return len(self.store) + (0 if self.gallery is None else len(self.gallery))

    def threshold_of_search(self) -> tuple[float, dict[str, Any]] | None:
        """Return the threshold of `options.fpir` for the entries that are enrolled now, and its FPIR.

        The FPIR may be higher than the wanted one, and has a sentence. None without `options.fpir`.
        """
        if self.capacity is None or self.options.fpir is None:
            return None
        count = max(1, len(self))
        if self._threshold is None or self._threshold[0] != count:  # half the time of a request to compute
            threshold = self.capacity.strictest(self.options.fpir, count)
            expected, text = self.capacity.expected(self.options.fpir, count)
            self._threshold = count, (threshold, {**expected._asdict(), "text": text})
        return self._threshold[1]

    def strangers(self, similarity: float) -> dict[str, Any] | None:
        """Return the share of strangers that would score as high, with its 90 % interval, and a sentence."""
        if self.capacity is None or not len(self):
            return None
        found, count = self.capacity.fpir(similarity, len(self)), len(self)
        return {**found._asdict(), "enrolled": count, "text": found.sentence(count)}

    def holds(self) -> dict[str, Any] | None:
        """Return how many identities a gallery holds at least, at which FPIR and threshold; None: unknown."""
        found = None if self.capacity is None else self.capacity.holds(self.options.fpir)
        return None if found is None else found._asdict()

    def warning(self) -> str | None:
        """Return what to expect if more images are enrolled than the model holds."""
        return None if self.capacity is None else self.capacity.warning(len(self), self.options.fpir)

    def _warn(self) -> None:
        if not self._was_warned and (text := self.warning()):
            self._was_warned = True
            logger.warning(text)

    def known_far(self, far: float) -> float:
        """Return the FAR of the model's thresholds that is equal. Raises OptionError if there is none."""
        for known in self.model.thresholds:
            if abs(known - far) <= 1e-6 * known:
                return known
        names = ", ".join(f"{one:g}" for one in self.model.thresholds) or "none"
        raise OptionError(f"the model has no threshold for FAR {far:g}; known: {names}")

    async def embed(self, data: bytes) -> np.ndarray:
        """Return the embedding, float32 [D], of an encoded image.

        Raises:
            DataError: the image is damaged or over the limits.
            Busy: too many requests are waiting.
        """
        return await self.embeddings.submit(await self._pixels(data))

    async def search(self, embedding: np.ndarray, k: int) -> list[dict[str, Any]]:
        """Return the k nearest entries of the gallery and of the store."""
        return await self._searches.submit((embedding, k))

    async def enrol(self, name: str, data: bytes) -> int:
        """Enrol an image, and return the id of the entry after it was written to disk."""
        pixels = await self._pixels(data)
        embedding = await self.embeddings.submit(pixels)
        number = int(await self._writes.submit(New(name, embedding, _as_jpeg(pixels))))
        self._warn()
        return number

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
            gallery = open_gallery(self.options.gallery, self.model.fingerprint, self.model.emb_size)
            return gallery, gallery.is_classes
        if "classes" not in self.model.about:
            return None, False
        weights, names = self.model.class_weights()
        return build_gallery(weights, names), True

    async def _pixels(self, data: bytes) -> np.ndarray:
        """Return an image in the size of the network's input, uint8 [H, W, C]."""
        if self._decoding >= self.options.queue_size:
            raise Busy(f"{self._decoding} images are waiting")
        self._decoding += 1
        try:
            return await asyncio.wait_for(self._decode_in_thread(data), self.options.timeout)
        except asyncio.TimeoutError:  # the thread continues, but makes room
            raise Busy(f"the image was not decoded in {self.options.timeout:g} seconds") from None
        finally:
            self._decoding -= 1

    async def _decode_in_thread(self, data: bytes) -> np.ndarray:
        async with self._places:
            return await asyncio.get_running_loop().run_in_executor(self._decoder, self._decode, data)

    def _decode(self, data: bytes) -> np.ndarray:
        is_text = data[:1] == b"P" and not _PPM.match(data)  # Pillow reads comments one byte at a time
        is_long = data.startswith(b"\x89PNG") and sum(map(data.count, _COMPRESSED)) > _MOST_CHUNKS
        if is_text or is_long or data[:2] in _SLOW or data[4:8] == b"ftyp":
            raise DataError(
                "the image can take long to decode: its format, a comment in a PPM, or more than "
                f"{_MOST_CHUNKS} profiles and texts in a PNG; send it as JPEG"
            )
        channels, height, width = self.model.image_shape
        pixels, most = np.empty((height, width, channels), np.uint8), self.options.max_pixels
        if pixels[..., 0].size > most or not decode_jpeg_of_size(data, pixels):
            count_pixels(data, most, allows_slow=False)
            decode_into(data, pixels)
        return pixels

    def _embed(self, items: list[np.ndarray]) -> Sequence[np.ndarray | Exception]:
        images = torch.from_numpy(np.stack(items)).permute(0, 3, 1, 2)
        found = self.model.embed(to_input(images, "cpu").numpy())
        failed = DataError("the embedding of the image does not have norm 1; check the model")
        return [
            one if is_sound else failed for one, is_sound in zip(found, are_normalised(found), strict=True)
        ]

    def _search(self, items: list[tuple[np.ndarray, int]]) -> list[list[dict[str, Any]]]:
        queries, k = np.stack([query for query, _ in items]), max(k for _, k in items)
        near = [
            [_described(one, "enrolled", f"entries/{one.id}/thumbnail") for one in row]
            for row in self.store.search(queries, k)
        ]
        if self.gallery is not None:
            for row, found in zip(near, self.gallery.find(queries, k), strict=True):
                row += [_described(one, *self._origin(one.id)) for one in found]
        pairs = zip(near, items, strict=True)
        return [sorted(row, key=lambda one: -one["similarity"])[:wanted] for row, (_, wanted) in pairs]

    def _origin(self, number: int) -> tuple[str, str | None]:
        """Return the source and the picture of an entry of the gallery."""
        if not self.is_classes:
            return "gallery", None
        return "class", f"classes/{number}/thumbnail" if "thumbnails" in self.model.about else None


def _described(one: Found, source: str, thumbnail: str | None) -> dict[str, Any]:
    return {**vars(one), "mapped": bool(one.mapped), "source": source, "thumbnail": thumbnail}


def _as_jpeg(pixels: np.ndarray) -> bytes:
    """Return pixels, uint8 [H, W, C], as a JPEG file."""
    stream = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(
        stream, "JPEG", quality=_QUALITY
    )
    return stream.getvalue()


def entry_name(name: Any) -> str:
    """Return the name of an entry. Raises DataError unless it is a short line of text, and no path."""
    text = name.strip() if isinstance(name, str) else ""
    if not 1 <= len(text) <= 200 or set(text) & {"/", "\\", "\ufffd"} or text in (".", ".."):
        raise DataError("the name of an entry is missing or invalid; expected 1 to 200 characters, no slash")
    return check_name(text)
