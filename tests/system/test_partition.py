"""plsc data partition as a process: its memory, kills, full disks, concurrent runs."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from plsc.cli import main
from plsc.storage.store import Store

REPO = Path(__file__).parents[2]
TOOL = REPO / "tools/process_base64_files.py"


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}


def start(*arguments: object, **options) -> subprocess.Popen:
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.Popen(
        command,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def run(*arguments: object, code: int = 0, **options) -> str:
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=600)
    assert process.returncode == code, out + err
    return out + err


def write_set(folder: Path, count: int, lengths: tuple[int, int], files: int = 4) -> Path:
    """Write `count` lines of random text, `lengths` bytes long, to several files."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 64, 2**20, dtype=np.uint8)
    alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    text = np.frombuffer(alphabet, dtype=np.uint8)[noise].tobytes()
    folder.mkdir()
    cuts = [count * index // files for index in range(files + 1)]
    for index in range(files):
        with (folder / f"{index}.txt").open("wb") as file:
            for number in range(cuts[index], cuts[index + 1]):
                length = int(rng.integers(*lengths))
                begin = int(rng.integers(0, len(text) - length))
                file.write(b"%d+%s\t%d\n" % (number, text[begin : begin + length], number % 1000))
    (folder / "file_list.txt").write_text("".join(f"{index}.txt\n" for index in range(files)))
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def hidden_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def writes_since(began: float, folder: Path) -> bool:
    """Return whether a hidden folder was made or changed after `began`, or has just been renamed."""
    with contextlib.suppress(FileNotFoundError):
        return any((folder / name).stat().st_mtime >= began for name in hidden_in(folder))
    return True


_MEASURED = """
import runpy, sys
sys.argv = sys.argv[1:]
from pathlib import Path
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    status = Path("/proc/self/status").read_text()
    peak, files = (int(status.partition(key)[2].split()[0]) for key in ("VmHWM:", "RssFile:"))
    print(f"peak {peak - files}")
"""


def peak_mb(*arguments: object, code: int = 0) -> float:
    """Return the most memory that the command had, by the kernel's own mark, less pages of its libraries.

    The kernel maps libraries in pages of changing sizes. Files of the data, which count against the limit,
    are no longer mapped at the end.
    """
    command = [sys.executable, "-c", _MEASURED, str(TOOL), *map(str, arguments)]
    done = subprocess.run(command, env=environment(), text=True, capture_output=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert code == 0 or "0.txt:11: the line is longer than" in done.stderr
    return int(done.stdout.rpartition("peak ")[2]) / 1024


@pytest.fixture(scope="module")
def interpreter_mb(tmp_path_factory) -> float:
    """Return the memory of the command for a tiny dataset."""
    folder = write_set(tmp_path_factory.mktemp("small") / "set", 10, (10, 20))
    return peak_mb("--data_dir", folder, "--nranks", 2)


@pytest.mark.slow
def test_memory_is_bounded_and_the_bytes_do_not_depend_on_it_or_on_the_workers(tmp_path, interpreter_mb):
    folder = write_set(tmp_path / "set", 200_000, (1500, 1900))
    inputs = sum(path.stat().st_size for path in folder.iterdir())
    assert inputs > 5 * 64 * 2**20
    results = {}
    for memory, workers in ((64, 2), (2048, 1)):
        output = tmp_path / f"out-{memory}-{workers}"
        peak = peak_mb(
            "--data_dir", folder, "--nranks", 7, "--output_dir", output,
            "--memory", f"{memory}M", "--workers", workers,
        )  # fmt: skip
        assert peak - interpreter_mb < memory
        results[output.name] = files_of(output)
    first, other = results.values()
    assert len(first) == 9
    assert other == first
    run("--data_dir", folder, "--nranks", 7, "--output_dir", output, "--verify", "--memory", "64M")


def short_lines() -> Iterator[bytes]:
    yield b"A\t0\nB\t1\n" * 500_000  # line numbers take more memory than the lines


def long_lines() -> Iterator[bytes]:
    yield b"\xef\xbb\xbf"  # not of base64, so that every line is checked
    for number in range(12):
        yield b"%d" % number + b"A" * (2_000_000 + 2_860_000 * number) + b"\t1\n"  # the last: half of 64M


@pytest.mark.slow
@pytest.mark.parametrize("lines", [short_lines, long_lines])
def test_memory_is_bounded_for_lines_of_any_length(tmp_path, interpreter_mb, lines):
    folder = tmp_path / "set"
    folder.mkdir()
    with (folder / "0.txt").open("wb") as file:
        file.writelines(lines())
    (folder / "file_list.txt").write_text("0.txt")
    arguments = ["--data_dir", folder, "--nranks", 3, "--output_dir", tmp_path / "out"]
    arguments += ["--memory", "64M", "--workers", 2]
    assert peak_mb(*arguments) - interpreter_mb < 64
    assert peak_mb(*arguments, "--verify") - interpreter_mb < 64


@pytest.mark.slow
def test_a_line_of_a_gigabyte_is_an_error_in_bounded_memory(tmp_path, interpreter_mb):
    folder = write_set(tmp_path / "set", 10, (10, 20), files=1)
    with (folder / "0.txt").open("ab") as file:
        file.truncate(2**30)  # zeros that take no disk space
    assert peak_mb("--data_dir", folder, "--nranks", 2, "--memory", "64M", code=1) - interpreter_mb < 64
    assert hidden_in(folder) == []


@pytest.mark.slow
def test_a_killed_run_leaves_the_inputs_and_no_output_and_the_next_one_cleans_up(tmp_path):
    folder = write_set(tmp_path / "set", 40_000, (1500, 1900))
    inputs = files_of(folder)
    arguments = ["--data_dir", folder, "--nranks", 4, "--memory", "32M", "--workers", 2]
    run(*arguments, "--output_dir", tmp_path / "whole")
    whole = files_of(tmp_path / "whole")
    output = folder / "partition_4"
    chance = random.Random(1)
    seen_partial = 0
    for _ in range(4):
        began = time.time()
        process = start(*arguments)
        while process.poll() is None and not writes_since(began, folder):
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.25))
        process.kill()
        process.communicate()
        assert files_of(folder) == inputs
        seen_partial += bool(hidden_in(folder))
        if output.exists():  # the run was faster than the kill: the output is complete
            assert files_of(output) == whole
            for path in output.iterdir():
                path.unlink()
            output.rmdir()
    assert seen_partial
    words = [*map(str, arguments)]
    assert main(["data", "partition", *words]) == 0  # the command does the same as the tool
    assert files_of(output) == whole
    assert hidden_in(folder) == []


def test_a_run_stopped_by_a_signal_cleans_up(tmp_path):
    folder = write_set(tmp_path / "set", 40_000, (1500, 1900))
    process = start("--data_dir", folder, "--nranks", 4, "--memory", "32M")
    while not any(folder.glob(".buckets_*/*")):  # the run is writing
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert hidden_in(folder) == []
    assert not (folder / "partition_4").exists()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 40 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(folder)]
    made = subprocess.run(mount, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no small disk can be mounted here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("full", ["output", "buckets"])
def test_a_disk_that_becomes_full_is_reported_and_cleaned_up(tmp_path, small_disk, full):
    folder = write_set(tmp_path / "set", 20_000, (1500, 1900))  # 34 MB
    inputs = files_of(folder)
    output = small_disk / "out" if full == "output" else tmp_path / "out"
    temporary = small_disk if full == "buckets" else tmp_path
    (small_disk / "other").write_bytes(bytes(25_000_000))
    where = ["--output_dir", output, "--tmp_dir", temporary]
    said = run("--data_dir", folder, "--nranks", 3, "--memory", "32M", *where, code=1)
    assert "No space left" in said
    assert len(said.splitlines()) == 1
    assert files_of(folder) == inputs
    assert [path.name for path in small_disk.iterdir()] == ["other"]
    assert not output.exists()


def in_process(capsys, *arguments: object, code: int = 0) -> str:
    assert main(["data", "partition", *map(str, arguments)]) == code
    printed = capsys.readouterr()
    return printed.out + printed.err


def test_a_dataset_on_s3_gives_the_same_parts_as_a_local_one(tmp_path, s3, capsys):
    run = functools.partial(in_process, capsys)
    folder = write_set(tmp_path / "set", 300, (1500, 1900))
    run("--data_dir", folder, "--nranks", 3, "--output_dir", tmp_path / "local")
    store = s3fs_client()
    store.put(str(folder), f"{s3}/set", recursive=True)
    store.pipe(f"{s3}/out/part_0.txt", b"half a part")  # as a run leaves that was killed
    arguments = ["--data_dir", f"{s3}/set", "--nranks", 3]
    arguments += ["--output_dir", f"{s3}/out", "--tmp_dir", tmp_path / "tmp"]
    assert "already exists" in run(*arguments, code=1)
    store.rm(f"{s3}/out", recursive=True)
    run(*arguments)
    store.get(f"{s3}/out", str(tmp_path / "out"), recursive=True)
    local, remote = files_of(tmp_path / "local"), files_of(tmp_path / "out")
    assert local.keys() == remote.keys()
    assert all(local[name] == remote[name] for name in local if name != "manifest.json")
    assert list((tmp_path / "tmp").iterdir()) == []
    assert "300 lines" in run(*arguments, "--verify")
    store.pipe(f"{s3}/out/part_2.txt", remote["part_2.txt"][:-1] + b" ")
    assert "part_2.txt" in run(*arguments, "--verify", code=1)
    printed = run("--data_dir", folder, "--nranks", 3, "--output_dir", "s3://no-bucket/out", code=1)
    assert "s3://no-bucket/out" in printed
    assert len(printed.splitlines()) == 1


@pytest.mark.parametrize("listed", ["inside", "outside"])
def test_inputs_on_s3_that_are_named_as_parts_are_no_leftovers(tmp_path, s3, listed, capsys):
    """Output in the folder of the inputs would overwrite them, and delete them if it fails."""
    store, lines = s3fs_client(), [b"AAAA\t0\n", b"BBBB\t1\n"]
    for number, line in enumerate(lines):
        store.pipe(f"{s3}/set/part_{number}.txt", line)
    names = tmp_path / "names.txt"
    names.write_text("part_0.txt\npart_1.txt\n")
    arguments = ["--data_dir", f"{s3}/set", "--nranks", 2, "--output_dir", f"{s3}/set".replace("s3:", "s3a:")]
    if listed == "inside":
        store.put(str(names), f"{s3}/set/file_list.txt")
    else:
        arguments += ["--file_list", names]
    assert "already exists" in in_process(capsys, *arguments, code=1)
    assert [store.cat_file(f"{s3}/set/part_{number}.txt") for number in (0, 1)] == lines


def s3fs_client():
    import s3fs

    return s3fs.S3FileSystem(skip_instance_cache=True)


def test_objects_below_the_name_of_a_file_are_not_deleted_with_it(s3):
    store = s3fs_client()
    store.pipe({f"{s3}/set/a": b"QUJD\t1\n", f"{s3}/set/a/b": b"other"})
    Store(f"{s3}/set").delete("a")
    store.invalidate_cache()
    assert store.find(f"{s3}/set/a/") == [f"{s3}/set/a/b".removeprefix("s3://")]
    assert not store.isfile(f"{s3}/set/a")
