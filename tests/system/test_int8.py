"""A run with 8-bit class weights: class weights as floats, new classes, warm start, export."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from plsc.checkpoint import load_weights
from plsc.checkpoint.classes import change_classes
from tests.images import write_dataset
from tests.system.small_entry import entry

pytestmark = pytest.mark.slow
CODED = {"set_row_dtype": "int8", "set_head_optimizer": "adagrad"}


def class_weights(checkpoint):
    return load_weights(checkpoint, "class_weights")["weight"]


def test_a_run_with_8_bit_class_weights_does_all_that_others_do(tmp_path):
    dataset = write_dataset(tmp_path / "data", classes=7, per_class=6)
    larger = write_dataset(tmp_path / "larger", classes=9, per_class=6)
    first = entry(dataset, tmp_path / "first", **CODED).train().checkpoint

    trained = class_weights(first)
    assert (trained.shape, trained.dtype) == ((7, 8), torch.float32)
    assert trained.isfinite().all()
    assert trained.norm(dim=1).min() > 0

    change_classes(first, tmp_path / "grown", grow=2)
    change_classes(tmp_path / "grown", tmp_path / "merged", merge=np.array([[8, 0]]))
    grown = class_weights(tmp_path / "grown")
    assert torch.equal(grown[:7], trained)
    unit = torch.nn.functional.normalize(grown)
    mean = torch.nn.functional.normalize(unit[0] + unit[8], dim=0)
    merged = torch.nn.functional.normalize(class_weights(tmp_path / "merged")[0], dim=0)
    torch.testing.assert_close(merged, mean, atol=0.02, rtol=0)
    entry(larger, tmp_path / "on", set_checkpoint_dir=str(tmp_path / "grown"), set_train_epochs=2).train()

    for name, settings in (("floats", {}), ("codes", CODED)):
        start = entry(dataset, tmp_path / name, set_pretrained=str(first), **settings, set_lr=1e-12)
        started = class_weights(start.train().checkpoint)
        torch.testing.assert_close(started, trained, atol=float(trained.abs().max()) / 60, rtol=0)

    ins = entry(dataset, tmp_path / "export")
    ins.set_checkpoint_dir(str(first))
    folder = ins.convert_for_prediction(str(tmp_path / "model"), classes=True, graph="none")
    exported = load_file(folder / "classes.safetensors")["weight"]
    np.testing.assert_allclose(exported, torch.nn.functional.normalize(trained).numpy(), atol=1e-6)
