"""`plsc data convert | inspect | pack | unpack` on the command line."""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path

import pytest

from plsc import cli
from plsc.clean.changes import Change, write_changes
from plsc.data.lists import read_listing
from plsc.data.sources import open_source
from tests.distributed.launch import Ranks
from tests.distributed.test_interruption import wait_for
from tests.images import class_folders, write_dataset
from tests.system.small_entry import SMALL, shrink_defaults


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PLSC_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def dataset(tmp_path) -> Path:
    return write_dataset(tmp_path / "set", classes=3, per_class=2)


def samples(location: Path) -> list[tuple[bytes, int]]:
    source = open_source(location)
    return [source[i] for i in range(len(source))]


def test_a_dataset_is_inspected(dataset, capsys):
    (dataset / "images/1_0.png").write_bytes(b"no image")
    assert cli.main(["data", "inspect", str(dataset), "--check", "0"]) == 0
    out = capsys.readouterr().out
    assert "samples          6" in out
    assert "images/1_0.png (label.txt:3): the image is not readable" in out


def test_a_dataset_is_converted_packed_and_unpacked(dataset, tmp_path, capsys):
    lines, archive, back = (str(tmp_path / name) for name in ("lines", "set.tar.zst", "back"))
    for words, told in (
        (["convert", str(dataset), lines], f"wrote 6 samples to {lines}"),
        (["pack", lines, archive], "packed 2 files"),
        (["unpack", archive, back], "unpacked 2 files"),
    ):
        assert cli.main(["data", *words]) == 0
        assert told in capsys.readouterr().out
    assert samples(tmp_path / "back") == samples(dataset)


def test_a_mistake_gives_a_one_line_error(dataset, tmp_path, capsys):
    wrong = {
        "unknown suffix": ["convert", str(dataset), str(tmp_path / "a.zip")],
        "does not exist": ["inspect", str(tmp_path / "gone")],
        "ends in .tar.zst": ["pack", str(dataset), str(tmp_path / "a.zip")],
        "label_map is set": ["convert", str(dataset), str(tmp_path / "a.rec"), "--label_map", "x"],
        "--check is": ["inspect", str(dataset), "--check", "-1"],
        "already exists": ["convert", str(dataset), str(dataset)],
    }
    for message, arguments in wrong.items():
        assert cli.main(["data", *arguments]) == 1
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


SLOW = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # SIGINT is ignored in background processes
import plsc.data.writers as convert
open_source = convert.open_source
def open_slowly(*arguments, **how):
    source = open_source(*arguments, **how)
    class Slow(type(source)):
        def __getitem__(self, index):
            if index == 3:
                Path("half way").touch()
                time.sleep(600)
            return super().__getitem__(index)
    source.__class__ = Slow
    return source
convert.open_source = open_slowly
from plsc.cli import main
sys.exit(main(["data", "convert", *sys.argv[1:]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "signal_name"),
    [("a.rec", "SIGTERM"), ("lines", "SIGKILL")],  # a file, a folder
)
def test_an_interrupted_conversion_publishes_nothing(dataset, tmp_path, tmp_path_factory, name, signal_name):
    here = tmp_path_factory.mktemp("here")
    (here / "slow.py").write_text(SLOW)
    job = Ranks(here / "slow.py", 0, str(dataset), str(tmp_path / name), cwd=here)
    wait_for((here / "half way").exists, job)
    os.kill(job.pid, getattr(signal, signal_name))
    job.communicate()
    assert job.returncode != 0
    visible = [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert set(visible) <= {"set", "cache"}
    left = [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert bool(left) == (signal_name == "SIGKILL")
    # The next run removes the leftovers of a killed one.
    assert cli.main(["data", "convert", str(dataset), str(tmp_path / name)]) == 0
    assert samples(tmp_path / name) == samples(dataset)
    assert not [path for path in left if path.exists()]


@pytest.fixture
def faces(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shrink_defaults(monkeypatch, SMALL)
    flat = write_dataset(tmp_path / "set", classes=12, per_class=6)
    class_folders(flat, tmp_path / "the faces, 2", {label: f"{label:04d}" for label in range(12)})
    return "the faces, 2"


def printed_commands(capsys, *words):
    assert cli.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    return [shlex.split(line)[1:] for line in lines[lines.index("Next:") + 1 :]]


@pytest.mark.slow
@pytest.mark.parametrize("by", ["class", "image"])
def test_the_commands_after_a_split_run(faces, capsys, by):
    words = ("data", "split", faces, "the split", "--by", by, "--held_out", "0.4")
    train, pairs, identify = printed_commands(capsys, *words)
    assert cli.main(train) == 0
    shown = capsys.readouterr().out
    assert ("val_dir" in " ".join(train)) == (by == "image")
    assert f"{7 if by == 'class' else 12} classes" in shown
    assert cli.main(pairs) == 0
    assert "pairs: accuracy" in capsys.readouterr().out
    assert cli.main(identify) == 0
    listings = [
        read_listing(f"the split/{name}.tsv", image_folder=faces)[1] for name in ("gallery", "probes")
    ]
    gallery, probes = ([one.classes[label] for label in one.labels] for one in listings)
    mated = sum(name in gallery for name in probes)
    assert 0 < mated < len(probes)
    shown = capsys.readouterr().out
    assert f"({mated} mated and {len(probes) - mated} non-mated searches)" in shown


@pytest.mark.slow
def test_the_command_after_changes_runs(faces, capsys, tmp_path):
    write_changes(tmp_path / "changes.tsv", [Change("merge", 1, "", "0000", "0001")])
    (train,) = printed_commands(capsys, "data", "apply", faces, "changes.tsv", "clean")
    assert cli.main(train) == 0
    assert "11 classes" in capsys.readouterr().out
