"""The vectors of a gallery, in float32 or in 8 bits, and the search among them with faiss.

`Float32` stores 4 bytes per value. `Int8` stores 16-bit values as two bytes: faiss reads only the upper bytes
of all vectors, and the best candidates are compared with both bytes. Every score is computed in float64 from
the stored values, so that equal vectors have equal scores.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from typing import Any, ClassVar

import numpy as np

from plsc.errors import OptionError
from plsc.version import install

Chunks = Callable[[], Iterator[np.ndarray]]
"""Returns the vectors, float32 [n, D] at a time; called several times."""

ROOM = 128
"""Bytes before the codes of `Int8`: the header of faiss is written there, in memory."""
_LARGEST = 127 * 256 + 127  # both bytes of a value are in -128..127
_EXACT = 20_000  # rows that `nearest` searches without inverted lists
RECALL, SAMPLE = 0.98, 1000  # of an approximate search, measured on a sample
_MULTIPLIED = 1536  # values of the queries from which faiss multiplies matrices; its default is 128,000


class Float32:
    """Vectors in float32; `tensors` has ``vectors``, float32 [N, D]."""

    DTYPES: ClassVar = {"vectors": "float32"}
    LAST: ClassVar = "vectors"

    def __init__(self, tensors: Mapping[str, np.ndarray]) -> None:
        self._vectors = tensors["vectors"]
        self.shape: tuple[int, int] = self._vectors.shape

    @staticmethod
    def shapes(count: int, size: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors."""
        return {"vectors": (count, size)}

    @staticmethod
    def encode(vectors: Chunks, largest: np.ndarray) -> dict[str, Chunks]:
        """Return the tensors, in chunks. largest: the largest absolute value per dimension, float32 [D]."""
        return {"vectors": vectors}

    def candidates(self, queries: np.ndarray, k: int) -> np.ndarray:
        """Return numbers of vectors that are likely to include the k nearest, int64 [q, c]."""
        faiss = import_faiss()
        count = min(k + 16, len(self._vectors))
        return faiss.knn(queries, self._vectors, count, faiss.METRIC_INNER_PRODUCT)[1]

    def decode(self, numbers: np.ndarray | slice, dtype: type[np.floating] = np.float64) -> np.ndarray:
        """Return vectors, [..., D]."""
        return self._vectors[numbers].astype(dtype, copy=False)


class Int8:
    """Vectors in 16 bits, of which 8 are searched.

    Value i of a vector is ``scale[i] * (256 * (codes[i] - 128) + rest[i])``.

    Args:
        tensors: ``codes``, uint8 [ROOM + N * D], of which the first bytes are overwritten; ``rest``,
            int8 [N, D]; ``scale``, float32 [D].
    """

    DTYPES: ClassVar = {"codes": "uint8", "rest": "int8", "scale": "float32"}
    LAST: ClassVar = "rest"  # of the tensors with a row per vector, the last one in the file

    def __init__(self, tensors: Mapping[str, np.ndarray]) -> None:
        codes, self._rest, self._scale = (tensors[name] for name in self.DTYPES)
        self.shape: tuple[int, int] = self._rest.shape
        self._codes = codes[ROOM:].reshape(self.shape)  # keeps the memory, of which faiss has the address
        self._index = _index_over(codes, *self.shape)

    @staticmethod
    def shapes(count: int, size: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors."""
        return {"codes": (ROOM + count * size,), "rest": (count, size), "scale": (size,)}

    @staticmethod
    def encode(vectors: Chunks, largest: np.ndarray) -> dict[str, Chunks]:
        """Return the tensors, in chunks. largest: the largest absolute value per dimension, float32 [D]."""
        scale = np.maximum(largest / np.float32(_LARGEST), np.finfo(np.float32).tiny)

        def parts() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for chunk in vectors():
                values = np.rint(chunk / scale).astype(np.int32)
                upper = (values + 128) >> 8
                yield (upper + 128).astype(np.uint8), (values - 256 * upper).astype(np.int8)

        room = np.zeros(ROOM, np.uint8)
        return {
            "codes": lambda: itertools.chain([room], (codes for codes, _ in parts())),
            "rest": lambda: (rest for _, rest in parts()),
            "scale": lambda: iter([scale]),
        }

    def candidates(self, queries: np.ndarray, k: int) -> np.ndarray:
        """Return numbers of vectors that are likely to include the k nearest, int64 [q, c]."""
        scaled = queries * self._scale
        largest = np.abs(scaled).max(axis=1, keepdims=True)
        # faiss truncates queries to integers on some processors.
        rounded = np.rint(scaled * (127 / np.where(largest, largest, 1)))
        count = min(4 * k + 12, len(self._rest))
        return self._index.search(rounded.astype(np.float32), count)[1]

    def decode(self, numbers: np.ndarray | slice, dtype: type[np.floating] = np.float64) -> np.ndarray:
        """Return vectors, [..., D]."""
        upper = (self._codes[numbers] ^ 128).view(np.int8).astype(np.int16) << 8
        return (upper + self._rest[numbers]) * self._scale.astype(dtype)


KINDS: dict[str, type[Float32] | type[Int8]] = {"float32": Float32, "int8": Int8}


def _index_over(codes: np.ndarray, count: int, size: int) -> Any:
    """Return a faiss index that searches codes in their place, such as a memory-mapped file.

    faiss only reads an index where its header precedes the codes, so the header is written there.
    codes: uint8 [ROOM + count * size].
    """
    faiss = import_faiss()
    empty = faiss.IndexScalarQuantizer(
        size, faiss.ScalarQuantizer.QT_8bit_direct_signed, faiss.METRIC_INNER_PRODUCT
    )
    empty.ntotal = count
    header = faiss.serialize_index(empty)
    header[-8:] = np.frombuffer((count * size).to_bytes(8, "little"), np.uint8)  # instead of no codes
    first = ROOM - len(header)
    codes[first:ROOM] = header
    reader = faiss.ZeroCopyIOReader(faiss.swig_ptr(codes[first:]), len(codes) - first)
    return faiss.read_index(reader)


def nearest(queries: np.ndarray, rows: np.ndarray, k: int) -> tuple[np.ndarray, float]:
    """Return the numbers of the k nearest rows by cosine, int64 [n, k], and the measured recall.

    From 20,000 rows on, by inverted lists, of which as many are searched as a recall of 0.98 needs on 1,000
    queries; if that is a quarter of them, exact search is faster. The nearest row stands for missing ones.
    """
    faiss = import_faiss()
    from faiss.contrib.big_batch_search import big_batch_search

    k, metric = min(k, len(rows)), faiss.METRIC_INNER_PRODUCT
    if len(rows) <= _EXACT:
        return faiss.knn(queries, rows, k, metric)[1], 1.0
    rng = np.random.default_rng(0)
    lists = int(2 * np.sqrt(len(rows)))
    index = faiss.IndexIVFScalarQuantizer(
        faiss.IndexFlatIP(rows.shape[1]), rows.shape[1], lists, faiss.ScalarQuantizer.QT_fp16, metric, False
    )
    index.cp.niter = 5
    trained = rng.choice(len(rows), min(len(rows), 39 * lists), replace=False)
    index.train(rows[trained])
    index.add(rows)
    some = queries[rng.choice(len(queries), min(SAMPLE, len(queries)), replace=False)]
    exact = faiss.knn(some, rows, k, metric)[1]
    recall, index.nprobe = 0.0, 2
    while recall < RECALL:
        index.nprobe *= 2
        if index.nprobe >= lists // 4:
            return faiss.knn(queries, rows, k, metric)[1], 1.0
        recall = recall_of(exact, index.search(some, k)[1])
    with redirect_stdout(None):  # it prints its progress
        _, numbers = big_batch_search(index, queries, k)  # matrix products, list by list
    return np.where(numbers < 0, numbers[:, :1], numbers), recall


def recall_of(exact: np.ndarray, found: np.ndarray) -> float:
    """Return the share of the neighbours in lists [n, k] that other lists have."""
    return float(np.mean([np.isin(a, b).mean() for a, b in zip(exact, found, strict=True)]))


def import_faiss() -> Any:
    """Return the module faiss. Raises OptionError if it is not installed."""
    try:
        import faiss
    except ImportError as error:
        raise OptionError(
            f"the search needs the package faiss, which is not installed; run {install('search')}"
        ) from error
    faiss.cvar.distance_compute_blas_threshold = _MULTIPLIED
    return faiss
