from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from plsc.data.sources import LabelFileSource, check_labels
from plsc.errors import DataError


def write(folder: Path, content: bytes | str, *files: str) -> Path:
    data = content.encode() if isinstance(content, str) else content
    (folder / "label.txt").write_bytes(data)
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return folder


def entries(source: LabelFileSource) -> list[tuple[str, int]]:
    return [
        (str(source.path(i).relative_to(source.root)), label)
        for i, label in enumerate(source.labels().tolist())
    ]


@pytest.mark.parametrize(
    "content",
    [
        "images/a.jpg 3\nimages/b.jpg 4\n",
        "images/a.jpg\t3\nimages/b.jpg\t4",
        "images/a.jpg \t 3  \r\n\r\nimages/b.jpg 4\r\n",
        "\ufeffimages/a.jpg 3\n\n   \nimages/b.jpg 4\n\n",
        "images/x/../a.jpg 3\nimages/b.jpg 04\n",
    ],
)
def test_blanks_line_ends_and_byte_order_marks_are_accepted(tmp_path, content):
    source = LabelFileSource(write(tmp_path, content, "images/a.jpg"))
    assert entries(source) == [("images/a.jpg", 3), ("images/b.jpg", 4)]
    assert source[0] == (b"images/a.jpg", 3)


def test_a_path_may_contain_spaces_and_any_letters(tmp_path):
    name = "images/été  на 1.jpg"
    source = LabelFileSource(write(tmp_path, f"{name} 7\n", name))
    assert source[0] == (name.encode(), 7)


def test_a_path_that_is_not_unicode_is_read_and_has_a_printable_name(tmp_path):
    source = LabelFileSource(write(tmp_path, b"a\xff\x1b[2J.jpg 1\n"))
    (tmp_path / "x").write_bytes(b"data")
    (tmp_path / "x").rename(source.path(0))
    assert source[0] == (b"data", 1)
    assert source.name(0) == r"a\xff\x1b[2J.jpg (label.txt:1)"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("images/a.jpg", "label"),
        ("images/a.jpg -1", "0 or more"),
        ("images/a.jpg one", "integer"),
        ("images/a.jpg 1.5", "integer"),
        ("images/a.jpg 1_0", "integer"),
        ("images/a.jpg ٣", "integer"),
        ("images/a.jpg 9999999999999999999", "digits"),
        ("../a.jpg 1", "is outside"),
        ("images/../../a.jpg 1", "is outside"),
        (".. 1", "is outside"),
        ("http://host/a.jpg 1", "allowed"),
        ("a\0.jpg 1", "null byte"),
        ("x" * 9000 + " 1", "bytes"),
    ],
)
def test_a_bad_line_is_reported_with_its_number(tmp_path, line, message):
    folder = write(tmp_path, f"good.jpg 0\n\n{line}\n")
    with pytest.raises(DataError, match=r"label\.txt:3\b") as caught:
        LabelFileSource(folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "\n\n", "\ufeff", "  \r\n"])
def test_an_empty_file_is_refused(tmp_path, content):
    with pytest.raises(DataError, match=r"label\.txt contains no samples"):
        LabelFileSource(write(tmp_path, content))


def test_a_missing_or_huge_image_below_images_is_named_with_its_line_and_not_read(tmp_path):
    source = LabelFileSource(write(tmp_path, "\n\na.jpg 1\n\nb.jpg 2\n", "images/a.jpg"))
    assert source[0] == (b"images/a.jpg", 1)
    os.truncate(tmp_path / "images/a.jpg", 2**40)  # sparse: reading it would cause a MemoryError
    with pytest.raises(DataError, match=r"images/a\.jpg \(label\.txt:3\): .*1099511627776 bytes"):
        source[0]
    with pytest.raises(DataError, match=r"images/b\.jpg \(label\.txt:5\): .* missing"):
        source[1]


def test_the_first_label_out_of_range_is_reported_with_advice(tmp_path):
    source = LabelFileSource(write(tmp_path, "a 0\nb 85741\nc 85742\nd 85743\n"))
    check_labels(source, 85744)
    with pytest.raises(DataError) as caught:
        check_labels(source, 85742)
    text = str(caught.value)
    assert "label 85742 at c (label.txt:3) is outside 0..85741" in text
    assert "head.class_num to 85744" in text


def test_a_line_takes_little_more_memory_than_its_text(tmp_path):
    count = 20_000
    write(tmp_path, "".join(f"images/{i:06}.jpg {i}\n" for i in range(count)))
    tracemalloc.start()
    source = LabelFileSource(tmp_path)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(source) == count
    assert held / count < 17 + 8 + 8 + 12  # path, offset, label, spare capacity of growing buffers
