"""Saved checkpoints of each format that is read, and of former options: they load, resume, test and predict.

It was saved by two ranks at step 2 of 6, in the middle of an epoch: AdamW, and CosFace whose classes are
sampled and updated by Adagrad. The expected numbers are those of the code that saved it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from plsc import Entry
from plsc.checkpoint import load_weights, read_manifest
from plsc.checkpoint.classes import change_classes
from plsc.checkpoint.remote import verify
from plsc.errors import CheckpointError
from plsc.gallery.embedder import open_embedder
from tests.images import write_dataset, write_pair_file
from tests.resuming import Drawing, losses_of, options_of

SAVED = Path(__file__).parents[1] / "saved/format_4"
# Resumed by one rank, which draws other classes.
LOSSES = {3: 1.6539366, 4: 1.4653594, 5: 1.3717589, 6: 1.2819481}
ACCURACY = 0.975
EMBEDDING = (-0.1691543, 0.1415846, -0.0041926)


@pytest.fixture
def ins(tmp_path, monkeypatch):
    monkeypatch.setattr("plsc.models.resnet.SMALL_WIDTHS", (4, 4, 4, 4))
    faces = write_dataset(tmp_path / "faces", 5, 4)
    write_pair_file(faces / "lfw.bin", faces, 40)
    entry = Entry()
    entry.set_checkpoint_dir(SAVED)
    entry.set_dataset_dir(faces)
    entry.set_model_save_dir(tmp_path / "saved")
    entry.set_with_test(False)
    return entry


def test_a_checkpoint_is_valid():
    assert read_manifest(SAVED).format_version == 4
    verify(SAVED)


def test_a_run_resumes_on_another_number_of_ranks(ins, tmp_path):
    ins.train()
    assert losses_of(tmp_path / "saved") == pytest.approx(LOSSES, rel=1e-4)


def test_a_saved_network_tests_and_predicts(ins):
    assert ins.test()["lfw"].accuracy == pytest.approx(ACCURACY)
    assert ins.predict().embeddings[0][:3] == pytest.approx(EMBEDDING, rel=1e-4)


SEVERAL = Path(__file__).parents[1] / "saved/several_heads"  # of a run with the former option data.datasets


@pytest.fixture
def several(tmp_path):
    entry = Entry()
    entry.options = options_of(write_dataset(tmp_path / "faces", 6, 3, seed=1), tmp_path / "run")
    entry.set_model(Drawing())
    return entry


def test_the_network_of_a_run_with_several_heads_predicts_exports_and_starts_a_run(several, tmp_path):
    verify(SEVERAL)
    several.set_checkpoint_dir(SEVERAL)
    assert several.predict().embeddings[0][:3] == pytest.approx((-3.7742138, 8.4520807, -8.5702057), rel=1e-4)
    card = several.convert_for_prediction(tmp_path / "model", graph="none") / "README.md"
    assert "| glyphs | 8 | 4 |" in card.read_text()
    several.set_checkpoint_dir(None)
    several.set_pretrained(SEVERAL)
    several.set_train_steps(1)
    assert several.train().warm_start.head_left.keys() >= {"heads.faces.weight", "heads.glyphs.weight"}


def test_the_heads_of_a_run_with_several_are_refused_with_the_name_of_the_option(several, tmp_path):
    several.set_checkpoint_dir(SEVERAL)
    several.set_val_dir(tmp_path / "faces")
    for use in (
        several.train,
        lambda: several.predict(field="id"),
        several.test,
        lambda: several.convert_for_prediction(tmp_path / "model", graph="none", classes=True),
        lambda: change_classes(SEVERAL, tmp_path / "grown", grow=1),
        lambda: load_weights(SEVERAL, "class_weights"),
        lambda: open_embedder(str(SEVERAL)).classes(),
    ):
        with pytest.raises(CheckpointError, match=r"data\.datasets"):
            use()
    assert {path.name for path in tmp_path.iterdir()} == {"faces"}
