"""The Spark engine on two local executors writes the same bytes."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from plsc.data.partition.inputs import list_inputs
from plsc.data.partition.spark import open_split, split_inputs
from tests.system.test_partition import (
    environment,
    files_of,
    hidden_in,
    run,
    s3fs_client,
    write_set,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("java") is None, reason="there is no Java to run Spark"),
]
SPARK = ("--engine", "spark", "--master", "local[2]")
SEVERAL = """
import contextlib, io, json, sys
from plsc.cli import main

results = {}
for name, arguments in json.load(sys.stdin).items():
    reports = io.StringIO()
    with contextlib.redirect_stdout(reports), contextlib.redirect_stderr(reports):
        results[name] = main(["data", "partition", *arguments]), reports.getvalue()
with open(sys.argv[1], "w") as file:
    json.dump(results, file)
"""

LOOK = """
import os, sys
from pathlib import Path
from plsc.data.partition import spark

with spark.session(None, 2**29, sys.argv[1]) as context:
    context.parallelize(range(9), 2).groupBy(bool).collect()
    process = Path("/proc", str(context._jvm.java.lang.ProcessHandle.current().pid()))
    sockets = {os.readlink(one) for one in (process / "fd").iterdir() if one.is_symlink()}
    for table in ("tcp", "tcp6"):
        for fields in map(str.split, (process / "net" / table).read_text().splitlines()[1:]):
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                print("listens", fields[1].split(":")[0])
    [folder] = Path(sys.argv[1]).iterdir()  # not in SPARK_LOCAL_DIRS
    print("shuffled", oct(folder.stat().st_mode)[-3:], len(list(folder.rglob("shuffle*.data"))))
    print("login", context.getConf().get("spark.authenticate"))
"""


@pytest.fixture(autouse=True, scope="module")
def pyspark() -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed")


def write_mixed_set(folder: Path) -> Path:
    """Write a set with a compressed file, a blank line and CRLF in it."""
    write_set(folder, 3001, (100, 3000))
    data = (folder / "1.txt").read_bytes()
    (folder / "1.txt.gz").write_bytes(gzip.compress(b"\n" + data.replace(b"\n", b"\r\n"), 1))
    (folder / "1.txt").unlink()
    (folder / "file_list.txt").write_text("0.txt\n1.txt.gz\n2.txt\n3.txt\n")
    return folder


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_mixed_set(tmp_path / "set")


@dataclass(frozen=True)
class Local:
    """Partitions of local datasets by both engines; reports: exit code and output of each run, by name."""

    root: Path
    reports: dict[str, tuple[int, str]]

    def outputs(self, name: str) -> list[dict[str, bytes]]:
        """Return the files that each engine wrote."""
        return [files_of(self.root / f"{name}-{engine}") for engine in ("spark", "local")]


@pytest.fixture(scope="module")
def local(tmp_path_factory, pyspark) -> Local:
    """Run all partitions in one process, because starting Java is slow."""
    root = tmp_path_factory.mktemp("spark")
    sets = {
        "mixed": (write_mixed_set(root / "mixed"), 7, "512M"),
        "few": (write_set(root / "few", 4, (10, 20), files=2), 11, "512M"),
        # More than three times the memory limit, and several splits.
        "many": (write_set(root / "many", 200_000, (350, 650)), 8, "32M"),
    }
    runs: dict[str, list[str]] = {}
    for name, (folder, nranks, memory) in sets.items():
        arguments = ["--data_dir", str(folder), "--nranks", str(nranks), "--seed", "3"]
        output = str(root / name)
        runs[f"{name}-local"] = [*arguments, "--output_dir", f"{output}-local", "--memory", memory]
        runs[f"{name}-spark"] = [*arguments, "--output_dir", f"{output}-spark", *SPARK]
    bad = write_mixed_set(root / "bad")
    with (bad / "2.txt").open("ab") as file:
        file.write(b"no label\n")
    runs["bad"] = ["--data_dir", str(bad), "--nranks", "2", *SPARK]
    runs["no master"] = ["--data_dir", str(root / "few"), "--nranks", "2", *SPARK[:-1], "locl[2]"]
    command = [sys.executable, "-c", SEVERAL, str(root / "reports.json")]
    done = subprocess.run(command, input=json.dumps(runs), env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Local(root, json.loads((root / "reports.json").read_text()))


@pytest.mark.parametrize("name", ["mixed", "few", "many"])
def test_spark_writes_the_same_bytes_and_manifest_as_the_local_engine(local, name):
    """For mixed inputs, for fewer lines than ranks, and for many lines in many splits."""
    assert local.reports[f"{name}-spark"][0] == 0, local.reports
    spark, ours = local.outputs(name)
    assert spark == ours
    assert "manifest.json" in spark
    assert hidden_in(local.root / f"{name}-spark") == []
    assert hidden_in(local.root) == []


def test_a_bad_line_is_reported_and_nothing_is_left(local):
    code, reports = local.reports["bad"]
    assert code == 1
    assert "2.txt:751: expected '<base64>TAB<label>'" in reports
    assert hidden_in(local.root / "bad") == []
    assert not (local.root / "bad/partition_2").exists()


def test_an_invalid_spark_master_gives_one_error(local):
    code, reports = local.reports["no master"]
    assert code == 1
    assert "plsc: error: Spark failed: " in reports
    assert "Traceback (most recent call last)" not in reports
    assert not (local.root / "few/partition_2").exists()


def test_from_s3_to_s3(tmp_path, folder, s3):
    store = s3fs_client()
    store.put(str(folder), f"{s3}/set", recursive=True)
    arguments = ["--data_dir", f"{s3}/set", "--output_dir", f"{s3}/out"]
    arguments += ["--nranks", 3, "--tmp_dir", tmp_path / "tmp"]
    run(*arguments, *SPARK)
    run(*arguments, "--verify")
    store.get(f"{s3}/out", str(tmp_path / "out"), recursive=True)
    run("--data_dir", folder, "--nranks", 3, "--output_dir", tmp_path / "local")
    local, remote = files_of(tmp_path / "local"), files_of(tmp_path / "out")
    assert local.keys() == remote.keys()
    assert all(local[name] == remote[name] for name in local if name != "manifest.json")


@pytest.mark.parametrize("size", [1, 7, 1000, 40_000, 10**9])
def test_splits_of_any_size_contain_each_line_once_and_in_order(tmp_path, folder, size):
    if size < 100:  # use few lines; each split is shorter than a line
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


def test_other_machines_and_users_cannot_read_the_lines(tmp_path):
    """Of a local master, also of the default one: Java listens on loopback alone, and has a login."""
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(tmp_path)], capture_output=True, text=True, env=environment()
    )
    found = [line.split() for line in done.stdout.splitlines()]
    addresses = {values[0][-8:] for name, *values in found if name == "listens"}
    assert addresses == {"0100007F"}, done.stdout + done.stderr
    assert ["shuffled", "700", "2"] in found
    assert ["login", "true"] in found
    assert not list(tmp_path.iterdir())
