"""Checkpoints of earlier formats: they load, resume, test and predict.

tests/saved/format_1 was saved by two ranks at step 2 of 6, in the middle of an epoch, by the code of commit
e2bb7f3, whose format was 1; the expected numbers are those that it gave.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plsc import Entry
from plsc.checkpoint import read_manifest
from plsc.checkpoint.classes import change_classes
from plsc.checkpoint.remote import verify
from tests.images import write_dataset, write_pair_file
from tests.resuming import losses_of

SAVED = Path(__file__).parents[1] / "saved" / "format_1"


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


def test_a_checkpoint_of_format_1_is_sound():
    assert read_manifest(SAVED).format_version == 1
    verify(SAVED)


def test_a_run_of_format_1_resumes_on_another_number_of_ranks(ins, tmp_path):
    ins.train()
    # Its lr was 8.0 for a global batch of 1024, its global batch 8, and it had no warm-up.
    rates = [json.loads(x)["lr"] for x in (tmp_path / "saved/metrics.jsonl").open() if '"lr"' in x]
    assert rates == [8.0 * 8 / 1024] * 4
    expected = {3: 11.091095, 4: 16.987720, 5: 10.142573, 6: 11.759775}
    assert losses_of(tmp_path / "saved") == pytest.approx(expected, rel=1e-4)


def test_the_rate_of_format_1_is_converted_once_where_its_classes_change(tmp_path):
    change_classes(SAVED, tmp_path / "grown", grow=2)
    manifest = read_manifest(tmp_path / "grown")
    assert manifest.options["optim"]["lr"] == 8.0 * 8 / 1024
    verify(tmp_path / "grown")


def test_a_network_of_format_1_tests_and_predicts(ins):
    assert ins.test()["lfw"].accuracy == pytest.approx(0.875)
    expected = [251.66006, 605.35809, -181.60468, -1224.08936]
    assert ins.predict().embeddings[0] == pytest.approx(expected, rel=1e-4)
