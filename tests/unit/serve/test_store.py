import sqlite3

import numpy as np
import pytest

import plsc.serve.store
from plsc.errors import CheckpointError, DataError
from plsc.serve.store import New, Store, StoreError

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
    expected = {}
    for batch in range(5):
        added = news(50, seed=batch)
        gone = list(expected)[::3]
        results = opened.write([*added, *gone, 10**9])
        assert results[len(added) :] == [True] * len(gone) + [False]
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


def test_ids_are_never_used_again(store):
    first = store.write(news(2))
    store.write(first)
    assert len(store) == 0
    assert store.search(vectors(2), 3) == [[], []]
    assert min(store.write(news(2))) > max(first)


def test_a_full_store_refuses_only_what_exceeds_it(store, monkeypatch):
    monkeypatch.setattr(plsc.serve.store, "MOST_ENTRIES", 2)
    *good, refused = store.write(news(3))
    assert [type(one) for one in good] == [int, int]
    assert isinstance(refused, DataError)
    assert len(store) == 2


def test_a_full_disk_is_no_fault_of_the_request_and_loses_nothing(store):
    store.write(news(1))
    store._database.execute("PRAGMA max_page_count = 1")
    with pytest.raises(StoreError, match="disk is full"):
        store.write(news(100))
    assert len(store) == len(store.entries(0, 9)) == 1
    store._database.execute("PRAGMA max_page_count = 1000000")
    store.write(news(1))
    assert len(store) == len(store.entries(0, 9)) == 2


def test_a_store_of_another_network_or_size_is_refused(store, tmp_path):
    store.write(news(3))
    store.close()
    with pytest.raises(CheckpointError, match="entries of another network"):
        Store(tmp_path / "s.sqlite", "m2", SIZE)
    with pytest.raises(CheckpointError, match=f"vectors of {SIZE} values; the model has 7"):
        Store(tmp_path / "s.sqlite", "m1", 7)


def test_a_store_in_use_is_refused(store, tmp_path):
    store.write(news(1))
    with pytest.raises(DataError, match="is used by another server"):
        Store(tmp_path / "s.sqlite", "m1", SIZE)


def test_another_database_and_another_file_are_refused(tmp_path):
    database = sqlite3.connect(tmp_path / "other.sqlite")
    database.execute("CREATE TABLE x (y)")
    database.close()
    (tmp_path / "text.sqlite").write_text("no database" * 1000)
    for name in ("other", "text"):
        before = (tmp_path / f"{name}.sqlite").read_bytes()
        with pytest.raises(DataError, match="choose another"):
            Store(tmp_path / f"{name}.sqlite", "m1", SIZE)
        assert (tmp_path / f"{name}.sqlite").read_bytes() == before
