from __future__ import annotations

import base64
import gzip
from pathlib import Path

import numpy as np
import pytest
from conftest import encode, smooth_picture

from plsc.data import lines
from plsc.data.lines import decode_base64
from plsc.data.partition import PartitionOptions, partition
from plsc.data.sources import Base64Source, open_source, rows
from plsc.errors import DataError, OptionError
from plsc.utils import base64_reader


def line_of(data: bytes, label: int) -> bytes:
    return base64.b64encode(data) + b"\t%d" % label


def write_set(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "file_list.txt").write_text("\n".join(files))
    return folder


def write_images(folder: Path, counts: dict[str, int], classes: int = 3) -> Path:
    files, number = {}, 0
    for name, count in counts.items():
        lines = []
        for _ in range(count):
            picture = encode(smooth_picture(number), "PNG")
            lines.append(line_of(picture, number % classes) + b"\n")
            number += 1
        files[name] = b"".join(lines)
    return write_set(folder, files)


def test_sample_names_are_file_and_line_despite_blank_lines(tmp_path):
    a, b, c, d = (line_of(bytes([n]), n) for n in range(4))
    files = {
        "one": b"\xef\xbb\xbf\n" + a + b"\r\n\r\n\n" + b + b"\n\n",
        "two": b"\n\n",
        "three": b"\n" + c + b"\n" + d,
    }
    source = Base64Source(write_set(tmp_path / "set", files))
    names = [source.name(index) for index in range(4)]
    assert names == ["one:2", "one:5", "three:2", "three:3"]
    assert [source[index] for index in range(4)] == [(bytes([n]), n) for n in range(4)]
    assert source.lines_per_file.tolist() == [2, 0, 2]


def test_lines_longer_than_a_block_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "_BLOCK", 64)
    rng = np.random.default_rng(0)
    contents = [rng.bytes(int(rng.integers(1, 300))) for _ in range(60)]
    lines = [line_of(data, n) + (b"\n" if n % 7 else b"\r\n\n") for n, data in enumerate(contents)]
    source = Base64Source(write_set(tmp_path / "set", {"a": b"".join(lines)}))
    assert [source[n] for n in range(60)] == [(data, n) for n, data in enumerate(contents)]
    assert source.labels().tolist() == list(range(60))


@pytest.mark.parametrize("text", [b"QUJ", b"QU JD", b"QUJD!", b"QUJDQ===", b"\xff\xfe"])
def test_invalid_base64_is_reported_with_file_and_line(tmp_path, text):
    folder = write_set(tmp_path / "set", {"a": b"QUJD\t1\n\n" + text + b"\t2\nQUJD\t3\n"})
    source = Base64Source(folder)
    with pytest.raises(DataError, match=r"a:3: .* not base64"):
        source[1]
    assert source[2] == (b"ABC", 3)


def test_data_uris_and_url_safe_text_are_read(tmp_path):
    lines = b"data:image/png;base64,/+8=\t1\r\nDATA:;base64, _-8=\t2\n _-8=\t3\n"
    source = Base64Source(write_set(tmp_path / "set", {"a": lines}))
    assert [source[n] for n in range(3)] == [(b"\xff\xef", n) for n in (1, 2, 3)]


@pytest.mark.timeout(60)  # not an hour
@pytest.mark.parametrize("text", [b" ", b"data:", b"\r\n"])
def test_text_that_is_nearly_a_data_uri_is_refused_in_linear_time(text):
    with pytest.raises(DataError, match="not base64"):
        decode_base64(text * 2**17 + b"!")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a", b"QUJD\nQUJD\t1\n", r"a:1: .*-w0"),
        ("a", "QUJD\t1\n".encode("utf-16"), "a is UTF-16"),
        ("a", b"\n\n", "no samples"),
        ("a.gz", gzip.compress(b"QUJD\t1\n" * 100, mtime=0), r"a\.gz"),
    ],
)
def test_a_file_that_is_not_lines_of_base64_is_refused_as_what_it_is(tmp_path, name, content, message):
    with pytest.raises(DataError, match=message):
        Base64Source(write_set(tmp_path / "set", {name: content}))


@pytest.mark.parametrize(
    "line", [b"QUJD", b"QUJD 1", b"QUJD\tx", b"QUJD\t-1", b"\t1", b"Q\tD\t1", b"QUJD\t1\rQUJD\t2\r"]
)
def test_an_invalid_label_is_reported_when_the_index_is_built(tmp_path, line):
    with pytest.raises(DataError, match="b:2: "):
        Base64Source(write_set(tmp_path / "set", {"a": b"QUJD\t1\n", "b": b"QUJD\t1\n" + line}))


def test_the_index_is_rebuilt_only_when_a_file_has_changed(tmp_path, monkeypatch):
    folder = write_set(tmp_path / "set", {"a": b"QUJD\t1\n"})
    built = []
    read = lines.LineReader.__iter__
    monkeypatch.setattr(lines.LineReader, "__iter__", lambda self: built.append(1) or read(self))
    for _ in range(3):
        assert len(Base64Source(folder)) == 1
    assert len(built) == 1
    (folder / "a").write_bytes(b"QUJD\t1\nQUJD\t2\n")
    assert Base64Source(folder).labels().tolist() == [1, 2]
    assert len(built) == 2


def test_a_partition_is_a_source(tmp_path):
    folder = write_images(tmp_path / "set", {"a": 5, "b": 6})
    partition(PartitionOptions(str(folder), 3))
    before, after = open_source(folder), open_source(folder / "partition_3")
    assert len(after) == 12
    assert {before[n] for n in range(11)} == {after[n] for n in range(12)}
    assert after.lines_per_file.tolist() == [4, 4, 4]


class TestReader:
    def test_each_rank_reads_its_parts_in_the_order_of_the_lines(self, tmp_path):
        folder = write_images(tmp_path / "set", {"a": 2, "b": 1, "c": 1, "d": 2}, classes=6)
        read = [
            [label for _, label in base64_reader.train(folder, "file_list.txt", 6, (3, 24, 20))(r, 2)]
            for r in range(2)
        ]
        assert read == [[0, 1, 2], [3, 4, 5]]

    def test_images_are_normalised_and_randomly_mirrored(self, tmp_path):
        folder = write_images(tmp_path / "set", {"a": 20}, classes=20)
        mirrored = 0
        reader = base64_reader.train(str(folder), "file_list.txt", 20, image_shape=(3, 24, 20))
        for image, label in reader():
            plain = np.array(smooth_picture(label)).transpose(2, 0, 1).astype(np.float32)
            plain = (plain - 127.5) / 128
            assert image.dtype == np.float32
            is_mirrored = np.array_equal(image, plain[..., ::-1])
            assert is_mirrored != np.array_equal(image, plain)
            mirrored += is_mirrored
        assert 0 < mirrored < 20

    def test_the_rank_is_read_from_the_launcher_s_environment(self, tmp_path, monkeypatch):
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        folder = write_images(tmp_path / "set", {"a": 2, "b": 2}, classes=4)
        reader = base64_reader.train(folder, "file_list.txt", 4, (3, 24, 20))
        assert [label for _, label in reader()] == [2, 3]
        assert [label for _, label in reader(0, 1)] == [0, 1, 2, 3]

    @pytest.mark.parametrize("ranks", ["2", "3"])
    def test_files_that_ranks_cannot_share_equally_are_refused(self, tmp_path, monkeypatch, ranks):
        monkeypatch.setenv("WORLD_SIZE", ranks)
        folder = write_images(tmp_path / "set", {"a": 2, "b": 1, "c": 3})
        with pytest.raises(DataError, match=rf"3 files of 2, 1, 3 lines .* {ranks} ranks"):
            base64_reader.train(folder, "file_list.txt", 3)

    def test_labels_out_of_range_and_unknown_augmentations_are_refused(self, tmp_path):
        folder = write_images(tmp_path / "set", {"a": 3})
        with pytest.raises(DataError, match=r"label 2 at a:3 is outside 0\.\.1"):
            base64_reader.train(folder, "file_list.txt", 2)
        with pytest.raises(OptionError, match="rotate"):
            base64_reader.arc_iterator(folder / "file_list.txt", 3, rotate=True)
