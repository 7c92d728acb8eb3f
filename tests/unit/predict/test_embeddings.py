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


OF_THE_INDEX = {
    "an absolute path": ("shards", 0, "file", "/etc/passwd"),
    "a path that leaves the folder": ("shards", 0, "file", "../00000-00000000.npy"),
    "a shard that is missing": ("shards", 0, "file", "00000-01234567.npy"),
    "rows that do not add up": ("shards", 0, "rows", 2),
    "another count": ("count", 8),
    "too many rows to hold": ("shards", 0, "rows", 2**62),
    "no names": ("columns", {"labels": COLUMNS["labels"]}),
    "a dtype of Python objects": ("columns", "embeddings", "dtype", "object"),
    "too many axes": ("columns", "embeddings", "shape", [2**39] * 1000),
    "a huge shape": ("columns", "embeddings", "shape", [2**40, 2**40]),
    "a checkpoint that is no text": ("model", "checkpoint", []),
    "a shard that is listed twice": ("shards", 1, None),
}


@pytest.mark.parametrize("what", OF_THE_INDEX)
def test_a_wrong_index_is_an_error_when_the_folder_is_opened(folder, what):
    *path, value = OF_THE_INDEX[what]
    value = {"file": first_shard(folder).name, "rows": ROWS} if path == ["shards", 1] else value
    change(folder, *path, to=value)
    with pytest.raises(DataError) as caught:
        plsc.open_embeddings(folder)
    assert str(folder) in str(caught.value)


OF_A_SHARD = {
    "embeddings of another shape": {"embeddings": ("float32", (2, 2))},
    "embeddings of another size": {"embeddings": ("float32", (2 * SIZE,))},
    "embeddings of another dtype": {"embeddings": ("float64", (SIZE,))},
    "labels with an axis": {"labels": ("int64", (1,))},
    "labels that are not integers": {"labels": ("float32", ())},
    "names that are numbers": {"names": ("int64", ())},
    "a missing column": {"embeddings": None},
}


@pytest.mark.parametrize("what", OF_A_SHARD)
def test_a_shard_that_differs_from_the_index_is_an_error_when_it_is_read(folder, what):
    fields = {name: one for name, one in {**FIELDS, **OF_A_SHARD[what]}.items() if one is not None}
    replace(folder, saved(fields))
    found = plsc.open_embeddings(folder)
    (name,) = OF_A_SHARD[what]
    for index in (0, slice(None), [6, 0]):
        with pytest.raises(DataError, match="00000-"):
            found[name][index]
    with pytest.raises(DataError, match="00000-"):
        next(found[name].shards())


@pytest.mark.parametrize("rows", [1, 5])
def test_a_shard_with_other_rows_than_the_index_is_an_error_when_it_is_read(folder, rows):
    replace(folder, saved(FIELDS, rows=rows))
    for name in COLUMNS:
        with pytest.raises(DataError, match="00000-"):
            plsc.open_embeddings(folder)[name][0]


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"PK\x03\x04" + bytes(99), b"{" * 99])
def test_a_shard_that_is_no_table_is_an_error_when_it_is_read(folder, content):
    replace(folder, content)
    for name in COLUMNS:
        with pytest.raises(DataError, match="00000-"):
            plsc.open_embeddings(folder)[name][0]


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


def test_a_shard_in_the_other_format_of_numpy_is_not_unpacked(folder):
    content = io.BytesIO()
    np.savez_compressed(content, **{name: np.zeros(ROWS, np.int64) for name in COLUMNS})
    replace(folder, content.getvalue())
    with pytest.raises(DataError, match="00000-"):
        plsc.open_embeddings(folder)["labels"][0]


def test_rows_are_counted_before_they_fill_the_memory(folder):
    """A small file can state any number of rows: names of no bytes."""
    count, file = 3 * 10**7, io.BytesIO()
    header = {"descr": [("names", "|S0")], "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)
    file.write(b"x")
    replace(folder, file.getvalue())
    with pytest.raises(DataError, match=f"{count} rows"):
        plsc.open_embeddings(folder)["names"][0]
