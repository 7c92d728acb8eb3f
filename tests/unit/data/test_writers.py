from pathlib import Path

import pybase64
import pytest

from plsc.data.sources import open_source
from plsc.data.writers import convert, describe
from plsc.errors import DataError
from tests.distributed.launch import run_code
from tests.images import write_dataset


@pytest.fixture
def dataset(tmp_path) -> Path:
    return write_dataset(tmp_path / "set", classes=3, per_class=4)


def samples(location: str | Path) -> list[tuple[bytes, int]]:
    source = open_source(location)
    return [source[i] for i in range(len(source))]


def base64_samples(folder: Path) -> list[tuple[bytes, int]]:
    lines = [
        line.split(b"\t")
        for name in (folder / "file_list.txt").read_text().split()
        for line in (folder / name).read_bytes().splitlines()
    ]
    return [(pybase64.b64decode(image), int(label)) for image, label in lines]


def test_a_dataset_converted_through_all_formats_is_unchanged(dataset, tmp_path):
    expected = samples(dataset)
    location = str(dataset)
    for place in (tmp_path / "a.rec", "memory://converted/b.rec", tmp_path / "c.rec"):
        assert convert(location, str(place)).written == 12
        location = str(place)
        assert samples(location) == expected
        with pytest.raises(DataError, match="already exists"):
            convert(str(dataset), location)
        assert samples(location) == expected
    for lines in (str(tmp_path / "lines"), "memory://converted/lines"):
        convert(location, lines)
        assert samples(lines) == expected
    assert base64_samples(tmp_path / "lines") == expected


def test_it_is_said_that_class_names_are_not_kept(tmp_path):
    odd = b"\xff".decode("utf-8", "surrogateescape")
    for folder in ("b", "Zoe\u0301", "007", odd):
        (tmp_path / "set" / folder).mkdir(parents=True)
        (tmp_path / "set" / folder / "1.png").write_bytes(b"\x89PNG")
    done = convert(str(tmp_path / "set"), str(tmp_path / "a.rec"))
    assert open_source(tmp_path / "a.rec").labels().tolist() == [0, 1, 2, 3]
    assert "names of the 4 classes" in describe(done, "a.rec")


@pytest.mark.parametrize("name", ["a.rec", "lines"])
def test_a_broken_sample_stops_the_conversion_or_is_skipped(dataset, tmp_path, name):
    (dataset / "images/1_2.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"1_2\.png \(label\.txt:7\)"):
        convert(str(dataset), str(tmp_path / name))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["set"]
    done = convert(str(dataset), str(tmp_path / name), broken="skip")
    assert (done.written, done.skipped) == (11, 1)
    assert "label.txt:7" in describe(done, name)
    for path in (dataset / "images").iterdir():
        path.write_bytes(b"")
    with pytest.raises(DataError, match="12"):
        convert(str(dataset), str(tmp_path / f"none-{name}"), broken="skip")


CODE = """
import sys, resource, signal
from plsc.data.writers import convert
from plsc.errors import DataError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
for name in sys.argv[2:]:
    try:
        convert(sys.argv[1], name)
    except DataError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_full_disk_is_reported_and_nothing_is_left(dataset, tmp_path):
    names = [str(tmp_path / name) for name in ("a.rec", "lines")]
    done = run_code(CODE, str(dataset), *names)
    assert done.stdout.count("cannot write") == 2, done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
