"""Every reader of a data or model folder: pipes never block it, and links lead it nowhere else; writers."""

import base64
import contextlib
import json
import multiprocessing
import os
import pickle
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import fsspec
import numpy as np
import pytest
import torch

from plsc.checkpoint import Manifest, Snapshot, load_weights, save_checkpoint
from plsc.checkpoint.class_plan import read_class_list
from plsc.checkpoint.manifest import HeadInfo
from plsc.cli import main
from plsc.data.batch import BadSample, BadSampleList
from plsc.data.pairs import read_pairs
from plsc.data.partition.inputs import list_inputs
from plsc.data.sources import open_images, open_source
from plsc.data.sources.columns import read_label_map
from plsc.errors import CheckpointError, DataError, PlscError
from plsc.evaluate.templates import read_protocol
from plsc.evaluate.verification import read_pair_list
from plsc.gallery import open_gallery, write_gallery
from plsc.parallel.world import World
from plsc.predict.embeddings import FORMAT, VERSION, open_embeddings, write_index, write_shard
from plsc.storage.disk import (
    FileName,
    FolderLock,
    Size,
    Text,
    lock_note,
    publishing,
    publishing_folder,
    read_record,
    read_regular,
)
from plsc.storage.urls import exists
from plsc.train.log import JsonLines
from tests.images import write_samples
from tests.roles import role_of_key
from tests.unit.evaluate.test_templates import FILES

pytestmark = pytest.mark.timeout(60)
LINES = "a.jpg 10 10 30 10 20 20 12 30 28 30\n"


class Case(NamedTuple):
    """A file, and a call that reads it. is_named: by the user, so it may be a link to anywhere."""

    file: Path
    read: Callable[[], object]
    is_named: bool = False


def images(folder: Path, names: str = "ab") -> None:
    for name in names:
        (folder / f"{name}.jpg").write_bytes(b"image " + name.encode())


def every_image(folder: Path, **options: object) -> Callable[[], object]:
    def read() -> list[object]:
        source = open_source(folder, **options)
        samples = list(source.read_many(np.arange(len(source))))
        for sample in samples:
            if isinstance(sample, DataError):
                raise sample
        return samples

    return read


def label_list(folder: Path) -> Case:
    images(folder)
    (folder / "label.txt").write_text("a.jpg 0\nb.jpg 1\n")
    return Case(folder / "label.txt", every_image(folder))


def listed_image(folder: Path) -> Case:
    return Case(folder / "a.jpg", label_list(folder).read)


def listed_folder(folder: Path) -> Case:
    (folder / "images").mkdir()
    images(folder / "images")
    (folder / "label.txt").write_text("images/a.jpg 0\nimages/b.jpg 1\n")
    return Case(folder / "images", every_image(folder))


def folder_of_images(folder: Path) -> Case:
    case = listed_folder(folder)
    (folder / "label.txt").write_text("a.jpg 0\nb.jpg 1\n")
    return case


def aligned_image(folder: Path) -> Case:
    label_list(folder)
    (folder / "points.txt").write_text(LINES + LINES.replace("a.jpg", "b.jpg"))
    return Case(folder / "a.jpg", every_image(folder, landmarks="points.txt"))


def landmarks(folder: Path) -> Case:
    return Case(folder / "points.txt", aligned_image(folder).read, is_named=True)


def class_image(folder: Path) -> Case:
    for label in "ab":
        (folder / label).mkdir()
        images(folder / label)
    return Case(folder / "a/a.jpg", every_image(folder))


def label_map(folder: Path) -> Case:
    (folder / "map.json").write_text('{"a": 1, "b": 0}')
    return Case(folder / "map.json", lambda: read_label_map(folder / "map.json"), is_named=True)


def csv_image(folder: Path) -> Case:
    images(folder)
    (folder / "train.csv").write_text("path,label\na.jpg,0\nb.jpg,1\n")
    return Case(folder / "b.jpg", every_image(folder))


def csv_file(folder: Path) -> Case:
    return Case(folder / "train.csv", csv_image(folder).read)


def file_list(folder: Path) -> Case:
    lines = [f"{base64.b64encode(b'image').decode()}\t{label}\n" for label in range(2)]
    (folder / "part").write_text("".join(lines))
    (folder / "file_list.txt").write_text("part\n")
    return Case(folder / "file_list.txt", every_image(folder))


def listed_part(folder: Path) -> Case:
    return Case(folder / "part", file_list(folder).read)


def found(suffix: str) -> Callable[[Path], Case]:
    def make(folder: Path) -> Case:
        location = str(folder / f"train{suffix}")
        write_samples(location, [(b"image", 0), (b"other", 1)])
        return Case(Path(location), every_image(folder))

    make.__name__ = f"found_{suffix[1:]}"
    return make


def named(suffix: str) -> Callable[[Path], Case]:
    def make(folder: Path) -> Case:
        case = found(suffix)(folder)
        return Case(case.file, every_image(case.file), is_named=True)

    make.__name__ = f"named_{suffix[1:]}"
    return make


def pair_list(folder: Path) -> Case:
    images(folder)
    (folder / "pairs.txt").write_text("a.jpg b.jpg 0\n")
    return Case(
        folder / "pairs.txt", lambda: read_pair_list(folder / "pairs.txt").pairs.tolist(), is_named=True
    )


def paired_image(folder: Path) -> Case:
    case = pair_list(folder)
    return Case(folder / "a.jpg", lambda: read_pair_list(case.file).images[0])


def pair_file(folder: Path) -> Case:
    (folder / "lfw.bin").write_bytes(pickle.dumps(([b"1", b"2"], [True])))
    return Case(folder / "lfw.bin", lambda: read_pairs(folder / "lfw.bin").images, is_named=True)


def template(part: str) -> Callable[[Path], Case]:
    def make(folder: Path) -> Case:
        for name, text in FILES.items():
            (folder / name).write_text(text)
        (file,) = folder.glob(f"*{part}*")
        return Case(file, lambda: read_protocol(folder).template_ids.tolist())

    make.__name__ = f"template_{part}"
    return make


def class_list(folder: Path) -> Case:
    (folder / "drop").write_text("1\n2\n")
    read = lambda: read_class_list(folder / "drop", "drop", 1, 9).numbers.tolist()  # noqa: E731
    return Case(folder / "drop", read, is_named=True)


def image_list(folder: Path) -> Case:
    images(folder)
    (folder / "list.txt").write_text("a.jpg\nb.jpg\n")
    return Case(folder / "list.txt", lambda: open_images(folder / "list.txt")[0], is_named=True)


def manifest(folder: Path) -> Case:
    values = {role_of_key("backbone.a"): torch.ones(3)}
    about = Manifest("0.1.0", 7, 1, 0, 1, 3, {"": HeadInfo(5, [(0, 5)])})
    path = save_checkpoint(folder, "1", Snapshot(values, about), World.single())
    return Case(path / "manifest.json", lambda: load_weights(path)["a"].tolist())


def gallery(name: str) -> Callable[[Path], Case]:
    def make(folder: Path) -> Case:
        write_gallery(folder / "g", np.eye(3), model="0" * 64)
        return Case(folder / "g" / name, lambda: len(open_gallery(folder / "g")))

    make.__name__ = name
    return make


def embeddings(name: str) -> Callable[[Path], Case]:
    def make(folder: Path) -> Case:
        shard = write_shard(folder, 0, ["a", "b"], {"embeddings": np.ones((2, 1), np.float32)})
        columns = {
            "embeddings": {"dtype": "float32", "shape": [1]},
            "names": {"dtype": "object", "shape": []},
        }
        about = {"format": FORMAT, "version": VERSION, "columns": columns, "count": 2, "complete": True}
        model = dict.fromkeys(("name", "checkpoint", "step", "weights"), "")
        shards = [{"file": shard, "rows": 2}]
        write_index(folder, {**about, "shards": shards, "model": model, "input": {}, "rows_per_shard": 2})
        return Case(folder / (name or shard), lambda: open_embeddings(folder)["embeddings"][:].tolist())

    make.__name__ = f"embeddings_{name or 'shard'}"
    return make


CASES = [
    *(label_list, listed_image, listed_folder, folder_of_images, aligned_image, landmarks, class_image),
    *(label_map, csv_image, csv_file, file_list, listed_part, pair_list, paired_image, pair_file),
    *map(found, (".rec", ".parquet", ".tar")),
    *map(named, (".rec", ".parquet", ".tar")),
    *map(template, ("face_tid_mid", "pair_label", "probe_mixed")),
    *(class_list, image_list, manifest),
    *map(gallery, ("gallery.json", "gallery.safetensors")),
    *map(embeddings, ("_index.json", "")),
]


@pytest.fixture(params=CASES, ids=lambda make: make.__name__)
def case(request, tmp_path):
    (tmp_path / "data").mkdir()
    return request.param(tmp_path / "data")


def test_links_are_followed_inside_the_folder_only_and_a_pipe_does_not_block(case, tmp_path):
    def refused(match=None):
        with pytest.raises(PlscError, match=match) as caught:
            case.read()
        assert re.search(rf"{case.file.name}|train\.csv:3", str(caught.value))

    expected, is_folder, outside = case.read(), case.file.is_dir(), tmp_path / "outside"
    case.file.rename(outside)
    case.file.symlink_to(outside)
    if case.is_named:  # by the user
        assert case.read() == expected
    else:
        refused("link")
    case.file.unlink()
    if case.file.name != "manifest.json":  # a checkpoint folder has only the files of its manifest
        inside = case.file.parent / ".inside"
        inside.mkdir()
        outside.rename(inside / "it")
        for target in (Path(".inside/it"), inside / "it"):
            case.file.symlink_to(target)
            assert case.read() == expected
            case.file.unlink()
    if not is_folder:
        os.mkfifo(case.file)
        refused()


def test_the_folder_itself_and_files_of_a_pattern_may_be_links(tmp_path):
    (tmp_path / "data").mkdir()
    case = found(".parquet")(tmp_path / "data")
    expected = case.read()
    (tmp_path / "link").symlink_to("data")
    assert every_image(tmp_path / "link")() == expected
    case.file.rename(tmp_path / "blob")
    case.file.symlink_to(tmp_path / "blob")
    assert every_image(tmp_path / "data/*.parquet")() == expected


def test_an_index_that_is_a_pipe_is_replaced(tmp_path, cache):
    (tmp_path / "data").mkdir()
    read = aligned_image(tmp_path / "data").read
    expected = read()
    (index,) = cache.glob("index/*")
    index.unlink()
    os.mkfifo(index)
    assert read() == expected
    assert index.is_file()


@pytest.mark.parametrize(
    "words",
    [
        "data inspect LONG", "data pack LONG out.tar.zst", "index LONG out", "data unpack LONG.tar.zst out",
        "serve LONG", "checkpoint import LONG out", "predict --checkpoint.load_dir LONG",
    ],
)  # fmt: skip
def test_a_path_of_5000_bytes_is_an_error_message(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([word.replace("LONG", "x" * 5000) for word in words.split()]) == 1
    assert capsys.readouterr().err.startswith("plsc: error: ")


def test_a_list_with_a_path_of_5000_bytes_is_an_error_message(tmp_path):
    (tmp_path / "label.txt").write_text(f"{'x/' * 2500} 0\n")
    with pytest.raises(PlscError, match="too long"):
        open_source(tmp_path)[0]
    (tmp_path / "pairs.txt").write_text(f"1 1\n{'x' * 5000} 1 2\n{'x' * 5000} 1 y 2\n")
    with pytest.raises(PlscError, match=r"pairs\.txt:2"):
        read_pair_list(tmp_path / "pairs.txt")


def test_the_size_of_a_sparse_file_is_checked_before_it_is_read(tmp_path):
    write_gallery(tmp_path / "g", np.eye(3), model="0" * 64)
    (tmp_path / "list.txt").write_bytes(b"a" * 100)  # it does not look like a picture
    for name, read, message in (
        ("g/gallery.safetensors", lambda _: open_gallery(tmp_path / "g"), "8000000000000 bytes"),
        ("map.json", read_label_map, "8000000000000 bytes"),
        ("list.txt", open_images, r"list\.txt:1"),
    ):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 8 * 10**12)
        with pytest.raises(PlscError, match=message):
            read(tmp_path / name)


def test_a_file_is_inside_a_folder_however_that_is_written(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("1")
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab/b").write_text("2")
    monkeypatch.chdir(tmp_path)
    for folder in (".", tmp_path, b".", f"{tmp_path}/ab/..", "/"):
        assert read_regular("a", 9, folder) == b"1"
    with pytest.raises(OSError, match="leaves a"):
        read_regular("ab/b", 9, "a")  # `a` is a prefix of its path


@pytest.mark.parametrize("name", ["a\\u0000.jpg", "\\ud800.jpg"])
def test_a_name_that_no_file_can_have_is_an_error_message(tmp_path, name):
    (tmp_path / "train.jsonl").write_text(f'{{"image": "{name}", "label": 0}}\n')
    with pytest.raises(PlscError, match=r"train\.jsonl:1"):
        open_source(tmp_path)[0]
    (tmp_path / "list.txt").write_bytes(b"a.jpg\n" * 20 + b"a\0.jpg\n")  # it does not look like a picture
    with pytest.raises(PlscError, match="null byte"):
        open_images(tmp_path / "list.txt")[20]
    with pytest.raises(PlscError, match="null byte"):
        read_pairs("a\0.bin")


def test_folders_nested_deeper_than_python_recurses_are_read(tmp_path):
    (tmp_path / "data/b").mkdir(parents=True)
    deep = tmp_path.joinpath("data", *["a"] * 400)
    deep.mkdir(parents=True)
    images(deep)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(350)
    try:
        assert len(open_images(tmp_path / "data")) == 2
    finally:
        sys.setrecursionlimit(before)


@pytest.mark.parametrize("command", ["read", "partition"])
def test_a_file_that_becomes_a_link_after_the_list_was_checked_is_refused(tmp_path, command):
    part = tmp_path / "data/part.txt"
    part.parent.mkdir()
    part.write_bytes(base64.b64encode(b"image") + b"\t0\n")
    (part.parent / "file_list.txt").write_text("part.txt\n")
    source = pickle.dumps(open_source(part.parent))  # a worker opens the files again
    (listed,) = list_inputs(str(part.parent), "file_list.txt")
    part.rename(tmp_path / "outside")
    part.symlink_to(tmp_path / "outside")
    with pytest.raises(DataError, match="link"), contextlib.ExitStack() as stack:
        pickle.loads(source)[0] if command == "read" else stack.enter_context(listed.open())


@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe"])
@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("metrics.jsonl", lambda folder: JsonLines(folder, 0).write({"step": 1})),
        ("bad_samples.txt", lambda folder: BadSampleList(folder).add([BadSample("missing", "a.jpg")])),
    ],
)
def test_an_output_is_never_written_through_a_link_or_into_a_pipe(tmp_path, name, write, kind):
    (tmp_path / "run").mkdir()
    (tmp_path / "outside").write_text('{"step": 0}\n')
    place = tmp_path / "run" / name
    if kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(tmp_path / ("outside" if kind == "link" else "missing"))
    with contextlib.suppress(PlscError, OSError):
        write(tmp_path / "run")
        assert place.is_file()
        assert not place.is_symlink()
    assert (tmp_path / "outside").read_text() == '{"step": 0}\n'
    assert not (tmp_path / "missing").exists()


class Row(NamedTuple):
    near: float
    far: Annotated[float, (0, 1)] | None


class Record(TypedDict, total=False):
    kind: Literal["a", 1]
    rows: list[Row]
    sizes: dict[FileName, Size]
    shape: tuple[Any, bool]
    text: Text
    word: str


@dataclass
class Exact:
    count: int
    model: Record


GOOD = {
    "kind": 1, "rows": [[1, None], [-2.5, 0.5]], "sizes": {"a b": 1}, "shape": [[3], True], "text": "\x1b",
    "word": "x", "of a newer version": {"deep": [1]},
}  # fmt: skip
WRONG = [
    {"kind": True}, {"kind": 1.0}, {"rows": {"0": 1}}, {"rows": [[1]]}, {"rows": [[1, 2]]}, {"word": None},
    {"rows": [[float("nan"), 0]]}, {"rows": [["1", 0]]}, {"sizes": {"../x": 1}}, {"sizes": {"a": 2**41}},
    {"shape": [1, 1]}, {"text": 3}, {"word": "\x1b"}, {"other": "\x07"},
]  # fmt: skip


def test_a_record_is_returned_with_its_kinds_and_unknown_names():
    found = read_record(Record, json.dumps(GOOD).encode(), "x")
    assert found == {**GOOD, "rows": [Row(1.0, None), Row(-2.5, 0.5)], "shape": ([3], True)}
    assert read_record(Exact, {"count": 2, "model": {}}, "x") == Exact(2, {})


def test_a_value_of_another_kind_or_out_of_range_is_refused():
    for change in WRONG:
        with pytest.raises(DataError, match="x"):
            read_record(Record, {**GOOD, **change}, "x", DataError)


def test_a_text_that_is_no_record_deep_or_too_large_is_refused_and_a_dataclass_has_all_its_names(tmp_path):
    long, deep = b'{"word": "%s"}' % (b"x" * 999), b'{"other": %s%s}' % (b"[" * 60, b"]" * 60)
    for text in (b"[" * 10**5, b"{", b"\xff", b'{"a": NaN}', b"[]", b"3", long, deep):
        with pytest.raises(CheckpointError):
            read_record(Record, text, "x", most=500)
    for wrong in ({"count": 1}, {"count": 1, "model": {}, "more": 1}, {"count": -1, "model": {}}):
        with pytest.raises(CheckpointError):
            read_record(Exact, wrong, "x")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 2**40)
    for name in ("large", "missing"):
        with pytest.raises(CheckpointError, match=name):
            read_record(Exact, tmp_path / name, tmp_path / name)


@pytest.fixture(params=["local", "memory"])
def location(request, tmp_path) -> str:
    if request.param == "local":
        return str(tmp_path / "new/inner/file.bin")
    fsspec.filesystem("memory").makedirs("/publish", exist_ok=True)
    fsspec.filesystem("memory").rm("/publish", recursive=True)
    return "memory://publish/file.bin"


def names(location: str) -> list[str]:
    filesystem, path = fsspec.core.url_to_fs(location)
    folder = path.rsplit("/", 1)[0]
    return [name.rsplit("/", 1)[-1] for name in filesystem.find(folder)]


def test_a_file_appears_when_it_is_complete(location):
    with publishing(location) as file:
        file.write(b"content")
        assert not exists(location)
    assert names(location) == ["file.bin"]
    filesystem, path = fsspec.core.url_to_fs(location)
    assert filesystem.cat_file(path) == b"content"
    filesystem.rm(path)
    with contextlib.suppress(KeyboardInterrupt), publishing(location) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert names(location) == []


def test_what_another_process_has_published_meanwhile_is_not_replaced(location):
    def write() -> None:
        with publishing(location) as file:
            file.write(b"later")
            with fsspec.open(location, "wb") as other:
                other.write(b"first")

    with pytest.raises(DataError, match=r"another process|exists"):
        write()
    with fsspec.open(location, "rb") as file:
        assert file.read() == b"first"


@pytest.mark.parametrize("publish", [publishing, publishing_folder])
def test_concurrent_writers_are_excluded_and_leftovers_are_removed(tmp_path, publish):
    left = tmp_path / ".a.plsc-partial"
    left.mkdir()
    (left / "half").write_bytes(b"half")
    (tmp_path / "precious").write_bytes(b"content")
    (left / "link").symlink_to(tmp_path / "precious")
    with publish(tmp_path / "a"):
        assert not (left / "half").exists()
        with (
            pytest.raises(DataError, match="another run is working on a"),
            publish(tmp_path / "a"),
        ):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "precious"]


def test_a_lock_outlives_a_reader_of_its_note_but_not_its_process(tmp_path):
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    with FolderLock(tmp_path):
        assert lock_note(tmp_path)["pid"]
        with pytest.raises(DataError, match="another run"):
            FolderLock(tmp_path)
        child.start()
    FolderLock(tmp_path).release()
    child.kill()
    child.join()
