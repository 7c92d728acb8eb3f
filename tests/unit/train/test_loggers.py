"""Loggers: what each writes in a run, and that a resumed run continues it."""

import json
import logging
import math
import os
import shutil
import sys

import numpy as np
import pytest
from PIL import Image

from plsc.errors import OptionError
from plsc.train import log
from tests.system.small_entry import entry
from tests.undrawn import drawing

STEPS = 3  # per epoch: 10, 10 and 4 images


def train(dataset, folder, *loggers, epochs=2, resume=None, **settings):
    settings = {"set_with_test": True, "set_train_batch_size": 10, "set_last_batch": "keep"} | settings
    ins = entry(dataset, folder, set_train_epochs=epochs, **settings)
    if loggers:
        ins.set_loggers(*loggers)
    if resume:
        ins.set_checkpoint_dir(resume)
    losses = []
    for event in ("after_step", "epoch_end"):
        ins.add_callback(lambda context: losses.extend(context.losses), event)
    ins.train()
    return losses


def train_and_resume(dataset, folder, *loggers, **settings):
    """Train two epochs, and resume from the first: as after a crash in the second."""
    train(dataset, folder, *loggers, **settings)
    shutil.rmtree(folder / "1")
    train(dataset, folder, *loggers, epochs=3, resume=folder / "0", **settings)


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


class Remember:
    """A user's logger."""

    def __init__(self):
        self.entries, self.is_closed = [], False

    def write(self, entry):
        self.entries.append(entry)

    def close(self):
        self.is_closed = True


def test_the_loss_of_an_epoch_is_the_mean_over_its_images(dataset, tmp_path):
    losses = train(dataset, tmp_path, set_calc_acc=True)
    lines = lines_of(tmp_path)
    epochs = [line for line in lines if "loss_epoch" in line]
    assert [(line["step"], line["epoch"]) for line in epochs] == [(STEPS, 0), (2 * STEPS, 1)]
    accuracies = [line["accuracy"] for line in lines if "loss" in line]
    for number, line in enumerate(epochs):
        mine = slice(STEPS * number, STEPS * (number + 1))
        values, images = zip(*losses[mine], strict=True)
        assert images == (10, 10, 4)
        assert line["loss_epoch"] == pytest.approx(np.average(values, weights=images))
        assert line["accuracy_epoch"] == pytest.approx(np.average(accuracies[mine], weights=images))
        assert line["seconds"] > 0 < line["images_per_second_epoch"]


def test_a_run_that_resumes_within_an_epoch_has_the_same_loss_of_the_epoch(dataset, tmp_path):
    train(dataset, tmp_path / "whole")
    train(dataset, tmp_path / "parts", set_train_steps=STEPS + 1)
    train(dataset, tmp_path / "parts", set_train_steps=2 * STEPS, resume="last")
    (first, last), parts = (
        [line["loss_epoch"] for line in lines_of(tmp_path / name) if "loss_epoch" in line]
        for name in ("whole", "parts")
    )
    assert parts[0] == first
    assert parts[-1] == last


def test_a_continued_file_loses_later_and_damaged_lines_and_its_steps_are_drawn(tmp_path, monkeypatch):
    drawn, path = [], tmp_path / "metrics.jsonl"
    monkeypatch.setattr(log, "plot_losses", lambda points, path: drawn.append(points))
    whole = [{"step": 1, "mean_loss": 9.0, "lr": 0.1}, {"step": 3, "eval": {}}]
    whole += [{"step": 2, "mean_loss": math.nan, "lr": 0.1}, {"step": 4, "mean_loss": 10**400, "lr": 0.1}]
    damaged = ["", "[1, 2]", '{"step": "two"}', "[" * 100_000, '{"step": 5}', '{"step": 4, "lo']
    path.write_bytes("\n".join([*map(json.dumps, whole), *damaged]).encode() + b"\xff")
    lines = log.JsonLines(tmp_path, 4)
    lines.write({"step": 5, "mean_loss": 5.0, "lr": 0.2})
    lines.write({"step": 6, "mean_loss": 5.0, "lr": 0.2, "loss_epoch": 5.0})
    assert drawn == [{1: (9.0, 0.1), 5: (5.0, 0.2), 6: (5.0, 0.2)}]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3, 2, 4, 5, 6]
    drawing(drawn[0], tmp_path / "loss.png")
    with Image.open(tmp_path / "loss.png") as image:
        assert len(image.convert("RGB").getcolors(10**5)) > 10


def test_tensorboard_shows_scalars_and_each_step_once(dataset, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train_and_resume(dataset, tmp_path, "tensorboard", set_callbacks="gradient_norm")
    board = EventAccumulator(str(tmp_path)).Reload()
    for name in ("loss_step", "mean_loss", "lr", "images_per_second", "data_seconds", "gradient_norm"):
        assert [one.step for one in board.Scalars(name)] == list(range(1, 3 * STEPS + 1)), name
    for name in ("loss_epoch", "eval/lfw/accuracy"):
        assert [one.step for one in board.Scalars(name)] == [STEPS, 2 * STEPS, 3 * STEPS], name


def test_any_folder_and_any_name_works(dataset, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    # xdist cannot send what pytest captures of lines that are not UTF-8.
    monkeypatch.setattr(logging.getLogger("plsc"), "propagate", False)
    names = ("loss (ema)", "loss _ema_", "../a//b/", "", "n" * 400, "\udcff", 7)
    for name, logger in ((os.fsdecode(b"run\xff"), "jsonl"), ("run", "tensorboard")):
        ins = entry(dataset, tmp_path / name, set_with_test=True)
        ins.set_loggers(logger)
        ins.add_callback(lambda context: [context.log(name, 1.0) for name in names], "after_step")
        assert ins.train().epochs == 1


def test_a_users_logger_gets_all_entries_and_is_closed(dataset, tmp_path):
    mine = Remember()
    train(dataset, tmp_path, "jsonl", mine)
    assert mine.is_closed
    assert mine.entries == lines_of(tmp_path)
    only_mine = Remember()
    train(dataset, tmp_path / "other", only_mine, epochs=1)
    assert len([entry for entry in only_mine.entries if "loss" in entry]) == STEPS
    assert not (tmp_path / "other" / "metrics.jsonl").exists()


def test_a_failing_logger_ends_the_run_and_the_checkpoints_are_complete(dataset, tmp_path):
    class Unreachable(Remember):
        def write(self, entry):
            if entry["step"] == STEPS + 1:
                raise ConnectionError("the server does not respond")

        def close(self):
            raise ConnectionError("again")

    with pytest.raises(ConnectionError, match="does not respond"):
        train(dataset, tmp_path, Unreachable())
    assert (tmp_path / "0" / "manifest.json").exists()


def test_wrong_loggers_raise_before_training(dataset, tmp_path, monkeypatch):
    ins = entry(dataset, tmp_path)
    with pytest.raises(OptionError, match="'tensorboard'"):
        ins.set_loggers("tensorbord")
    monkeypatch.setitem(
        sys.modules, "torch.utils.tensorboard", None
    )  # Python behaves as if it were not installed
    with pytest.raises(OptionError, match=r"pip install 'plsc-torch\[tensorboard\]'"):
        train(dataset, tmp_path / "run", "tensorboard")
    assert not list((tmp_path / "run").glob("0*"))


def test_a_generator_of_unknown_length_logs_its_first_and_last_step(dataset, tmp_path):
    def reader():
        for number in range(20):
            yield np.full((3, 16, 16), number / 20, np.float32), number % 4

    def run(folder, **settings):
        long = {"set_train_epochs": 2, "set_train_batch_size": 4, "set_log_period": 200, "set_class_num": 4}
        ins = entry(dataset, folder, **long, **settings)
        ins.train_reader = reader
        ins.train()
        return {line["step"]: line for line in lines_of(folder) if "loss" in line}

    found = run(tmp_path / "unknown")
    assert list(found) == [1, 5, 10]
    known = run(tmp_path / "known", set_train_image_num=20)
    assert list(known) == [5, 10]
    assert [found[step]["loss"] for step in known] == [line["loss"] for line in known.values()]
