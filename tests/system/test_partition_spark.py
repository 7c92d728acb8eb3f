"""The Spark engine on two local executors writes the same bytes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from plsc.data.partition.inputs import list_inputs
from plsc.data.partition.spark import open_split, split_inputs
from tests.hdfs_server import SHORT_JAVA
from tests.s3_server import use_s3
from tests.system.test_partition import (
    environment,
    files_of,
    hidden_in,
    s3fs_client,
    write_set,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("java") is None, reason="there is no Java to run Spark"),
]
SPARK = ("--engine", "spark", "--master", "local[2]")
SEVERAL = """
import contextlib, io, json, os, sys
from pathlib import Path
from plsc.cli import main
from plsc.data.partition import spark

with spark.session(None, 2**29, sys.argv[2]) as context:
    context.parallelize(range(9), 2).groupBy(bool).collect()
    process = Path("/proc", str(context._jvm.java.lang.ProcessHandle.current().pid()))
    sockets = {os.readlink(one) for one in (process / "fd").iterdir() if one.is_symlink()}
    for table in ("tcp", "tcp6"):
        for fields in map(str.split, (process / "net" / table).read_text().splitlines()[1:]):
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                print("listens", fields[1].split(":")[0])
    [folder] = Path(sys.argv[2]).iterdir()  # not in SPARK_LOCAL_DIRS
    print("shuffled", oct(folder.stat().st_mode)[-3:], len(list(folder.rglob("shuffle*.data"))))
    print("login", context.getConf().get("spark.authenticate"))

results = {}
for name, arguments in json.load(sys.stdin).items():
    reports = io.StringIO()
    with contextlib.redirect_stdout(reports), contextlib.redirect_stderr(reports):
        results[name] = main(["data", "partition", *arguments]), reports.getvalue()
with open(sys.argv[1], "w") as file:
    json.dump(results, file)
"""


@pytest.fixture(autouse=True, scope="module")
def pyspark() -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed")


def write_mixed_set(folder: Path) -> Path:
    """Write a set with a blank line and CRLF in it."""
    write_set(folder, 3001, (100, 3000))
    data = (folder / "1.txt").read_bytes()
    (folder / "1.txt").write_bytes(b"\n" + data.replace(b"\n", b"\r\n"))
    return folder


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_mixed_set(tmp_path / "set")


@dataclass(frozen=True)
class Runs:
    """Partitions of datasets by both engines. reports: exit code and output of each run, by name.

    seen: what the process printed of Java.
    """

    root: Path
    reports: dict[str, tuple[int, str]]
    seen: str

    def outputs(self, name: str) -> list[dict[str, bytes]]:
        """Return the files that each engine wrote."""
        return [files_of(self.root / f"{name}-{engine}") for engine in ("spark", "local")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, pyspark, s3_address) -> Runs:
    """Run all partitions in one process, because starting Java is slow."""
    root = tmp_path_factory.mktemp("spark")
    sets = {
        "mixed": (write_mixed_set(root / "mixed"), 7),
        "few": (write_set(root / "few", 4, (10, 20), files=2), 11),
        "many": (write_set(root / "many", 20_000, (350, 650), files=2), 8),  # several blocks per split
    }
    commands: dict[str, list[str]] = {}
    for name, (folder, nranks) in sets.items():
        arguments = ["--data_dir", str(folder), "--nranks", str(nranks), "--seed", "3"]
        output = str(root / name)
        commands[f"{name}-local"] = [*arguments, "--output_dir", f"{output}-local"]
        target = f"{output}-spark" if name == "many" else f"file://{output}-spark"  # a store with renames
        commands[f"{name}-spark"] = [*arguments, "--output_dir", target, *SPARK]
    del commands["mixed-spark"]  # from and to S3 instead
    bad = write_mixed_set(root / "bad")
    with (bad / "2.txt").open("ab") as file:
        file.write(b"no label\n")
    commands["bad"] = ["--data_dir", str(bad), "--nranks", "2", *SPARK]
    commands["no master"] = ["--data_dir", str(root / "few"), "--nranks", "2", *SPARK[:-1], "locl[2]"]
    remote = ["--data_dir", "s3://spark/set", "--output_dir", "s3://spark/out", "--nranks", "7"]
    remote += ["--seed", "3", "--tmp_dir", str(root / "tmp")]
    commands |= {"s3": [*remote, *SPARK], "s3 verified": [*remote, "--verify"]}
    with pytest.MonkeyPatch.context() as patch:
        use_s3(patch, s3_address)
        store = s3fs_client()
        store.mkdir("spark")
        store.put(str(root / "mixed"), "s3://spark/set", recursive=True)
        (root / "java").mkdir()
        words = [sys.executable, "-c", SEVERAL, str(root / "reports.json"), str(root / "java")]
        variables = {**environment(), "JAVA_TOOL_OPTIONS": " ".join(SHORT_JAVA)}
        how = {"env": variables, "capture_output": True, "text": True}
        done = subprocess.run(words, input=json.dumps(commands), **how)
        assert done.returncode == 0, done.stderr
        store.get("s3://spark/out", str(root / "s3-spark"), recursive=True)
    return Runs(root, json.loads((root / "reports.json").read_text()), done.stdout)


@pytest.mark.parametrize("name", ["few", "many"])
def test_spark_writes_the_same_bytes_and_manifest_as_the_local_engine(runs, name):
    """For fewer lines than ranks, and for many lines."""
    assert runs.reports[f"{name}-spark"][0] == 0, runs.reports
    spark, ours = runs.outputs(name)
    assert spark == ours
    assert "manifest.json" in spark
    assert hidden_in(runs.root / f"{name}-spark") == []
    assert hidden_in(runs.root) == []


def test_a_bad_line_is_reported_and_nothing_is_left(runs):
    code, reports = runs.reports["bad"]
    assert code == 1
    assert "2.txt:751: expected '<base64>TAB<label>'" in reports
    assert hidden_in(runs.root / "bad") == []
    assert not (runs.root / "bad/partition_2").exists()


def test_an_invalid_spark_master_gives_one_error(runs):
    code, reports = runs.reports["no master"]
    assert code == 1
    assert "plsc: error: Spark failed: " in reports
    assert "Traceback (most recent call last)" not in reports
    assert not (runs.root / "few/partition_2").exists()


def test_mixed_inputs_from_s3_to_s3(runs):
    assert [runs.reports[name][0] for name in ("s3", "s3 verified")] == [0, 0], runs.reports
    remote, local = files_of(runs.root / "s3-spark"), files_of(runs.root / "mixed-local")
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
        assert content == Path(one.location).read_bytes()


def test_other_machines_and_users_cannot_read_the_lines(runs):
    """Of a local master, also of the default one: Java listens on loopback alone, and has a login."""
    found = [line.split() for line in runs.seen.splitlines()]
    addresses = {values[0][-8:] for name, *values in found if name == "listens"}
    assert addresses == {"0100007F"}, runs.seen
    assert ["shuffled", "700", "2"] in found
    assert ["login", "true"] in found
    assert not list((runs.root / "java").iterdir())
