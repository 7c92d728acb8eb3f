from __future__ import annotations

import base64
import csv
import io
import tracemalloc
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from plsc.data.decode import PILLOW_FORMATS
from plsc.data.sources import open_source, rows
from plsc.data.sources.rows import CsvSource
from plsc.errors import DataError, OptionError

JPEG = b"\xff\xd8\xff\xe0" + bytes(range(100))
IN_BASE64 = base64.b64encode(JPEG).decode()


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


def test_the_name_is_the_first_line_of_the_row(tmp_path):
    text = '\npath,label,x\na.jpg,1,"two\nlines"\n\na.jpg,1,\n'
    source = CsvSource(write(tmp_path, text))
    assert [source.name(i) for i in range(2)] == ["train.csv:3", "train.csv:6"]


def test_columns_are_chosen_by_name(tmp_path):
    path = write(tmp_path, f"path,mine,person,label\nx,{IN_BASE64},7,0\n")
    assert read(path, image_column="mine", label_column="person") == [(JPEG, 7)]
    assert read(path, image_column="mine") == [(JPEG, 0)]


@pytest.mark.parametrize("option", ["image_column", "label_column"])
def test_a_missing_column_is_refused_with_a_list_of_the_columns(tmp_path, option):
    path = write(tmp_path, "path,label\na.jpg,1\n")
    with pytest.raises(OptionError, match=r"'who'; the columns are: path, label"):
        CsvSource(path, **{option: "who"})
    with pytest.raises(OptionError, match=r"no label column.*a, b"):
        CsvSource(write(tmp_path, "a,b\n1,2\n"), image_column="a")


def test_class_names_get_their_sorted_rank_or_the_id_of_a_label_map(tmp_path):
    path = write(tmp_path, 'label,path\n"Zoë, the 2nd",a.jpg\nAda,a.jpg\n"Zoë, the 2nd",a.jpg\n')
    source = CsvSource(path)
    assert source.labels().tolist() == [1, 0, 1]
    assert source.class_names == ["Ada", "Zoë, the 2nd"]
    (tmp_path / "map.json").write_text('{"Ada": 70, "Zoë, the 2nd": 5, "more": 1}')
    assert CsvSource(path, label_map=tmp_path / "map.json").labels().tolist() == [5, 70, 5]
    numbers = write(tmp_path, "label,path\n10,a.jpg\n9,a.jpg\n", "numbers.csv")
    (tmp_path / "numbers.json").write_text('{"10": 0, "9": 1}')
    assert CsvSource(numbers, label_map=tmp_path / "numbers.json").labels().tolist() == [0, 1]
    assert CsvSource(numbers).labels().tolist() == [10, 9]
    (tmp_path / "map.json").write_text('{"Ada": 70}')
    with pytest.raises(DataError, match="no id for 'Zoë, the 2nd'"):
        CsvSource(path, label_map=tmp_path / "map.json")


@pytest.mark.parametrize("odd", ["007", "0_0", "٣", "9" * 30, "seven"])
def test_labels_that_are_not_all_canonical_integers_are_names(tmp_path, odd):
    path = write(tmp_path, f"path,label\na.jpg,10\na.jpg,7\na.jpg,{odd}\na.jpg,7\n")
    source = CsvSource(path)
    names = sorted(["10", "7", odd])
    assert source.class_names == names
    assert [names[label] for label in source.labels()] == ["10", "7", odd, "7"]


@pytest.mark.parametrize(
    "text",
    ["1", "-1", "+.5", "5.", "1e9", "1.5E-3", ".5e+1", "5.e3", "1.", ".", "NaN", "inf", "1" * 10**5 + "x"],
)
def test_numbers_that_are_no_labels_are_recognised_in_linear_time(tmp_path, text):
    source = write(tmp_path, f"path,label\na.jpg,{text}\n")
    if text in ("1", "5.e3", ".") or text.endswith("x"):
        assert CsvSource(source).labels().tolist() == [int(text == "1")]
        return
    with pytest.raises(DataError, match="integer"):
        CsvSource(source)


@pytest.mark.parametrize("labels", [["12e4", "7", "ab1"], ["Nan", "Bob"], ["-1", "x"], ["1e3", "007"]])
def test_names_may_look_like_numbers_in_any_order_of_the_rows(tmp_path, labels):
    for order in (labels, labels[::-1]):
        source = CsvSource(write(tmp_path, "path,label\n" + "".join(f"a.jpg,{one}\n" for one in order)))
        assert [source.class_names[label] for label in source.labels()] == order
    with pytest.raises(DataError, match=r"train.csv:3.*integer"):
        CsvSource(write(tmp_path, "path,label\na.jpg,1\na.jpg,1.5\na.jpg,2.5\n"))


def test_composed_and_decomposed_names_are_one_class_as_first_written(tmp_path):
    path = write(tmp_path, "path,label\na.jpg,Zoe\u0301\na.jpg,Zo\u00e9\na.jpg,Zod\na.jpg,Zoz\n")
    source = CsvSource(path)
    assert source.labels().tolist() == [2, 2, 0, 1]
    assert source.class_names == ["Zod", "Zoz", "Zoe\u0301"]
    (tmp_path / "map.tsv").write_text("Zo\u00e9\t5\nZod\t6\nZoz\t7\n")
    assert CsvSource(path, label_map=tmp_path / "map.tsv").labels().tolist() == [5, 5, 6, 7]
    (tmp_path / "map.tsv").write_text("Zo\u00e9\t5\nZoe\u0301\t6\n")
    with pytest.raises(DataError, match="Zo"):
        CsvSource(path, label_map=tmp_path / "map.tsv")


def test_base64_may_be_a_data_uri_or_wrapped(tmp_path):
    lines = [IN_BASE64[i : i + 76] for i in range(0, len(IN_BASE64), 76)]
    texts = [
        f"data:image/jpeg;base64,{IN_BASE64}",
        f"DATA:IMAGE/JPEG;BASE64, {IN_BASE64}",
        '"{}\n"'.format("\n".join(lines)),
        '"\n    {}\n"'.format("\r\n    ".join(lines)),
        IN_BASE64.replace("+", "-").replace("/", "_"),
    ]
    for text in texts:
        quoted = text if text[0] == '"' else f'"{text}"'
        assert read(write(tmp_path, f"image,label\n{quoted},3\n")) == [(JPEG, 3)]


@pytest.mark.parametrize("kind", PILLOW_FORMATS)
def test_base64_of_every_type_of_image_is_told_from_a_path(tmp_path, kind):
    file = io.BytesIO()
    Image.fromarray(np.arange(768, dtype=np.uint8).reshape(16, 16, 3)).save(file, kind)
    text = base64.b64encode(file.getvalue()).decode()
    assert read(write(tmp_path, f"image,label\n{text},3\n")) == [(file.getvalue(), 3)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a.jpg", "1 fields"),
        ("a.jpg,1,2", "3 fields"),
        ("a.jpg,", "label"),
        ("a.jpg,-1", "'-1'"),
        ("a.jpg,1.5", "'1.5'"),
        ("a.jpg,nan", "'nan'"),
        ('"a"jpg,1', "CSV"),
        (b'"a\xff",1', "UTF-8"),
        (b"a.jpg,\xff", "UTF-8"),
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
        ("", "empty"), ("\n\n", "empty"), ("path,label\n", "samples"), ("path,label\n\n \n", "samples"),
        ("path,label\na.jpg,1\n".encode("utf-16"), "UTF-16"),
        ("path,label\na.jpg,1\n".encode("utf-16-be"), "UTF-16"),
    ],
)  # fmt: skip
def test_a_file_without_samples_or_of_another_encoding_is_refused(tmp_path, text, message):
    with pytest.raises((DataError, OptionError), match=rf"train\.csv.*{message}"):
        CsvSource(write(tmp_path, text))


@pytest.mark.parametrize("path", ["../a.jpg", "x/../../a.jpg", "/etc/passwd", "..", "", "a\0b"])
def test_a_path_that_leaves_the_folder_or_is_no_image_is_refused(tmp_path, path):
    source = CsvSource(write(tmp_path, f'path,label\na.jpg,0\n"{path}",1\n'))
    with pytest.raises(DataError, match=r"train\.csv:3: .*(is outside|not an image|null byte)"):
        source[1]
    source = CsvSource(write(tmp_path, f"image,label\n{IN_BASE64},0\n/9j/{'*' * 99},1\n"))
    with pytest.raises(DataError, match=r"train\.csv:3: the image is not base64"):
        source[1]


@pytest.mark.parametrize(
    ("start", "zeros", "message"),
    [
        (b"path,label\na.jpg,0\n", b"\0", r"train\.csv:3 is longer than 1048576 bytes"),
        (b'path,label\n"a.jpg,1\n', b"\n", r"train\.csv:2: a quote .*is not closed"),
    ],
)
def test_a_line_or_quote_without_end_takes_bounded_memory(tmp_path, monkeypatch, start, zeros, message):
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 2**20)
    (tmp_path / "train.csv").write_bytes(start + zeros * 4_000_000)
    tracemalloc.start()
    with pytest.raises(DataError, match=message):
        CsvSource(tmp_path / "train.csv")
    assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    tracemalloc.stop()


def test_a_quoted_field_of_many_lines_is_read_in_linear_time(tmp_path):
    note = "\n" * 100_000
    text = f'note,label,path\n"{note}",1,a.jpg\n"{note}",2,a.jpg\n'
    source = CsvSource(write(tmp_path, text))
    assert source.labels().tolist() == [1, 2]
    assert source.name(1) == "train.csv:100003"


field = st.text(st.sampled_from('a",\n\r; é'), max_size=6)


@given(st.lists(st.tuples(field, st.integers(0, 9), field), min_size=1, max_size=8), st.booleans())
def test_everything_the_csv_module_writes_is_read_back(rows, crlf):
    text = io.StringIO()
    # Outside quotes, a single CR does not end a row by the standard, but the module writes it there.
    has_cr = any("\r" in path + note for path, _, note in rows)
    quoting = csv.QUOTE_ALL if has_cr else csv.QUOTE_MINIMAL
    writer = csv.writer(text, lineterminator="\r\n" if crlf else "\n", quoting=quoting)
    writer.writerow(["path", "label", "x"])
    writer.writerows(rows)
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe("/csv/train.csv", text.getvalue().encode())
    source = CsvSource("memory://csv/train.csv")
    assert source.labels().tolist() == [label for _, label, _ in rows]
    texts = [source._image_text(source._stored_at(i)) for i in range(len(rows))]
    assert texts == [path.strip() for path, _, _ in rows]


def test_images_of_a_remote_file_are_read_from_its_folder():
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe("/csvs/train.csv", b"path,label\nimages/a.jpg,3\nimages/gone.jpg,1\n")
    filesystem.pipe("/csvs/images/a.jpg", b"content")
    source = open_source("memory://csvs/train.csv")
    assert source[0] == (b"content", 3)
    with pytest.raises(DataError, match=r"train\.csv:3: .*gone\.jpg"):
        source[1]
