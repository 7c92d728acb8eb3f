"""One test suite for all sources: to test a new source, add it to ``SOURCES``."""

from __future__ import annotations

import base64
import json
import pickle
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder

from plsc.data.decode import decode_image
from plsc.data.sources import Source, TorchDatasetSource, check_labels, open_source
from plsc.errors import DataError
from tests.images import write_samples

COLOURS = [10, 90, 170, 250]
LABELS = [0, 1, 1, 2]


def write_images(folder: Path) -> list[str]:
    names = []
    for index, (colour, label) in enumerate(zip(COLOURS, LABELS, strict=True)):
        name = f"class{label}/{index}.png"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (colour,) * 3).save(folder / name)
        names.append(name)
    return names


def from_label_file(folder: Path) -> Source:
    names = write_images(folder)
    lines = [f"{name} {label}\n" for name, label in zip(names, LABELS, strict=True)]
    (folder / "label.txt").write_text("".join(lines))
    return open_source(folder)


def from_image_folder(folder: Path) -> Source:
    write_images(folder)
    return open_source(folder)


def from_torch_dataset(folder: Path) -> Source:
    write_images(folder)
    return TorchDatasetSource(ImageFolder(folder))


def samples(folder: Path) -> list[tuple[bytes, int]]:
    names = write_images(folder / "images")
    images = [(folder / "images" / name).read_bytes() for name in names]
    return list(zip(images, LABELS, strict=True))


def written(suffix: str) -> Callable[[Path], Source]:
    def make(folder: Path) -> Source:
        location = str(folder / f"train{suffix}")
        folder.mkdir(exist_ok=True)
        assert write_samples(location, samples(folder.parent / "images")) == len(LABELS)
        return open_source(location)

    make.__name__ = f"from_written_{suffix.removeprefix('.')}"
    return make


def copied_to_memory(folder: Path, name: str, **options: int) -> Source:
    memory = fsspec.filesystem("memory")
    for path in folder.rglob("*"):
        if path.is_file():
            memory.pipe(f"/{name}/{path.relative_to(folder)}", path.read_bytes())
    return open_source(f"memory://{name}", **options)


def remote(suffix: str) -> Callable[[Path], Source]:
    def make(folder: Path) -> Source:
        written(suffix)(folder / "set")
        return copied_to_memory(folder / "set", f"contract-{suffix.removeprefix('.')}")

    make.__name__ = f"from_remote_{suffix.removeprefix('.')}"
    return make


def from_csv_of_paths(folder: Path) -> Source:
    names = write_images(folder)
    rows = [f"{name},{label}\n" for name, label in zip(names, LABELS, strict=True)]
    (folder / "train.csv").write_text("path,label\n" + "".join(rows))
    return open_source(folder / "train.csv")


def from_remote_tsv_of_names(folder: Path) -> Source:
    names = write_images(folder / "images")
    rows = [f'"person {n}"\timages/{name}\n' for name, n in zip(names, LABELS, strict=True)]
    (folder / "train.tsv").write_text("label\timage\n" + "".join(rows))
    return copied_to_memory(folder, "contract-tsv")


def from_base64_parts(folder: Path) -> Source:
    lines = [f"{base64.b64encode(i).decode()}\t{n}" for i, n in samples(folder)]
    parts = {"a.txt": ["", lines[0], ""], "empty.txt": [], "b.txt": [lines[1], "", *lines[2:]]}
    for name, content in parts.items():
        (folder / name).write_text("\r\n".join(content))
    (folder / "file_list.txt").write_text("\n".join(parts))
    return open_source(folder)


def from_remote_base64(folder: Path) -> Source:
    from_base64_parts(folder)
    return copied_to_memory(folder, "contract-base64")


def from_remote_label_file(folder: Path) -> Source:
    from_label_file(folder / "images")
    (folder / "images/label.txt").rename(folder / "label.txt")
    return copied_to_memory(folder, "contract-labels")


def from_remote_image_folder(folder: Path) -> Source:
    write_images(folder)
    return copied_to_memory(folder, "contract-folders")


def from_json_lines(folder: Path) -> Source:
    names = write_images(folder)
    rows = [{"who": n, "file": name} for name, n in zip(names, LABELS, strict=True)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return open_source(folder / "train.jsonl", label_column="who")


def from_parquet_of_structs(folder: Path) -> Source:
    rows = [{"image": {"bytes": i, "path": None}, "label": str(n)} for i, n in samples(folder)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet", row_group_size=3)
    return open_source(folder / "train.parquet")


SOURCES = [
    from_label_file,
    from_image_folder,
    from_remote_label_file,
    from_remote_image_folder,
    from_torch_dataset,
    written(".rec"),
    *map(remote, (".rec", ".tar", ".parquet")),
    from_csv_of_paths,
    from_remote_tsv_of_names,
    from_base64_parts,
    from_remote_base64,
    from_json_lines,
    written(".parquet"),
    from_parquet_of_structs,
    written(".tar"),
]


@pytest.fixture(params=SOURCES, ids=lambda make: make.__name__)
def source(request, tmp_path) -> Source:
    return request.param(tmp_path)


def test_each_index_returns_its_image_and_label(source):
    assert len(source) == len(COLOURS)
    for index, (colour, label) in enumerate(zip(COLOURS, LABELS, strict=True)):
        data, found = source[index]
        assert found == label
        assert torch.equal(decode_image(data, (3, 16, 16)), torch.full((3, 16, 16), colour).byte())


def test_read_many_equals_individual_reads(source):
    if not hasattr(source, "read_many"):
        pytest.skip("this source reads one sample at a time")
    order = np.array([2, 0, 3, 3, 1])
    for index, found in zip(order, source.read_many(order), strict=False):
        assert found == source[index]


def test_labels_equal_those_of_the_items_as_int64(source):
    labels = source.labels()
    assert isinstance(labels, np.ndarray)
    assert labels.dtype == np.int64
    assert labels.tolist() == LABELS
    assert all(type(source[index][1]) is int for index in range(len(source)))


def test_names_are_unique_and_one_line(source):
    names = [source.name(index) for index in range(len(source))]
    assert len(set(names)) == len(names)
    assert all(name and "\n" not in name for name in names)


def test_an_index_out_of_range_raises_index_error(source):
    with pytest.raises(IndexError):
        source[len(source)]


def test_a_copy_in_another_process_returns_the_same(source):
    copy = pickle.loads(pickle.dumps(source))
    assert len(copy) == len(source)
    assert copy.labels().tolist() == LABELS
    assert copy.name(2) == source.name(2)
    assert copy[3][1] == source[3][1]


def test_concurrent_threads_read_the_same_as_one(source):
    order = list(range(len(source))) * 25

    def read(index: int) -> tuple[list, int]:
        image, label = source[index]
        return decode_image(image, (3, 16, 16)).tolist(), label

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(read, order)) == list(map(read, order[: len(source)])) * 25


@pytest.mark.parametrize("suffix", [".rec", ".parquet", ".tar"])
def test_an_empty_image_is_named_when_it_is_read(tmp_path, suffix):
    location = str(tmp_path / f"a{suffix}")
    write_samples(location, [(b"image", 0), (b"", 1)])
    source = open_source(location)
    with pytest.raises(DataError, match=f"^{re.escape(source.name(1))}: ") as caught:
        source[1]
    assert caught.value.kind == "empty"


def test_a_label_out_of_range_is_reported(source):
    check_labels(source, 3)
    with pytest.raises(DataError, match=r"label 2 at .* is outside 0\.\.1.*head\.class_num") as caught:
        check_labels(source, 2)
    assert source.name(3) in str(caught.value)
