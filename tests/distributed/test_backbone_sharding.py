"""A sharded backbone trains like a replicated one, and its checkpoints can be loaded with any layout.

One launch of four ranks runs all checks.
"""

from pathlib import Path

import pytest
import torch

from plsc.checkpoint import load_weights, read_manifest
from plsc.checkpoint.classes import change_classes
from plsc.parallel.world import World
from plsc.state.network import open_trained
from tests.distributed.launch import run_ranks, run_torchrun
from tests.distributed.resume_worker import joined
from tests.distributed.sharding_worker import CASES, STEPS, Uneven
from tests.images import write_dataset, write_pair_file
from tests.resuming import options_of, saved_at

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Return the output of the four ranks, and the folder of their runs."""
    folder = tmp_path_factory.mktemp("sharding")
    # 65 images in steps of 24; 42 to evaluate: uneven shares on 4 ranks.
    dataset = write_dataset(folder / "set", classes=13, per_class=5)
    write_pair_file(dataset / "lfw.bin", dataset, pairs=21)
    worker = Path(__file__).with_name("sharding_worker.py")
    return run_ranks(worker, 4, str(dataset), str(folder / "runs")).stdout, folder / "runs"


@pytest.fixture(scope="module")
def checkpoint(outcome):
    return saved_at(outcome[1] / "fp64" / "sharded", STEPS)


def test_sharded_training_equals_replicated_training(outcome):
    for case, (_, ways, _) in CASES.items():
        for way in ways:
            assert f"{case} {way}: equal" in outcome[0]


def test_a_resumed_run_has_the_bits_of_the_uninterrupted_one(outcome):
    assert outcome[0].count("resumed to the bit") == 2


def test_a_checkpoint_can_be_loaded_with_every_layout(outcome):
    assert "layouts: the same bits" in outcome[0]
    assert "warm start: the same bits" in outcome[0]


def test_each_rank_has_only_its_shard_of_parameters_and_state(outcome):
    assert "memory: 0.25" in outcome[0]


def test_an_unreadable_image_on_one_rank_stops_evaluation_on_all_ranks(outcome):
    assert "evaluation: refused everywhere" in outcome[0]


def test_different_networks_per_rank_are_synchronised_and_unsupported_ones_raise(outcome):
    assert "networks: made equal, or refused" in outcome[0]


def test_a_custom_optimizer_without_sharding_support_raises_a_one_line_error(outcome):
    assert "factories: refused in a line" in outcome[0]


def test_the_checkpoint_of_a_sharded_network_loads_in_one_process(checkpoint, tmp_path):
    manifest = read_manifest(checkpoint)
    assert manifest.tensors["backbone.fc.weight"].sharded
    options = options_of(tmp_path, tmp_path / "none", checkpoint__load_dir=str(checkpoint))
    network, _, _ = open_trained(options, World.single(), Uneven())
    expected = joined(checkpoint)
    for name, tensor in network.state_dict().items():
        assert tensor.equal(expected[f"backbone.{name}"]), name


def test_dropping_classes_keeps_the_sharded_backbone(checkpoint, tmp_path):
    change_classes(checkpoint, tmp_path / "fewer", drop=[3, 12])
    before, after = joined(checkpoint), joined(tmp_path / "fewer")
    assert after.keys() == before.keys()
    for key, tensor in before.items():
        kept = [c for c in range(13) if c not in (3, 12)]
        has_classes = key.startswith(("head.", "rows."))
        assert after[key].equal(tensor[kept] if has_classes else tensor), key
    weights = load_weights(tmp_path / "fewer")
    assert weights["fc.weight"].shape == (8, 96)


needs_two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="torch sees fewer than two CUDA devices here"
)


@pytest.mark.gpu
@needs_two_gpus
def test_each_of_two_gpus_holds_only_its_shard():
    worker = Path(__file__).with_name("sharding_start_worker.py")
    run_torchrun(worker, 2, env={"CUDA_VISIBLE_DEVICES": "0,1"})


@pytest.mark.gpu
@needs_two_gpus
def test_sharded_training_on_two_gpus_equals_replicated_training(tmp_path):
    dataset = write_dataset(tmp_path / "set", classes=10, per_class=8)
    job = Path(__file__).with_name("job.py")
    losses = {}
    for way in ("replicated", "sharded"):
        done = run_torchrun(
            job, 2, str(dataset), str(tmp_path / way), f"set_backbone_parallel={way!r}",
            "set_device='cuda'", "set_dropout=0.0",
            env={"CUDA_VISIBLE_DEVICES": "0,1"},
        )  # fmt: skip
        losses[way] = [
            float(line.split(" loss ")[1].split()[0]) for line in done.stdout.splitlines() if " loss " in line
        ]
    assert losses["sharded"] == pytest.approx(losses["replicated"], rel=1e-3)
