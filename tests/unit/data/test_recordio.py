import contextlib
import json
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plsc.data.sources.recordio import (
    HEADER,
    MAGIC_BYTES,
    PART,
    RecordIOSource,
    frame,
    pack_image,
    unframe,
)
from plsc.data.writers import write_recordio
from plsc.errors import DataError

ROOT = Path(__file__).resolve().parents[3]
IMAGES = [b"first image", MAGIC_BYTES * 2 + b"x", b"a" * 4001, b"12345678" + MAGIC_BYTES]
LABELS = [3, 0, 2**24, 3]


@pytest.fixture
def rec(tmp_path) -> Path:
    write_recordio(str(tmp_path / "train.rec"), zip(IMAGES, LABELS, strict=True))
    return tmp_path / "train.rec"


def read(path: Path | str) -> list[tuple[bytes, int]]:
    source = RecordIOSource(path)
    assert source.labels().tolist() == [source[i][1] for i in range(len(source))]
    return [source[i] for i in range(len(source))]


def record(image: bytes, labels: list[float]) -> bytes:
    return frame(HEADER.pack(len(labels), 0.0, 0, 0) + struct.pack(f"<{len(labels)}f", *labels) + image)


def write(path: Path, records: list[bytes], keys: list[int] | None = None) -> Path:
    path.write_bytes(b"".join(records))
    if keys is not None:
        starts = np.cumsum([0, *map(len, records)]).tolist()
        lines = [f"{key}\t{start}\n" for key, start in zip(keys, starts, strict=False)]
        path.with_suffix(".idx").write_text("".join(lines))
    return path


pieces = st.lists(st.sampled_from([MAGIC_BYTES, b"a", b"bc", b"\0\0\0\0"]) | st.binary(max_size=9))


@given(pieces)
def test_any_content_survives_framing_with_the_magic_at_multiples_of_4_only_where_a_part_begins(parts):
    content = b"".join(parts)
    framed = frame(content)
    assert unframe(framed) == content
    assert len(framed) % 4 == 0
    places = [p for p in range(0, len(framed), 4) if framed[p : p + 4] == MAGIC_BYTES]
    position, starts = 0, []
    while position < len(framed):
        starts.append(position)
        length = PART.unpack_from(framed, position)[1] & (2**29 - 1)
        position += 8 + (length + 3) // 4 * 4
    assert places == starts


@given(pieces, st.integers(0, 400), st.integers(0, 7))
def test_a_damaged_record_gives_content_or_an_error(parts, place, bit):
    framed = bytearray(frame(b"".join(parts)))
    framed[place % len(framed)] ^= 1 << bit
    for bad in (bytes(framed), bytes(framed[:place])):
        with contextlib.suppress(DataError):
            assert isinstance(unframe(bad), bytes)


def test_samples_are_read_back_with_and_without_the_index_file(rec):
    assert read(rec) == list(zip(IMAGES, LABELS, strict=True))
    rec.with_suffix(".idx").unlink()
    assert read(rec) == list(zip(IMAGES, LABELS, strict=True))


def test_the_order_and_the_names_are_those_of_the_index_file(tmp_path):
    records = [record(b"image %d" % i, [i]) for i in range(3)]
    path = write(tmp_path / "a.rec", records)
    starts = [0, len(records[0]), len(records[0]) + len(records[1])]
    (tmp_path / "a.idx").write_text(f"9\t{starts[2]}\r\n\n4\t{starts[0]}")
    source = RecordIOSource(path)
    assert [source[i] for i in range(len(source))] == [(b"image 2", 2), (b"image 0", 0)]
    assert [source.name(i) for i in range(2)] == ["a.rec record 9", "a.rec record 4"]


def insightface(images: list[tuple[bytes, int]], end: float | None = None) -> list[bytes]:
    end = len(images) + 1 if end is None else end
    records = [record(b"", [end, end + 2])]
    records += [record(image, [label]) for image, label in images]
    return [*records, record(b"", [1, 2]), record(b"", [2, 4])]


@pytest.mark.parametrize("with_idx", [True, False])
def test_the_insightface_layout_gives_only_its_images(tmp_path, with_idx):
    images = [(b"a", 0), (b"b", 1), (b"c", 1)]
    records = insightface(images)
    keys = list(range(len(records))) if with_idx else None
    assert read(write(tmp_path / "train.rec", records, keys)) == images


def test_insightface_layout_that_lost_images_or_all_is_refused(tmp_path):
    for records in (insightface([(b"a", 0), (b"b", 1)], end=9), []):
        with pytest.raises(DataError, match="image"):
            RecordIOSource(write(tmp_path / "train.rec", records))


def test_a_first_record_with_two_labels_and_an_image_is_a_sample(tmp_path):
    """The first of several labels is the class."""
    records = [record(b"a", [2, 5]), record(b"b", [1, 0.5, -1])]
    assert read(write(tmp_path / "a.rec", records, [0, 1])) == [(b"a", 2), (b"b", 1)]


@pytest.mark.parametrize("label", [-1.0, 0.5, float("nan")])
def test_an_invalid_label_is_reported_with_its_record(tmp_path, label):
    path = write(tmp_path / "a.rec", [record(b"a", [1]), record(b"b", [label])])
    with pytest.raises(DataError, match=r"a\.rec record 1"):
        RecordIOSource(path)


def test_a_huge_record_is_refused_without_reading_it(tmp_path):
    size = 65 * 2**20
    with (tmp_path / "a.rec").open("wb") as file:
        file.write(PART.pack(0xCED7230A, size) + HEADER.pack(0, 1.0, 0, 0))
        file.truncate(8 + size)
    source = RecordIOSource(tmp_path / "a.rec")
    tracemalloc.start()
    with pytest.raises(DataError, match=r"record 0: .*68157448 bytes"):
        source[0]
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-9], r"record 3 at byte \d+ "),
        (lambda content: b"\xff\xd8" + content[2:], "record 0 at byte 0 "),  # no magic
        (lambda content: content[:4] + struct.pack("<I", 3 << 29 | 35) + content[8:], "record 0 at byte 0 "),
        (lambda content: content[:8] + b"\xff" * 4 + content[12:], "record 0 at byte 0 "),  # of labels
        (lambda content: frame(b"tiny") + content, "record 0 at byte 0 "),
    ],
)
def test_damage_is_reported_with_its_record(rec, damage, message):
    rec.with_suffix(".idx").unlink()
    rec.write_bytes(damage(rec.read_bytes()))
    with pytest.raises(DataError, match=message):
        RecordIOSource(rec)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0\t0\nx\t9\n", r"train\.idx:2"),
        ("0\t0\t4\n5\n", r"train\.idx:1"),
        ("0\t4\n", "key 0 .* at 4"),
        ("0\t999999999\n", "key 0 .* at 999999999"),
        ("0\t" + "9" * 30, r"train\.idx:1"),
        ("0\t0\n0\t0\n", "key 0 .* repeated"),
    ],
)
def test_an_inconsistent_index_file_is_reported(rec, text, message):
    rec.with_suffix(".idx").write_text(text)
    with pytest.raises(DataError, match=message):
        RecordIOSource(rec)


def test_an_index_file_that_is_a_link_out_of_its_folder_is_not_read(rec, tmp_path):
    idx = rec.with_suffix(".idx").rename(tmp_path.parent / f"{tmp_path.name}.netrc")
    rec.with_suffix(".idx").symlink_to(idx)
    with pytest.raises(DataError, match="link"):
        RecordIOSource(rec)


def test_a_label_that_float32_cannot_represent_is_not_written(tmp_path):
    with pytest.raises(DataError, match="label 16777217 cannot be written"):
        write_recordio(str(tmp_path / "a.rec"), [(b"image", 2**24 + 1)])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="label -1 cannot"):
        pack_image(b"image", -1, 0)


@pytest.fixture(scope="module")
def from_mxnet(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mxnet")
    tool = ROOT / "tools" / "make_mxnet_fixture.py"
    done = subprocess.run(
        [sys.executable, str(tool), str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"mxnet 1.9.1 cannot be installed here: {done.stderr.strip()[-300:]}")
    return folder


@pytest.mark.slow
def test_files_written_by_mxnet_are_read_and_ours_are_equal_byte_for_byte(from_mxnet, tmp_path):
    found = json.loads((from_mxnet / "expected.json").read_text())
    samples = list(zip(map(bytes.fromhex, found["images"]), found["labels"], strict=True))
    for name in ("plain", "several", "backwards", "unindexed"):
        assert read(from_mxnet / f"{name}.rec") == samples
    assert read(from_mxnet / "insightface.rec") == [samples[i] for i in found["order"]]
    write_recordio(str(tmp_path / "ours.rec"), samples)
    for suffix in (".rec", ".idx"):
        theirs = (from_mxnet / f"plain{suffix}").read_bytes()
        assert (tmp_path / f"ours{suffix}").read_bytes() == theirs
