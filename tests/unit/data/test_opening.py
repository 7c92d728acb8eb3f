import json
import traceback
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from plsc.data.sources import Base64Source, TorchDatasetSource, open_source
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
