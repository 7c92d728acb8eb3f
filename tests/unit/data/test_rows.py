import base64
import csv
import gzip
import io
import json
import tracemalloc
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.data.files import name_key
from plsc.data.lines import decode_base64
from plsc.data.partition import PartitionOptions, partition
from plsc.data.sources import Base64Source, open_source, rows
from plsc.data.sources.base import class_names_of
from plsc.data.sources.rows import CsvSource, JsonLinesSource
from plsc.errors import DataError, OptionError
from plsc.utils import base64_reader
from tests.images import NAMES, UNSAFE_NAMES
from tests.unit.data.conftest import encode, smooth_picture


def write(folder: Path, text: str | bytes, name: str = "train.csv") -> Path:
    data = text.encode() if isinstance(text, str) else text
    (folder / name).write_bytes(data)
    for image in ("a.jpg", "b, c.jpg"):
        (folder / image).write_bytes(image.encode())
    return folder / name


def read(path: Path, **options: str) -> list[tuple[bytes, int]]:
    source = CsvSource(path, **options)
    return [source[i] for i in range(len(source))]


@pytest.mark.parametrize(
    "text",
    [
        'path,label\na.jpg,1\n"b, c.jpg",0\n',
        'path,label\r\na.jpg,1\r\n"b, c.jpg",0\r\n',
        '\ufeff\n\npath,label\n\na.jpg, 1 \n\n"b, c.jpg",0',
        'label;x;image\n1;;a.jpg\n0;"1\n2";b, c.jpg\n',
        'Path\tLabel\n"a.jpg"\t"1"\nb, c.jpg\t0\n',
        '"path","label"\na.jpg,01\n"b, c.jpg",0\n',
        'label,note,path\n1,"with ""quotes"" and\nlines\n\n",a.jpg\n0,,"b, c.jpg"\n',
    ],
)
def test_quotes_separators_blank_lines_and_line_ends_are_accepted(tmp_path, text):
    assert read(write(tmp_path, text)) == [(b"a.jpg", 1), (b"b, c.jpg", 0)]


def test_columns_are_chosen_by_name(tmp_path):
    path = write(tmp_path, "path,mine,person,label\nx,a.jpg,7,0\n")
    assert read(path, image_column="mine", label_column="person") == [(b"a.jpg", 7)]
    assert read(path, image_column="mine") == [(b"a.jpg", 0)]
    with pytest.raises(OptionError, match=r"'who'.* path, mine, person, label"):
        CsvSource(path, label_column="who")


def test_an_image_is_named_by_its_path_or_url_in_any_order(tmp_path):
    (tmp_path / "a.csv").write_text(f"path,label\nx/1.png,0\nmemory://set/2.png,1\n{tmp_path}/3.png,1\n")
    source = CsvSource(tmp_path / "a.csv", allowed=["memory://set/"])
    places = [f"{tmp_path}/x/1.png", "memory://set/2.png", f"{tmp_path}/3.png"]
    assert [str(source.path(index)) for index in range(3)] == places


def test_class_names_get_their_sorted_rank_or_the_id_of_a_label_map(tmp_path):
    path = write(tmp_path, 'label,path\n"Zoë, the 2nd",a.jpg\nAda,a.jpg\n"Zoë, the 2nd",a.jpg\n')
    source = CsvSource(path)
    assert source.labels().tolist() == [1, 0, 1]
    assert [*source.class_names.values()] == ["Ada", "Zoë, the 2nd"]
    (tmp_path / "map.json").write_text('{"Ada": 70, "Zoë, the 2nd": 5, "more": 1}')
    assert CsvSource(path, label_map=tmp_path / "map.json").labels().tolist() == [5, 70, 5]
    numbers = write(tmp_path, "label,path\n10,a.jpg\n9,a.jpg\n", "numbers.csv")
    (tmp_path / "numbers.json").write_text('{"10": 0, "9": 1}')
    assert CsvSource(numbers, label_map=tmp_path / "numbers.json").labels().tolist() == [0, 1]
    assert CsvSource(numbers).labels().tolist() == [10, 9]
    (tmp_path / "map.json").write_text('{"Ada": 70}')
    with pytest.raises(DataError, match="no id for 'Zoë, the 2nd'"):
        CsvSource(path, label_map=tmp_path / "map.json")


@pytest.mark.parametrize(
    "text",
    ["1", "-1", "+.5", "1.5E-3", ".5e+1", "5.e3", "1.", ".", "NaN", "inf", "1" * 10**5 + "x"],
)
def test_numbers_that_are_no_labels_are_recognised_in_linear_time(tmp_path, text):
    source = write(tmp_path, f"path,label\na.jpg,{text}\n")
    if text in ("1", "5.e3", ".") or text.endswith("x"):
        assert CsvSource(source).labels().tolist() == [int(text == "1")]
        return
    with pytest.raises(DataError, match="integer"):
        CsvSource(source)


@pytest.mark.parametrize(
    "labels",
    [
        ["12e4", "7", "ab1"],
        ["Nan", "Bob"],
        ["-1", "x"],
        *([odd, "10", "7"] for odd in ("007", "0_0", "٣", "9" * 30)),
    ],
)
def test_labels_that_are_not_all_canonical_integers_are_names_in_any_order_of_the_rows(tmp_path, labels):
    for order in (labels, labels[::-1]):
        source = CsvSource(write(tmp_path, "path,label\n" + "".join(f"a.jpg,{one}\n" for one in order)))
        assert [source.class_names[label] for label in source.labels()] == order
        assert [*source.class_names.values()] == sorted(order)
    with pytest.raises(DataError, match=r"train.csv:3.*integer"):
        CsvSource(write(tmp_path, "path,label\na.jpg,1\na.jpg,1.5\na.jpg,2.5\n"))


def test_composed_and_decomposed_names_are_one_class_as_first_written(tmp_path):
    path = write(tmp_path, "path,label\na.jpg,Zoe\u0301\na.jpg,Zo\u00e9\na.jpg,Zod\na.jpg,Zoz\n")
    source = CsvSource(path)
    assert source.labels().tolist() == [2, 2, 0, 1]
    assert [*source.class_names.values()] == ["Zod", "Zoz", "Zoe\u0301"]
    (tmp_path / "map.tsv").write_text("Zo\u00e9\t5\nZod\t6\nZoz\t7\n")
    assert CsvSource(path, label_map=tmp_path / "map.tsv").labels().tolist() == [5, 5, 6, 7]
    (tmp_path / "map.tsv").write_text("Zo\u00e9\t5\nZoe\u0301\t6\n")
    with pytest.raises(DataError, match="Zo"):
        CsvSource(path, label_map=tmp_path / "map.tsv")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a.jpg,1,2", "3 fields"),
        ("a.jpg,", "label"),
        ("a.jpg,-1", "'-1'"),
        ('"a"jpg,1', "CSV"),
        (b'"a\xff",1', "UTF-8"),
    ],
)
def test_a_bad_row_is_reported_with_its_line(tmp_path, row, message):
    data = row.encode() if isinstance(row, str) else row
    with pytest.raises(DataError, match=r"train\.csv:4[: ]") as caught:
        CsvSource(write(tmp_path, b"path,label\n\na.jpg,0\n" + data + b"\na.jpg,0\n"))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n\n", "column"), ("path,label\n\n \n", "samples"), ("a,b\n1,2\n", "column"),
        ("path,label\na.jpg,1\n".encode("utf-16-be"), "UTF-16"),
    ],
)  # fmt: skip
def test_a_file_without_samples_or_of_another_encoding_is_refused(tmp_path, text, message):
    with pytest.raises((DataError, OptionError), match=rf"train\.csv.*{message}"):
        CsvSource(write(tmp_path, text))


@pytest.mark.parametrize("path", ["../a.jpg", "x/../../a.jpg", "/etc/passwd", "..", "", "a\0b"])
def test_a_path_that_leaves_the_folder_or_is_no_image_is_refused(tmp_path, path):
    with pytest.raises(DataError, match=r"train\.csv:3: "):
        CsvSource(write(tmp_path, f'path,label\na.jpg,0\n"{path}",1\n'))[1]


@pytest.mark.parametrize(
    ("start", "zeros", "message"),
    [
        (b"path,label\na.jpg,0\n", b"\0", r"train\.csv:3"),
        (b'path,label\n"a.jpg,1\n', b"\n", r"train\.csv:2: "),
    ],
)
def test_a_line_or_quote_without_end_takes_bounded_memory(tmp_path, monkeypatch, start, zeros, message):
    monkeypatch.setattr(rows, "_MAX_ROW_BYTES", 2**15)
    (tmp_path / "train.csv").write_bytes(start + zeros * 60_000)
    tracemalloc.start()
    with pytest.raises(DataError, match=message):
        CsvSource(tmp_path / "train.csv")
    assert tracemalloc.get_traced_memory()[1] < 2**21
    tracemalloc.stop()


def test_a_quoted_field_of_many_lines_is_read_in_linear_time(tmp_path):
    note = "\n" * 30_000
    text = f'note,label,path\n"{note}",1,a.jpg\n"{note}",2,a.jpg\n'
    source = CsvSource(write(tmp_path, text))
    assert source.labels().tolist() == [1, 2]
    assert source.name(1) == "train.csv:30003"


field = st.text(st.sampled_from('a",\n\r; é'), max_size=6)
path = st.text(st.sampled_from('a",; é'), max_size=6).map("é".__add__)


@settings(max_examples=40)
@given(st.lists(st.tuples(path, st.integers(0, 9), field), min_size=1, max_size=8), st.booleans())
def test_everything_the_csv_module_writes_is_read_back(rows, crlf):
    text = io.StringIO()
    # Outside quotes, a single CR does not end a row by the standard, but the module writes it there.
    has_cr = any("\r" in note for _, _, note in rows)
    quoting = csv.QUOTE_ALL if has_cr else csv.QUOTE_MINIMAL
    writer = csv.writer(text, lineterminator="\r\n" if crlf else "\n", quoting=quoting)

    writer.writerow(["path", "label", "x"])
    writer.writerows(rows)
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe("/csv/train.csv", text.getvalue().encode())
    source = CsvSource("memory://csv/train.csv")
    assert source.labels().tolist() == [label for _, label, _ in rows]
    assert source.paths() == [path.strip() for path, _, _ in rows]


GOOD = '{"image": "a.jpg", "label": 4}'


@pytest.mark.parametrize(
    "text",
    [f"\ufeff{GOOD}\r\n\r\n{GOOD}", f"\n\n {GOOD} \n\n{GOOD}\n\n"],
)
def test_blank_lines_and_line_ends_are_accepted(tmp_path, text):
    source = JsonLinesSource(write(tmp_path, text, "train.jsonl"))
    assert [source[i] for i in range(len(source))] == [(b"a.jpg", 4)] * 2


def test_an_integer_and_a_string_with_zeros_are_different_classes(tmp_path):
    rows = ({"image": "a.jpg", "label": label} for label in (7, "7", "007"))
    source = JsonLinesSource(write(tmp_path, "\n".join(map(json.dumps, rows)), "train.jsonl"))
    assert (source.labels().tolist(), [*source.class_names.values()]) == ([1, 1, 0], ["007", "7"])


def test_class_names_are_data_and_only_unsafe_ones_are_refused(tmp_path):
    rows = [{"image": "a.jpg", "label": name} for name in NAMES]
    source = JsonLinesSource(write(tmp_path, "\n".join(map(json.dumps, rows)), "train.jsonl"))
    assert [*source.class_names.values()] == sorted(NAMES)
    assert [*class_names_of(source)] == sorted(NAMES)
    for name in UNSAFE_NAMES:
        text = "\n".join(json.dumps(row) for row in [*rows, {"image": "a.jpg", "label": name}])
        with pytest.raises(DataError, match=r"train\.jsonl:8: .*name"):
            JsonLinesSource(write(tmp_path, text, "train.jsonl"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "JSON"),
        ('{"image": "a.jpg"}', "'label'"),
        ('{"image": "a.jpg", "label": true}', "'label'"),
        ('{"image": "a.jpg", "label": NaN}', "JSON"),
        ('{"image": "a.jpg", "label": 1, "label": 2}', "twice"),
        ('{"image": "a.jpg", "label": ""}', "label"),
        ('{"image": "a.jpg", "label": %s}' % ("9" * 5000), "JSON"),
        ("[" * 100_000, "JSON"),
    ],
)
def test_a_bad_line_is_reported_with_its_number(tmp_path, line, message):
    text = f"{GOOD}\n\n{line}\n{GOOD}"
    with pytest.raises(DataError, match=r"train\.jsonl:3: ") as caught:
        JsonLinesSource(write(tmp_path, text, "train.jsonl"))
    assert message in str(caught.value)
    with pytest.raises(DataError, match=r"train\.jsonl:2: 'image'"):
        JsonLinesSource(write(tmp_path, f'{GOOD}\n{{"image": 3, "label": 1}}', "train.jsonl"))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=25)
@given(st.lists(values, max_size=5))
def test_every_label_is_read_or_refused(tmp_path_factory, labels):
    folder = tmp_path_factory.mktemp("json")
    rows = [{"image": "a.jpg", "label": label} for label in [0, *labels]]
    path = write(folder, "\n".join(map(json.dumps, rows)), "train.jsonl")
    are_ids = all(type(label) is int and 0 <= label < 10**18 for label in labels)
    try:
        source = JsonLinesSource(path)
    except DataError:
        assert not are_ids
    else:
        names = source.class_names
        found = [str(label) if names is None else names[label] for label in source.labels()]
        expected = [str(row["label"]).strip() for row in rows]
        assert list(map(name_key, found)) == list(map(name_key, expected))


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


@pytest.mark.parametrize("text", [b"QUJ", b"QUJD!", b"\xff\xfe"])
def test_invalid_base64_is_reported_with_file_and_line_and_data_uris_and_url_safe_text_are_read(
    tmp_path, text
):
    lines = b"DATA:;base64, _-8=\t1\r\n" + text + b"\t2\n _-8=\t3\n"
    source = Base64Source(write_set(tmp_path / "set", {"a": lines}))
    with pytest.raises(DataError, match=r"a:2: .*base64"):
        source[1]
    assert [source[0], source[2]] == [(b"\xff\xef", 1), (b"\xff\xef", 3)]


@pytest.mark.timeout(60)  # not an hour
@pytest.mark.parametrize("text", [b"data:", b"\r\n"])
def test_text_that_is_nearly_a_data_uri_is_refused_in_linear_time(text):
    with pytest.raises(DataError, match="not base64"):
        decode_base64(text * 2**17 + b"!")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a", b"QUJD\nQUJD\t1\n", r"a:1: .*-w0"),
        ("a", "QUJD\t1\n".encode("utf-16"), "UTF-16"),
        ("a.gz", gzip.compress(b"QUJD\t1\n" * 100, mtime=0), r"a\.gz"),
    ],
)
def test_a_file_that_is_not_lines_of_base64_is_refused_as_what_it_is(tmp_path, name, content, message):
    with pytest.raises(DataError, match=message):
        Base64Source(write_set(tmp_path / "set", {name: content}))


def test_a_partition_is_a_source(tmp_path):
    folder = write_images(tmp_path / "set", {"a": 5, "b": 6})
    partition(PartitionOptions(str(folder), 3))
    before, after = open_source(folder), open_source(folder / "partition_3")
    assert len(after) == 12
    assert {before[n] for n in range(11)} == {after[n] for n in range(12)}
    assert after.lines_per_file.tolist() == [4, 4, 4]
    (folder / "a").write_bytes(b"QUJD\t1\n")  # the stored index is of another file
    assert open_source(folder).labels().tolist()[:2] == [1, 5 % 3]


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

    def test_what_it_cannot_read_is_refused(self, tmp_path, monkeypatch):
        folder = write_images(tmp_path / "set", {"a": 3, "b": 1, "c": 3})
        with pytest.raises(DataError, match="label 2 at a:3"):
            base64_reader.train(folder, "file_list.txt", 2)
        with pytest.raises(OptionError, match="rotate"):
            base64_reader.arc_iterator(folder / "file_list.txt", 3, rotate=True)
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(DataError, match=r"3, 1, 3 lines .* 2 ranks"):
            base64_reader.train(folder, "file_list.txt", 3)
