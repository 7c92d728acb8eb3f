import contextlib
import itertools
import os
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import plsc.gallery.store
from plsc.errors import CheckpointError, DataError
from plsc.gallery import write_gallery
from plsc.gallery.gallery import copy_gallery
from plsc.gallery.store import New, Store, StoreError
from tests.images import NAMES, UNSAFE_NAMES

SIZE = 6


def vectors(count, seed=0):
    found = np.random.default_rng(seed).standard_normal((count, SIZE)).astype(np.float32)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def news(count, seed=0):
    return [New(f"n{i}", vector, b"jpeg %d" % i) for i, vector in enumerate(vectors(count, seed))]


@pytest.fixture
def store(tmp_path):
    opened = Store(tmp_path / "s.sqlite", "m1", SIZE)
    yield opened
    opened.close()


def nearest(store, query, k):
    """The ids of the nearest entries, by all similarities."""
    pairs = [(float(vector.astype(float) @ query), number) for number, vector in store.items()]
    return [number for _, number in sorted(pairs, key=lambda pair: (-pair[0], pair[1]))[:k]]


def test_the_index_finds_what_is_in_the_file_after_changes_and_after_opening(tmp_path):
    path = tmp_path / "s.sqlite"
    opened = Store(path, "m1", SIZE)
    assert opened.search(vectors(2), 3) == [[], []]
    expected, last = {}, 0
    for batch in range(5):
        added = news(50, seed=batch)
        gone = list(expected)[-1:0:-3]
        results = opened.write([*added, *gone, 10**9])
        assert results[len(added) :] == [True] * len(gone) + [False]
        assert min(results[: len(added)]) > last  # ids are never used again
        last = max(results[: len(added)])
        expected = {number: vector for number, vector in expected.items() if number not in gone}
        expected |= dict(zip(results, (new.vector for new in added), strict=False))
    queries = vectors(7, seed=99)
    for again in (False, True):
        if again:
            opened.close()
            opened = Store(path, "m1", SIZE)
        assert len(opened) == len(expected)
        found = opened.search(queries, 9)
        for query, row in zip(queries, found, strict=True):
            assert [one.id for one in row] == nearest(expected, query.astype(float), 9)
    assert opened.thumbnail(results[0]) == b"jpeg 0"
    assert opened.thumbnail(10**9) is None
    assert [row[0] for row in opened.entries(after=0, count=1000)] == list(expected)
    opened.close()


def test_names_are_data_and_only_unsafe_ones_are_refused(store, tmp_path):
    store.write([New(name, vector, b"") for name, vector in zip(NAMES, vectors(len(NAMES)), strict=True)])
    store.close()
    with contextlib.closing(Store(tmp_path / "s.sqlite", "m1", SIZE)) as again:
        assert [name for _, name, *_ in again.entries(0, 99)] == [one.name for one in again.read(0, 99)]
        assert tuple(again.search(one, 1)[0][0].name for one in vectors(len(NAMES))[:, None]) == NAMES
    for name in UNSAFE_NAMES:
        with pytest.raises(DataError, match="name"):
            New(name, vectors(1)[0], b"")


def test_of_equal_vectors_the_lower_ids_are_found_first(tmp_path):
    different = np.random.default_rng(1).standard_normal((20, 512)).astype(np.float32)
    different /= np.linalg.norm(different, axis=1, keepdims=True)
    opened = Store(tmp_path / "s.sqlite", "m1", 512)
    opened.write([New("a", different[i % 20], b"jpeg") for i in range(140)])
    for k in (1, 6, 7):
        for first, row in enumerate(opened.search(different, k), 1):
            assert [one.id for one in row] == list(range(first, 141, 20))[:k]
            assert len({one.similarity for one in row}) == 1
    opened.close()


def test_a_full_store_refuses_only_what_exceeds_it(store, monkeypatch):
    monkeypatch.setattr(plsc.gallery.store, "MOST_ENTRIES", 2)
    *good, refused = store.write(news(3))
    assert [type(one) for one in good] == [int, int]
    assert isinstance(refused, DataError)
    assert len(store) == 2


def test_a_full_disk_is_no_fault_of_the_request_and_loses_nothing(tmp_path, monkeypatch):
    connect, opened = sqlite3.connect, []
    monkeypatch.setattr(
        sqlite3, "connect", lambda *words, **how: opened.append(connect(*words, **how)) or opened[0]
    )
    store = Store(tmp_path / "full.sqlite", "m1", SIZE)
    store.write(news(1))
    opened[0].execute("PRAGMA max_page_count = 1")
    with pytest.raises(StoreError, match="disk is full"):
        store.write(news(100))
    assert len(store) == len(store.entries(0, 9)) == 1
    opened[0].execute("PRAGMA max_page_count = 1000000")
    store.write(news(1))
    assert len(store) == len(store.entries(0, 9)) == 2


def test_a_store_of_another_network_or_size_or_in_use_is_refused(store, tmp_path):
    store.write(news(3))
    with pytest.raises(DataError, match="in use"):
        Store(tmp_path / "s.sqlite", "m1", SIZE)
    opens = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute('SELECT 1 FROM entries')"
    asked = [sys.executable, "-c", opens, tmp_path / "s.sqlite"]  # the refused one must not drop the lock
    assert b"locked" in subprocess.run(asked, capture_output=True, check=False).stderr
    store.close()
    for model, size in (("m2", SIZE), ("m1", 7)):
        with pytest.raises(CheckpointError, match=r"network|values"):
            Store(tmp_path / "s.sqlite", model, size)


@pytest.fixture
def alter(store, tmp_path):
    """Return a function that sets a column of an entry, of three, in a store that is closed; and its path."""
    store.write(news(3))
    store.close()

    def alter(column, value, number=2):
        with contextlib.closing(sqlite3.connect(tmp_path / "s.sqlite", isolation_level=None)) as database:
            database.execute(f"UPDATE entries SET {column} = ? WHERE id = ?", (value, number))
        return tmp_path / "s.sqlite"

    return alter


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("vector", (vectors(1)[0] * np.float32(norm)).tobytes()) for norm in (np.nan, 3e38, 1.002, 0.998)),
        ("vector", 7), ("model", 7), ("name", b"\xff"), ("name", "a\x1b[2J"),
        ("id", 0), ("id", 2**53),
    ],
)  # fmt: skip
def test_what_no_store_writes_is_refused_when_it_is_opened(alter, column, value):
    with pytest.raises((DataError, CheckpointError)):
        Store(alter(column, value), "m1", SIZE)


def test_an_entry_whose_id_no_store_may_have_is_not_acknowledged(alter):
    path = alter("id", 2**53 - 1, 3)
    with contextlib.closing(Store(path, "m1", SIZE)) as opened:
        with pytest.raises(StoreError, match="id"):
            opened.write(news(1))
        assert len(opened) == 3
    Store(path, "m1", SIZE).close()


def test_columns_of_other_types_are_converted_and_a_zero_vector_is_accepted(alter):
    alter("vector", bytes(4 * SIZE), 1)
    alter("name", 1e300)
    alter("thumbnail", "text", 3)
    with contextlib.closing(Store(path := alter("enrolled", 1e300), "m1", SIZE)) as opened:
        rows = opened.entries(0, 9)
        assert {(type(name), type(time)) for _, name, time, _ in rows} == {(str, str)}
        assert {one.id for one in opened.search(vectors(1), 3)[0]} == {1, 2, 3}
        assert len(opened.thumbnail(3)) < 10
    for time in (1e300, "yesterday", "-4000-01-01"):
        alter("enrolled", time)
        with contextlib.closing(Store(path, "m1", SIZE)) as opened, pytest.raises(DataError, match="entry 2"):
            opened.read(0, 9)


def test_ids_that_do_not_rise_are_refused(store, tmp_path):
    store.write([New("a", vectors(1)[0], b"", 5), New("b", vectors(1)[0], b"", 6)])
    store.close()
    path = tmp_path / "s.sqlite"
    data = bytearray(path.read_bytes())
    place = data.rindex(b"a" + vectors(1)[0].tobytes()) - 8  # of the id, before the seven bytes of a header
    assert data[place] == 5
    data[place] = 9
    path.write_bytes(data)
    with pytest.raises(DataError, match="out of order"):
        Store(path, "m1", SIZE)


def test_another_file_is_refused(tmp_path):
    (tmp_path / "text.sqlite").write_text("no database" * 1000)
    before = (tmp_path / "text.sqlite").read_bytes()
    with pytest.raises(DataError, match="choose another"):
        Store(tmp_path / "text.sqlite", "m1", SIZE)
    assert (tmp_path / "text.sqlite").read_bytes() == before


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n)"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "change",
    [
        f"DROP TABLE entries; CREATE VIEW entries AS {ENDLESS} SELECT x AS id, '' AS name, x'' AS vector, "
        "x'' AS thumbnail, 'm1' AS model, '' AS enrolled FROM n WHERE x < 0",
        "CREATE TRIGGER endless AFTER INSERT ON entries BEGIN INSERT INTO entries "
        f"SELECT NULL, 'a', x'', x'', 'm1', '' FROM ({ENDLESS} SELECT x FROM n); END",
        "DROP TABLE entries; CREATE TABLE entries (id, name, vector, thumbnail, model, enrolled)",
        "CREATE TABLE other (x)",
    ],
    ids=["view", "trigger", "other columns", "other table"],
)
def test_a_store_with_another_schema_is_refused_and_nothing_of_it_runs(tmp_path, change):
    Store(tmp_path / "a.sqlite", "m1", SIZE).close()
    Store(tmp_path / "a.sqlite", "m1", SIZE).close()  # its own schema is accepted
    with contextlib.closing(sqlite3.connect(tmp_path / "a.sqlite")) as database:
        database.executescript(change)
    with pytest.raises(DataError, match="is not a store"):
        Store(tmp_path / "a.sqlite", "m1", SIZE)


@pytest.mark.parametrize(
    ("link", "said"), [(None, "-journal exists"), ("file", "link"), ("folder", "-journal exists")]
)
def test_a_journal_beside_a_store_deletes_no_other_file(tmp_path, link, said):
    (tmp_path / "data").mkdir()
    path, other = tmp_path / "data/s.sqlite", tmp_path / "other.txt"
    Store(path, "m1", SIZE).close()
    other.write_text("precious")
    name, magic = str(other).encode(), bytes.fromhex("d9d505f920a163d7")
    pages = path.stat().st_size // 4096
    header = (magic + struct.pack(">IIIII", 0, 1, pages, 512, 4096)).ljust(512, b"\0")
    ending = struct.pack(">I", 2**30 // 4096 + 1) + name + struct.pack(">II", len(name), sum(name)) + magic
    Path(f"{path}-journal").write_bytes(header + ending)
    if link:
        (tmp_path / "link").symlink_to(path if link == "file" else path.parent)
        path = tmp_path / "link" if link == "file" else tmp_path / "link/s.sqlite"
    with pytest.raises(DataError, match=said):
        Store(path, "m1", SIZE)
    assert other.exists()


@pytest.mark.parametrize("kind", ["s.sqlite", "s.sqlite-wal", "link"])
def test_a_file_that_another_user_prepared_and_a_link_are_refused(tmp_path, kind):
    prepared = tmp_path / ("other" if kind == "link" else kind)
    if kind == "link":
        (tmp_path / "s.sqlite").symlink_to(prepared)
    else:
        prepared.touch()
        try:
            os.chown(prepared, 12345, 12345)
        except PermissionError:
            pytest.skip("only root can make a file of another user")
    with pytest.raises(DataError, match=r"another user|link"):
        Store(tmp_path / "s.sqlite", "m1", SIZE)
    assert not prepared.exists() if kind == "link" else not prepared.stat().st_size


@pytest.mark.parametrize("name", ["s.sqlite", "s.sqlite-wal"])
def test_a_file_with_a_second_name_is_refused_and_unchanged(tmp_path, name):
    Store(tmp_path / "other", "m1", SIZE).close()
    Store(tmp_path / "s.sqlite", "m1", SIZE).close()
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).hardlink_to(tmp_path / "other")
    before = (tmp_path / "other").read_bytes()
    with pytest.raises(DataError, match="link"):
        Store(tmp_path / "s.sqlite", "m1", SIZE)
    assert (tmp_path / "other").read_bytes() == before


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_copies_have_the_same_readers_and_entries_with_names_are_private(tmp_path, mode):
    def modes(name):
        place = tmp_path / name
        return {path.stat().st_mode & 0o777 for path in (place.iterdir() if place.is_dir() else [place])}

    write_gallery(tmp_path / "unnamed", vectors(3), model="m1")
    (tmp_path / "file").touch()
    assert modes("unnamed") == modes("file")
    write_gallery(tmp_path / "a", vectors(3), ["x", "y", "z"], model="m1")
    assert modes("a") == {0o600}
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    for path in (tmp_path / "a").iterdir():
        path.chmod(mode)
    places = ["a", "b.sqlite", "c", "d.sqlite"]
    for source, target in itertools.pairwise(places):
        copy_gallery(str(tmp_path / source), str(tmp_path / target))
        assert modes(target) == {mode & 0o644}
    assert (tmp_path / "c").stat().st_mode & 0o777 == {0o600: 0o700, 0o640: 0o750, 0o666: 0o755}[mode]
    write_gallery(tmp_path / "blank", vectors(3), model="m1 mapped")
    with pytest.raises(DataError, match="blanks"):  # after a blank, a store has something else
        copy_gallery(str(tmp_path / "blank"), str(tmp_path / "blank.sqlite"))
