"""The folder of `predict` may come from anyone: what its index says is checked, and so is every shard."""

import io
import json
import os
import pickle
import zlib

import numpy as np
import pytest

import plsc
from plsc.errors import DataError
from plsc.predict.embeddings import FORMAT, VERSION, write_index, write_shard

COUNT, ROWS, SIZE = 7, 3, 4
VALUES = np.arange(COUNT * SIZE, dtype=np.float32).reshape(COUNT, SIZE)
COLUMNS = {
    "embeddings": {"dtype": "float32", "shape": [SIZE]},
    "labels": {"dtype": "int64", "shape": []},
    "names": {"dtype": "object", "shape": []},
}
MODEL = {"checkpoint": "run/3", "step": 3, "name": "ResNet18", "weights": "0" * 64, "files": "0"}


@pytest.fixture
def folder(tmp_path):
    shards = []
    for number, first in enumerate(range(0, COUNT, ROWS)):
        rows = slice(first, min(first + ROWS, COUNT))
        columns = {"embeddings": VALUES[rows], "labels": np.arange(COUNT)[rows]}
        names = [f"{index}.jpg" for index in range(COUNT)[rows]]
        file = write_shard(tmp_path, number, names, columns)
        shards.append({"file": file, "rows": len(names)})
    write_index(tmp_path, {
        "format": FORMAT, "version": VERSION, "model": MODEL, "input": {"shape": ["batch", 3, 16, 16]},
        "flip": False, "precision": "float32", "columns": COLUMNS, "images": COUNT, "rows_per_shard": ROWS,
        "count": COUNT, "shards": shards, "complete": True,
    })  # fmt: skip
    return tmp_path


def change(folder, *path, to):
    """Replace an entry of the index, at keys or positions."""
    index = json.loads((folder / "_index.json").read_text())
    place = index
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    (folder / "_index.json").write_text(json.dumps(index))


def first_shard(folder):
    return min(folder.glob("00000-*"))


def replace(folder, content):
    """Replace the content of the first shard, with the checksum in its name and in the index."""
    old = first_shard(folder)
    new = folder / f"00000-{zlib.crc32(content):08x}{old.suffix}"
    old.unlink()
    new.write_bytes(content)
    change(folder, "shards", 0, "file", to=new.name)


def saved(fields, rows=ROWS):
    """Return a shard with other fields: name -> (dtype, shape of a row)."""
    file = io.BytesIO()
    np.save(file, np.zeros(rows, np.dtype([(name, *field) for name, field in fields.items()])))
    return file.getvalue()


FIELDS = {"embeddings": ("float32", (SIZE,)), "labels": ("int64", ()), "names": ("S5", ())}


def test_the_columns_are_those_that_were_written(folder):
    found = plsc.open_embeddings(folder)
    assert list(found) == list(COLUMNS)
    assert np.array_equal(found["embeddings"][:], VALUES)
    assert found["labels"][[6, 0]].tolist() == [6, 0]
    assert found["names"][-1] == "6.jpg"
    assert [len(part) for part in found["embeddings"].shards()] == [3, 3, 1]
    assert pickle.loads(pickle.dumps(found))["names"][0] == "0.jpg"


@pytest.mark.parametrize(
    "to",
    [
        ("shards", 0, "file", "/etc/passwd"),
        ("shards", 0, "file", "../00000-00000000.npy"),
        ("shards", 0, "file", "00000-01234567.npy"),
        ("shards", 0, "rows", 2),
        ("shards", 0, "rows", 2**62),
        ("shards", 1, "file", None),  # that of the first shard
        ("count", 8),
        ("columns", {"labels": COLUMNS["labels"]}),
        ("columns", "embeddings", "dtype", "object"),
        ("columns", "embeddings", "shape", [2**39] * 1000),
        ("columns", "embeddings", "shape", [2**40, 2**40]),
        ("model", "checkpoint", []),
    ],
)
def test_a_wrong_index_is_an_error_when_the_folder_is_opened(folder, to):
    *path, value = to
    change(folder, *path, to=first_shard(folder).name if value is None else value)
    with pytest.raises(DataError, match=str(folder)):
        plsc.open_embeddings(folder)


def unpacked():
    file = io.BytesIO()
    np.savez_compressed(file, **{name: np.zeros(ROWS, np.int64) for name in COLUMNS})
    return file.getvalue()


def endless():
    """A small file can state any number of rows: names of no bytes."""
    file = io.BytesIO()
    header = {"descr": [("names", "|S0")], "fortran_order": False, "shape": (3 * 10**7,)}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + b"x"


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (saved({**FIELDS, "embeddings": ("float32", (2, 2))}), ["embeddings"]),
        (saved({**FIELDS, "embeddings": ("float32", (2 * SIZE,))}), ["embeddings"]),
        (saved({**FIELDS, "embeddings": ("float64", (SIZE,))}), ["embeddings"]),
        (saved({**FIELDS, "labels": ("int64", (1,))}), ["labels"]),
        (saved({**FIELDS, "labels": ("float32", ())}), ["labels"]),
        (saved({**FIELDS, "names": ("int64", ())}), ["names"]),
        (saved({name: FIELDS[name] for name in ("labels", "names")}), ["embeddings"]),
        *((saved(FIELDS, rows), COLUMNS) for rows in (1, 5)),
        *((content, COLUMNS) for content in (b"", b"\x93NUMPY", b"PK\x03\x04" + bytes(99), b"{" * 99)),
        *((content, COLUMNS) for content in (unpacked(), endless())),
    ],
)
def test_a_shard_that_differs_from_the_index_is_an_error_when_it_is_read(folder, content, names):
    replace(folder, content)
    found = plsc.open_embeddings(folder)
    for name in names:
        for index in (0, slice(None), [6, 0]):
            with pytest.raises(DataError, match="00000-"):
                found[name][index]
        with pytest.raises(DataError, match="00000-"):
            next(found[name].shards())


def test_a_flipped_bit_is_found_when_the_first_row_of_its_shard_is_read(folder):
    data = bytearray(first_shard(folder).read_bytes())
    data[len(data) // 2] ^= 1
    first_shard(folder).write_bytes(data)
    found = plsc.open_embeddings(folder)
    assert np.array_equal(found["embeddings"][ROWS:], VALUES[ROWS:])  # of the other shards
    for name in COLUMNS:
        with pytest.raises(DataError, match=r"00000-.*checksum"):
            found[name][0]
    os.truncate(first_shard(folder), 8 * 10**12)  # sparse: not hashed to its end
    with pytest.raises(DataError, match="checksum"):
        plsc.open_embeddings(folder)["embeddings"][0]
