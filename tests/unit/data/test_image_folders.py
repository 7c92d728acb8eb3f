import os
import tracemalloc
import uuid
from pathlib import Path

import fsspec
import pytest
from PIL import features

from plsc.data.decode import decode_image
from plsc.data.sources import ImageFolderSource, LabelFileSource, check_labels, open_images, open_source
from plsc.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for name in ("b/2.PNG", "b/3.jpg", "a/1.jpg", "c/notes.txt", ".cache/x.jpg", "a/.hidden.jpg"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return root


def names(source: ImageFolderSource) -> list[str]:
    return [source.name(i) for i in range(len(source))]


def test_class_ids_follow_the_sorted_folder_names(folder):
    source = ImageFolderSource(folder)
    assert [*source.class_names.values()] == ["a", "b", "c"]
    assert names(source) == ["a/1.jpg", "b/2.PNG", "b/3.jpg"]
    assert source.labels().tolist() == [0, 1, 1]
    assert source[2] == (b"b/3.jpg", 1)


OF_SYSTEMS = [
    "__MACOSX/a/._1.jpg", "#recycle/1.jpg", "$RECYCLE.BIN/1.jpg", "System Volume Information/1.jpg",
    "lost+found/1.jpg", "a/@eaDir/1.jpg/SYNOPHOTO_THUMB_M.jpg", "a/.@__thumb/1.jpg", "@__thumb/1.jpg",
    "#SynoRecycle/1.jpg", "$WINDOWS.~BT/1.jpg", "_gsdata_/1.jpg", "a/Thumbs.db", "a/desktop.ini", ".DS_Store",
]  # fmt: skip


def copied(folder: Path, is_remote: bool) -> Path | str:
    """Return a folder, or its copy in a store."""
    if not is_remote:
        return folder
    url = f"memory://{uuid.uuid4()}"
    for path in folder.rglob("*"):
        if path.is_file():
            fsspec.filesystem("memory").pipe(f"{url}/{path.relative_to(folder)}", path.read_bytes())
    return url


@pytest.mark.parametrize("is_remote", [False, True])
def test_names_of_operating_systems_are_neither_classes_nor_images(folder, messages, is_remote):
    for name in OF_SYSTEMS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    (folder / "c" / "1.jpg").write_bytes(b"x")
    place = copied(folder, is_remote)
    source = open_source(place)
    assert [*source.class_names.values()] == ["a", "b", "c"]
    assert names(source) == ["a/1.jpg", "b/2.PNG", "b/3.jpg", "c/1.jpg"]
    assert [text.count(f"{len(OF_SYSTEMS) + 2} hidden (such as") for text in messages] == [1]
    assert names(open_images(place)) == names(source)
    assert len(messages) == 2


@pytest.mark.parametrize("is_remote", [False, True])
def test_files_that_are_not_read_are_counted_with_an_example(folder, messages, is_remote):
    for name in ("a/1.heic", "b/3.HEIC", "b/readme", "0.jpg"):
        (folder / name).write_bytes(b"x")
    place = copied(folder, is_remote)
    open_source(place)
    for words in (("2 .heic", "a/1.heic"), ("1 .txt", "c/notes.txt"), ("1 in no class folder", "0.jpg")):
        assert [all(word in text for word in words) for text in messages] == [True]
    assert names(open_images(place))[0] == "0.jpg"
    assert "2 .heic" in messages[1]


def test_every_suffix_of_a_type_that_the_decoder_reads_is_an_image(tmp_path):
    read = ["jfif", "jpe", "JPG", "mpo", "pnm", "pbm", "webp", *["avif"] * features.check("avif")]
    for suffix in (*read, "heic", "svg"):
        (tmp_path / f"1.{suffix}").write_bytes(b"x")
    assert names(open_images(tmp_path)) == sorted(f"1.{suffix}" for suffix in read)


@pytest.mark.parametrize("name", ["a.heic", "no suffix"])
def test_an_image_of_another_type_is_no_list_of_paths(tmp_path, name):
    (tmp_path / name).write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0")
    source = open_images(tmp_path / name)
    assert source.labels().tolist() == [-1]
    with pytest.raises(DataError, match="PNG"):
        decode_image(source[0][0], (3, 8, 8))


@pytest.mark.parametrize("start", [b"\0\0\0\x0cjP  \r\n\x87\n", b"PK\3\4", b"\xef\xbb\xbf <svg xmlns="])
def test_a_file_of_another_kind_is_not_read_as_a_list(tmp_path, start):
    (tmp_path / "a.jp2").write_bytes(start)
    with pytest.raises(DataError, match="neither"):
        open_images(tmp_path / "a.jp2")


def test_composed_and_decomposed_folders_are_one_class(tmp_path):
    for name in ("Zoe\u0301", "Zo\u00e9", "Zod"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.jpg").write_bytes(b"")
    source = ImageFolderSource(tmp_path)
    found = dict(zip(names(source), source.labels().tolist(), strict=True))
    assert found == {"Zod/1.jpg": 0, "Zoe\u0301/1.jpg": 1, "Zo\u00e9/1.jpg": 1}
    assert [*source.class_names.values()] == ["Zod", "Zoe\u0301"]


@pytest.fixture
def alphabets(tmp_path: Path) -> Path:
    """Two alphabets of two and three characters."""
    root = tmp_path / "alphabets"
    for name in ("latin/a", "latin/b", "latin-extended/a", "latin-extended/b", "latin-extended/c"):
        (root / name).mkdir(parents=True)
        for number in range(2):
            (root / name / f"{number}.png").write_bytes(name.encode())
    return root


def test_nested_class_folders_are_refused(alphabets):
    with pytest.raises(DataError, match=r"latin/a .* no class folder"):
        open_source(alphabets)


@pytest.mark.parametrize(
    ("file", "text"),
    [("map.json", '{"a": 10, "b": 5, "c": 0}'), ("map.txt", "a\t10\r\nb\t5\n\nc\t0\n")],
)
def test_a_label_map_defines_the_class_ids(folder, tmp_path, file, text):
    (tmp_path / file).write_text(text)
    source = ImageFolderSource(folder, label_map=tmp_path / file)
    assert source.labels().tolist() == [10, 5, 5]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("map.json", '{"a": 1, "b": 2}', "'c'"),
        ("map.json", '{"a": true}', "True"),
        ("map.json", '{"a": 0, "b": 1, "a": 5}', "twice"),
        ("map.json", "[" * 100_000, "map.json"),
        ("map.txt", "a\t1\na\t2\n", "line 2"),
    ],
)
def test_a_bad_label_map_is_refused(folder, tmp_path, file, text, message):
    (tmp_path / file).write_text(text)
    with pytest.raises(DataError) as caught:
        ImageFolderSource(folder, label_map=tmp_path / file)
    assert message in str(caught.value)


def test_links_that_leave_the_folder_are_refused(folder, tmp_path):
    (tmp_path / "secret.jpg").write_bytes(b"x")
    link = folder / "a" / "2.jpg"
    link.symlink_to(tmp_path / "secret.jpg")
    with pytest.raises(DataError, match=r"a/2\.jpg is a link that leaves"):
        ImageFolderSource(folder)
    link.unlink()
    (folder / "d").symlink_to(tmp_path)
    with pytest.raises(DataError, match="d is a link to a folder"):
        ImageFolderSource(folder)


def test_a_folder_of_unknown_layout_is_refused_with_a_list_of_layouts(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "forgotten" / "images").mkdir(parents=True)
    (tmp_path / "label.txt").write_text("x")
    for name in ("empty", "forgotten", "label.txt", "missing"):
        with pytest.raises(DataError, match=r"label\.txt"):
            open_source(tmp_path / name)
    (tmp_path / "bare" / "a").mkdir(parents=True)
    with pytest.raises(DataError, match="no images"):
        open_source(tmp_path / "bare")
    (tmp_path / "bare/a/1.heic").touch()
    for read in (open_images, ImageFolderSource):
        with pytest.raises(DataError, match=r"1 \.heic"):
            read(tmp_path / "bare")


def write(folder: Path, content: bytes | str, *files: str) -> Path:
    data = content.encode() if isinstance(content, str) else content
    (folder / "label.txt").write_bytes(data)
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return folder


@pytest.mark.parametrize(
    "content",
    [
        "images/é  a.jpg\t3\nimages/b.jpg\t4",
        "images/é  a.jpg \t 3  \r\n\r\nimages/b.jpg 4\r\n",
        "\ufeffimages/x/../é  a.jpg 3\n\n   \nimages/b.jpg 04\n\n",
    ],
)
def test_blanks_line_ends_and_byte_order_marks_are_accepted(tmp_path, content):
    source = LabelFileSource(write(tmp_path, content, "images/é  a.jpg"))
    assert source.paths() == ["images/é  a.jpg", "images/b.jpg"]
    assert source.labels().tolist() == [3, 4]
    assert source[0] == ("images/é  a.jpg".encode(), 3)
    check_labels(source, 5)
    with pytest.raises(DataError, match=r"label 4 at .*label\.txt:\d"):
        check_labels(source, 4)


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
        ("images/a.jpg -1", "label"),
        ("images/a.jpg 1_0", "integer"),
        ("images/a.jpg ٣", "integer"),
        ("images/a.jpg 9999999999999999999", "digits"),
        ("../a.jpg 1", "outside"),
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


def test_a_missing_or_huge_image_below_images_is_named_with_its_line_and_not_read(tmp_path):
    source = LabelFileSource(write(tmp_path, "\n\na.jpg 1\n\nb.jpg 2\n", "images/a.jpg"))
    assert source[0] == (b"images/a.jpg", 1)
    os.truncate(tmp_path / "images/a.jpg", 2**40)  # sparse: reading it would cause a MemoryError
    with pytest.raises(DataError, match=r"images/a\.jpg \(label\.txt:3\): .*1099511627776 bytes"):
        source[0]
    with pytest.raises(DataError, match=r"images/b\.jpg \(label\.txt:5\): .* missing"):
        source[1]


def test_a_line_takes_little_more_memory_than_its_text(tmp_path):
    count = 20_000
    write(tmp_path, "".join(f"images/{i:06}.jpg {i}\n" for i in range(count)))
    tracemalloc.start()
    source = LabelFileSource(tmp_path)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(source) == count
    assert held / count < 17 + 8 + 8 + 12  # path, offset, label, spare capacity of growing buffers
