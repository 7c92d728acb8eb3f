from __future__ import annotations

import concurrent.futures
import json
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from plsc.data.sources import parquet
from plsc.data.sources.parquet import ParquetSource
from plsc.data.writers import write_parquet
from plsc.errors import DataError, OptionError
from tests.distributed.launch import run_code

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


@pytest.mark.parametrize("rows", [1, 3, 10])
def test_the_size_of_row_groups_does_not_change_the_samples(tmp_path, rows):
    assert read(write(tmp_path / "a.parquet", rows)) == EXPECTED


@pytest.mark.parametrize(
    "column",
    [
        pa.array(IMAGES, pa.large_binary()),
        pa.array(IMAGES, pa.binary_view()),
        pa.array([{"bytes": image, "path": None} for image in IMAGES]),
        pa.array([{"path": "x", "bytes": image} for image in IMAGES]),
    ],
)
def test_every_kind_of_image_column_gives_the_same_samples(tmp_path, column):
    assert read(write(tmp_path / "a.parquet", image=column)) == EXPECTED


@pytest.mark.parametrize(
    "column",
    [
        pa.array(LABELS, pa.uint8()),
        pa.array(LABELS, pa.int32()),
        pa.array(list(map(str, LABELS))),
        pa.array(list(map(str, LABELS)), pa.large_string()),
        pa.array(list(map(str, LABELS)), pa.string_view()),
        pa.array(list(map(str, LABELS))).dictionary_encode(),
        pa.array([f"person {n}" for n in LABELS]).dictionary_encode(),
    ],
)
def test_every_kind_of_label_column_gives_the_same_samples(tmp_path, column):
    assert read(write(tmp_path / "a.parquet", label=column)) == EXPECTED


def test_images_of_a_fixed_size_are_read(tmp_path):
    images = [b"%03d" % n for n in range(10)]
    path = write(tmp_path / "a.parquet", image=pa.array(images, pa.binary(3)))
    assert read(path) == list(zip(images, LABELS, strict=True))


def write_class_label(path: Path, names: list[str]) -> Path:
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    table = pa.table({"image": IMAGES, "label": LABELS})
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(table.replace_schema_metadata(about), path)
    return path


def test_a_class_label_feature_names_the_integers(tmp_path):
    path = write_class_label(tmp_path / "a.parquet", ["z", "y", "x", "007", "unused"])
    source = ParquetSource(path)
    assert (source.labels().tolist(), source.class_names) == (LABELS, ["z", "y", "x", "007", "unused"])
    (tmp_path / "map.json").write_text('{"z": 7, "y": 8, "x": 9, "007": 10}')
    assert read(path, label_map=str(tmp_path / "map.json")) == [(i, n + 7) for i, n in EXPECTED]
    with pytest.raises(DataError, match=r"a\.parquet.* label 3"):
        ParquetSource(write_class_label(tmp_path / "a.parquet", ["z", "y", "x"]))
    with pytest.raises(DataError, match=r"a\.parquet.* name .*control"):
        ParquetSource(write_class_label(tmp_path / "a.parquet", ["z", "y", "x", "a\x1b[2J"]))
    write_class_label(tmp_path / "a.parquet", ["z", "y", "x"])
    write_class_label(tmp_path / "b.parquet", ["z", "x", "y"])
    with pytest.raises(DataError, match=r"b\.parquet.*names"):
        ParquetSource(tmp_path)


def test_columns_and_a_label_map_are_chosen(tmp_path):
    names = pa.array([f"p{n}" for n in LABELS])
    path = write(tmp_path / "a.parquet", mine=pa.array(IMAGES[::-1]), who=names)
    (tmp_path / "map.tsv").write_text("p0\t9\np1\t8\np2\t7\np3\t6\n")
    found = read(path, image_column="mine", label_column="who", label_map=str(tmp_path / "map.tsv"))
    assert found == [(i, 9 - n) for i, n in zip(IMAGES[::-1], LABELS, strict=True)]


def test_a_column_class_name_has_names_even_if_they_are_digits(tmp_path):
    path = write(tmp_path / "a.parquet", class_name=pa.array([f"0{n}" for n in LABELS]))
    source = ParquetSource(path, label_column="class_name")
    assert (source.labels().tolist(), source.class_names) == (LABELS, ["00", "01", "02", "03"])


def test_shards_are_read_in_the_order_of_their_names(tmp_path):
    for name in ("b.parquet", "a.parquet", "c.txt", ".hidden.parquet"):
        write(tmp_path / name, label=pa.array([ord(name[0])] * 10))
    source = ParquetSource(tmp_path)
    assert source.labels().tolist() == [97] * 10 + [98] * 10
    assert [source.name(i) for i in (0, 9, 10)] == [
        "a.parquet row 0",
        "a.parquet row 9",
        "b.parquet row 0",
    ]
    assert len(ParquetSource(str(tmp_path / "[ab].parquet"))) == 20
    assert source[13] == (IMAGES[3], 98)


def test_written_files_are_read_back_also_remotely(tmp_path):
    write_parquet(str(tmp_path / "a.parquet"), iter(EXPECTED))
    write_parquet("memory://parquets/x/a.parquet", iter(EXPECTED))
    assert read(tmp_path / "a.parquet") == EXPECTED
    assert read("memory://parquets/x/a.parquet") == EXPECTED
    assert read("memory://parquets/x") == EXPECTED
    assert not [p for p in fsspec.filesystem("memory").find("/parquets") if "tmp" in p]


def test_the_writer_keeps_its_groups_small(tmp_path):
    write_parquet(str(tmp_path / "a.parquet"), ((b"x" * 9, i) for i in range(2500)))
    metadata = pq.ParquetFile(tmp_path / "a.parquet").metadata
    assert [metadata.row_group(i).num_rows for i in range(3)] == [1000, 1000, 500]


def test_the_cache_of_decoded_groups_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "CACHE_BYTES", 3000)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"image": [bytes(500)] * 40, "label": [1] * 40}), path, row_group_size=2)
    source = ParquetSource(path)
    for index in range(40):
        source[index]
        assert source._groups._bytes <= 3000
    assert 1 < len(source._groups._decoded) < 4


def test_threads_read_concurrently(tmp_path):
    source = ParquetSource(write(tmp_path / "a.parquet", 1))
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        found = list(threads.map(source.__getitem__, list(range(10)) * 20))
    assert found == EXPECTED * 20


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({}, {"image_column": "gone"}, "no image column 'gone'; the columns are: image, label"),
        ({}, {"label_column": "gone"}, "no label column 'gone'"),
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


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0] * 6 + [None] * 4, "row 6: the label"),
        ([0] * 9 + [-1], r"row 9: .*'-1'"),
        (["1"] * 9 + [""], "row 9: the label"),
        (["1"] * 9 + ["-1"], "row 9: .*'-1'"),
        (pa.array([1] * 9 + [2**63], pa.uint64()), "row 9: .* integer"),
    ],
)
def test_a_bad_label_is_reported_with_its_row(tmp_path, labels, message):
    with pytest.raises(DataError, match=message):
        ParquetSource(write(tmp_path / "a.parquet", label=pa.array(labels)))


def test_a_missing_image_is_reported_when_it_is_read(tmp_path):
    source = ParquetSource(write(tmp_path / "a.parquet", image=[*IMAGES[:8], None, b""]))
    for row in (8, 9):
        with pytest.raises(DataError, match=rf"a\.parquet row {row}: ") as caught:
            source[row]
        assert caught.value.kind == "empty"


def test_a_too_large_row_group_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "GROUP_BYTES", 100)
    with pytest.raises(DataError, match="row group 0"):
        ParquetSource(write(tmp_path / "a.parquet"))


def test_a_file_without_rows_and_a_folder_without_files_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no file ends in \.parquet"):
        ParquetSource(tmp_path / "empty")
    write_parquet(str(tmp_path / "a.parquet"), [])
    with pytest.raises(DataError, match="contains no rows"):
        ParquetSource(tmp_path / "a.parquet")


FUZZ = """
import faulthandler, resource, sys
import numpy as np
from pathlib import Path
from plsc.data.sources.parquet import ParquetSource
from plsc.errors import DataError, OptionError

faulthandler.enable()
resource.setrlimit(resource.RLIMIT_AS, (12 * 2**30,) * 2)
path = Path(sys.argv[1])
good = path.read_bytes()
rng = np.random.default_rng(int(sys.argv[2]))
outcomes = {"read": 0, "refused": 0}
for turn in range(250):
    bad = bytearray(good)
    if rng.random() < 0.7:  # most of the file is images; its metadata is at the end
        low = len(bad) - 900 if rng.random() < 0.6 else 0
        for _ in range(rng.integers(1, 4)):
            bad[rng.integers(low, len(bad))] ^= 1 << rng.integers(8)
    elif rng.random() < 0.5:
        bad = bad[: rng.integers(len(bad))]
    else:
        start = rng.integers(len(bad) - 40)
        bad[start : start + 40] = rng.bytes(40)
    path.write_bytes(bad)
    try:
        source = ParquetSource(path)
        for index in range(len(source)):
            source[index]
        outcomes["read"] += 1
    except (DataError, OptionError):
        outcomes["refused"] += 1
# Not ru_maxrss, which starts at the peak of the parent.
peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
assert peak < 3 * 2**20, f"{peak} KiB"
assert outcomes["refused"] > 60, outcomes
print(outcomes, peak)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_damaged_files_neither_crash_nor_exhaust_memory(tmp_path, seed):
    if seed == 0:
        write_parquet(str(tmp_path / "a.parquet"), iter(EXPECTED))
    else:
        write(tmp_path / "a.parquet", image=pa.array([{"bytes": i, "path": "x"} for i in IMAGES]))
    run_code(FUZZ, str(tmp_path / "a.parquet"), str(seed))
