"""A profile on a GPU: kernels count to the phase that launched them; the host's time is next to it."""

from __future__ import annotations

import torch

from tests.devices import NEEDS_GPU
from tests.distributed.job import small_entry
from tests.images import write_dataset

pytestmark = NEEDS_GPU


def test_the_phases_have_the_time_of_their_kernels_and_the_host_s(tmp_path, capsys):
    dataset = write_dataset(tmp_path / "set", classes=6, per_class=8)
    ins = small_entry(dataset, tmp_path / "run")
    ins.set_device("cuda")
    result = ins.profile(3, tmp_path / "out")
    assert result.device == "cuda"
    found = {phase.name: phase for phase in result.phases}
    assert found["backward"].milliseconds > 0
    assert found["update class weights"].milliseconds > 0
    assert found["data"].milliseconds == 0 < found["data"].host
    assert 0 < result.memory < torch.cuda.get_device_properties(0).total_memory
    assert "host ms" in capsys.readouterr().out
    assert (tmp_path / "out" / "trace-rank0.json.gz").stat().st_size > 0
