"""Checkpoints of earlier formats: they load, resume, test and predict.

Both were saved by two ranks at step 2 of 6, in the middle of an epoch: tests/saved/format_1 by the code of
commit e2bb7f3, with SGD and ArcFace; tests/saved/format_3 by that of a676ebe, with AdamW, and CosFace whose
classes are sampled and updated by Adagrad. The expected numbers are those that these gave.
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

SAVED = Path(__file__).parents[1] / "saved"
FORMAT_1 = SAVED / "format_1"
EXPECTED = {
    # losses of steps 3 to 6, accuracy on the pairs, the beginning of the first embedding
    1: ((11.091095, 16.987720, 10.142573, 11.759775), 0.875, (251.66006, 605.35809, -181.60468)),
    3: ((1.6539366, 1.4653594, 1.3717589, 1.2819481), 0.975, (-0.1691543, 0.1415846, -0.0041926)),
}
each_format = pytest.mark.parametrize("format", EXPECTED)


@pytest.fixture
def ins(format, tmp_path, monkeypatch):
    monkeypatch.setattr("plsc.models.resnet.SMALL_WIDTHS", (4, 4, 4, 4))
    faces = write_dataset(tmp_path / "faces", 5, 4)
    write_pair_file(faces / "lfw.bin", faces, 40)
    entry = Entry()
    entry.set_checkpoint_dir(SAVED / f"format_{format}")
    entry.set_dataset_dir(faces)
    entry.set_model_save_dir(tmp_path / "saved")
    entry.set_with_test(False)
    return entry


@each_format
def test_a_checkpoint_is_valid(format):
    folder = SAVED / f"format_{format}"
    assert read_manifest(folder).format_version == format
    verify(folder)


@each_format
def test_a_run_resumes_on_another_number_of_ranks(format, ins, tmp_path):
    ins.train()
    expected = dict(zip((3, 4, 5, 6), EXPECTED[format][0], strict=True))
    assert losses_of(tmp_path / "saved") == pytest.approx(expected, rel=1e-4)
    if format == 1:
        # Its lr was 8.0 for a global batch of 1024, its global batch 8, and it had no warm-up.
        lines = map(json.loads, (tmp_path / "saved/metrics.jsonl").open())
        assert [line["lr"] for line in lines if "lr" in line] == [8.0 * 8 / 1024] * 4


@each_format
def test_a_saved_network_tests_and_predicts(format, ins):
    _, accuracy, embedding = EXPECTED[format]
    assert ins.test()["lfw"].accuracy == pytest.approx(accuracy)
    assert ins.predict().embeddings[0][:3] == pytest.approx(embedding, rel=1e-4)


def test_the_learning_rate_of_format_1_is_converted_once_when_classes_change(tmp_path):
    change_classes(FORMAT_1, tmp_path / "grown", grow=2)
    manifest = read_manifest(tmp_path / "grown")
    assert manifest.options["optim"]["lr"] == 8.0 * 8 / 1024
    verify(tmp_path / "grown")
