"""Galleries in folders, SQLite files and PostgreSQL: open a store by its path or URL, and copy galleries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from plsc.errors import DataError
from plsc.gallery.gallery import open_gallery, write_gallery
from plsc.gallery.store import MOST_ENTRIES, New, Store

if TYPE_CHECKING:
    from plsc.gallery.postgres import PostgresStore

AnyStore: TypeAlias = "Store | PostgresStore"
_BATCH = 4096  # entries copied per transaction


def is_postgres(place: object) -> bool:
    """Return whether a place is the URL of a PostgreSQL database."""
    return str(place).startswith(("postgresql:/", "postgres:/"))


def open_store(place: str, model: str, size: int = 0, timeout: int = 0) -> AnyStore:
    """Open the store in an SQLite file or a database; arguments as of `Store` and `PostgresStore`."""
    if not is_postgres(place):
        return Store(Path(place), model, size)
    from plsc.gallery.postgres import PostgresStore

    return PostgresStore(place, model, size, timeout)


def copy_gallery(source: str, target: str, fingerprint: str = "") -> str:
    """Copy the entries of a gallery; a copy that was interrupted continues. Return what was copied, as text.

    Ids, thumbnails and times of enrolment are copied, too; galleries in folders have none.

    Args:
        source: a folder of ``plsc index``, an SQLite file, or the URL of a database.
        target: a folder to write; or a file that ends with .sqlite or a URL, with none or some of them.
        fingerprint: if the database has several networks, the first digits of the fingerprint of one.

    Raises:
        DataError: a place cannot be used, or the target has other entries.
    """
    in_folder = not is_postgres(source) and not Path(source).is_file()
    opened: Any = nullcontext(open_gallery(source)) if in_folder else closing(open_store(source, fingerprint))
    with opened as origin:
        if in_folder and origin.is_classes:
            raise DataError(f"{source} has the classes of a model; expected a gallery of images")
        if not is_postgres(target) and not target.endswith(".sqlite"):
            read = [one for part in _batches(origin) for one in part]
            vectors = np.array([one.vector for one in read], np.float32).reshape(-1, origin.size)
            write_gallery(target, vectors, [one.name for one in read], model=origin.model)
            return f"{len(read):,} entries"
        if not is_postgres(target) and (count := len(origin)) > MOST_ENTRIES:
            raise DataError(f"{source} has {count:,} entries; an SQLite file has at most {MOST_ENTRIES:,}")
        with closing(open_store(target, origin.model, origin.size)) as store:
            other = DataError(f"{target} has entries that are not of {source}; choose an empty target")
            count = there = last = 0
            for entries in _batches(origin):
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
    return (one.id, one.name, one.vector.tobytes()) != (other.id, other.name, other.vector.tobytes())


def _batches(origin: Any) -> Iterator[list[Any]]:
    last = 0
    while entries := origin.read(last, _BATCH):
        yield entries
        last = entries[-1].id
