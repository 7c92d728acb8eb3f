import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from plsc.data.sources import parquet
from plsc.data.sources.parquet import ParquetSource
from plsc.errors import DataError, OptionError

IMAGES = [b"image %d" % i * (i + 1) for i in range(10)]
LABELS = [i % 4 for i in range(10)]


def write(path: Path, rows: int = 3, **columns: object) -> Path:
    table = pa.table({"image": IMAGES, "label": LABELS, **columns})
    pq.write_table(table, path, row_group_size=rows)
    return path


def read(location: Path | str, **options: str) -> list[tuple[bytes, int]]:
    source = ParquetSource(location, **options)
    return [source[i] for i in range(len(source))]


EXPECTED = list(zip(IMAGES, LABELS, strict=True))


@pytest.mark.parametrize(
    "columns",
    [
        {"image": pa.array(IMAGES, pa.large_binary()), "rows": 1},
        {"image": pa.array(IMAGES, pa.binary_view()), "rows": 10},
        {"image": pa.array([{"bytes": image, "path": None} for image in IMAGES])},
        {"image": pa.array([{"path": "x", "bytes": image} for image in IMAGES])},
        {"label": pa.array(LABELS, pa.uint8())},
        {"label": pa.array(list(map(str, LABELS)), pa.large_string())},
        {"label": pa.array(list(map(str, LABELS)), pa.string_view())},
        {"label": pa.array(list(map(str, LABELS))).dictionary_encode()},
        {"label": pa.array([f"person {n}" for n in LABELS]).dictionary_encode()},
    ],
)
def test_every_kind_of_column_and_size_of_row_groups_gives_the_same_samples(tmp_path, columns):
    assert read(write(tmp_path / "a.parquet", **columns)) == EXPECTED


def test_images_of_a_fixed_size_are_read(tmp_path):
    images = [b"%03d" % n for n in range(10)]
    path = write(tmp_path / "a.parquet", image=pa.array(images, pa.binary(3)))
    assert read(path) == list(zip(images, LABELS, strict=True))


def test_a_file_that_is_overwritten_is_not_read_on(tmp_path):
    path = write(tmp_path / "a.parquet")
    source = ParquetSource(path)
    assert source[0] == EXPECTED[0]
    os.utime(path)  # as after a write in place
    with pytest.raises(DataError, match="changed"):
        source[9]


def write_class_label(path: Path, names: list[str]) -> Path:
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    table = pa.table({"image": IMAGES, "label": LABELS})
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(table.replace_schema_metadata(about), path)
    return path


def test_a_class_label_feature_names_the_integers(tmp_path):
    path = write_class_label(tmp_path / "a.parquet", ["z", "y", "x", "007", "unused"])
    source = ParquetSource(path)
    assert source.labels().tolist() == LABELS
    assert [*source.class_names.values()] == ["z", "y", "x", "007", "unused"]
    (tmp_path / "map.json").write_text('{"z": 7, "y": 8, "x": 9, "007": 10}')
    assert read(path, label_map=str(tmp_path / "map.json")) == [(i, n + 7) for i, n in EXPECTED]
    with pytest.raises(DataError, match=r"a\.parquet.* label 3"):
        ParquetSource(write_class_label(tmp_path / "a.parquet", ["z", "y", "x"]))
    with pytest.raises(DataError, match=r"a\.parquet.* name .*control"):
        ParquetSource(write_class_label(tmp_path / "a.parquet", ["z", "y", "x", "a\x1b[2J"]))
    write_class_label(tmp_path / "a.parquet", ["z", "y", "x"])
    write_class_label(tmp_path / "b.parquet", ["z", "x", "y"])
    with pytest.raises(DataError, match=r"b\.parquet: its labels"):
        ParquetSource(tmp_path)


def test_columns_and_a_label_map_are_chosen(tmp_path):
    names = pa.array([f"p{n}" for n in LABELS])
    path = write(tmp_path / "a.parquet", mine=pa.array(IMAGES[::-1]), who=names)
    (tmp_path / "map.tsv").write_text("p0\t9\np1\t8\np2\t7\np3\t6\n")
    found = read(path, image_column="mine", label_column="who", label_map=str(tmp_path / "map.tsv"))
    assert found == [(i, 9 - n) for i, n in zip(IMAGES[::-1], LABELS, strict=True)]


def test_shards_are_read_in_the_order_of_their_names(tmp_path):
    for name in ("b.parquet", "a.parquet", "c.txt", ".hidden.parquet"):
        write(tmp_path / name, label=pa.array([ord(name[0])] * 10))
    source = ParquetSource(tmp_path)
    assert source.labels().tolist() == [97] * 10 + [98] * 10
    assert [source.name(i) for i in (9, 10)] == ["a.parquet row 9", "b.parquet row 0"]
    assert len(ParquetSource(str(tmp_path / "[ab].parquet"))) == 20
    assert source[13] == (IMAGES[3], 98)


def test_more_rows_than_bytes_are_refused_before_they_are_read(tmp_path):
    nulls = pa.nulls(10**6, pa.binary())
    pq.write_table(pa.table({"image": nulls, "label": pa.repeat(1, 10**6)}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="announces"):
        ParquetSource(str(tmp_path / "a.parquet"))


def test_the_cache_of_decoded_groups_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "CACHE_BYTES", 10**6)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"image": [bytes(250_000)] * 40, "label": [1] * 40}), path, row_group_size=1)
    source, before = ParquetSource(path), pa.total_allocated_bytes()
    for index in range(40):
        source[index]
        assert pa.total_allocated_bytes() - before < 2 * 10**6


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({}, {"image_column": "gone"}, "'gone'; the columns are: image, label"),
        ({"image": LABELS}, {}, "'image' is int64"),
        ({"image": [{"x": b""}] * 10}, {}, "'image' is struct"),
        ({"label": [0.5] * 10}, {}, "'label' is double"),
        ({"label": [[1]] * 10}, {}, "'label' is list"),
    ],
)
def test_missing_or_unsupported_columns_are_refused(tmp_path, columns, options, message):
    path = write(tmp_path / "a.parquet", **columns)
    with pytest.raises(OptionError, match=message):
        ParquetSource(path, **options)

    table = pa.table([IMAGES, LABELS, LABELS], names=["image", "label", "label"])
    pq.write_table(table, tmp_path / "twice.parquet")
    with pytest.raises(OptionError, match="two"):
        ParquetSource(tmp_path / "twice.parquet")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0] * 6 + [None] * 4, "row 6: the label"),
        ([0] * 9 + [-1], r"row 9: .*'-1'"),
        (["1"] * 9 + [""], "row 9: the label"),
        (pa.array([1] * 9 + [2**63], pa.uint64()), "row 9: .* integer"),
    ],
)
def test_a_bad_label_is_reported_with_its_row(tmp_path, labels, message):
    with pytest.raises(DataError, match=message):
        ParquetSource(write(tmp_path / "a.parquet", label=pa.array(labels)))


def test_a_too_large_row_group_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "GROUP_BYTES", 100)
    with pytest.raises(DataError, match="row group"):
        ParquetSource(write(tmp_path / "a.parquet"))


def test_a_file_without_rows_and_a_folder_without_files_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no file ends in \.parquet"):
        ParquetSource(tmp_path / "empty")
    schema = pa.schema({"image": pa.binary(), "label": pa.int64()})
    pq.write_table(schema.empty_table(), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="contains no rows"):
        ParquetSource(tmp_path / "a.parquet")
