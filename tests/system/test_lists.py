"""The commands that `plsc data split` and `plsc data apply` print: each runs as it is printed."""

from __future__ import annotations

import shlex

import pytest

from plsc import cli
from plsc.clean.changes import Change, write_changes
from plsc.data.lists import read_listing
from tests.images import write_dataset
from tests.system.small_entry import shrink_defaults

SMALL = {
    "model.name": "SmallResNet",
    "model.emb_size": 8,
    "model.image_shape": (3, 16, 16),
    "train.batch_size": 12,
    "train.epochs": 1,
}


@pytest.fixture
def faces(tmp_path, monkeypatch):
    monkeypatch.setenv("PLSC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    shrink_defaults(monkeypatch, SMALL)
    images = write_dataset(tmp_path / "set", classes=12, per_class=6) / "images"
    for path in images.iterdir():
        folder = tmp_path / f"the faces, 2/{int(path.name.split('_')[0]):04d}"
        folder.mkdir(parents=True, exist_ok=True)
        path.rename(folder / path.name)
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
