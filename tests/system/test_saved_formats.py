"""Saved checkpoints of each format that is read, and of former options: they load, resume, test and predict.

It was saved by two ranks at step 2 of 6, in the middle of an epoch: AdamW, and CosFace whose classes are
sampled and updated by Adagrad. The expected numbers are those of the code that saved it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from plsc import Entry
from plsc.checkpoint import read_manifest
from plsc.checkpoint.remote import verify
from tests.images import write_dataset, write_pair_file
from tests.resuming import losses_of

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
