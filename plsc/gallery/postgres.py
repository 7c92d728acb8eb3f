"""Enrolled entries in PostgreSQL: a table per network, with an HNSW index of pgvector.

The table has the vectors in float32, and the index in float16 (halfvec). A search takes candidates from the
index and compares them again exactly, as `Store` does: what both find has the same similarity.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from plsc.errors import CheckpointError, OptionError, shown
from plsc.gallery.store import Change, Found, New, StoreError, check_entries, rank
from plsc.version import install

try:
    import psycopg
    from pgvector.psycopg.vector import register_vector_info
    from psycopg_pool import ConnectionPool
except ImportError as error:
    raise OptionError(f"PostgreSQL needs a package ({error}): {install('postgres')}") from error

logger = logging.getLogger(__name__)
_ABOUT = "plsc entries, version 1, weights "  # comment of a table, followed by the fingerprint
_SAFE = "SET search_path = pg_catalog, pg_temp"  # no function or operator of others is called
_UNSAFE = (
    "is no ordinary, logged table of plsc without triggers, or its owner is not trusted (docs/gallery.md)"
)
_TRUSTED = """
    WITH RECURSIVE ours AS (
        SELECT oid AS role FROM pg_roles WHERE rolname = current_user
        UNION SELECT roleid FROM pg_auth_members AS granted JOIN ours ON member = role
        -- Who creates a role is a member that may only grant it, since PostgreSQL 16, which has this column.
        WHERE coalesce((to_jsonb(granted) ->> 'inherit_option')::bool, true)),
    trusted AS (SELECT role FROM ours UNION SELECT oid FROM pg_roles WHERE rolsuper
        OR rolname = 'pg_database_owner' OR oid = (SELECT datdba FROM pg_database
            WHERE datname = current_database()))"""
_TABLES = (
    _TRUSTED
    + """
    SELECT substr(about, length(%(about)s) + 1), atttypmod, nspname::text FROM pg_class AS relation
    JOIN pg_namespace AS schema ON schema.oid = relnamespace JOIN pg_attribute ON attrelid = relation.oid,
        obj_description(relation.oid, 'pg_class') AS about
    WHERE relkind = 'r' AND relpersistence = 'p' AND attname = 'vector' AND atttypmod > 0
        AND nspname = ANY(%(schemas)s) AND starts_with(about, %(about)s)
        AND relname = 'plsc_' || substr(about, length(%(about)s) + 1, 16)
        AND NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = relation.oid)
        AND NOT EXISTS (SELECT FROM pg_rewrite WHERE ev_class = relation.oid)
        AND relowner IN (TABLE trusted) AND nspowner IN (TABLE trusted)  -- who could replace the table
    ORDER BY array_position(%(schemas)s::text[], nspname::text) DESC"""
)
_COLUMNS = {"name": "text", "vector": "vector", "thumbnail": "bytea", "id": "int8"}
_COLUMNS |= {"enrolled": "timestamptz", "mapped": "text"}
_OLDEST = (0, 8)  # of pgvector: has iterative scans, so that deleted entries do not hide others
_LEAST_EF, _MOST_EF = 100, 1000  # of hnsw.ef_search: 52, for k = 10, finds less; a scan for more iterates
_SAMPLE, _NEAREST, _ROWS = 100, 10, 4096  # to measure recall: queries, entries per query, rows read at a time
_COUNT_SECONDS = 60.0  # changes by other servers are counted so late
_LOCK = 0x706C7363  # key of advisory locks: "plsc"
_LIMITS = {"connect_timeout": 5, "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 2}
_POOL = {"min_size": 0, "max_size": 8, "timeout": 5, "reconnect_timeout": 5, "open": True}


class PostgresStore:
    """Enrolled entries of one network in a table of PostgreSQL, for any number of servers at a time.

    What `write` has returned is on disk, and is found by all servers. Methods raise StoreError as long as the
    connection is lost, and may be called from any thread.

    Args:
        url: ``postgresql://user:password@host:port/database``; libpq's variables and files count, too.
        model: fingerprint of the network; without `size`, its first digits, if they are those of one table.
        size: D, values per vector; the table is created if it does not exist. 0: it must exist.
        timeout: seconds until a connection that accepts no data counts as lost; 0: as the system decides.
            On a slow disk, a large transaction may wait for minutes.

    Raises:
        OptionError: the URL cannot be parsed.
        StoreError: the database cannot be used.
        CheckpointError: it has no entries of the network, or they are of another size.
    """

    def __init__(self, url: str, model: str, size: int = 0, timeout: int = 0) -> None:
        self.path = shown(url)
        try:
            given = psycopg.conninfo.conninfo_to_dict(url)
            if not re.fullmatch(r"[a-z]+://([^@/?]*@)?[^@]*", url):  # part of the password would be the host
                raise psycopg.ProgrammingError
        except psycopg.Error:  # its message may contain the password
            expected = "%40 for @, %2F for / and %20 for a blank in its user name and password"
            raise OptionError(f"the URL of the database cannot be parsed; expected {expected}") from None
        how: dict[str, Any] = {**_LIMITS, "tcp_user_timeout": 1000 * timeout, **given, "autocommit": True}
        how["client_encoding"] = "utf8"
        with self._refusing(), psycopg.connect(**how) as connection, connection.transaction():
            encoding = connection.info.parameter_status("server_encoding")
            if encoding != "UTF8":  # one name that it lacks would fail the enrolments of all who wait
                raise StoreError(f"{self.path} has the encoding {encoding}; expected UTF8")
            [[found]] = connection.execute("SELECT pg_catalog.current_schemas(false)::pg_catalog.text[]")
            schemas = found or ["public"]
            connection.execute(_SAFE)
            self._pgvector = _find_extension(connection, self.path)[0]
            self._open_table(connection, model, size, schemas)
        self._ids = f"pg_get_serial_sequence({psycopg.sql.quote(self._table)}, 'id')"
        pool: Any = {**_POOL, "configure": _configure, "check": ConnectionPool.check_connection}
        self._pool: Any = ConnectionPool(kwargs=how, **pool)
        self._count = 0
        self.entries(0, 0)  # counts them

    def __len__(self) -> int:
        """Return the number of entries, without a query; changes by other servers count a minute later."""
        return self._count

    def write(self, changes: Sequence[Change], builds: bool = False) -> list[int | bool | Exception]:
        """Change entries in one transaction, as `Store.write`; builds: it also builds the index."""
        news = [one for one in changes if isinstance(one, New)]
        gone = [one for one in changes if isinstance(one, int)]
        with self._connected() as connection, connection.transaction(), connection.cursor() as cursor:
            cursor.execute(f"LOCK {self._table} IN ROW EXCLUSIVE MODE")  # no trigger can be added
            if self.model not in self._find_tables(connection, [self._schema]):
                raise StoreError(f"{self.path}: {self._table} {_UNSAFE}")
            cursor.execute(f"DELETE FROM {self._table} WHERE id = ANY(%s) RETURNING id", [gone])
            deleted = {number for (number,) in cursor}
            cursor.execute(f"SELECT nextval({self._ids}), now() FROM generate_series(1, %s)", [len(news)])
            free = cursor.fetchall()
            ids = [one.id or number for one, (number, _) in zip(news, free, strict=True)]
            check_entries(self.path, [(number, one.name) for number, one in zip(ids, news, strict=True)])
            command = f"COPY {self._table} ({', '.join(_COLUMNS)}) FROM STDIN (FORMAT BINARY)"
            with cursor.copy(command) as copy:
                copy.set_types(list(_COLUMNS.values()))
                for one, number, (_, now) in zip(news, ids, free, strict=True):
                    when = one.enrolled or now
                    copy.write_row([one.name, one.vector, one.thumbnail, number, when, one.mapped])
            if ids and ids[-1] > free[-1][0]:
                cursor.execute(f"SELECT setval({self._ids}, %s)", [ids[-1]])
            if builds:
                self._build(connection)
        self._count += len(news) - len(deleted)
        numbers, results = iter(ids), list[int | bool | Exception]()
        for change in changes:
            results.append(change in deleted if isinstance(change, int) else next(numbers))
            deleted -= {change} if isinstance(change, int) else set()  # given twice, it is deleted once
        return results

    def build_index(self) -> bool:
        """Build the HNSW index unless there is one; return whether it was built, for entries."""
        with self._connected() as connection, connection.transaction():
            return self._build(connection) and len(self) > 0

    def search(self, queries: np.ndarray, k: int) -> list[list[Found]]:
        """Return the k nearest entries of each query, the nearest first. queries: float32 [q, D], norm 1.

        A few of the nearest may be missing: see `measure_recall`.
        """
        # The index orders 16-bit vectors. `rank` compares more candidates than k again, in float32.
        count, half = 4 * k + 12, f"{self._pgvector}.halfvec({self.size})"
        setting = f"SET hnsw.ef_search = {min(max(count, _LEAST_EF), _MOST_EF)}"
        order = f"(vector::{half}) OPERATOR({self._pgvector}.<#>) %b::{self._pgvector}.vector::{half}"
        query = f"SELECT vector, id, name, mapped FROM {self._table} ORDER BY {order} LIMIT {count}"
        with self._connected() as connection:
            with connection.pipeline():
                connection.execute(setting)
                answers = [connection.execute(query, [one], binary=True) for one in queries]
            found = [answer.fetchall() for answer in answers]
        pairs = zip(queries, found, strict=True)
        return [rank(one, self._stacked(rows), [row[1:] for row in rows], k) for one, rows in pairs]

    def measure_recall(self) -> float:
        """Return the share of the 10 nearest others of 100 random entries that `search` finds."""
        with self._connected() as connection, connection.transaction():
            vectors = f"SELECT vector, id, '' FROM {self._table}"
            sample = connection.execute(f"{vectors} ORDER BY random() LIMIT {_SAMPLE}", binary=True)
            queries = self._stacked(sample.fetchall())
            best = np.empty((len(queries), 0))
            with connection.cursor("vectors") as cursor:
                cursor.execute(vectors, binary=True)
                while rows := cursor.fetchmany(_ROWS):
                    best = np.concatenate([best, queries @ self._stacked(rows).T], axis=1)
                    best = -np.sort(-best, axis=1)[:, : _NEAREST + 1]
        found = zip(self.search(queries, _NEAREST + 1), best[:, -1], strict=True)
        # Equal entries may be found in place of each other. Each entry finds itself.
        hits = sum(one.similarity > low - 1e-6 for row, low in found for one in row) - len(queries)
        return hits / max(1, best.size - len(queries)) if best.shape[1] > 1 else 1.0

    def thumbnail(self, number: int) -> bytes | None:
        """Return the JPEG file of an entry; None if there is no such entry."""
        rows = self._read("thumbnail", "WHERE id = %s", number)
        return rows[0][0] if rows else None

    def entries(self, after: int, count: int) -> list[tuple[int, str, str, bool]]:
        """As `Store.entries`."""
        self._counted = float("-inf")  # whoever lists entries wants their present number, too
        columns = "id, name, enrolled, mapped <> ''"
        rows = self._read(columns, "WHERE id > %s ORDER BY id LIMIT %s", after, count)
        check_entries(self.path, rows)
        return [(number, name, f"{time:%Y-%m-%d %H:%M:%S}", mapped) for number, name, time, mapped in rows]

    def read(self, after: int, count: int) -> list[New]:
        """Return the first entries whose id is larger than `after`."""
        columns = "vector, id, name, thumbnail, enrolled, mapped"
        rows = self._read(columns, "WHERE id > %s ORDER BY id LIMIT %s", after, count)
        pairs = zip(rows, self._stacked(rows), strict=True)
        return [New(name, vector, jpeg, i, *rest) for (_, i, name, jpeg, *rest), vector in pairs]

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()

    def _find_tables(self, connection: Any, schemas: list[str]) -> dict[str, tuple[int, str]]:
        """Return vector size and schema of the safe tables, by network; of two, that of the first schema."""
        rows = connection.execute(_TABLES, {"about": _ABOUT, "schemas": schemas}).fetchall()
        return {network: (size, schema) for network, size, schema in rows}

    def _open_table(self, connection: Any, model: str, size: int, schemas: list[str]) -> None:
        """Find the table of a network; create it if `size` is given."""
        known = self._find_tables(connection, schemas)
        if size and model not in known:  # of two servers, one creates it; any role may hold the lock
            connection.execute(f"SET LOCAL lock_timeout = '5s'; SELECT pg_advisory_xact_lock({_LOCK})")
            known = self._find_tables(connection, schemas)
        others = ", ".join(f"{one:.16}" for one in sorted(known)) or "none"
        if not size:
            matching = [one for one in known if one.startswith(model)]
            if len(matching) != 1:
                which = f"the network {model:.16}" if model else "one network"
                text = f"does not have entries of {which}; networks that have some: {others}"
                raise CheckpointError(f"{self.path} {text}")
            [model] = matching
        self.model, (self.size, self._schema) = model, known.get(model, (size, schemas[0]))
        self._table = psycopg.sql.Identifier(self._schema, f"plsc_{model:.16}").as_string()
        self._index = f"plsc_{model:.16}_hnsw"
        if size not in (0, self.size):
            raise CheckpointError(f"{self.path} has vectors of {self.size} values; the model has {size}")
        if model in known:
            return
        if known:
            text = f"{self.path} has no entries of this network; those of others ({others}) are not searched"
            logger.warning(text)
        # The vector is in the row; by default it would be in another table, in two parts.
        connection.execute(f"""
            CREATE TABLE {self._table} (
                id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
                name text NOT NULL,
                vector {self._pgvector}.vector({size}) NOT NULL,
                thumbnail bytea NOT NULL,
                enrolled timestamptz NOT NULL,
                mapped text NOT NULL DEFAULT ''
            );
            ALTER TABLE {self._table} ALTER vector SET STORAGE MAIN, ALTER thumbnail SET STORAGE EXTERNAL;
            COMMENT ON TABLE {self._table} IS {psycopg.sql.quote(_ABOUT + model)}""")
        if model not in self._find_tables(connection, [self._schema]):  # in a schema of others
            raise StoreError(f"{self.path}: {self._table} {_UNSAFE}")

    def _read(self, columns: str, ending: str, *values: int) -> list[Any]:
        with self._connected() as connection:
            query = f"SELECT {columns} FROM {self._table} {ending}"
            return connection.execute(query, values, binary=True).fetchall()

    def _build(self, connection: Any) -> bool:
        query = "SELECT FROM pg_index WHERE indrelid = to_regclass(%s) AND indexrelid = to_regclass(%s)"
        index = psycopg.sql.Identifier(self._schema, self._index).as_string()
        if not connection.execute(query, [self._table, index]).rowcount:  # one server builds it, for minutes
            connection.execute("SET LOCAL lock_timeout = 0")
            connection.execute(f"LOCK {self._table} IN SHARE UPDATE EXCLUSIVE MODE")
        if connection.execute(query, [self._table, index]).rowcount:
            return False
        column = f"(vector::{self._pgvector}.halfvec({self.size})) {self._pgvector}.halfvec_ip_ops"
        name = psycopg.sql.Identifier(self._index).as_string()
        connection.execute(f"CREATE INDEX {name} ON {self._table} USING hnsw ({column})")
        connection.execute(f"ANALYZE {self._table}")
        return True

    def _stacked(self, rows: list[Any]) -> np.ndarray:
        vectors = np.array([row[0].to_numpy() for row in rows], np.float32).reshape(-1, self.size)
        check_entries(self.path, (row[1:] for row in rows), vectors)
        return vectors

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Any]:
        with self._refusing(), self._pool.connection() as connection:
            if time.monotonic() > self._counted + _COUNT_SECONDS:
                query = f"SELECT count(*), coalesce(min(id), 1) FROM {self._table}"
                self._count, least = connection.execute(query).fetchone()
                check_entries(self.path, [(least, "")])  # it would be found, but not listed
                self._counted = time.monotonic()
            yield connection

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Convert errors of the database to StoreError. Their messages do not contain the password."""
        try:
            yield
        except psycopg.Error as error:
            what = (str(error).splitlines() or [type(error).__name__])[0]
            raise StoreError(f"{self.path} cannot be used ({what}); check the database and rights") from error


def _configure(connection: Any) -> None:
    connection.execute(_SAFE)
    register_vector_info(connection, psycopg.types.TypeInfo("vector", *_find_extension(connection)[1:]))
    # What was answered is on disk. Stricter settings, for replicas, are kept. Whoever holds a row stops one
    # writer, for whom all others wait.
    connection.execute("""
        SET lock_timeout = '5s';
        SET hnsw.iterative_scan = relaxed_order;
        SET timezone = 'UTC';
        SET datestyle = 'ISO';
        SELECT set_config('synchronous_commit', 'on', false)
        WHERE current_setting('synchronous_commit') = 'off'""")


def _find_extension(connection: Any, path: str = "the database") -> tuple[str, int, int]:
    """Return the schema of pgvector, quoted, and the ids of its type and of the arrays of it."""
    query = f"""{_TRUSTED}
        SELECT extowner IN (TABLE trusted) AND nspowner IN (TABLE trusted), extversion, quote_ident(nspname),
            pg_type.oid, typarray FROM pg_extension
        JOIN pg_namespace ON pg_namespace.oid = extnamespace JOIN pg_type ON typnamespace = extnamespace
        WHERE extname = 'vector' AND typname = 'vector'"""
    found = connection.execute(query).fetchone()
    if found is None or not found[0] or tuple(map(int, found[1].split(".")[:2])) < _OLDEST:
        has = f"pgvector {found[1]} in {found[2]}" if found else "no pgvector (CREATE EXTENSION vector)"
        raise StoreError(f"{path} has {has}; expected 0.8 or newer of a trusted role (docs/trust.md)")
    return found[2:]
