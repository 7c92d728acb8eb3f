"""Stores in PostgreSQL: the interface they share with SQLite, several at a time, failures, and copies."""

import contextlib
import logging
import traceback
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("psycopg", reason="plsc-torch[postgres] is not installed")
import psycopg

import plsc.gallery.gallery
from plsc.cli import main
from plsc.errors import CheckpointError, DataError, OptionError
from plsc.gallery import open_gallery, write_gallery
from plsc.gallery.gallery import copy_gallery, open_store
from plsc.gallery.store import New, StoreError
from tests.images import NAMES
from tests.postgres_server import PASSWORD, connected

SIZE = 32


@contextlib.contextmanager
def opened(place, model="m1", size=SIZE):
    with contextlib.closing(open_store(str(place), model, size)) as store:
        yield store


def vectors(count, seed=0, size=SIZE):
    found = np.random.default_rng(seed).standard_normal((count, size)).astype(np.float32)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def news(count, seed=0):
    return [New(f"n{i}", vector, b"jpeg %d" % i) for i, vector in enumerate(vectors(count, seed))]


def contents(store):
    return [(one.id, one.name, one.vector.tobytes(), one.thumbnail) for one in store.read(0, 10**6)]


def ids_of(store):
    return [one.id for one in store.read(0, 10**6)]


def test_both_stores_give_the_same_results_for_the_same_calls(database, tmp_path):
    with opened(database) as ours, opened(tmp_path / "s.sqlite") as sqlite:
        ours.build_index()
        results = []
        for store in (ours, sqlite):
            zero = New("zero", np.zeros(SIZE, np.float32), b"")
            named = [New(name, vector, b"") for name, vector in zip(NAMES, vectors(40, seed=2), strict=False)]
            first = store.write([*news(40), zero])
            changes = [
                first[3],
                *news(3, seed=1),
                first[3],
                10**9,
                first[20],
                New("equal", vectors(1)[0], b""),
            ]
            changed = store.write(changes)
            store.write(named)
            assert tuple(entry.name for entry in store.read(45, 99)) == NAMES
            found = store.search(np.concatenate([vectors(40), vectors(5, seed=7)]), 9)
            looks = [store.thumbnail(first[1]), store.thumbnail(10**9), store.thumbnail(first[3])]
            listed = [row[:2] for row in store.entries(first[2], 7)]
            results.append((first, changed, found, looks, listed, contents(store), len(store)))
        assert results[0] == results[1]
        assert results[0][1] == [True, 42, 43, 44, False, False, True, 45]
        [[time], [other]] = [[row[2] for row in store.entries(0, 1)] for store in (ours, sqlite)]
        assert len(time) == len(other) == len("2026-01-01 00:00:00")
        assert abs(np.datetime64(time) - np.datetime64(other)) < np.timedelta64(10, "m")  # UTC
        assert set(ours.write(ids_of(ours))) == {True}
        assert min(ours.write(news(2))) > 45 + len(NAMES)


def test_what_servers_enrol_at_a_time_is_found_by_all_and_by_one_that_starts_later(database):
    with opened(database) as first, opened(database) as second, ThreadPoolExecutor(2) as pool:
        first.build_index()
        batches = [news(7, seed=number) for number in range(20)]
        ids = pool.map(lambda one: one[0].write(one[1]), zip([first, second] * 10, batches, strict=True))
        assert len({number for batch in ids for number in batch}) == len(second.entries(0, 1000)) == 140
        [[nearest]] = second.search(vectors(7, seed=4)[5:6], 1)
        assert nearest.name == "n5"
        with opened(database, size=0) as third:
            assert contents(third) == contents(first) == contents(second)
            assert third.search(vectors(3), 5) == first.search(vectors(3), 5)


def test_settings_of_a_role_change_neither_the_place_of_its_table_nor_the_times(database):
    url = f"{database}?options=-csearch_path%3D%20-cdatestyle%3DGerman"
    for count in (1, 2):
        with opened(url) as store:
            store.write(news(1))
            assert len(store.entries(0, 9)) == count


def test_types_of_others_before_those_of_the_server_are_not_used(database):
    with connected(database) as connection:
        connection.execute("CREATE SCHEMA theirs")
        fails = "BEGIN RAISE 'theirs'; END"
        connection.execute(f"CREATE FUNCTION theirs.f(_text) RETURNS bool LANGUAGE plpgsql AS $${fails}$$")
        connection.execute("CREATE DOMAIN theirs.text AS pg_catalog.text[] CHECK (theirs.f(VALUE))")
    with opened(f"{database}?options=-csearch_path%3Dtheirs,pg_catalog") as store:
        assert store.write(news(1)) == [1]


def test_the_index_finds_nearly_all_nearest_entries_and_deleted_ones_hide_none(database):
    centres = vectors(100, seed=5, size=128)
    crowd = np.repeat(centres, 60, axis=0) + 0.3 * vectors(6000, seed=6, size=128)
    crowd = (crowd / np.linalg.norm(crowd, axis=1, keepdims=True)).astype(np.float32)
    with opened(database, size=128) as store:
        store.write([New(str(i), one, b"") for i, one in enumerate(crowd)], builds=True)
        assert not store.build_index()
        with connected(database) as connection:
            order = "(vector::halfvec(128)) <#> %s::halfvec(128)"
            query = f"EXPLAIN SELECT id FROM plsc_m1 ORDER BY {order} LIMIT 52"
            plan = connection.execute(query, [str(crowd[0].tolist())]).fetchall()
            assert "Index Scan using plsc_m1_hnsw" in plan[1][0]
        for _ in range(2):
            assert 0.9 < store.measure_recall() <= 1  # its index is random
            kept = np.array(ids_of(store))
            queries = vectors(50, seed=8, size=128) * 0.3 + centres[:50]
            queries = (queries / np.linalg.norm(queries, axis=1, keepdims=True)).astype(np.float32)
            best = np.argsort(-(queries @ crowd[kept - 1].T), axis=1)[:, :10]
            found = store.search(queries, 10)
            hits = [len({one.id for one in row} & {*kept[one]}) for row, one in zip(found, best, strict=True)]
            assert sum(hits) > 0.9 * 500
            assert len(store.search(queries[:1], 300)[0]) == 300
            store.write([int(number) for number in kept if number % 60 > 12])  # not vacuumed yet


@pytest.mark.parametrize(
    "how", ["extension", "old", "rights", "size", "encoding", "password", "port", "percent", "slash"]
)
def test_a_database_that_cannot_be_used_is_one_message_and_is_unchanged(
    database, postgres, how, capsys, caplog
):
    url, kind, message = database, StoreError, "CREATE EXTENSION vector"
    with connected(database) as connection:
        if how == "extension":
            connection.execute("DROP EXTENSION vector")
        elif how == "old":
            connection.execute("SET allow_system_table_mods = on")
            connection.execute("UPDATE pg_extension SET extversion = '0.7.4' WHERE extname = 'vector'")
            message = "pgvector 0.7.4"
        elif how == "rights":
            connection.execute("DROP ROLE IF EXISTS guest")
            connection.execute(f"CREATE ROLE guest LOGIN PASSWORD '{PASSWORD}'")
            url, message = postgres.url("one", f"guest:{PASSWORD}"), "permission denied for schema public"
        elif how == "encoding":
            connection.execute("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
            url, message = postgres.url("latin", f"plsc:{PASSWORD}"), "LATIN1"
        elif how == "size":
            with opened(database, size=SIZE + 1):
                kind, message = CheckpointError, f"has vectors of {SIZE + 1} values; the model has {SIZE}"
        before = tables(connection)
    if how == "password":
        url, message = postgres.url("one", f"plsc:{PASSWORD}-wrong"), "password authentication failed"
    elif how == "port":
        url, message = database.replace(f":{postgres.port}/", ":9/"), "Connection refused"
    elif how in ("percent", "slash"):
        kind, message = {"percent": (OptionError, "parsed"), "slash": (DataError, "%2F")}[how]
        url = f"postgresql://plsc:{PASSWORD}{'%zz' if how == 'percent' else '/'}{PASSWORD}@127.0.0.1/one"
    with pytest.raises(kind, match=message) as caught, opened(url):
        pass
    assert "\n" not in str(caught.value)
    shown = "".join(traceback.format_exception(caught.value, limit=0))  # with its causes
    assert PASSWORD not in "".join([shown, caplog.text, *capsys.readouterr()])
    with connected(database) as connection:
        assert tables(connection) == before


def tables(connection):
    return connection.execute("SELECT relname FROM pg_class WHERE relname LIKE 'plsc%' ORDER BY 1").fetchall()


RUNS = "INSERT INTO ran VALUES (1)"
HOSTILE = {
    "view": """ALTER TABLE plsc_m1 RENAME TO kept; CREATE FUNCTION spy(vector) RETURNS vector LANGUAGE plpgsql
        AS $$ BEGIN INSERT INTO ran VALUES (1); RETURN $1; END $$;
        CREATE VIEW plsc_m1 AS SELECT id, name, spy(vector)::vector(32) AS vector, thumbnail, enrolled, mapped
        FROM kept; GRANT ALL ON plsc_m1 TO app;
        COMMENT ON VIEW plsc_m1 IS 'plsc entries, version 1, weights m1'""",
    "trigger": """CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql
        AS $$ BEGIN INSERT INTO ran VALUES (1); RETURN NULL; END $$;
        CREATE TRIGGER swallow BEFORE INSERT OR DELETE ON plsc_m1 FOR EACH ROW EXECUTE FUNCTION swallow()""",
    "rule": "CREATE RULE swallow AS ON DELETE TO plsc_m1 DO INSTEAD INSERT INTO ran VALUES (1)",
    "unlogged": "ALTER TABLE plsc_m1 SET UNLOGGED",
    "owner": "ALTER TABLE plsc_m1 OWNER TO other",
}


@pytest.fixture
def roles(database, postgres):
    """URLs by role: `app`, which is a member of `team`, may use all tables and owns none; and a superuser."""
    with connected(database) as connection:
        for role in ("app", "team", "other"):
            with contextlib.suppress(psycopg.errors.DuplicateObject):
                connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{PASSWORD}'")
        connection.execute("GRANT team TO app; GRANT ALL ON SCHEMA public TO other, team")
        connection.execute("CREATE TABLE ran (x int); GRANT ALL ON ran TO public")
        with opened(database) as store:
            store.write(news(3))
        connection.execute("GRANT ALL ON ALL TABLES IN SCHEMA public TO app")
        connection.execute("GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO app")
    return {"app": postgres.url("one", f"app:{PASSWORD}"), "superuser": database}


@pytest.mark.parametrize(
    ("how", "role"),
    [*zip(HOSTILE, ["app", "superuser"] * 3, strict=False), ("view", "superuser"), ("trigger", "app")],
)
def test_a_relation_that_another_role_may_have_prepared_is_refused_and_runs_nothing(roles, how, role):
    with opened(roles[role]) as store:
        ids = store.write(news(1))
        with connected(roles["superuser"]) as connection:
            connection.execute(HOSTILE[how])
            for changes in (news(1), ids):  # of a store that is open
                with pytest.raises(StoreError, match="table"):
                    store.write(changes)
            for size in (SIZE, 0):
                with pytest.raises(DataError if size else CheckpointError):
                    open_store(roles[role], "m1", size)
            assert connection.execute("SELECT count(*) FROM ran").fetchone() == (0,)


def test_no_table_or_pgvector_of_a_schema_of_another_role_is_used(roles):
    with connected(roles["superuser"]) as connection:
        connection.execute("CREATE SCHEMA app AUTHORIZATION other; GRANT ALL ON SCHEMA app TO app")
        with pytest.raises(StoreError, match="table"):
            open_store(roles["app"], "m2", SIZE)  # the schema with the name of the role comes first
        connection.execute("ALTER TABLE plsc_m1 SET SCHEMA app; ALTER TABLE app.plsc_m1 OWNER TO app")
        with pytest.raises(CheckpointError):
            open_store(roles["app"], "m1", 0)
        connection.execute("ALTER EXTENSION vector SET SCHEMA app")
        with pytest.raises(StoreError, match="app"):  # DROP SCHEMA would drop the vectors
            open_store(roles["app"], "m1", 0)


@pytest.mark.parametrize("owner", ["app", "team", "boss", "superuser"])
def test_tables_of_our_roles_the_owner_of_the_database_and_superusers_are_opened(roles, owner):
    with connected(roles["superuser"]) as connection:
        if owner == "boss":
            with contextlib.suppress(psycopg.errors.DuplicateObject):
                connection.execute("CREATE ROLE boss")
            connection.execute("ALTER DATABASE one OWNER TO boss")
        if owner != "superuser":
            connection.execute(f"ALTER TABLE plsc_m1 OWNER TO {owner}; GRANT ALL ON plsc_m1 TO app")
    with opened(roles["app"], size=0) as store:
        assert len(store.write(news(1))) == 1
        assert len(store.search(vectors(1), 9)[0]) == 4


def test_a_role_that_we_only_created_is_not_trusted(roles):
    with connected(roles["superuser"]) as connection:
        connection.execute("DROP ROLE IF EXISTS made; ALTER ROLE app CREATEROLE")
        with connected(roles["app"]) as of_app:
            of_app.execute("CREATE ROLE made")  # PostgreSQL 16 makes app a member, which may grant it
        connection.execute("ALTER TABLE plsc_m1 OWNER TO made; GRANT ALL ON plsc_m1 TO app")
        connection.execute("ALTER ROLE app NOCREATEROLE")
        with pytest.raises(CheckpointError):
            open_store(roles["app"], "m1", 0)
        connection.execute("ALTER TABLE plsc_m1 OWNER TO app; DROP ROLE made")


def test_a_role_that_may_only_connect_stops_neither_opening_nor_the_index(roles, postgres):
    with connected(roles["superuser"]) as connection:
        connection.execute("ALTER TABLE plsc_m1 OWNER TO app")
        connection.execute("REVOKE ALL ON ALL TABLES IN SCHEMA public FROM other")
    with connected(postgres.url("one", f"other:{PASSWORD}")) as connection:
        connection.execute("SELECT pg_advisory_lock(1886155619)")
        connection.execute("SELECT pg_advisory_lock(1886155619, hashtext('plsc_m1_hnsw'))")
        with opened(roles["app"]) as store:
            assert store.build_index()
            assert not store.build_index()
        with pytest.raises(StoreError, match="lock"):
            open_store(roles["app"], "m2", SIZE)


def test_a_row_that_another_session_holds_is_one_error_and_stops_nobody_for_long(roles):
    with opened(roles["app"]) as store, connected(roles["superuser"]) as connection, connection.transaction():
        connection.execute("SELECT FROM plsc_m1 WHERE id = 1 FOR UPDATE")
        with pytest.raises(StoreError, match="lock"):
            store.write([1])
        assert len(store.write(news(1))) == 1


def test_decoys_stop_nothing_and_functions_of_others_are_not_called(roles, postgres):
    with connected(postgres.url("one", f"other:{PASSWORD}")) as connection:
        connection.execute("CREATE TABLE decoy (vector vector(7))")
        connection.execute("COMMENT ON TABLE decoy IS 'plsc entries, version 1, weights m1'")
        kinds = [("generate_series", f"int, {kind}", "SETOF int") for kind in ("smallint", "int", "bigint")]
        kinds += [("pg_advisory_xact_lock", "int", "int"), ("setval", "text, smallint", "bigint")]
        for name, given, returned in kinds:
            connection.execute(f"""CREATE FUNCTION public.{name}({given}) RETURNS {returned} LANGUAGE sql
                AS $$ {RUNS}; SELECT 1 $$""")
    for role in roles.values():
        with opened(role) as store:
            store.write(news(2))
            assert store.measure_recall() == 1
    with connected(roles["superuser"]) as connection:
        assert connection.execute("SELECT count(*) FROM ran").fetchone() == (0,)


@pytest.mark.parametrize(
    "change",
    [
        "vector = (SELECT array_agg(1000 * x)::vector FROM unnest(vector::real[]) AS x)",
        "id = 0",
        "name = E'a\x1b[2J'",
        "enrolled = '0044-03-15 BC'",
    ],
)
def test_what_no_store_writes_is_refused_when_it_is_read(database, tmp_path, change):
    with opened(database) as store:
        store.write(news(3))
        with connected(database) as connection:
            connection.execute(f"UPDATE plsc_m1 SET {change} WHERE id = 1")
        calls = [lambda: copy_gallery(database, str(tmp_path / "to.sqlite"))]
        if "enrolled" not in change:
            calls.append(lambda: store.search(vectors(1), 1))
        if "vector" not in change:
            calls.append(lambda: store.entries(0, 9))
        for call in calls:
            with pytest.raises(DataError):
                call()


def test_tables_of_other_networks_are_named_and_are_not_searched(database, caplog):
    with opened(database, "a" * 64) as first:
        first.write(news(3))
        with caplog.at_level(logging.WARNING), opened(database, "b" * 64) as second:
            assert "a" * 16 in caplog.text
            assert second.search(vectors(1), 3) == [[]]
    for model in ("c" * 64, ""):
        with pytest.raises(CheckpointError, match=r"a{16}, b{16}"):
            open_store(database, model)
    with connected(database) as connection:
        connection.execute("COMMENT ON TABLE plsc_bbbbbbbbbbbbbbbb IS 'other'")
    with pytest.raises(StoreError, match="plsc_bbbbbbbbbbbbbbbb"):
        open_store(database, "b" * 64, SIZE)


def test_a_full_disk_is_one_message_and_nothing_is_half_enrolled(database, postgres):
    size, largest = 1024, 17 * 2**20  # a file of the log has 16 MiB, and the table would have more
    many = [New(str(i), one, b"") for i, one in enumerate(vectors(5000, size=size))]
    postgres.limit_files(largest)
    try:
        with opened(database, size=size) as store:
            ids = store.write(many[:1])
            for builds in (False, True):
                with pytest.raises(StoreError, match="could not extend file"):
                    store.write(many, builds)
            assert ids_of(store) == ids
            assert len(store) == 1
            assert len(store.write(many[:10])) == 10
    finally:
        postgres.limit_files("unlimited")


def filled(kind, folder, postgres):
    """A gallery with the entries 0..29, in a store without id 3, as ids are not all there."""
    if kind == "folder":
        write_gallery(folder / "from", vectors(30), [f"n{i}" for i in range(30)], model="m1")
        return str(folder / "from")
    place = str(folder / "from.sqlite")
    if kind == "postgres":
        place = postgres.make_database("two")
    with opened(place) as store:
        first = store.write([*news(2), New("gone", vectors(1)[0], b"")])
        store.write([first[2], *news(30)[2:]])
    return place


@pytest.mark.parametrize(
    ("source", "target"), [("folder", "sqlite"), ("sqlite", "postgres"), ("postgres", "postgres")]
)
def test_an_interrupted_copy_to_a_store_continues_and_later_ids_are_larger(
    database, tmp_path, postgres, source, target, monkeypatch, capsys
):
    start = filled(source, tmp_path, postgres)
    end = database if target == "postgres" else f"{tmp_path}/t.sqlite"
    read = plsc.gallery.gallery.batches

    def interrupted(origin):
        [entries] = read(origin)
        yield entries[:7]
        yield entries[7:14]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(plsc.gallery.gallery, "batches", interrupted)
        with pytest.raises(KeyboardInterrupt):
            copy_gallery(start, end)
    assert main(["gallery", "copy", start, end]) == 0
    shown = end.replace(f"plsc:{PASSWORD}@", "")
    assert f"copied to {shown}: 30 entries, of which 14 were there" in capsys.readouterr().out
    assert copy_gallery(start, end).startswith("30 entries, of which 30 were there")
    with opened(end) as store:
        copied = contents(store)
        assert [name for _, name, _, _ in copied] == [f"n{i}" for i in range(30)]
        if source == "folder":
            assert [(one.id, one.vector.tobytes()) for one in store.read(0, 99)] == [
                (i, vector.tobytes())
                for i, vector in enumerate(np.concatenate([*open_gallery(start).parts()]), 1)
            ]
        else:
            with opened(start) as original:
                assert copied == contents(original)
                assert store.entries(0, 99) == original.entries(0, 99)
        assert store.search(vectors(30), 1)[4][0].name == "n4"
        assert min(store.write(news(2))) > copied[-1][0]
    with pytest.raises(DataError, match="has entries that are not of"):
        copy_gallery(start, end)
    assert copy_gallery(start, str(tmp_path / "to")) == "30 entries"
    gallery = open_gallery(tmp_path / "to", "m1")
    assert [gallery.name(i) for i in range(len(gallery))] == [f"n{i}" for i in range(30)]
    assert gallery.search(vectors(30), 1)[1].ravel().tolist() == [*range(30)]


def test_what_cannot_be_copied_is_one_message(database, tmp_path, monkeypatch, messages):
    write_gallery(tmp_path / "classes", vectors(3), model="m1", of="classes")
    write_gallery(tmp_path / "images", vectors(3), model="m1")
    monkeypatch.setattr(plsc.gallery.gallery, "MOST_ENTRIES", 2)
    for source, target, message in [
        ("classes", database, "has the classes of a model"),
        ("images", tmp_path / "t.sqlite", "at most 2"),
        ("images", tmp_path / "images", "exists"),
        ("missing", database, "cannot be read"),
        (filled("sqlite", tmp_path, None), tmp_path / "images", "exists"),
    ]:
        assert main(["gallery", "copy", str(tmp_path / source), str(target)]) == 1
        assert message in messages[-1]
    assert not (tmp_path / "t.sqlite").exists()
    with connected(database) as connection:
        assert tables(connection) == []
