"""The engine for sets beyond one machine, on two local executors: the same bytes."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import pytest

from plsc.data.partition.inputs import list_inputs
from plsc.data.partition.split import open_split, split_inputs
from tests.hdfs_server import hdfs_server
from tests.s3_server import s3_server, use_s3
from tests.system.test_partition import files_of, hidden_in, run, s3fs_client, write_set

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("java") is None, reason="there is no Java to run Spark"),
]
SPARK = ("--engine", "spark", "--master", "local[2]")


@pytest.fixture(autouse=True)
def pyspark() -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed")


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = write_set(tmp_path / "set", 3001, (100, 3000))
    data = (folder / "1.txt").read_bytes()
    (folder / "1.txt.gz").write_bytes(gzip.compress(b"\n" + data.replace(b"\n", b"\r\n"), 1))
    (folder / "1.txt").unlink()
    (folder / "file_list.txt").write_text("0.txt\n1.txt.gz\n2.txt\n3.txt\n")
    return folder


def test_spark_gives_the_bytes_and_the_manifest_of_the_local_engine(tmp_path, folder):
    local, spark = tmp_path / "local", tmp_path / "spark"
    arguments = ["--data_dir", folder, "--nranks", 7, "--seed", 3]
    run(*arguments, "--output_dir", local)
    run(*arguments, "--output_dir", spark, *SPARK)
    assert files_of(spark) == files_of(local)
    assert hidden_in(spark) == []
    assert hidden_in(tmp_path) == []


def test_fewer_lines_than_ranks_are_padded_alike(tmp_path):
    folder = write_set(tmp_path / "set", 4, (10, 20), files=2)
    for name, engine in (("local", ()), ("spark", SPARK)):
        run("--data_dir", folder, "--nranks", 11, "--output_dir", tmp_path / name, *engine)
    assert files_of(tmp_path / "spark") == files_of(tmp_path / "local")


def test_a_bad_line_is_named_and_nothing_is_left(tmp_path, folder):
    with (folder / "2.txt").open("ab") as file:
        file.write(b"no label\n")
    said = run("--data_dir", folder, "--nranks", 2, *SPARK, code=1)
    assert "2.txt:751: expected '<base64>TAB<label>'" in said
    assert hidden_in(folder) == []
    assert not (folder / "partition_2").exists()


def test_from_s3_to_s3(tmp_path, folder, monkeypatch):
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    with s3_server() as address:
        use_s3(monkeypatch, address)
        store = s3fs_client()
        store.mkdir("spark")
        store.put(str(folder), "spark/set", recursive=True)
        arguments = ["--data_dir", "s3://spark/set", "--output_dir", "s3://spark/out"]
        arguments += ["--nranks", 3, "--tmp_dir", tmp_path / "tmp"]
        run(*arguments, *SPARK)
        run(*arguments, "--verify")
        store.get("spark/out", str(tmp_path / "out"), recursive=True)
    run("--data_dir", folder, "--nranks", 3, "--output_dir", tmp_path / "local")
    local, remote = files_of(tmp_path / "local"), files_of(tmp_path / "out")
    assert local.keys() == remote.keys()
    assert all(local[name] == remote[name] for name in local if name != "manifest.json")


@pytest.mark.parametrize("size", [1, 7, 1000, 40_000, 10**9])
def test_splits_of_any_size_hold_each_line_once_and_in_order(tmp_path, folder, size):
    if size < 100:  # of a few lines only, each split less than a line
        (folder / "0.txt").write_bytes(b"AA\t1\n\n\nBBBB\t22\nC\t3")
        (folder / "file_list.txt").write_text("0.txt\n")
    inputs = list_inputs(str(folder), "file_list.txt")
    contents = [b""] * len(inputs)
    for one in split_inputs(inputs, size):
        with open_split(one) as (stream, offset):
            buffer = bytearray(999)
            first = True
            while count := stream.readinto(memoryview(buffer)):
                assert not first or offset == len(contents[one.number])
                contents[one.number] += buffer[:count]
                first = False
    for one, content in zip(inputs, contents, strict=True):
        whole = Path(one.location).read_bytes()
        assert content == (gzip.decompress(whole) if one.compression else whole)


def test_many_lines_come_out_alike_in_many_splits(tmp_path):
    folder = write_set(tmp_path / "set", 200_000, (700, 1300))  # 200 MB
    arguments = ["--data_dir", folder, "--nranks", 8]
    run(*arguments, "--memory", "64M", "--output_dir", tmp_path / "local")
    run(*arguments, "--output_dir", tmp_path / "spark", *SPARK)
    assert files_of(tmp_path / "spark") == files_of(tmp_path / "local")


def test_from_hdfs_to_hdfs(tmp_path, folder):
    pytest.importorskip("hdfs_native", reason="hdfs-native is not installed")
    with hdfs_server() as hdfs:
        store = hdfs.client()
        store.makedirs("/set")
        for path in folder.iterdir():
            store.put_file(str(path), f"/set/{path.name}")
        arguments = ["--data_dir", f"{hdfs.url}/set", "--nranks", 3]
        for output, engine in (("spark", SPARK), ("local", ())):
            run(*arguments, "--output_dir", f"{hdfs.url}/{output}", *engine)
        run(*arguments, "--output_dir", f"{hdfs.url}/spark", "--verify")
        assert sorted(store.ls("/", detail=False)) == ["/local", "/set", "/spark"]
        names = [name.rsplit("/", 1)[-1] for name in store.ls("/local", detail=False)]
        found = {
            engine: {name: store.cat_file(f"/{engine}/{name}") for name in names}
            for engine in ("local", "spark")
        }
    assert found["spark"] == found["local"]
    assert len(names) == 5
