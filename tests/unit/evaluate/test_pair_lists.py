"""Text lists of pairs: what is read, and hostile lists."""

from __future__ import annotations

import numpy as np
import pytest

from plsc.errors import DataError
from plsc.evaluate.pair_lists import read_pair_list


@pytest.fixture
def folder(tmp_path):
    for name in ("a.png", "b.png", "my face.png", "Al_Gore/Al_Gore_0001.png", "Al_Gore/Al_Gore_0012.png",
                 "Bo/Bo_0003.png"):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


def write(folder, content):
    path = folder / "list.txt"
    path.write_bytes(content)
    return path


def read(folder, content):
    """Return the content of both images and the flag of each pair."""
    found = read_pair_list(write(folder, content))
    images = [found.images[index][0].decode() for index in range(len(found.images))]
    assert len(set(images)) == len(images)
    pairs = found.pairs.tolist()
    return [(images[a], images[b], flag) for (a, b), flag in zip(pairs, found.is_same.tolist(), strict=True)]


def test_lines_are_two_paths_and_a_flag(folder):
    content = b"\xef\xbb\xbfa.png b.png 0\r\n\r\n  a.png   b.png  1 \nmy face.png\ta.png\t1\nb.png b.png 1"
    content += b"\nAl_Gore/../a.png b.png 0"
    assert read(folder, content) == [
        ("a.png", "b.png", False),
        ("a.png", "b.png", True),
        ("my face.png", "a.png", True),
        ("b.png", "b.png", True),
        ("a.png", "b.png", False),
    ]


@pytest.mark.parametrize(
    "content",
    [
        b"a.png,b.png,True\na.png , my face.png, FALSE\n",
        b"path1,path2,is_same\r\na.png,b.png,1\r\na.png,my face.png,-1\r\n",
        b'left;right;same\n"a.png";"b.png";"1"\na.png;"my face.png";0\n',
        b"a.png b.png true\na.png\tmy face.png\t-1\n",
    ],
)
def test_flags_and_separators_of_tables_are_read(folder, content):
    assert read(folder, content) == [("a.png", "b.png", True), ("a.png", "my face.png", False)]


@pytest.mark.parametrize("header", [b"1\t1", b"1"])
def test_the_layout_of_lfw_finds_the_suffix_of_the_images(folder, header):
    assert read(folder, header + b"\nAl_Gore\t1\t12\nAl_Gore\t12\tBo\t3\n") == [
        ("Al_Gore/Al_Gore_0001.png", "Al_Gore/Al_Gore_0012.png", True),
        ("Al_Gore/Al_Gore_0012.png", "Bo/Bo_0003.png", False),
    ]


def test_the_layout_of_lfw_finds_suffixes_in_upper_case(tmp_path):
    (tmp_path / "Bo").mkdir()
    for number in (1, 2):
        (tmp_path / f"Bo/Bo_000{number}.JPG").write_bytes(b"%d" % number)
    assert read(tmp_path, b"1\nBo\t1\t2\nBo\t2\tBo\t1\n") == [("1", "2", True), ("2", "1", False)]


def test_images_may_be_in_another_folder_and_are_named_with_their_first_line(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("lists")
    found = read_pair_list(write(elsewhere, b"a.png b.png 0\nb.png a.png 0\n"), folder)
    assert [found.images.name(index) for index in (0, 1)] == ["a.png (list.txt:1)", "b.png (list.txt:1)"]
    assert found.images.path(1) == folder / "b.png"
    assert np.array_equal(found.pairs, [[0, 1], [1, 0]])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no pairs"),
        (b"a.png b.png\n", r"list\.txt:1: expected .*, got 'a\.png b\.png'"),
        (b"a.png b.png 1\nmy face.png b.png 1\n", r"list\.txt:2: expected .* contains a blank, got"),
        (b"a.png\tb.png\t1\ta\n", r"list\.txt:1: expected"),
        (b"\ta.png\t1\n", r"list\.txt:1: expected"),
        (b"a.png b.png 1\n\na.png b.png 2\n", r"list\.txt:3: expected .*, got 'a\.png b\.png 2'"),
        (b"a.png,b.png,Maybe\n", r"list\.txt:1: expected"),
        ("a.png b.png 1\n".encode("utf-16"), "UTF-16"),
        (b"a.png b.png 1\na.png c.png 1\n", r"c\.png \(list\.txt:2\): there is no such image in "),
        (b"a.png Al_Gore 1\n", r"Al_Gore \(list\.txt:1\): there is no such image"),
        (b"a.png /etc/passwd 1\n", r"/etc/passwd \(list\.txt:1\): the file is not an image"),
        (b"a.png ../a.png 1\n", r"list\.txt:1: the location '\.\./a\.png' is outside"),
        (b"a.png b\0.png 1\n", r"list\.txt:1: the location 'b\\x00\.png' has a null byte"),
        (b"a.png http://host/b.png 1\n", r"list\.txt:1: the location .* argument `allowed`"),
        (b"a.png " + b"b" * 100_000, r"list\.txt:1 is longer than 16384 bytes"),
        (b"1\t2\nAl_Gore\t1\t12\n", r"has 1 pairs, but its first line announces 4; it is truncated"),
        (b"1\t1\nAl_Gore\t1\n", r"list\.txt:2: expected"),
        (b"1\t1\nAl_Gore\t1\tx\n", r"list\.txt:2: expected"),
        (b"1\t1\n..\t1\t12\n", r"list\.txt:2: the location '\.\./"),
    ],
)  # fmt: skip
def test_a_bad_list_is_an_error_that_names_file_and_line(folder, content, message):
    with pytest.raises(DataError, match=message) as caught:
        read_pair_list(write(folder, content)).images[1]
    assert "\n" not in str(caught.value)


def test_a_missing_list_or_image_is_an_error(folder):
    for place, message in ((folder / "none.txt", "none.txt"), (folder, "directory")):
        with pytest.raises(DataError, match=f"(?i){message}"):
            read_pair_list(place)
    listed = read_pair_list(write(folder, b"a.png b.png 0\n"))
    (folder / "b.png").unlink()
    with pytest.raises(DataError, match=r"^b\.png \(list\.txt:1\): .*missing"):
        listed.images[1]
