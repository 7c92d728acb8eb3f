"""What a run chooses of its learning rate, warm-ups and scale: said at its start, kept by its checkpoints."""

import json

import pytest

from plsc.checkpoint import read_manifest
from plsc.errors import OptionError
from plsc.parallel.world import World
from tests.images import write_dataset
from tests.resuming import different, losses_of, options_of, saved_at, train

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


def rates_of(save_dir):
    lines = map(json.loads, (save_dir / "metrics.jsonl").read_text().splitlines())
    return [line["lr"] for line in lines if "lr" in line]


def test_a_longer_resumed_run_keeps_the_default_rate_and_warm_up(dataset, tmp_path, capsys):
    train(options(dataset, tmp_path / "a", train__epochs=4), WORLD)
    said = "learning rate 0.0005859 (default: 0.1 x global batch 6 / 1024), schedule constant, "
    assert said + "warm-up 1 step, scale " in capsys.readouterr().out
    base = 0.1 * 6 / 1024
    assert rates_of(tmp_path / "a") == pytest.approx([base] * 16)
    load_dir = str(saved_at(tmp_path / "a", 4))
    train(options(dataset, tmp_path / "b", train__epochs=40, checkpoint__load_dir=load_dir), WORLD)
    said = "learning rate 0.0005859 (from the checkpoint), schedule constant, warm-up 1 step, "
    assert said in capsys.readouterr().out
    saved = read_manifest(tmp_path / "b/39").options["optim"]
    assert (saved["lr"], saved["warmup_epochs"], saved["warmup_steps"]) == (base, 0, 1)


def test_the_rate_that_is_set_is_that_of_backbone_and_class_weights(dataset, tmp_path, capsys):
    one = options(dataset, tmp_path / "a", optim__lr=0.02, optim__warmup_steps=0)
    one.set("checkpoint.every_n_steps", 1)
    train(one, WORLD)
    assert (
        "learning rate 0.02 (optim.lr), schedule constant, warm-up 0 steps, scale " in capsys.readouterr().out
    )
    assert set(rates_of(tmp_path / "a")) == {0.02}


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
        "head__initial_norm": 2.0,
    }  # fmt: skip
    every = {"checkpoint__every_n_steps": 3, "checkpoint__keep_last": -1}
    train(options(dataset, tmp_path / "whole", **settings, **every), WORLD)
    load_dir = str(saved_at(tmp_path / "whole", 3))
    train(options(dataset, tmp_path / "resumed", checkpoint__load_dir=load_dir, **every), WORLD)
    assert different(tmp_path / "resumed/1", tmp_path / "whole/1") == []
    later = {step: loss for step, loss in losses_of(tmp_path / "whole").items() if step > 3}
    assert losses_of(tmp_path / "resumed") == later


def test_an_automatic_scale_is_said_and_saved_as_auto(dataset, tmp_path, capsys):
    train(options(dataset, tmp_path / "run", head__scale="auto", train__steps=1), WORLD)
    assert ", scale 2.276 (auto, 6 classes)\n" in capsys.readouterr().out
    assert read_manifest(tmp_path / "run/0-step1").options["head"]["scale"] == "auto"


def test_a_scale_that_is_neither_auto_nor_positive_is_refused(dataset, tmp_path):
    for value in ("fast", 0, -1.0):
        with pytest.raises(OptionError, match="expected a number greater than 0, or 'auto'"):
            options(dataset, tmp_path, head__scale=value)
