"""Galleries: a folder with gallery.json, which describes it, and gallery.safetensors with vectors and names.

And the same entries in an SQLite file or a database: open a store by its path or URL, and copy galleries.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypedDict

import numpy as np
import torch

from plsc.checkpoint.manifest import Entry, FileInfo, Part, checksum, read_header, write_shard
from plsc.data.class_names import ClassNames
from plsc.errors import CheckpointError, DataError, OptionError, check_name
from plsc.export.served import are_normalised
from plsc.gallery.store import MOST_ENTRIES, Found, New, Store
from plsc.storage.disk import Size, publishing_folder, read_record
from plsc.storage.urls import is_url
from plsc.version import install

if TYPE_CHECKING:
    from plsc.gallery.postgres import PostgresStore


AnyStore: TypeAlias = "Store | PostgresStore"
Chunks: TypeAlias = Callable[[], Iterator[np.ndarray]]
"""Returns the vectors, float32 [n, D] at a time; called several times."""

ABOUT_NAME, VECTORS_NAME = "gallery.json", "gallery.safetensors"
_NAMES = {"names": "uint8", "name_ends": "int64"}
_MOST_BYTES = 2**20  # of gallery.json
_ROWS = 8192  # vectors processed at a time
_QUERIES = 256  # queries searched at a time
_BATCH = 4096  # entries copied per transaction
_EXACT = 20_000  # rows that `nearest` searches without inverted lists
RECALL, SAMPLE = 0.98, 1000  # of an approximate search, measured on a sample
_MULTIPLIED = 1536  # values of the queries from which faiss multiplies matrices; its default is 128,000


class _About(TypedDict):
    format: Literal["plsc-gallery"]
    version: Literal[1]
    model: Annotated[str, r"[\w .:/-]*"]
    kind: Literal["float32"]
    count: Size
    size: Size
    centers: Literal[1]
    file: FileInfo


class Gallery:
    """Vectors with names, read-only, in which `search` finds the nearest by cosine similarity.

    `build_gallery` and `open_gallery` return one.

    Attributes:
        names: the name of each entry, or None.
        model: fingerprint of the network; '' if the gallery is only in memory.
        mapped: as of `New`.
        about: the contents of gallery.json; empty if the gallery is only in memory.
    """

    def __init__(self, vectors: np.ndarray, names: ClassNames | None, about: Mapping[str, Any]) -> None:
        self._vectors = vectors
        self.names = names
        self.about = about
        self.model = str(about.get("model", ""))
        self.mapped = str(about.get("mapped", ""))

    def __len__(self) -> int:
        """Return the number of entries."""
        return self._vectors.shape[0]

    @property
    def size(self) -> int:
        """The number of values per vector."""
        return self._vectors.shape[1]

    @property
    def is_classes(self) -> bool:
        """Whether the vectors are class weights, not embeddings of images."""
        return self.about.get("of") == "classes"

    def search(self, queries: np.ndarray, k: int = 5) -> tuple[np.ndarray, np.ndarray]:
        """Find the k nearest entries of each query.

        Args:
            queries: embeddings, [q, D], of any norm; a zero embedding has cosine 0 with every entry.
            k: number of entries; at most all are returned.

        Returns:
            Cosine similarities, float32 [q, k], highest first, and numbers of entries, int64 [q, k]. Of equal
            similarities, the lower number comes first; if some of the last ones are left out, any may be.

        Raises:
            DataError: the queries have another size, or are not finite.
        """
        unit = normalised(np.asarray(queries), 0, "query", self.size)
        k = min(k, len(self))
        found = [self._search(unit[first : first + _QUERIES], k) for first in range(0, len(unit), _QUERIES)]
        if not found:
            return np.empty((0, k), np.float32), np.empty((0, k), np.int64)
        scores, numbers = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return scores, numbers

    def name(self, number: int) -> str:
        """Return the name of an entry, or its number if it has none."""
        return (self.names[number] if self.names is not None else "") or str(number)

    def find(self, queries: np.ndarray, k: int) -> list[list[Found]]:
        """Return what `search` finds, with names; an id is the number of the entry."""
        pairs = zip(*self.search(queries, k), strict=True)
        found = [zip(scores.tolist(), numbers.tolist(), strict=True) for scores, numbers in pairs]
        return [[Found(one, number, self.name(number), self.mapped) for one, number in row] for row in found]

    def read(self, after: int, count: int) -> list[New]:
        """Return the first entries whose id, their number plus 1, is larger than `after`."""
        last = min(after + count, len(self))
        vectors = self._vectors[after:last]
        rows = range(after, last)
        return [New(self.name(i), vectors[i - after], b"", i + 1, None, self.mapped) for i in rows]

    def parts(self) -> Iterator[np.ndarray]:
        """Yield all vectors in order, float32 [n, D] at a time."""
        return (self._vectors[low : low + _ROWS] for low in range(0, len(self._vectors), _ROWS))

    def _search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        faiss, vectors = import_faiss(), self._vectors
        # A few more than wanted: the products of equal vectors differ by rounding errors.
        count = min(k + 16, len(vectors))
        rows = faiss.knn(queries, vectors, count, faiss.METRIC_INNER_PRODUCT)[1]
        # A sum per row in float64: it does not depend on the position of the row, unlike a product.
        pairs = zip(rows, queries, strict=True)
        scores = np.stack([(vectors[row].astype(np.float64) * query).sum(axis=1) for row, query in pairs])
        scores = scores.astype(np.float32)
        order = np.lexsort((rows, -scores))
        scores, rows = (np.take_along_axis(one, order[:, :k], 1) for one in (scores, rows))
        return scores, rows


def build_gallery(vectors: np.ndarray, names: Sequence[str] | ClassNames | None = None) -> Gallery:
    """Return a gallery in memory, for vectors [N, D] of any norm; it is not written to a file.

    Raises DataError if there are no vectors, or one is not finite.
    """
    unit = np.concatenate(list(_chunks(np.asarray(vectors))()))
    return Gallery(unit, _packed(names, len(unit)), {})


def write_gallery(
    folder: str | os.PathLike[str],
    vectors: np.ndarray | Chunks,
    names: Sequence[str] | ClassNames | None = None,
    *,
    model: str,
    of: str = "images",
    mapped: str = "",
    mode: int = 0,
) -> Gallery:
    """Write vectors of any norm as a gallery to a new folder, and open it.

    Args:
        folder: the folder to write; it must not exist.
        vectors: [N, D], or a function that returns an iterator over parts of them, and is called several
            times.
        names: a name per entry.
        model: fingerprint of the network that computed the vectors: the SHA-256 of its weights.
        of: ``images``, or ``classes``: class weights.
        mapped: as `New.mapped`.
        mode: permissions of the files; 0: 0600 if there are names, otherwise as the umask says.

    Raises:
        DataError: there are no vectors, one is not finite, or the folder cannot be written.
    """
    chunks = _chunks(vectors)
    sizes = [part.shape for part in chunks()]
    count, size = sum(rows for rows, _ in sizes), sizes[0][1]
    packed = _packed(names, count)
    entries = [Entry("vectors", torch.float32, (count, size), 0, _as_bytes(chunks))]
    if packed is not None:
        for (name, dtype), array in zip(_NAMES.items(), (packed.text, packed.ends), strict=True):
            one_part = functools.partial(iter, [array])
            entries.append(Entry(name, getattr(torch, dtype), array.shape, 0, _as_bytes(one_part)))
    mode = mode or (0o600 if packed is not None else 0)
    with publishing_folder(Path(folder)) as temporary:
        if mode:  # before a file is written
            temporary.chmod(0o300 | mode | (mode & 0o444) >> 2)
        about = {
            "format": "plsc-gallery",
            "version": 1,
            "model": model,
            "kind": "float32",
            "count": count,
            "size": size,
            "centers": 1,
            "of": of,
            **({"mapped": mapped} if mapped else {}),
            "file": asdict(write_shard(temporary / VECTORS_NAME, entries)),
        }
        (temporary / ABOUT_NAME).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        for path in temporary.iterdir() if mode else ():
            path.chmod(mode)
    return open_gallery(folder)


def open_gallery(
    folder: str | os.PathLike[str], model: str | None = None, size: int | None = None
) -> Gallery:
    """Open a gallery; its vectors are memory-mapped.

    Its checksum and the norms of its vectors are checked. Do not change the files of an open gallery.

    Args:
        folder: the folder of a gallery.
        model, size: fingerprint of a network, and its values per vector; a gallery of another is refused.

    Raises:
        DataError: there is no gallery, or it is damaged.
        CheckpointError: it was made with another network.
    """
    path = Path(folder)
    about = read_record(_About, path / ABOUT_NAME, path / ABOUT_NAME, DataError, _MOST_BYTES)
    if (model or about["model"], size or about["size"]) != (about["model"], about["size"]):
        both = f"weights {about['model']:.16}, {about['size']} values; not {model:.16}, {size or 'any'}"
        raise CheckpointError(f"{path} was made with another network ({both}); index the images again")
    file = path / VECTORS_NAME
    try:
        parts = {part.key: part for part in read_header(file)}
        dtypes = {"vectors": "float32", **(_NAMES if "names" in parts else {})}
        shapes = {"vectors": (about["count"], about["size"]), "name_ends": (about["count"],)}
        opened = {name: _mapped(file, parts.get(name), dtypes[name], shapes.get(name)) for name in dtypes}
        vectors = opened["vectors"]
        norms = (are_normalised(vectors[low : low + _ROWS]) for low in range(0, len(vectors), _ROWS))
        with np.errstate(invalid="ignore", over="ignore"):
            if checksum(file, about["file"].bytes) != about["file"] or not all(map(np.all, norms)):
                raise ValueError("its checksum is not that in gallery.json, or a vector does not have norm 1")
    except (OSError, ValueError, CheckpointError) as error:
        raise _wrong(file, getattr(error, "strerror", None) or str(error)) from error
    names = ClassNames(opened["names"], opened["name_ends"]) if "names" in opened else None
    if names is not None and not names.is_sound():
        raise _wrong(file, "its names are damaged")
    return Gallery(vectors, names, about)


def _mapped(file: Path, part: Part | None, dtype: str, shape: tuple[int, ...] | None) -> np.ndarray:
    """Return a tensor of a file, memory-mapped; changes to it are private to this process."""
    if part is None or part.dtype != dtype or part.shape != (shape or part.shape[:1]):
        raise ValueError(f"it has no {dtype} tensor of shape {shape}")
    if 0 in part.shape:  # cannot be mapped
        return np.empty(part.shape, dtype)
    return np.memmap(file, dtype, "c", part.begin, part.shape)


def _wrong(file: Path, what: str) -> DataError:
    return DataError(f"{file}: {what}; choose another gallery, or index the images again")


def _chunks(vectors: np.ndarray | Chunks) -> Chunks:
    """Return a function that yields the normalised vectors in parts."""

    def parts() -> Iterator[np.ndarray]:
        first = 0
        for part in vectors() if callable(vectors) else [vectors]:
            for low in range(0, len(part), _ROWS):
                rows = np.asarray(part[low : low + _ROWS])
                yield normalised(rows, first, "vector")
                first += len(rows)
        if not first:
            raise DataError("there are no vectors; expected at least one")

    return parts


def normalised(rows: np.ndarray, first: int, what: str, size: int | None = None) -> np.ndarray:
    """Return rows of norm 1, float32 [n, D]; a zero row is unchanged. first: the number of the first row."""
    if rows.ndim != 2 or size not in (None, rows.shape[1]):
        raise DataError(f"expected each {what} as a row [n, {size or 'D'}], got shape {list(rows.shape)}")
    rows = rows.astype(np.float64)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    if not np.isfinite(norms).all():
        raise DataError(f"{what} {first + int(np.argmin(np.isfinite(norms)))} is not finite; remove it")
    return (rows / np.where(norms, norms, 1)).astype(np.float32)


def _packed(names: Sequence[str] | ClassNames | None, count: int) -> ClassNames | None:
    if names is None:
        return None
    if len(names) != count:
        raise DataError(f"there are {len(names)} names for {count} entries; expected a name per entry")
    return names if isinstance(names, ClassNames) else ClassNames.of([*map(check_name, names)])


def _as_bytes(chunks: Chunks) -> Callable[[], Iterator[memoryview]]:
    return lambda: (np.ascontiguousarray(one).data for one in chunks())


def is_postgres(place: object) -> bool:
    """Return whether a place is the URL of a PostgreSQL database."""
    return is_url(str(place)) and str(place).lower().startswith(("postgresql:/", "postgres:/"))


def is_folder(target: str) -> bool:
    """Return whether a gallery is written to this place as a folder, not as a store; no URL is a folder."""
    if not is_postgres(target) and (is_url(target) or "password=" in target):  # a folder's name is logged
        raise OptionError("a gallery is a local folder, a file named *.sqlite or a postgresql:// URL")
    return not is_postgres(target) and not target.endswith(".sqlite")


def open_store(place: str, model: str, size: int = 0, timeout: int = 0) -> AnyStore:
    """Open the store in an SQLite file or a database; arguments as of `Store` and `PostgresStore`."""
    if not is_postgres(place):
        if is_folder(place) and not Path(place).is_file():
            raise OptionError("a store is a file named *.sqlite or a postgresql:// URL; expected one of them")
        return Store(Path(place), model, size)
    from plsc.gallery.postgres import PostgresStore

    return PostgresStore(place, model, size, timeout)


def mode_of(place: str) -> int:
    """Return who may read the files of a gallery, for its copies, which only their owner may change."""
    if is_postgres(place):
        return 0o600
    file = Path(place) if Path(place).is_file() else Path(place, VECTORS_NAME)
    return file.stat().st_mode & 0o444 | 0o200


def copy_gallery(source: str, target: str, fingerprint: str = "") -> str:
    """Copy the entries of a gallery; a copy that was interrupted continues. Return what was copied, as text.

    Ids, thumbnails and times of enrolment are copied, too; galleries in folders have none. Who can read the
    source can read a new target.

    Args:
        source: a folder of ``plsc index``, an SQLite file, or the URL of a database.
        target: a folder to write; or a file that ends with .sqlite or a URL, with none or some of them.
        fingerprint: if the database has several networks, the first digits of the fingerprint of one.

    Raises:
        DataError: a place cannot be used, or the target has other entries.
    """
    with opened_gallery(source, fingerprint) as origin:
        return copy_entries(origin, source, target)


@contextmanager
def opened_gallery(place: str, fingerprint: str = "") -> Iterator[Any]:
    """Open a gallery of images in a folder or a store, arguments as of `copy_gallery`, and close it."""
    in_folder = not is_postgres(place) and not Path(place).is_file()
    network = fingerprint if is_postgres(place) else ""  # a file has one network
    opened: Any = nullcontext(open_gallery(place)) if in_folder else closing(open_store(place, network))
    with opened as origin:
        if in_folder and origin.is_classes:
            raise DataError(f"{place} has the classes of a model; expected a gallery of images")
        yield origin


def copy_entries(origin: Any, source: str, target: str) -> str:
    """Copy the entries of `origin` as `copy_gallery`; source: its name in messages."""
    if is_folder(target):
        read = [one for part in batches(origin) for one in part]
        kinds = {one.mapped for one in read}
        if len(kinds) > 1:
            raise DataError(f"{source} has mapped and other entries, and a folder one kind; choose a store")
        vectors = np.array([one.vector for one in read], np.float32).reshape(-1, origin.size)
        how: Any = {"model": origin.model, "mapped": "".join(kinds), "mode": mode_of(source)}
        write_gallery(target, vectors, [one.name for one in read], **how)
        return f"{len(read):,} entries"
    is_large = not is_postgres(target) and len(origin) > MOST_ENTRIES
    if is_large or " " in origin.model:  # a store has other texts after a blank
        raise DataError(
            f"{source} has {len(origin):,} entries of the network {origin.model!r:.80}; a store needs a name "
            f"without blanks, and an SQLite file has at most {MOST_ENTRIES:,}"
        )
    is_new_file = not is_postgres(target) and not Path(target).exists()
    with closing(open_store(target, origin.model, origin.size)) as store:
        if is_new_file:
            Path(target).chmod(mode_of(source))
        other = DataError(f"{target} has entries that are not of {source}; choose an empty target")
        count = there = last = 0
        for entries in batches(origin):
            held = store.read(last, len(entries))
            if any(map(_differ, held, entries)):
                raise other
            store.write(entries[len(held) :])
            there, count, last = there + len(held), count + len(entries), entries[-1].id
        if store.entries(last, 1) or len(store) != count:
            raise other
        text = f"{count:,} entries, of which {there:,} were there"
        if not isinstance(store, Store) and store.build_index():
            text += f"; {store.measure_recall():.2%} of the 10 nearest entries are found"
        return text


def _differ(one: New, other: New) -> bool:
    are_near = np.abs(one.vector - other.vector).max() <= 1e-5  # mapped ones have rounding errors
    return (one.id, one.name, one.mapped) != (other.id, other.name, other.mapped) or not are_near


def batches(origin: Any) -> Iterator[list[Any]]:
    """Yield all entries in order."""
    last = 0
    while entries := origin.read(last, _BATCH):
        yield entries
        last = entries[-1].id


def nearest(queries: np.ndarray, rows: np.ndarray, k: int) -> np.ndarray:
    """Return the numbers of the k nearest rows by cosine, int64 [n, k].

    From 20,000 rows on, by inverted lists, of which as many are searched as a recall of 0.98 needs on 1,000
    queries; if that is a quarter of them, exact search is faster. The nearest row stands for missing ones.
    """
    faiss = import_faiss()
    from faiss.contrib.big_batch_search import big_batch_search

    k, metric = min(k, len(rows)), faiss.METRIC_INNER_PRODUCT
    if len(rows) <= _EXACT:
        return faiss.knn(queries, rows, k, metric)[1]
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
            return faiss.knn(queries, rows, k, metric)[1]
        recall = recall_of(exact, index.search(some, k)[1])
    with redirect_stdout(None):  # it prints its progress
        _, numbers = big_batch_search(index, queries, k)  # matrix products, list by list
    return np.where(numbers < 0, numbers[:, :1], numbers)


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
