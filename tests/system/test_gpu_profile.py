"""A profile on a GPU: the parts of the device's time add up, and are not the host's."""

from __future__ import annotations

import pytest
import torch

from plsc.marks import Part
from tests.devices import NEEDS_GPU
from tests.distributed.job import small_entry
from tests.images import write_dataset

pytestmark = NEEDS_GPU


def test_the_parts_are_of_the_device_and_the_host_s_stand_beside_them(tmp_path, capsys):
    dataset = write_dataset(tmp_path / "set", classes=6, per_class=8)
    ins = small_entry(dataset, tmp_path / "run")
    ins.set_device("cuda")
    result = ins.profile(3, tmp_path / "out")
    assert result.device == "cuda"
    assert result.step == pytest.approx(sum(part.milliseconds for part in result.parts))
    found = {part.part: part for part in result.parts}
    assert found[Part.BACKWARD].milliseconds > 0
    assert found[Part.HEAD_ROWS].milliseconds > 0
    assert any(part.host != part.milliseconds for part in result.parts)
    assert 0 < result.memory < torch.cuda.get_device_properties(0).total_memory
    assert "host ms" in capsys.readouterr().out
    assert (tmp_path / "out" / "trace-rank0.json.gz").stat().st_size > 0
