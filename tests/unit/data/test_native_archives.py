"""The records and samples that C finds are those of the plain way, whatever the bytes are."""

from __future__ import annotations

import io
import random
import tarfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.data import native
from plsc.data.native.records import find_records
from plsc.data.native.tar import find_tar_samples
from plsc.data.recordio import MAGIC_BYTES, frame, pack_image
from plsc.data.sources import recordio_index, tar
from plsc.data.sources.columns import LabelReader
from plsc.data.sources.recordio_index import scan
from plsc.data.sources.tar import TarSource
from plsc.data.writers import writer_of
from plsc.errors import DataError, OptionError
from tests.in_memory import InMemory

pytestmark = pytest.mark.skipif(native.library() is None, reason="the C library is not built")


class OneShard(list):
    locations = ("train.tar",)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> TarSource:
    path = tmp_path_factory.mktemp("tar") / "a.tar"
    writer_of(str(path))(str(path), [(b"image", 1)])
    return TarSource(path)


def damaged(content: bytes, rng: random.Random, times: int) -> bytes:
    data = bytearray(content)
    for _ in range(times):
        data[rng.randrange(len(data))] = rng.choice((0, 1, 32, 47, 46, 48, 55, 120, 128, 255))
    return bytes(data[: rng.randrange(len(data))] if rng.random() < 0.2 else data)


def index_of(source: TarSource, content: bytes, names_wanted: bool) -> dict[str, list[int]] | str:
    source._shards = OneShard([InMemory(content)])
    try:
        return {name: a.tolist() for name, a in source._build(LabelReader(names_wanted)).items()}
    except (DataError, OptionError) as error:
        return str(error)


NAMES = ["a", "b/17", "./c", "b/é", "d.", ".e", "f" * 120, "b/../g", "//h", "b/i/"]
SUFFIXES = [".jpg", ".cls", ".json", ".txt", ".PNG", ".seg.png", ".x.cls", ""]
CONTENTS = [b"5", b" 7\n", b"bo", b'{"label": 3}', b'{"label": "al"}', b"", b"9" * 19, b"x" * 600]
members = st.tuples(
    st.sampled_from(NAMES),
    st.lists(
        st.tuples(st.sampled_from(SUFFIXES), st.sampled_from(CONTENTS)), min_size=1, max_size=4
    ),
    st.sampled_from([0, 1.5]),  # a time that is no whole number makes remarks
)
usual = st.tuples(
    st.sampled_from(["a", "b/17", "./c", "b/é"]),
    st.tuples(st.just((".jpg", b"x" * 600)), st.tuples(st.just(".cls"), st.sampled_from(CONTENTS))),
    st.sampled_from([0, 1.5]),
)


@settings(max_examples=150)
@given(
    st.lists(usual | usual | usual | members, min_size=1, max_size=12),
    st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
    st.sampled_from([1500, 2**20]),
    st.integers(0, 3),
    st.integers(),
)
def test_samples_of_a_tar_are_those_of_the_plain_way(source, samples, form, piece, damages, seed):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for name, parts, time in samples:
            for suffix, content in parts:
                member = tarfile.TarInfo(name + suffix)
                member.size, member.mtime = len(content), time
                archive.addfile(member, io.BytesIO(content))
    rng = random.Random(seed)
    content = damaged(file.getvalue(), rng, rng.randint(1, 3)) if damages == 0 else file.getvalue()
    names_wanted = rng.random() < 0.5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tar, "_PIECE", piece)
        found = index_of(source, content, names_wanted)
        patch.setattr(tar, "find_tar_samples", lambda *_: None)
        expected = index_of(source, content, names_wanted)
    # Where several samples are bad, which of them is named may differ.
    assert found == expected or (isinstance(found, str) and isinstance(expected, str))


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_usual_samples_of_a_tar_are_found_by_c(form):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for number in range(5):
            for suffix, content in ((".jpg", b"image"), (".json", b'{"label": 1}'), (".txt", b"a")):
                member = tarfile.TarInfo(f"./faces/{number}{suffix}")
                member.size, member.mtime = len(content), 1.5
                archive.addfile(member, io.BytesIO(content))
    content = file.getvalue()
    found = find_tar_samples(content, 0, len(content), "", "cls")
    assert found.numbers.tolist() == [-2] * 4  # the last one may go on
    keys = [content[start:][:8] for start in found.key_starts.tolist()]
    assert keys == [f"faces/{number}.".encode() for number in range(4)]
    assert all(content[at : at + 5] == b"image" for at in found.offsets.tolist())
    assert content[found.text_starts[0] :][: found.text_lengths[0]] == b'{"label": 1}'


record = st.builds(
    lambda image, label, cut: frame(pack_image(image + MAGIC_BYTES * cut, label, 0)),
    st.binary(max_size=40).map(lambda image: image + bytes(-len(image) % 4)),
    st.integers(0, 2**20),
    st.sampled_from([0, 0, 0, 1]),
)


@settings(max_examples=150)
@given(
    st.lists(record, max_size=12),
    st.sampled_from([40, 100, 2**20]),
    st.integers(0, 2),
    st.integers(),
)
def test_records_are_those_of_the_plain_way(records, piece, damages, seed):
    content = b"".join(records)
    if damages == 0 and content:
        content = damaged(content, random.Random(seed), 2)

    def found() -> list[np.ndarray] | str:
        try:
            return [_one_nan(array).tobytes() for array in scan(InMemory(content))]
        except DataError as error:
            return str(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recordio_index, "_PIECE", piece)
        by_c = found()
        patch.setattr(recordio_index, "find_records", lambda *_: None)
        assert by_c == found()


def _one_nan(array: np.ndarray) -> np.ndarray:
    """There are many bit patterns of NaN, and going through Python's float changes some."""
    return np.where(np.isnan(array), np.nan, array) if array.dtype.kind == "f" else array


def test_usual_records_are_found_by_c():
    content = b"".join(frame(pack_image(b"x" * n, n, 0)) for n in range(1, 50))
    found = find_records(content, 0, len(content))
    assert found.labels.tolist() == list(range(1, 50))
    assert found.image_bytes.tolist() == list(range(1, 50))
    assert found.position == len(content)
