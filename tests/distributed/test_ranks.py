"""What one launch of a worker shows: heads, traffic, resuming, words, pairs of options, bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from plsc.checkpoint import read_manifest
from plsc.checkpoint.remote import verify
from plsc.parallel.world import class_ranges
from tests.distributed.launch import run_ranks, run_torchrun
from tests.distributed.test_interruption import free_port
from tests.distributed.train_worker import CASES, OF_THREE, STEPS
from tests.images import write_dataset, write_pair_file
from tests.overflowing import logged
from tests.resuming import joined, saved_at

HERE = Path(__file__).parent


def launch(worker, ranks, *words, **how):
    return run_ranks(HERE / f"{worker}_worker.py", ranks, *map(str, words), **how)


def test_every_head_equals_the_reference_with_uneven_shards_and_batches_of_one_to_four_ranks():
    output = launch("heads", 4).stdout
    assert [f"passed on {ranks}" in output for ranks in range(1, 5)] == [True] * 4, output


def test_the_head_communicates_what_the_documentation_says():
    launch("traffic", 2)


@pytest.mark.slow
def test_resuming_is_exact_on_equal_ranks_and_up_to_rounding_on_others(tmp_path):
    # 26 images in steps of 10: uneven shares on 4 and 3 ranks, and an uneven last batch.
    dataset = write_dataset(tmp_path / "set", classes=13, per_class=2)
    write_pair_file(dataset / "lfw.bin", dataset, pairs=20)
    done = launch("resume", 4, dataset, tmp_path / "runs")
    assert done.stdout.count("after the route") == 4, done.stdout


@pytest.mark.slow
def test_options_for_several_ranks_work_with_any_other_option():
    run_ranks(HERE.parent / "option_pairs.py", 2)


@pytest.mark.slow
def test_loss_scale_and_skipped_steps_follow_the_table_on_all_ranks_and_after_a_resume(tmp_path):
    # 120 images, 6 per step: one epoch of 20 steps. Only the last rank overflows.
    dataset = write_dataset(tmp_path / "set", classes=12, per_class=10)
    done = launch("precision", 3, dataset, tmp_path / "runs")
    assert done.stdout.count("all as the table says") == 3, done.stdout


TWO = """
import os, runpy, sys
children = [os.fork()]
if children[0]:
    children.append(os.fork())
if all(children):
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
else:
    worker, folder, port = sys.argv[1:]
    sys.argv = [worker, str(len(children) - 1), "2", folder, port]
    runpy.run_path(worker, run_name="__main__")
"""


def test_ranks_meet_over_tcp_in_a_file_and_in_a_given_store_and_count_their_local_ranks(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO)
    (tmp_path / "meet").mkdir()
    words = str(HERE / "world_worker.py"), str(tmp_path / "meet"), str(free_port())
    output = run_ranks(script, 0, *words).stdout
    for rank in range(2):
        for name in ("tcp", "file", "store", "mpi"):
            assert f"rank {rank} met the others: {name}" in output, output


def test_a_rank_uses_the_only_gpu_that_it_sees_unless_another_rank_does():
    output = launch("one_gpu", 2).stdout
    assert all(f"rank {rank} is refused" in output for rank in range(2)), output


@pytest.fixture
def faces(tmp_path):
    return write_dataset(tmp_path / "faces", classes=5, per_class=6)


def seen(folder, ranks):
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.slow
def test_all_ranks_see_the_same_events_and_one_rank_stops_the_run(faces, tmp_path):
    launch("entry", 3, "stopped", faces, tmp_path)
    first, *others = seen(tmp_path, 3)
    assert others == [first, first]
    steps, checkpoint, events = first
    assert steps == 3
    assert (Path(checkpoint) / "manifest.json").exists()
    assert [event for event, _ in events][-3:] == ["epoch_end", "saved", "run_end"]


@pytest.mark.slow
def test_an_epoch_is_saved_on_all_ranks_before_the_error_of_one_and_the_others_get_its_message(
    faces, tmp_path
):
    done = launch("entry", 2, "failing", faces, tmp_path, check=False)
    assert done.returncode == 1
    first, last = seen(tmp_path, 2)
    assert last == ["ZeroDivisionError", "on the last rank only"]
    assert first[0] == "DistributedError"
    assert "rank 1" in first[1]
    assert " on the last rank only" in first[1]
    assert verify(tmp_path / "run/0").epoch == 1
    assert not (tmp_path / "run/1").exists()


@pytest.mark.slow
def test_the_rank_with_the_bad_image_is_named_on_all_ranks(faces, tmp_path):
    launch("entry", 2, "bad_loss", faces, tmp_path)
    (_, first), (bad, second) = seen(tmp_path, 2)
    assert first == second
    assert "the loss is nan at step 4 " in first
    assert f"the first layer with a nan or inf: block.1 (rank 1); samples: {bad}; the batch" in first
    images = load_file(tmp_path / "run/bad_batch.safetensors")["images"]
    assert len(images) == 4
    assert not images[1].any()


@pytest.mark.slow
def test_only_rank_0_writes_and_the_gradient_norm_is_that_of_all_ranks(tmp_path):
    dataset = write_dataset(tmp_path / "faces", classes=4, per_class=6)
    launch("entry", 2, "logged", dataset, tmp_path)
    for rank, (entries, expected, norms) in enumerate(seen(tmp_path, 2)):
        lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
        assert entries == ([json.loads(line) for line in lines] if rank == 0 else [])
        # Two epochs of three steps: every other step is logged, and the last one of an epoch.
        assert norms == pytest.approx([expected[step - 1] for step in (2, 3, 4, 6)], rel=1e-5)


@pytest.mark.slow
def test_sparse_gradients_of_words_give_the_weights_of_a_plain_loop_and_resume_to_the_same_bits(tmp_path):
    launch("words", 3, tmp_path)


@pytest.mark.slow
def test_bad_samples_of_all_ranks_are_listed_once_and_the_steps_stay_equal(tmp_path):
    damaged, save_dir = write_dataset(tmp_path / "set", classes=13, per_class=7), tmp_path / "run"
    (damaged / "images/4_2.png").unlink()
    (damaged / "images/9_1.png").write_bytes(b"no image")
    done = run_ranks(
        HERE / "job.py", 2, str(damaged), str(save_dir), "set_train_epochs=2", "set_bad_images='skip'"
    )
    assert done.stderr.count("skipped: images/4_2.png") in (1, 2)  # once per rank that reads it
    lines = sorted((save_dir / "bad_samples.txt").read_text().splitlines())
    assert [line.split(":")[0] for line in lines] == [
        "missing\timages/4_2.png (label.txt",
        "undecodable\timages/9_1.png (label.txt",
    ]
    assert "bad_samples.txt" in done.stdout
    found = logged(save_dir, "bad_samples", "skipped_images", "step")
    assert found["bad_samples"][-1] == 2
    assert sum(found["skipped_images"]) >= 4
    assert read_manifest(save_dir / "1").step == found["step"][-1]


@pytest.mark.slow
def test_every_rank_raises_the_same_clear_error(faces, tmp_path):
    done = launch("bad_input", 2, faces, tmp_path, timeout=400)
    reports = [json.loads(line.split("CASE ", 1)[1]) for line in done.stdout.splitlines() if "CASE " in line]
    assert len(reports) == 2 * len({report["case"] for report in reports}) > 12
    for report in reports:
        assert report["raised"] in (
            "OptionError", "DataError", "CheckpointError", "TrainingError", "DistributedError"
        ), report  # fmt: skip
        assert report["expected"] in report["text"], report
        assert "\n" not in report["text"], report
    assert not Path("/tmp/owned").exists()


@pytest.mark.slow
def test_a_wrong_setting_ends_a_script_with_an_exception_that_is_the_root_cause(faces, tmp_path):
    words = (str(faces), str(tmp_path / "run"), "set_loss_type='softmax'", "set_margin=0.3")
    done = run_torchrun(HERE / "job.py", 2, *words, check=False, timeout=90)
    script, _, summary = done.stderr.partition("Root Cause")
    assert "plsc.errors.OptionError: " in script
    assert all("softmax has no option margin" in text for text in (script, summary)), done.stderr


# Training on 1, 3 and 4 ranks with the same global batch gives the same losses, weights and states.


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of all runs, trained in one launch."""
    folder = tmp_path_factory.mktemp("runs")
    # 13 classes x 11 = 143 images: six steps, the last one of 23 images, no multiple of 3 or 4 ranks.
    dataset = write_dataset(folder / "set", classes=13, per_class=11)
    run_ranks(HERE / "train_worker.py", 4, str(dataset), str(folder), timeout=900)
    return folder


def far(ours, theirs):
    """Return the largest difference relative to the largest value, or 1."""
    ours, theirs = torch.as_tensor(ours).double(), torch.as_tensor(theirs).double()
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1)) if theirs.numel() else 0.0


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_training_does_not_depend_on_the_number_of_ranks(runs, case):
    tolerance = 1e-4 if case == "float32" else 1e-9
    expected = logged(runs / "1" / case, "loss", "accuracy")
    weights = joined(saved_at(runs / "1" / case, STEPS))
    for ranks in (3, 4) if case in OF_THREE else (4,):
        found = logged(runs / str(ranks) / case, "loss", "accuracy")
        assert len(found["loss"]) == STEPS
        assert far(found["loss"], expected["loss"]) < tolerance
        assert far(found["accuracy"], expected["accuracy"]) < 0.05
        saved = joined(saved_at(runs / str(ranks) / case, STEPS))
        assert saved.keys() == weights.keys()
        distances = {key: far(value, weights[key]) for key, value in saved.items()}
        assert {key: distance for key, distance in distances.items() if distance > tolerance} == {}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_training_moves_every_trained_matrix_and_a_frozen_batch_norm_keeps_its_statistics(runs, case):
    torch.manual_seed(0)
    network = CASES[case][0]()
    weights, is_frozen = joined(saved_at(runs / "1" / case, STEPS)), "frozen" in case or "half" in case
    for name, before in network.named_parameters():
        if before.ndim > 1 and not is_frozen and "never" not in name:
            assert (weights[f"backbone.{name}"] - before).norm() > 0.01 * before.norm(), name
    if "stem.1.running_mean" in network.state_dict():
        assert weights["backbone.stem.1.running_mean"].eq(0).all() == is_frozen


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
def test_each_rank_holds_only_the_weights_of_its_classes(runs, ranks):
    for case in OF_THREE if ranks == 3 else CASES:
        settings = CASES[case][1]
        manifest = read_manifest(saved_at(runs / str(ranks) / case, STEPS))
        classes, is_sharded = settings.get("head__class_num", 13), "replicated" not in case
        ranges = class_ranges(classes, ranks) if is_sharded else [(0, classes)]
        assert manifest.heads[""].class_ranges == ranges, case
