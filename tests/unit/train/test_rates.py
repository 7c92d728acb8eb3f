"""What a run chooses of its learning rate, warm-ups and scale: said at its start, kept by its checkpoints."""

import math
import os

import numpy as np
import pytest
import torch

from plsc.checkpoint import read_manifest
from plsc.errors import CheckpointError, OptionError
from plsc.heads.kernels import fastest_engine, unavailable
from plsc.parallel.world import World
from plsc.train.build import load_head
from plsc.train.callbacks import UserParts
from plsc.train.run import build_run
from tests.images import write_dataset
from tests.overflowing import logged
from tests.resuming import Drawing, different, losses_of, options_of, saved_at, tensors_of, train

WORLD = World.single()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """24 images of 6 classes: 4 steps of 6 per epoch."""
    return write_dataset(tmp_path_factory.mktemp("data") / "set", classes=6, per_class=4)


def options(dataset, save_dir, **changes):
    """Options of two epochs that set neither rate nor warm-up."""
    made = options_of(dataset, save_dir, train__batch_size=6, **changes)
    for path in {"optim.lr", "optim.warmup_steps"} - {name.replace("__", ".") for name in changes}:
        made.values.pop(path, None)
        made.origins.pop(path, None)
    return made


def test_a_longer_resumed_run_keeps_the_default_rate_and_warm_up(dataset, tmp_path, capsys):
    train(options(dataset, tmp_path / "a", train__epochs=4, head__scale="auto"), WORLD)
    said = capsys.readouterr().out
    assert all(part in said for part in ("learning rate 0.0005859 ", "warm-up 1 step", "scale 2.276 (auto"))
    assert read_manifest(tmp_path / "a/3").options["head"]["scale"] == "auto"
    base = 0.1 * 6 / 1024
    assert logged(tmp_path / "a", "lr")["lr"] == pytest.approx([base] * 16)
    load_dir = str(saved_at(tmp_path / "a", 4))
    train(options(dataset, tmp_path / "b", train__epochs=12, checkpoint__load_dir=load_dir), WORLD)
    assert "learning rate 0.0005859 (from the checkpoint)" in capsys.readouterr().out
    saved = read_manifest(tmp_path / "b/11").options["optim"]
    assert (saved["lr"], saved["warmup_steps"]) == (base, 1)


def test_the_margin_rises_over_its_warm_up(dataset, tmp_path, capsys):
    cosface = {"head__loss_type": "dist_cosface", "head__scale": 64.0, "train__epochs": 1}
    warm = {"head__margin": 0.4, "head__margin_warmup_steps": 4}
    train(options(dataset, tmp_path / "warm", **cosface, **warm), WORLD)
    assert ", margin warm-up 4 steps" in capsys.readouterr().out
    train(options(dataset, tmp_path / "low", **cosface, head__margin=0.1), WORLD)
    train(options(dataset, tmp_path / "full", **cosface, head__margin=0.4), WORLD)
    first = {name: losses_of(tmp_path / name)[1] for name in ("warm", "low", "full")}
    assert first["warm"] == pytest.approx(first["low"], rel=1e-6)
    assert first["warm"] < first["full"] - 1


@pytest.mark.parametrize("loss_type", ["dist_arcface", "magface"])
def test_a_margin_warm_up_resumes_to_the_same_bits(loss_type, dataset, tmp_path):
    settings = {
        "head__loss_type": loss_type, "head__margin_warmup_steps": 6, "head__scale": "auto",
    }  # fmt: skip
    every = {"checkpoint__every_n_steps": 3, "checkpoint__keep_last": -1}
    train(options(dataset, tmp_path / "whole", **settings, **every), WORLD)
    load_dir = str(saved_at(tmp_path / "whole", 3))
    train(options(dataset, tmp_path / "resumed", checkpoint__load_dir=load_dir, **every), WORLD)
    assert different(tmp_path / "resumed/1", tmp_path / "whole/1") == []
    later = {step: loss for step, loss in losses_of(tmp_path / "whole").items() if step > 3}
    assert losses_of(tmp_path / "resumed") == later


@pytest.mark.parametrize("loss_type", ["dist_curricularface", "adaface"])
def test_margins_per_class_follow_the_images_and_resume_to_the_same_bits(loss_type, tmp_path):
    folder = write_dataset(tmp_path / "set", classes=6, per_class=4)
    lines = (folder / "label.txt").read_text().splitlines(keepends=True)
    (folder / "label.txt").write_text("".join(lines[3:]))  # class 0 keeps one image
    expected = [0.6, *[0.5 / math.sqrt(2) + 0.1] * 5, 0.6]  # class 6 has none
    settings = {"head__loss_type": loss_type, "head__class_num": 7, "checkpoint__every_n_steps": 3}
    formula = {**settings, "head__class_margins": {"a": 0.5, "b": 0.1}, "checkpoint__keep_last": -1}
    run = build_run(options(folder, tmp_path, **formula).resolve(), WORLD, UserParts(Drawing()))
    assert run.head.margin.class_margins.tolist() == pytest.approx(expected)
    np.save(tmp_path / "m.npy", expected)
    file = {**settings, "head__class_margins": {"file": str(tmp_path / "m.npy")}}
    train(options(folder, tmp_path / "file", **file), WORLD)
    train(options(folder, tmp_path / "whole", **formula), WORLD)
    train(options(folder, tmp_path / "plain", **settings), WORLD)
    assert losses_of(tmp_path / "file") == losses_of(tmp_path / "whole") != losses_of(tmp_path / "plain")
    load_dir = {"checkpoint__load_dir": str(saved_at(tmp_path / "whole", 3))}
    train(options(folder, tmp_path / "resumed", **load_dir), WORLD)  # with the margins of the checkpoint
    assert different(tmp_path / "resumed/1", tmp_path / "whole/1") == []
    assert not any("class_margins" in key for _, key in tensors_of(tmp_path / "whole/1"))
    load_dir = {"checkpoint__load_dir": str(saved_at(tmp_path / "file", 8))}
    with pytest.raises(CheckpointError, match="class_margins"):
        train(options(folder, tmp_path / "path", **load_dir, train__epochs=3), WORLD)
    path, manifest = saved_at(tmp_path / "file", 8), read_manifest(tmp_path / "file/1")
    assert load_head(path, manifest, WORLD).margin.class_margins is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head__margin": 0.3}, "head.margin and head.class_margins"),
        ({"head__loss_type": "dist_magface"}, "magface"),
        ({}, r"class 0 \(4 images\) of arcface is 2.12132"),
        ({"head__class_margins": {"file": "m.npy"}}, "5 margins for 6 classes"),
        ({"head__class_margins": {"file": "no.npy"}}, "no.npy"),
        ({"head__class_margins": {"file": "bad.npy"}}, "bad.npy"),
        ({"head__class_margins": {"file": "pipe.npy"}}, "regular file"),
        ({"reader": lambda: None}, "generator"),
    ],
)
def test_wrong_margins_per_class_are_refused(changes, message, dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("m.npy", np.full(5, 0.5))
    np.save("bad.npy", np.array([{}], dtype=object))
    os.mkfifo("pipe.npy")
    changes = {"head__class_margins": {"a": 3}, **changes}
    user = UserParts(Drawing(), train_reader=changes.pop("reader", None))
    if user.train_reader:
        changes["head__class_num"] = 6
    with pytest.raises(OptionError, match=message):
        build_run(options(dataset, tmp_path / "run", **changes).resolve(), WORLD, user)


@pytest.mark.parametrize("values", [{"b": 0.1}, {"a": -1}, {"a": 1, "file": "x"}])
def test_margins_per_class_are_a_formula_or_a_file(values, dataset, tmp_path):
    with pytest.raises(OptionError, match="a number a"):
        options(dataset, tmp_path, head__class_margins=values)


def test_log_and_checkpoint_name_the_kernels_of_the_head(dataset, tmp_path, capsys):
    train(options(dataset, tmp_path / "a", train__epochs=1), WORLD)
    name = "torch" if unavailable() else fastest_engine(torch.float32)
    assert f"kernels {name}" in capsys.readouterr().out.splitlines()[0]
    assert name in read_manifest(tmp_path / "a/0").heads[""].computed_by
