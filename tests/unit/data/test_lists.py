from __future__ import annotations

import base64
import json
import os
import re

import numpy as np
import pytest

from plsc.data.lists import read_listing, write_list
from plsc.data.sources import open_source
from plsc.errors import DataError, OptionError
from tests.images import write_dataset


def folders(root, images):
    """Write files at these paths, whose content is the path."""
    for path in images:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(path)
    return root


IMAGES = ["0000045/a.jpg", "007/b 1.jpg", '007/"c".jpg', "Zoë/d.jpg"]


def test_a_list_chooses_images_of_a_folder_and_keeps_digits_as_names(tmp_path):
    root = folders(tmp_path / "faces", IMAGES)
    _, listing = read_listing(root)
    counts = write_list(tmp_path / "list.tsv", listing, np.array([3, 1, 0]))
    assert counts == {"images": 3, "classes": 3}
    source, again = read_listing(tmp_path / "list.tsv", image_folder=root)
    assert [source[i] for i in range(3)] == [
        (b"Zo\xc3\xab/d.jpg", 2),
        (b'007/"c".jpg', 1),
        (IMAGES[0].encode(), 0),
    ]
    assert source.class_names == again.classes == ["0000045", "007", "Zoë"]
    assert again.paths == [listing.paths[i] for i in (3, 1, 0)]
    assert (again.labels == listing.labels[[3, 1, 0]]).all()


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_a_column_class_name_and_one_of_numbers_have_their_own_index(tmp_path, name):
    folders(tmp_path, ["a.jpg"])
    rows = [
        {"path": "a.jpg", "class_name": "20", "label": 5},
        {"path": "a.jpg", "class_name": "3", "label": 9},
    ]
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    lines = lines if name == "a.csv" else list(map(json.dumps, rows))
    (tmp_path / name).write_text("\n".join(lines))
    for _ in range(2):  # with the stored index, too
        source = open_source(tmp_path / name, label_column="class_name")
        assert (source.labels().tolist(), source.class_names) == ([0, 1], ["20", "3"])
        source = open_source(tmp_path / name)
        assert (source.labels().tolist(), source.class_names) == ([5, 9], None)


def test_links_of_an_image_folder_must_not_leave_it(tmp_path):
    folders(tmp_path, ["faces/a.jpg", "secret.jpg"])
    (tmp_path / "faces/b.jpg").symlink_to(tmp_path / "secret.jpg")
    (tmp_path / "list.tsv").write_text("path\tclass_name\na.jpg\tx\nb.jpg\tx\n../secret.jpg\tx\n")
    source = open_source(tmp_path / "list.tsv", image_folder=tmp_path / "faces")
    assert source[0] == (b"faces/a.jpg", 0)
    with pytest.raises(DataError, match="link"):
        source[1]
    with pytest.raises(DataError, match=r"list\.tsv:4: the location '\.\./secret\.jpg' is outside"):
        source[2]


def test_an_image_folder_that_is_missing_or_of_another_format_is_refused(tmp_path):
    (tmp_path / "list.tsv").write_text("path\tclass_name\na.jpg\tx\n")
    with pytest.raises(DataError, match="the image_folder gone does not exist"):
        open_source(tmp_path / "list.tsv", image_folder="gone")
    with pytest.raises(OptionError, match="image_folder is set, but this data format does not use it"):
        open_source(write_dataset(tmp_path / "set", 2, 1), image_folder=tmp_path)


def test_numeric_labels_are_listed_by_their_digits_below_the_folder_of_the_images(tmp_path):
    folders(tmp_path / "images", ["a.jpg", "b.jpg", "c.jpg"])
    (tmp_path / "label.txt").write_text("a.jpg 9\n./b.jpg 10\nc.jpg 9\n")
    source, listing = read_listing(tmp_path)
    assert listing.folder == str(tmp_path / "images")
    assert (listing.paths, listing.classes) == (["a.jpg", "b.jpg", "c.jpg"], ["10", "9"])
    assert listing.labels.tolist() == [1, 0, 1]
    assert source.labels().tolist() == [9, 10, 9]


def test_only_image_files_can_be_listed(tmp_path):
    stored = base64.b64encode(b"\xff\xd8\xff\xe0" + bytes(99)).decode()
    (tmp_path / "a.csv").write_text(f"image,label\n{stored},0\n")
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines/part").write_text(f"{stored}\t0\n")
    (tmp_path / "lines/file_list.txt").write_text("part\n")
    for name in ("a.csv", "lines"):
        with pytest.raises(DataError, match=rf"images of \S+{name} are inside its files"):
            read_listing(tmp_path / name)


@pytest.mark.parametrize("name", [b"a\nb", b"a\tb", b" a", b"a\xff", "\u2028a".encode()])
def test_a_path_that_a_list_cannot_contain_is_refused(tmp_path, name):
    (tmp_path / "faces").mkdir()
    os.mkdir(os.path.join(os.fsencode(tmp_path / "faces"), name))  # noqa: PTH102, PTH118 - bytes
    (tmp_path / "faces" / os.fsdecode(name) / "1.jpg").write_bytes(b"")
    with pytest.raises(DataError, match="cannot be in a list"):
        read_listing(tmp_path / "faces")


def test_two_samples_of_one_file_are_refused_with_both_places(tmp_path):
    (tmp_path / "a.csv").write_text("path,label\nx/a.jpg,0\nb.jpg,0\n./x//a.jpg,1\n")
    with pytest.raises(DataError, match=re.escape("a.csv:4 is the same image as a.csv:2")):
        read_listing(tmp_path / "a.csv")
