from __future__ import annotations

from pathlib import Path

import pytest

from plsc.data.sources import Base64Source, ImageFolderSource, open_source
from plsc.data.sources.parquet import ParquetSource
from plsc.data.sources.recordio import RecordIOSource
from plsc.data.sources.rows import CsvSource
from plsc.data.sources.tar import TarSource
from plsc.data.writers import writer_of
from plsc.errors import DataError, OptionError

SAMPLES = [(b"first", 1), (b"second", 0)]


def write(location: Path | str) -> None:
    writer_of(str(location))(str(location), SAMPLES)


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
    for location in (tmp_path / "set" / name, tmp_path / "set"):
        if kind is Base64Source and location.name == "set":
            continue
        source = open_source(location)
        assert type(source) is kind
        assert source[0] == SAMPLES[0]


def test_several_datasets_in_one_folder_are_refused(tmp_path):
    write(tmp_path / "a.rec")
    write(tmp_path / "b.rec")
    with pytest.raises(DataError, match=r"several datasets: a.rec, b.rec"):
        open_source(tmp_path)


def test_remote_folders_are_recognised_by_their_content():
    write("memory://opening/tars/a.tar")
    write("memory://opening/recs/a.rec")
    write("memory://opening/lines")
    kinds = {"tars": TarSource, "recs": RecordIOSource, "lines": Base64Source}
    for name, kind in kinds.items():
        source = open_source(f"memory://opening/{name}")
        assert type(source) is kind
        assert source[1] == SAMPLES[1]
    with pytest.raises(DataError, match="memory://opening contains no images"):
        open_source("memory://opening")
    with pytest.raises(DataError, match="memory://opening/gone cannot be listed"):
        open_source("memory://opening/gone")


def test_an_option_that_the_format_does_not_accept_is_refused(tmp_path):
    write(tmp_path / "a.rec")
    with pytest.raises(OptionError, match="label_map is set, but this data format does not use it"):
        open_source(tmp_path / "a.rec", label_map="x.json")
    (tmp_path / "folders/one").mkdir(parents=True)
    (tmp_path / "folders/one/a.jpg").write_bytes(b"image")
    with pytest.raises(OptionError, match=r"image_column is set.*it accepts label_map"):
        open_source(tmp_path / "folders", image_column="x")
    (tmp_path / "map.json").write_text('{"one": 5}')
    source = open_source(tmp_path / "folders", label_map=tmp_path / "map.json")
    assert type(source) is ImageFolderSource
    assert source.labels().tolist() == [5]


def test_class_folders_next_to_a_file_are_refused_without_an_option_that_decides(tmp_path):
    folder = tmp_path / "set"
    for name in "ab":
        (folder / name).mkdir(parents=True)
        (folder / name / "1.jpg").write_bytes(b"image")
    (folder / "notes.csv").write_text("path,label\na/1.jpg,1\nb/1.jpg,0\n")
    with pytest.raises(DataError, match=r"2 folders of images and notes\.csv.*class_depth"):
        open_source(folder)
    assert open_source(folder, class_depth=1).labels().tolist() == [0, 1]
    assert open_source(folder, label_column="label").labels().tolist() == [1, 0]
    assert open_source(folder / "notes.csv").labels().tolist() == [1, 0]


def test_a_file_next_to_the_folder_of_its_images_is_the_dataset(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images/1.jpg").write_bytes(b"image")
    (tmp_path / "masks").mkdir()
    (tmp_path / "train.csv").write_text("path,label\nimages/1.jpg,0\n")
    assert type(open_source(tmp_path)) is CsvSource


def test_a_url_shows_no_password():
    with pytest.raises(DataError) as caught:
        open_source("memory://user:secret@opening/gone.rec")
    assert "secret" not in str(caught.value)
