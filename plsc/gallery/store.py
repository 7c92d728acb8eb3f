"""Enrolled entries in a SQLite file, with an index in memory that is rebuilt from it."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from plsc.errors import CheckpointError, DataError, check_name
from plsc.export.served import are_normalised

MOST_ENTRIES = 100_000
_APPLICATION, _VERSION = 0x706C7363, 1  # "plsc"
_SCHEMA = """
CREATE TABLE entries (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL,
    vector BLOB NOT NULL,
    thumbnail BLOB NOT NULL,
    model TEXT NOT NULL,
    enrolled TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
)"""

_OF_SQLITE = "CREATE TABLE sqlite_sequence(name,seq)"  # for AUTOINCREMENT


LARGEST_ID = 2**53 - 1  # JavaScript rounds larger ones, so a page would delete another entry


class StoreError(DataError):
    """The file cannot be read or written: the disk is full, say."""


@dataclass(frozen=True)
class New:
    """An entry to enrol: a name (`check_name`), a vector of norm 1, float32 [D], and a JPEG file, or b"".

    id, enrolled: id, larger than all in the store, and time of enrolment, UTC, of an entry that is copied.
    mapped: how the vector was mapped from another network (JSON, `plsc.gallery.upgrade`); '' if it was not.
    """

    name: str
    vector: np.ndarray
    thumbnail: bytes
    id: int | None = None
    enrolled: datetime | None = None
    mapped: str = ""

    def __post_init__(self) -> None:
        check_name(self.name)


Change: TypeAlias = "New | int"  # an int: the id of an entry to delete


@dataclass(frozen=True)
class Found:
    """An entry near a query; `mapped` as of `New`."""

    similarity: float
    id: int
    name: str
    mapped: str = ""


def rank(query: np.ndarray, vectors: np.ndarray, entries: list[tuple[int, str, str]], k: int) -> list[Found]:
    """Return the k entries nearest to a query, float32 [D], and of equal ones those with the lower ids.

    vectors: float32 [n, D]. entries: id, name and `New.mapped` of each. A sum per row in float64: the result
    does not depend on the position of the row.
    """
    exact = (vectors * query.astype(np.float64)).sum(axis=1)
    order = np.lexsort(([number for number, *_ in entries], -exact))[:k]
    return [Found(float(exact[i]), *entries[i]) for i in order]


def check_entries(place: object, entries: Iterable[Sequence[Any]], vectors: np.ndarray | None = None) -> None:
    """Raise StoreError for what no store may have: an odd id, an unsafe name, a vector without norm 1 or 0.

    entries: id, name and more of each. vectors: float32 [n, D].
    """
    entries = list(entries)
    odd = [number for number, *_ in entries if not 0 < number <= LARGEST_ID]
    wrong = [f"an id is {number}; expected 1 to {LARGEST_ID}" for number in odd]
    if vectors is not None:
        rows = np.flatnonzero(~are_normalised(vectors))
        wrong += [f"the vector of entry {entries[row][0]} does not have norm 1" for row in rows]
    if wrong:
        raise StoreError(f"{place}: {wrong[0]}; choose another store")
    for _, name, *_ in entries:
        check_name(name)


class Store:
    """Enrolled entries. SQLite has the only copy that counts; searches use an index in memory.

    `write` returns after the transaction is on disk (WAL, synchronous=FULL). A file is used by one server at
    a time. All methods may be called from any thread.

    Args:
        path: the file; it is created if it does not exist.
        model: fingerprint of the network; by default that of the entries.
        size: D, values per vector; by default that of the entries.

    Raises:
        DataError: the file is damaged, is no such file, is of another user, or is in use.
        CheckpointError: it has entries of another network.
    """

    def __init__(self, path: Path, model: str = "", size: int = 0) -> None:
        self.path, self.model, self.size = path, model, size
        self._lock = threading.Lock()
        with self._refusing():
            # A journal of another database deletes any file that it names. Stores use a write-ahead log.
            if os.path.lexists(f"{path}-journal"):
                raise DataError(f"{path}-journal exists, of a killed start or another program; remove it")
            with contextlib.suppress(FileExistsError):  # only for its owner; to close a file drops its locks
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            for file in (path, Path(f"{path}-wal")):
                status = file.lstat() if os.path.lexists(file) else None
                is_own = status is None or (status.st_uid in (os.geteuid(), 0) and status.st_nlink == 1)
                if not is_own or (status and not stat.S_ISREG(status.st_mode)):
                    raise DataError(
                        f"{file} belongs to another user, who could read all entries, is a link, or has "
                        "another name (a hard link); copy it"
                    )
            place = path.absolute()  # ":memory:" alone would be no file
            self._database = sqlite3.connect(place, isolation_level=None, check_same_thread=False, timeout=1)
            try:
                self._open()
            except BaseException:
                self._database.close()
                raise

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._entries)

    def write(self, changes: Sequence[Change]) -> list[int | bool | Exception]:
        """Enrol and delete entries in one transaction.

        Returns, per change, the id of the new entry; whether the entry to delete existed; or a DataError
        if there are too many entries.
        """
        results: list[int | bool | Exception] = []
        with self._lock:
            room = MOST_ENTRIES - len(self)
            with self._refusing(), self._transaction():
                for change in changes:
                    if isinstance(change, int):
                        cursor = self._database.execute("DELETE FROM entries WHERE id = ?", (change,))
                        results.append(cursor.rowcount > 0)
                    elif room < 1:
                        results.append(DataError(f"the store has {MOST_ENTRIES} entries; delete some first"))
                    else:
                        results.append(self._insert(change))
                        room -= 1
            self._change_index(changes, results)
        return results

    def search(self, queries: np.ndarray, k: int) -> list[list[Found]]:
        """Return the k nearest entries of each query, the nearest first. queries: float32 [q, D], norm 1."""
        with self._lock:
            count = len(self)
            if not count:
                return [[] for _ in queries]
            most = min(k + 16, count)  # the products of equal vectors differ by rounding errors
            scores = queries @ self._vectors[:count].T
            rows = np.argpartition(-scores, most - 1, axis=1)[:, :most]
            return [
                rank(query, self._vectors[near], [self._entries[i] for i in near], k)
                for query, near in zip(queries, rows, strict=True)
            ]

    def thumbnail(self, number: int) -> bytes | None:
        """Return the JPEG file of an entry; None if there is no such entry."""
        rows = self._read("CAST(thumbnail AS BLOB)", "WHERE id = ?", number)
        return rows[0][0] if rows else None

    def entries(self, after: int, count: int) -> list[tuple[int, str, str, bool]]:
        """Return id, name, time of enrolment and whether it is mapped of the first entries after an id."""
        columns = "id, CAST(name AS TEXT), CAST(enrolled AS TEXT), instr(model, ' ') > 0"
        return self._read(columns, "WHERE id > ? ORDER BY id LIMIT ?", after, count)

    def read(self, after: int, count: int) -> list[New]:
        """Return the first entries whose id is larger than `after`."""
        time = "datetime(enrolled, '+0 days')"  # of 30 February: 1 March
        time = f"CASE WHEN {time} >= '0001' THEN {time} || '+00:00' END"  # else NULL
        columns = "CAST(name AS TEXT), CAST(vector AS BLOB), CAST(thumbnail AS BLOB), id, CAST(model AS TEXT)"
        rows = self._read(f"{columns}, {time}", "WHERE id > ? ORDER BY id LIMIT ?", after, count)
        if undated := [number for *_, number, _, when in rows if when is None]:
            raise DataError(f"{self.path}: entry {undated[0]} has no valid time; choose another store")
        return [
            New(n, np.frombuffer(v, "<f4"), t, i, datetime.fromisoformat(e), model.partition(" ")[2])
            for n, v, t, i, model, e in rows
        ]

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()

    def _read(self, columns: str, ending: str, *values: int) -> list[Any]:
        with self._lock, self._refusing():
            return self._database.execute(f"SELECT {columns} FROM entries {ending}", values).fetchall()

    def _open(self) -> None:
        run = self._database.execute
        run("PRAGMA locking_mode = EXCLUSIVE")
        run("PRAGMA trusted_schema = OFF")
        schema = [text for (text,) in run("SELECT sql FROM sqlite_master ORDER BY name")]
        is_new = not schema
        version = (run("PRAGMA application_id").fetchone()[0], run("PRAGMA user_version").fetchone()[0])
        problem = "not of version 1"  # a view or a trigger could run for ever
        if is_new or (*version, schema) == (_APPLICATION, _VERSION, [_SCHEMA.strip(), _OF_SQLITE]):
            problem = run("PRAGMA quick_check(1)").fetchone()[0]  # ids out of order, say
        if problem != "ok":
            raise DataError(f"{self.path} is not a store, or damaged ({problem}); choose another file")
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")
        run("PRAGMA secure_delete = ON")
        if is_new:
            with self._transaction():
                run(_SCHEMA)
                run(f"PRAGMA application_id = {_APPLICATION}")
                run(f"PRAGMA user_version = {_VERSION}")
        self._build_index()

    def _build_index(self) -> None:
        """Read all vectors."""
        if not self.model:
            query = "SELECT CAST(model AS TEXT), length(CAST(vector AS BLOB)) / 4 FROM entries LIMIT 1"
            if (first := self._database.execute(query).fetchone()) is None:
                raise DataError(f"{self.path} has no entries")
            self.model, self.size = first[0].partition(" ")[0], first[1]
        columns = "id, CAST(name AS TEXT), CAST(vector AS BLOB), CAST(model AS TEXT)"
        rows = self._database.execute(f"SELECT {columns} FROM entries ORDER BY id")
        self._entries: list[tuple[int, str, str]] = []  # id, name and `New.mapped`
        self._vectors = np.empty((64, self.size), np.float32)
        for number, name, vector, model in rows:
            network, _, mapped = model.partition(" ")
            if (network, len(vector)) != (self.model, 4 * self.size):
                raise CheckpointError(
                    f"{self.path} has entries of another network (weights {model:.16}, {len(vector) // 4} "
                    f"values; not {self.model:.16}, {self.size}); choose another store"
                )
            self._append(number, name, sys.intern(mapped), np.frombuffer(vector, "<f4"))
        check_entries(self.path, self._entries, self._vectors[: len(self)])

    def _append(self, number: int, name: str, mapped: str, vector: np.ndarray) -> None:
        if len(self) == len(self._vectors):
            self._vectors = np.concatenate([self._vectors, np.empty_like(self._vectors)])
        self._vectors[len(self)] = vector
        self._entries.append((number, name, mapped))

    def _insert(self, new: New) -> int:
        time = new.enrolled and new.enrolled.isoformat(" ")[:19]
        model = f"{self.model} {new.mapped}" if new.mapped else self.model
        cursor = self._database.execute(
            "INSERT INTO entries (name, vector, thumbnail, model, id, enrolled) "
            "VALUES (?, ?, ?, ?, ?, COALESCE(?, CURRENT_TIMESTAMP))",
            (new.name, _stored(new.vector), new.thumbnail, model, new.id, time),
        )
        assert cursor.lastrowid is not None
        check_entries(self.path, [(cursor.lastrowid, new.name)])  # SQLite counts from what the file says
        return cursor.lastrowid

    def _change_index(self, changes: Sequence[Change], results: Sequence[int | bool | Exception]) -> None:
        """Apply a committed transaction to the index."""
        deleted = set()
        for change, result in zip(changes, results, strict=True):
            if isinstance(change, New) and isinstance(result, int):
                self._append(result, change.name, change.mapped, change.vector)
            elif result is True:
                deleted.add(change)
        if deleted:
            kept = [row for row, (number, *_) in enumerate(self._entries) if number not in deleted]
            self._vectors = np.concatenate([self._vectors[kept], np.empty((64, self.size), np.float32)])
            self._entries = [self._entries[row] for row in kept]

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Convert errors of SQLite to StoreError."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            what = (
                "is in use, for example by plsc serve"
                if "locked" in str(error)
                else f"cannot be used ({error})"
            )
            raise StoreError(f"{self.path} {what}; choose another store") from error


def _stored(vector: np.ndarray) -> bytes:
    return vector.astype("<f4").tobytes()
