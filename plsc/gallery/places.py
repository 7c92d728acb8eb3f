"""Galleries in folders, SQLite files and PostgreSQL: open a store by its path or URL, and copy galleries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from plsc.errors import DataError
from plsc.gallery.gallery import VECTORS_NAME, open_gallery, write_gallery
from plsc.gallery.store import MOST_ENTRIES, New, Store
from plsc.storage.urls import is_url

if TYPE_CHECKING:
    from plsc.gallery.postgres import PostgresStore

AnyStore: TypeAlias = "Store | PostgresStore"
_BATCH = 4096  # entries copied per transaction


def is_postgres(place: object) -> bool:
    """Return whether a place is the URL of a PostgreSQL database."""
    return is_url(str(place)) and str(place).startswith(("postgresql:/", "postgres:/"))


def is_folder(target: str) -> bool:
    """Return whether a gallery is written to this place as a folder, not as a store."""
    return not is_postgres(target) and not target.endswith(".sqlite")


def open_store(place: str, model: str, size: int = 0, timeout: int = 0) -> AnyStore:
    """Open the store in an SQLite file or a database; arguments as of `Store` and `PostgresStore`."""
    if not is_postgres(place):
        return Store(Path(place), model, size)
    from plsc.gallery.postgres import PostgresStore

    return PostgresStore(place, model, size, timeout)


def mode_of(place: str) -> int:
    """Return who may read the files of a gallery, for its copies, which only their owner may change."""
    if is_postgres(place):
        return 0o600
    return (
        Path(place) if Path(place).is_file() else Path(place, VECTORS_NAME)
    ).stat().st_mode & 0o444 | 0o200


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
    if origin.model.split() != [origin.model]:  # a store has other texts after a blank
        raise DataError(f"{source} is of the network {origin.model!r:.80}; a store needs one without blanks")
    if not is_postgres(target) and (count := len(origin)) > MOST_ENTRIES:
        raise DataError(f"{source} has {count:,} entries; an SQLite file has at most {MOST_ENTRIES:,}")
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
