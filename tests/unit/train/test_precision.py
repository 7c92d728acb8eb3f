"""Mixed precision in runs of one process: what scaling changes, what is skipped, what stops a run."""

import math

import pytest
import torch
from safetensors.torch import load_file

from plsc import AutoMixedPrecisionLists, Entry
from plsc.checkpoint import list_checkpoints, read_manifest
from plsc.errors import CheckpointError, OptionError, TrainingError
from plsc.evaluate.embed import EvaluatedNetwork
from plsc.models.precision import MOST_SKIPS, LossScaler
from plsc.parallel.world import World
from plsc.train import build as network
from plsc.train import run as build
from plsc.train import step as step_module
from plsc.train.build import build_scaler, execution_of, open_targets
from plsc.train.callbacks import UserParts
from plsc.train.restore import restore
from plsc.train.run import build_run
from plsc.train.step import LossReader, Step
from plsc.train.targets import evaluate_targets
from tests.images import write_dataset, write_pair_file
from tests.overflowing import Scripted, logged, scale_in_any_mode, train_scripted
from tests.resuming import different, options_of, saved_at, tensors_of, train

WORLD = World.single()
STEPS = 10


def scaled(init_loss_scaling=64.0, **more):
    arguments = {"init_loss_scaling": init_loss_scaling, **more}
    return {"precision__scaling_arguments": arguments}


SCALED = scaled()
RISING = scaled(incr_every_n_steps=2)
HEADS = {
    "dense": {"head__loss_type": "curricularface", "optim__clip_norm": 0.5},
    "sampled": {
        "head__loss_type": "dist_adaface", "head__sample_ratio": 0.5, "train__micro_batches": 2,
        "optim__clip_norm": 0.5, "head__row_dtype": "bfloat16",
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _scaling(monkeypatch):
    scale_in_any_mode(monkeypatch)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """60 images: 10 steps of 6."""
    folder = write_dataset(tmp_path_factory.mktemp("data") / "set", classes=6, per_class=10)
    write_pair_file(folder / "lfw.bin", folder, pairs=20)
    return folder


def options(dataset, save_dir, **changes):
    settings = {"train__batch_size": 6, "train__epochs": 1, "train__with_test": False, **changes}
    return options_of(dataset, save_dir, **settings)


def options_for(head, dataset, save_dir, **changes):
    return options(dataset, save_dir, **HEADS[head], **changes)


@pytest.mark.parametrize("head", HEADS)
def test_a_scale_changes_no_bit_of_what_is_learnt_and_a_skipped_step_none_of_what_was_there(
    head, dataset, tmp_path
):
    train(options_for(head, dataset, tmp_path / "plain"), WORLD, Scripted)
    scaled = options_for(head, dataset, tmp_path / "scaled", **RISING)
    train_scripted(scaled, WORLD, "." * STEPS)
    assert not different(tmp_path / "scaled/0", tmp_path / "plain/0")
    assert logged(tmp_path / "scaled", "loss_scale")["loss_scale"][-1] == 64 * 2**5
    skipping = options_for(head, dataset, tmp_path / "skipping", **SCALED)
    train_scripted(skipping, WORLD, "..ge..p.e.")  # which looks at every bit
    found = logged(tmp_path / "skipping", "skipped_steps", "loss", "mean_loss")
    assert found["skipped_steps"] == [0, 0, 1, 2, 2, 2, 3, 3, 4, 4]
    # Where the embeddings were not finite there is no loss.
    assert [n for n, loss in enumerate(found["loss"]) if loss is None] == [3, 8]
    assert [n for n, loss in enumerate(found["mean_loss"]) if loss is None] == [3, 8]
    assert "NaN" not in (tmp_path / "skipping/metrics.jsonl").read_text()  # which is no JSON


STOPS = {
    "a loss that is nan though nothing overflowed": (SCALED, "...l", "the loss is nan at step 4"),
    "an overflow in the forward pass with nothing left to scale down": (
        scaled(1.0), "..e", "the loss is nan at step 3",
    ),
    "an overflow without scaling": ({}, ".e", "the loss is nan at step 2"),
    "an overflow in bfloat16": ({"precision__mode": "bfloat16"}, ".e", "the loss is nan at step 2"),
    "overflows without end": (
        {**scaled(2.0), "train__epochs": 4}, "." + "g" * 30,
        f"{MOST_SKIPS} steps in a row had .* loss scale of 1, which cannot be lower than 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STOPS)
def test_what_scaling_cannot_mend_stops_the_run(case, dataset, tmp_path):
    settings, script, said = STOPS[case]
    with pytest.raises(TrainingError, match=said):
        train_scripted(options(dataset, tmp_path / "run", **settings), WORLD, script)
    if "without end" in case:  # two that lowered the scale to 1, and then so many
        lines = logged(tmp_path / "run", "step")["step"]
        assert lines[-1] == 1 + 2 + MOST_SKIPS - 1
    else:
        assert len(load_file(tmp_path / "run/bad_batch.safetensors")["labels"]) == 6


@pytest.mark.parametrize("every_n_steps", [1, 3])
def test_a_loss_that_is_read_late_stops_the_run_at_its_own_step_and_before_anything_is_saved(
    every_n_steps, dataset, tmp_path, monkeypatch
):
    monkeypatch.setattr(step_module, "LossReader", lambda stop, is_late: LossReader(stop, True))
    late = options(
        dataset, tmp_path / "late", train__log_period=100, checkpoint__every_n_steps=every_n_steps,
        checkpoint__keep_last=-1,
    )  # fmt: skip
    made = []
    with pytest.MonkeyPatch.context() as patch:
        make = Step.make
        patch.setattr(Step, "make", lambda *args: made.append(1) or make(*args))
        with pytest.raises(TrainingError, match=r"the loss is nan at step 5 \(epoch 1"):
            train_scripted(late, WORLD, "....l.....")
    # The fifth step's loss is looked at when the sixth has begun, or is to be saved.
    assert len(made) == (6 if every_n_steps == 3 else 5)
    # The last save may have been under way when the run ended.
    saved = {manifest.step for _, manifest in list_checkpoints(tmp_path / "late")}
    assert saved <= {step for step in range(1, 5) if step % every_n_steps == 0}
    with pytest.raises(TrainingError):
        train_scripted(options(dataset, tmp_path / "once"), WORLD, "....l")
    late, once = ((tmp_path / run / "bad_batch.safetensors").read_bytes() for run in ("late", "once"))
    assert late == once


def test_a_run_that_reads_its_losses_late_logs_and_learns_the_same(dataset, tmp_path, monkeypatch):
    settings = {"train__log_period": 4, "checkpoint__every_n_steps": 5}
    train(options(dataset, tmp_path / "once", **settings), WORLD, Scripted)
    monkeypatch.setattr(step_module, "LossReader", lambda stop, is_late: LossReader(stop, True))
    train(options(dataset, tmp_path / "late", **settings), WORLD, Scripted)
    assert not different(tmp_path / "late/0", tmp_path / "once/0")
    mine, theirs = (logged(tmp_path / run, "loss", "mean_loss") for run in ("late", "once"))
    assert mine == theirs
    assert len(mine["loss"]) == 3
    metrics = [read_manifest(saved_at(tmp_path / run, 5)).scalars["metrics"] for run in ("late", "once")]
    assert metrics[0] == metrics[1]
    assert metrics[0]["loss"] > 0


def test_evaluation_is_in_float32(dataset, tmp_path):
    accuracies = {}
    for name in ("float32", "bfloat16"):
        made = options(dataset, tmp_path / name, model__name="SmallResNet", precision__mode=name)
        run = build_run(made, WORLD, UserParts())
        evaluated = EvaluatedNetwork(run.network, WORLD, (3, 16, 16), 8, 0, True)
        result = evaluate_targets(evaluated, open_targets(made.resolve(), WORLD, None))["lfw"]
        accuracies[name] = (result.threshold, result.accuracy)
    assert accuracies["float32"] == accuracies["bfloat16"]


def test_set_mixed_precision_sets_what_it_says_or_nothing():
    ins = Entry()
    lists = AutoMixedPrecisionLists(["softmax"], ["batch_norm"])
    ins.set_mixed_precision(True, 128, 1000, 3, 4, 0.25, False, lists)
    assert (precision := ins.options.precision).mode == "float16"
    assert build_scaler(precision.scaling_arguments, "float16") == LossScaler(
        128.0, 1000, 3, 4.0, 0.25, False
    )
    assert precision.lists == {"custom_white_list": ["softmax"], "custom_black_list": ["batch_norm"]}
    ins.set_mixed_precision(True)
    precision = ins.options.precision
    assert build_scaler(precision.scaling_arguments, "float16") == LossScaler(1.0, 2000, 2, 2.0, 0.5, True)
    assert precision.lists is None
    ins.set_mixed_precision(use_fp16=False)
    assert ins.options.precision.mode == "float32"


@pytest.mark.parametrize(
    "wrong",
    [
        {"init_loss_scaling": 0.5}, {"init_loss_scaling": 2.0**25},
        {"init_loss_scaling": math.nan}, {"incr_every_n_steps": 0}, {"decr_every_n_nan_or_inf": 2.5},
        {"incr_ratio": 1.0}, {"decr_ratio": 1}, {"decr_ratio": 0.0}, {"use_dynamic_loss_scaling": "yes"},
    ],
)  # fmt: skip
def test_a_wrong_argument_is_refused_and_changes_nothing(wrong):
    ins = Entry()
    before = ins.options.as_dict()
    with pytest.raises(OptionError, match="AutoMixedPrecisionLists|" + next(iter(wrong))):
        ins.set_mixed_precision(**{"use_fp16": True, "init_loss_scaling": 2.0} | wrong)
    assert ins.options.as_dict() == before
    assert not ins.options.explicit


def test_float16_is_bfloat16_without_scaling_on_a_cpu(dataset, tmp_path):
    made = options(dataset, tmp_path / "a", precision__mode="float16")
    run = build_run(made, WORLD, UserParts(model=Scripted()))
    assert run.scaler is None
    assert run.mode == "bfloat16"
    assert execution_of(None, "float16").products is torch.bfloat16
    assert execution_of({"products": "float32"}, "float16").products is torch.float32


def test_a_checkpoint_without_a_scale_begins_with_that_of_the_options(dataset, tmp_path):
    train(options(dataset, tmp_path / "plain", train__steps=4), WORLD, Scripted)
    made = options(dataset, tmp_path / "more", **RISING)
    run = build_run(made, WORLD, UserParts(model=Scripted()))
    path = tmp_path / "plain/0-step4"
    manifest = read_manifest(path)
    restore(run, path, manifest)
    assert (run.scaler.scale, run.position.updates) == (64.0, 4)
    manifest.scalars["updates"] = 5
    with pytest.raises(CheckpointError, match="updates 4"):
        restore(run, path, manifest)
    assert tensors_of(path)


def test_real_overflows_of_float16_lower_the_scale_until_training_goes_on(dataset, tmp_path, monkeypatch):
    # A CPU can compute in float16, too slowly for use: here it may.
    for module in (network, build):
        monkeypatch.setattr(module, "training_mode", lambda mode, device: mode)
    small = {"model__name": "SmallResNet", "model__emb_size": 32}
    settings = {
        "precision__mode": "float16", "train__epochs": 2,
        "precision__scaling_arguments": {"init_loss_scaling": 2.0**18, "decr_every_n_nan_or_inf": 1},
    }  # fmt: skip
    train(options(dataset, tmp_path / "float32", **small, train__steps=1), WORLD, lambda: None)
    train(options(dataset, tmp_path / "float16", **small, **settings), WORLD, lambda: None)
    found = logged(tmp_path / "float16", "loss_scale", "skipped_steps", "loss")
    skipped = found["skipped_steps"][-1]
    assert 1 <= skipped < 2 * STEPS - 3
    assert found["skipped_steps"][:skipped] == list(range(1, skipped + 1))
    assert found["loss_scale"][-1] == 2.0 ** (18 - skipped)
    exact = logged(tmp_path / "float32", "loss")["loss"][0]
    assert found["loss"][0] == pytest.approx(exact, rel=1e-3)
    assert found["loss"][-1] < found["loss"][0]
