"""Options of speed change a step by rounding alone, also two at a time; what excludes each other says so."""

import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from plsc.data.batch import Batch, copied_in_side_stream
from plsc.errors import DataError, OptionError
from plsc.models import BaseModel, build_model
from plsc.models.base_model import choose_memory_format
from plsc.models.recomputation import CompiledNetwork
from plsc.parallel.world import World
from plsc.train.build import check_combinations
from tests.images import write_dataset
from tests.option_pairs import CHANGES, SHAPE, check_pair, options_with, pairs
from tests.resuming import different, losses_of, options_of, saved_at, train


@pytest.mark.parametrize(("one", "other"), pairs(CHANGES))
def test_two_options_together_make_the_steps_of_the_plain_path(one, other):
    check_pair(one, other)


class Tiny(BaseModel):
    """Little to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8)
        self.dropout, self.fc = nn.Dropout(0.3), nn.Linear(8 * 16, 8)

    def build_network(self, input, label, is_train=True):
        return self.fc(self.dropout(self.norm(self.conv(input)).flatten(1)))


@pytest.mark.slow
def test_a_compiled_run_is_the_plain_one_and_resumes_to_the_bit(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    dataset = write_dataset(tmp_path / "set", classes=6, per_class=5)  # steps of 12, 12 and 6
    common = {
        "precision__mode": "bfloat16", "train__batch_size": 12,
        "checkpoint__every_n_steps": 2, "checkpoint__keep_last": -1, "train__with_test": False,
        "optim__lr": 0.1 * 12 / 1024,
    }  # fmt: skip
    for name, is_compiled in (("plain", False), ("whole", True), ("resumed", True)):
        options = options_of(dataset, tmp_path / name, speed__compile=is_compiled, **common)
        if name == "resumed":  # where the batch comes that is not compiled
            torch._dynamo.reset()
            options.set("checkpoint.load_dir", str(saved_at(tmp_path / "whole", 2)))
        train(options, World.single(), Tiny)
    assert capsys.readouterr().out.count("compiling the network") == 2
    assert not different(saved_at(tmp_path / "whole", 6), saved_at(tmp_path / "resumed", 6))
    found, expected = losses_of(tmp_path / "whole"), losses_of(tmp_path / "plain")
    assert [found[step] for step in (1, 2, 3)] == pytest.approx(
        [expected[step] for step in (1, 2, 3)], rel=1e-2
    )
    assert found != expected


def test_code_that_another_user_may_have_written_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    theirs = Path(default_cache_dir())
    theirs.mkdir()
    theirs.chmod(0o777)
    with pytest.raises(DataError, match="TMPDIR"):
        CompiledNetwork(Tiny(), [4])


def test_every_feature_map_and_gradient_stays_channels_last():
    network = build_model("SmallResNet", 16, SHAPE, dropout=0.0)
    choose_memory_format(network, SHAPE, torch.device("cpu"), in_16_bits=False)
    maps: list[torch.Tensor] = []
    for module in network.modules():
        if isinstance(module, (nn.Conv2d, nn.BatchNorm2d, nn.PReLU)):
            module.register_forward_hook(lambda _m, _i, output: maps.append(output))
    plainly_laid = torch.randn(4, *SHAPE)
    network(plainly_laid).sum().backward()
    assert len(maps) > 30
    wide = [one for one in maps if one.ndim == 4 and one.shape[2] > 1]
    assert all(one.is_contiguous(memory_format=torch.channels_last) for one in wide)
    kernels = [p for p in network.parameters() if p.ndim == 4]
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in kernels)
    assert all(p.grad.stride() == p.stride() for p in kernels)


def test_a_batch_is_written_in_the_networks_layout_at_once():
    pixels = torch.randint(256, (3, 16, 16, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    mirrored = torch.tensor([True, False, True])
    batch = Batch(pixels, torch.zeros(3, dtype=torch.int64), [""] * 3, mirrored=mirrored)
    laid = batch.input("cpu", torch.channels_last)
    assert laid.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(laid, batch.input("cpu"))
    assert batch.input("cpu").is_contiguous()


class Viewing(BaseModel):
    """Asks for a view of its maps, which channels last cannot give."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4 * 14 * 14, 16)

    def build_network(self, input, label, is_train=True):
        maps = self.conv(input)
        return self.fc(maps.view(len(maps), -1))


def test_a_network_that_does_not_stand_the_layout_is_left_alone():
    network = Viewing()
    choose_memory_format(network, SHAPE, torch.device("cpu"), in_16_bits=False)
    assert network.conv.weight.is_contiguous()
    network(torch.randn(2, *SHAPE))


def test_a_compiled_network_of_several_ranks_has_no_synchronised_batch_norm():
    both = {"speed.compile": True, "model.sync_batch_norm": True}
    with pytest.raises(OptionError, match=r"model\.sync_batch_norm"):
        check_combinations(options_with(both), 2)
    check_combinations(options_with(both), 1)


def test_batches_on_a_cpu_pass_as_they_are_and_their_reader_is_closed():
    closed: list[bool] = []

    def reader():
        try:
            yield from (1, 2, 3)
        finally:
            closed.append(True)

    batches = copied_in_side_stream(reader(), torch.device("cpu"))
    assert next(batches) == 1
    batches.close()
    assert closed == [True]
