import json
import os
import traceback
import tracemalloc
import uuid
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image, features

from plsc.data.decode import decode_image
from plsc.data.sources import (
    Base64Source,
    ImageFolderSource,
    LabelFileSource,
    TorchDatasetSource,
    check_labels,
    open_images,
    open_source,
)
from plsc.data.sources.parquet import ParquetSource
from plsc.data.sources.recordio import RecordIOSource
from plsc.data.sources.rows import CsvSource
from plsc.data.sources.tar import TarSource
from plsc.data.writers import write_recordio
from plsc.errors import DataError, OptionError, add_note
from tests.distributed.launch import run_code
from tests.images import write_parquet, write_samples, write_tar

SAMPLES = [(b"first", 1), (b"second", 0)]


def write(location: Path | str) -> None:
    write_samples(str(location), SAMPLES)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.rec", RecordIOSource),
        ("a.parquet", ParquetSource),
        ("a.tar", TarSource),
        ("b", Base64Source),
    ],
)
def test_a_file_and_the_folder_that_contains_only_it_are_recognised(tmp_path, name, kind):
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / name)
    (tmp_path / "set/lfw.bin").write_bytes(b"a pair file beside it")
    for location in (tmp_path / "set" / name, *[tmp_path / "set"] * (name != "b")):
        source = open_source(location)
        assert type(source) is kind
        assert source[0] == SAMPLES[0]


def test_several_datasets_in_one_folder_are_refused(tmp_path):
    write(tmp_path / "a.rec")
    write(tmp_path / "b.rec")
    with pytest.raises(DataError, match=r"a\.rec, b\.rec"):
        open_source(tmp_path)


def test_a_remote_folder_without_images_is_refused():
    write("memory://opening/tars/a.tar")
    for place in ("memory://opening", "memory://opening/gone"):
        with pytest.raises(DataError, match=place):
            open_source(place)


def test_an_option_that_the_format_does_not_accept_is_refused(tmp_path):
    write(tmp_path / "a.rec")
    with pytest.raises(OptionError, match="label_map"):
        open_source(tmp_path / "a.rec", label_map="x.json")
    (tmp_path / "folders/one").mkdir(parents=True)
    (tmp_path / "folders/one/a.jpg").write_bytes(b"image")
    with pytest.raises(OptionError, match=r"image_column .*label_map"):
        open_source(tmp_path / "folders", image_column="x")


def test_class_folders_next_to_a_file_are_refused(tmp_path):
    folder = tmp_path / "set"
    for name in "ab":
        (folder / name).mkdir(parents=True)
        (folder / name / "1.jpg").write_bytes(b"image")
    (folder / "notes.csv").write_text("path,label\na/1.jpg,1\nb/1.jpg,0\n")
    with pytest.raises(DataError, match=r"2 folders and notes\.csv"):
        open_source(folder)
    assert open_source(folder / "notes.csv").labels().tolist() == [1, 0]


def test_a_file_next_to_the_folder_of_its_images_is_the_dataset(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images/1.jpg").write_bytes(b"image")
    (tmp_path / "train.csv").write_text("path,label\nimages/1.jpg,0\n")
    assert type(open_source(tmp_path)) is CsvSource


class Items:
    """A dataset that counts how often it is read."""

    def __init__(self, labels: list) -> None:
        self.items = labels
        self.reads = 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Image.Image, object]:
        self.reads += 1
        return Image.new("RGB", (8, 8)), self.items[index]


@pytest.mark.parametrize(
    ("attribute", "kind"), [("targets", list), ("labels", np.array), ("targets", torch.tensor)]
)
def test_declared_labels_are_used_without_reading_images(attribute, kind):
    dataset = Items([4, 5, 6])
    setattr(dataset, attribute, kind([4, 5, 6]))
    labels = TorchDatasetSource(dataset).labels()
    assert labels.dtype == np.int64
    assert labels.tolist() == [4, 5, 6]
    assert dataset.reads == 0
    dataset.target_transform = lambda target: target * 10
    dataset.items = [40, 50, 60]
    assert TorchDatasetSource(dataset).labels().tolist() == [40, 50, 60]


@pytest.mark.parametrize("declared", [[1, 2], [[1], [2], [3]], ["a", "b", "c"], [[1], [2, 3], 4]])
def test_labels_of_unexpected_form_are_not_used(declared):
    dataset = Items([4, 5, 6])
    dataset.targets = declared
    assert TorchDatasetSource(dataset).labels().tolist() == [4, 5, 6]


@pytest.mark.parametrize("label", [1.0, "1", None, torch.tensor(1.5), torch.tensor([1, 2])])
def test_a_label_that_is_not_an_integer_is_refused(label):
    with pytest.raises(DataError, match=r"dataset\[0\]: .*integer"):
        TorchDatasetSource(Items([label]))[0]


def test_a_file_that_the_dataset_cannot_read_is_a_bad_image(tmp_path):
    class Broken(Items):
        def __getitem__(self, index: int) -> tuple[Image.Image, object]:
            return Image.open(tmp_path / "missing.jpg"), 0

    with pytest.raises(DataError, match=r"dataset\[0\]: cannot be read \(.*\) at .*test_opening") as bad:
        TorchDatasetSource(Broken([0]))[0]
    assert isinstance(bad.value.__cause__, FileNotFoundError)


def test_exceptions_of_a_dataset_keep_type_and_traceback_and_name_the_sample():
    class Mistaken(Items):
        def __getitem__(self, index: int) -> tuple[Image.Image, object]:
            return super().__getitem__({0: 0}[index])

    source = TorchDatasetSource(Mistaken([0, 1]), "mine")
    for read in (lambda: source[1], source.labels):
        with pytest.raises(KeyError) as mistake:
            read()
        told = "".join(traceback.format_exception(mistake.value))
        assert "return super().__getitem__({0: 0}[index])" in told
        assert told.count("while reading mine[1]") == 1
    error = ValueError("text")
    add_note(error, "note")
    add_note(error, "note")
    assert "".join(traceback.format_exception(error)).count("note") == 1


MANY = [(b"image %d" % i * (i + 1), i % 4) for i in range(10)]


def structs(location: str, samples: list[tuple[bytes, int]]) -> None:
    rows = [{"image": {"bytes": image, "path": "x"}, "label": label} for image, label in samples]
    pq.write_table(pa.Table.from_pylist(rows), location, row_group_size=3)


DAMAGE = """
import faulthandler, json, resource, sys
from pathlib import Path
import numpy as np
from plsc.data.sources import open_source
from plsc.errors import DataError, OptionError

def peak():  # KiB; not ru_maxrss, which starts at the peak of the parent
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])

faulthandler.enable()
resource.setrlimit(resource.RLIMIT_AS, (12 * 2**30,) * 2)  # torch alone maps some
paths = [Path(path) for path in sys.argv[1:]]
good = {path: path.read_bytes() for path in paths}
rng = np.random.default_rng(0)
outcomes, start = {"read": 0, "refused": 0}, peak()
for turn in range(150):
    for path, content in good.items():
        bad, way = bytearray(content), rng.random()
        if way < 0.6:  # most of a Parquet file is images; its metadata is at the end
            low = max(len(bad) - 900, 0) if rng.random() < 0.6 and path.suffix == ".parquet" else 0
            for _ in range(rng.integers(1, 5)):
                bad[rng.integers(low, len(bad))] ^= 1 << rng.integers(8)
        elif way < 0.8:
            bad = bad[: rng.integers(len(bad))]
        else:
            place = rng.integers(len(bad) - 40)
            bad[place : place + 40] = rng.bytes(40)
        if path.suffix == ".tar" and turn % 2:  # valid checksums, so that later fields are parsed
            for at in range(0, len(bad) - 511, 512):
                if bad[at + 257 : at + 262] == b"ustar":
                    bad[at + 148 : at + 156] = b" " * 8
                    bad[at + 148 : at + 156] = b"%06o\\0 " % sum(bad[at : at + 512])
        path.write_bytes(bad if len(good) == 1 or rng.random() < 0.7 else content)
    if len(good) > 1 and rng.random() < 0.3:
        paths[1].unlink()
    try:
        source = open_source(paths[0])
    except (DataError, OptionError):
        outcomes["refused"] += 1
        continue
    outcomes["read"] += 1
    for index in range(len(source)):
        try:
            data, label = source[index]
            assert isinstance(data, bytes) and label >= 0
        except DataError:
            pass
print(json.dumps([*outcomes.values(), peak() - start]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "write"),
    [
        (["a.rec", "a.idx"], write_recordio), (["a.tar"], write_tar),
        (["a.parquet"], write_parquet), (["a.parquet"], structs),
    ],
)  # fmt: skip
def test_damaged_files_neither_crash_nor_exhaust_memory(tmp_path, names, write):
    write(str(tmp_path / names[0]), MANY)
    done = run_code(DAMAGE, *(str(tmp_path / name) for name in names))
    read, refused, kilobytes = json.loads(done.stdout)
    assert min(read, refused) > 5
    assert kilobytes < 2**20


# Folders of images.


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


def write_file(folder: Path, content: bytes | str, *files: str) -> Path:
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
    source = LabelFileSource(write_file(tmp_path, content, "images/é  a.jpg"))
    assert source.paths() == ["images/é  a.jpg", "images/b.jpg"]
    assert source.labels().tolist() == [3, 4]
    assert source[0] == ("images/é  a.jpg".encode(), 3)
    check_labels(source, 5)
    with pytest.raises(DataError, match=r"label 4 at .*label\.txt:\d"):
        check_labels(source, 4)


def test_a_path_that_is_not_unicode_is_read_and_has_a_printable_name(tmp_path):
    source = LabelFileSource(write_file(tmp_path, b"a\xff\x1b[2J.jpg 1\n"))
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
    folder = write_file(tmp_path, f"good.jpg 0\n\n{line}\n")
    with pytest.raises(DataError, match=r"label\.txt:3\b") as caught:
        LabelFileSource(folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_or_huge_image_below_images_is_named_with_its_line_and_not_read(tmp_path):
    source = LabelFileSource(write_file(tmp_path, "\n\na.jpg 1\n\nb.jpg 2\n", "images/a.jpg"))
    assert source[0] == (b"images/a.jpg", 1)
    os.truncate(tmp_path / "images/a.jpg", 2**40)  # sparse: reading it would cause a MemoryError
    with pytest.raises(DataError, match=r"images/a\.jpg \(label\.txt:3\): .*1099511627776 bytes"):
        source[0]
    with pytest.raises(DataError, match=r"images/b\.jpg \(label\.txt:5\): .* missing"):
        source[1]


def test_a_line_takes_little_more_memory_than_its_text(tmp_path):
    count = 20_000
    write_file(tmp_path, "".join(f"images/{i:06}.jpg {i}\n" for i in range(count)))
    tracemalloc.start()
    source = LabelFileSource(tmp_path)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(source) == count
    assert held / count < 17 + 8 + 8 + 12  # path, offset, label, spare capacity of growing buffers
