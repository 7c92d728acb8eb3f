"""Galleries find what a comparison with every vector finds; damaged and hostile files are refused."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from plsc.checkpoint.manifest import checksum, entry_of, write_shard
from plsc.errors import DataError
from plsc.gallery import build_gallery, open_gallery, write_gallery
from tests.images import UNSAFE_NAMES

pytest.importorskip("faiss", reason="plsc-torch[search] is not installed")
RANDOM = np.random.default_rng(0)


def unit(vectors):
    vectors = np.asarray(vectors, np.float64)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(norms > 0, norms, 1)


def cosines(vectors, queries):
    """Of every query with every vector, as the formula says."""
    return np.array([[np.dot(v, q) for v in unit(vectors)] for q in unit(queries)])


@pytest.mark.parametrize(("size", "queries", "is_written"), [(3, 70, False), (50, 1, False), (32, 70, True)])
def test_search_finds_the_highest_cosines_and_of_equal_ones_the_lower_numbers_first(
    tmp_path, size, queries, is_written
):
    different = RANDOM.standard_normal((90, size)) * RANDOM.lognormal(0, 4, (90, 1))
    vectors = different[RANDOM.integers(90, size=400)]  # about four of each are equal
    vectors[[5, 300]] = 0
    asked = np.concatenate([vectors[:4], np.zeros((1, size)), RANDOM.standard_normal((queries, size))])
    truth = cosines(vectors, asked)
    gallery = write_gallery(tmp_path / "g", vectors, model="a") if is_written else build_gallery(vectors)
    for k in (1, 7, 400, 1000):
        scores, numbers = gallery.search(asked, k)
        assert scores.dtype == np.float32
        assert scores.shape == numbers.shape == (len(asked), min(k, 400))
        expected = -np.sort(-truth, axis=1)[:, :k]
        np.testing.assert_allclose(scores, expected, atol=1e-6)
        np.testing.assert_allclose(np.take_along_axis(truth, numbers, 1), scores, atol=1e-6)
        assert all(len(set(row)) == len(row) for row in numbers.tolist())
        is_equal = scores[:, 1:] == scores[:, :-1]
        assert (numbers[:, 1:] > numbers[:, :-1])[is_equal].all()
        assert k == 1 or is_equal.any()


def test_a_gallery_is_written_from_parts_and_opened_again_with_its_names(tmp_path):
    vectors = RANDOM.standard_normal((20_000, 16)).astype(np.float32)
    names = [f"images/é\u200c\u3000{i}.jpg" for i in range(20_000)]
    whole = write_gallery(tmp_path / "whole", vectors, names, model="a")
    parts = write_gallery(tmp_path / "b", lambda: iter(np.split(vectors, [1, 9000])), names, model="a")
    assert parts.about == whole.about
    opened = open_gallery(tmp_path / "whole", model="a")
    assert opened.search(vectors[[17, 19_999]], 1)[1].tolist() == [[17], [19_999]]
    assert opened.name(17) == names[17]
    assert write_gallery(tmp_path / "nameless", vectors[:2], ["", ""], model="a").name(1) == "1"
    with pytest.raises(DataError, match="exists"):
        write_gallery(tmp_path / "whole", vectors, model="a")
    for name in UNSAFE_NAMES:
        with pytest.raises(DataError, match="name"):
            write_gallery(tmp_path / "unsafe", vectors[:1], [name], model="a")


def test_what_cannot_be_searched_is_refused_and_nothing_is_written(tmp_path):
    for vectors, message in (
        (np.zeros((0, 4)), "no vectors"),
        (np.array([[1.0, 2], [3, np.nan]]), "vector 1"),
        (np.zeros(4), "shape"),
    ):
        with pytest.raises(DataError, match=message):
            write_gallery(tmp_path / "gallery", vectors, model="a")
    assert not list(tmp_path.iterdir())
    with pytest.raises(DataError, match="1 names for 2 entries"):
        build_gallery(np.ones((2, 2)), ["one"])
    for query, message in ((np.ones((1, 3)), "shape"), (np.array([[1.0, 1], [1, np.inf]]), "query 1")):
        with pytest.raises(DataError, match=message):
            build_gallery(np.ones((2, 2))).search(query)


def rewrite(folder, **tensors):
    """Replace tensors of a gallery, with a correct checksum, as an attacker would."""
    path = folder / "gallery.safetensors"
    held = {name: torch.from_numpy(one) for name, one in {**load_file(path), **tensors}.items()}
    path.unlink()
    write_shard(path, [entry_of(name, one) for name, one in held.items()])
    describe(folder)


def describe(folder, **changes):
    about = json.loads((folder / "gallery.json").read_text())
    found = checksum(folder / "gallery.safetensors")
    about |= {"file": {"bytes": found.bytes, "crc32": found.crc32}, **changes}
    (folder / "gallery.json").write_text(json.dumps(about))


def test_every_truncation_and_flipped_byte_is_an_error_message(tmp_path):
    folder = tmp_path / "gallery"
    write_gallery(folder, RANDOM.standard_normal((9, 4)), ["a"] * 9, model="a")
    for name in ("gallery.safetensors", "gallery.json"):
        content = (folder / name).read_bytes()
        for length in range(0, len(content) - 1, 7):  # the last byte of gallery.json is a line end
            (folder / name).write_bytes(content[:length])
            with pytest.raises(DataError):
                open_gallery(folder)
        (folder / name).write_bytes(content)
    content = bytearray((folder / "gallery.safetensors").read_bytes())
    for place in range(0, len(content), 5):
        content[place] ^= 1
        (folder / "gallery.safetensors").write_bytes(content)
        with pytest.raises(DataError, match=r"gallery.safetensors"):
            open_gallery(folder)
        content[place] ^= 1


@pytest.mark.parametrize(
    ("tensors", "changes"),
    [
        ({"name_ends": np.array([5, 1, 9], np.int64)}, {}),
        ({"name_ends": np.array([1, 2, 2**60], np.int64)}, {}),
        ({"name_ends": np.array([1, 2], np.int64)}, {}),
        ({"names": np.zeros(3, np.float32)}, {}),
        ({"vectors": np.ones((4, 3), np.float32)}, {}),
        ({"vectors": np.eye(3, 4)}, {}),
        *(({}, {"count": count}) for count in (10, 2**39)),
        ({}, {"size": 2}),
        ({}, {"size": 12, "count": 1}),
        ({}, {"centers": 2}),
        ({}, {"kind": "int8"}),
    ],
)
def test_a_file_and_a_description_that_do_not_match_are_refused(tmp_path, tensors, changes):
    folder = tmp_path / "gallery"
    write_gallery(folder, RANDOM.standard_normal((3, 4)), ["a", "b", "c"], model="a")
    rewrite(folder, **tensors)
    describe(folder, **changes)
    with pytest.raises(DataError):
        open_gallery(folder)


@pytest.mark.parametrize("value", [np.nan, 3e38, 1.002, 0.998])
def test_vectors_without_norm_1_are_refused_when_the_gallery_is_opened(tmp_path, value):
    folder, vectors = tmp_path / "gallery", np.eye(32, dtype=np.float32)[np.arange(20_000) % 32]
    vectors[7] = 0
    write_gallery(folder, vectors, model="a")  # zero is accepted
    vectors[19_999] *= np.float32(value)
    rewrite(folder, vectors=vectors)
    with pytest.raises(DataError, match="norm 1"):
        open_gallery(folder)


def test_a_file_without_offsets_is_refused(tmp_path):
    folder = tmp_path / "gallery"
    write_gallery(folder, np.ones((3, 4)), model="a")
    save_file({"vectors": np.ones((3, 4), np.float32)}, folder / "gallery.safetensors")
    describe(folder)
    with pytest.raises(DataError, match=r"gallery\.safetensors"):
        open_gallery(folder)
