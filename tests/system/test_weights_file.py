"""Runs with 8-bit class weights, in memory and in files: resume, kills, other ranks, and what is refused."""

from __future__ import annotations

import random
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from plsc.checkpoint import list_checkpoints, load_weights, read_manifest
from plsc.checkpoint.classes import change_classes
from plsc.cli import main
from plsc.errors import CheckpointError, DataError, OptionError
from plsc.train.callbacks import Callback
from tests.distributed import job
from tests.distributed.launch import Ranks, run_ranks
from tests.images import write_dataset
from tests.resuming import different
from tests.system.small_entry import entry

pytestmark = pytest.mark.slow

INT8 = {"set_row_dtype": "int8", "set_head_optimizer": "adagrad"}
CODED = {**INT8, "set_sample_ratio": 0.3}
CLASSES = 150


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "set", CLASSES, per_class=1)


def words(**settings):
    return [f"{name}={value!r}" for name, value in {**CODED, **settings}.items()]


def copy(checkpoint, files):
    """Return a copy of a checkpoint with its class weights."""
    target = checkpoint.with_name(f"{checkpoint.name}-whole")
    shutil.rmtree(target, ignore_errors=True)
    main(["checkpoint", "copy", str(checkpoint), str(target), "--weights_file", str(files)])
    return target


@pytest.fixture(scope="module")
def undisturbed(dataset, tmp_path_factory):
    """The last checkpoint of two ranks and two epochs, with class weights."""
    folder = tmp_path_factory.mktemp("undisturbed")
    files = words(set_weights_file=str(folder / "files"))
    run_ranks(job.__file__, 2, str(dataset), str(folder / "run"), *files)
    return copy(folder / "run/1", folder / "files")


def test_killed_runs_resume_to_the_same_bits(dataset, undisturbed, tmp_path):
    settings = {"set_weights_file": str(tmp_path / "files"), "set_save_every_n_steps": 3}
    resumed = words(**settings, set_checkpoint_dir="last")
    run = Ranks(job.__file__, 2, str(dataset), str(tmp_path / "run"), *resumed)
    while not list_checkpoints(tmp_path / "run"):
        assert run.wait(0.02) is None
    run.wait(random.Random(5).uniform(0, 0.3))
    run.kill()
    run.communicate()
    run_ranks(job.__file__, 2, str(dataset), str(tmp_path / "run"), *resumed)
    newest = list_checkpoints(tmp_path / "run")[-1][0]
    assert different(copy(newest, tmp_path / "files"), undisturbed) == []


def test_a_complete_copy_resumes_on_other_ranks_in_files_and_in_memory(dataset, undisturbed, tmp_path):
    ranks, first = 3, undisturbed
    shutil.copytree(first, tmp_path / "start")
    again = words(
        set_weights_file=str(tmp_path / "files"),
        set_checkpoint_dir=str(tmp_path / "start"),
        set_train_epochs=3,
    )
    killed = Ranks(job.__file__, ranks, str(dataset), str(tmp_path / "killed"), *again)
    while not (tmp_path / "files" / "rank0" / "pages").exists():
        assert killed.wait(0.05) is None
    killed.kill()  # while the files are filled, or before the first save
    killed.communicate()
    found, steps = {}, read_manifest(first).step + 1
    for kind, settings in (("files", {"set_weights_file": str(tmp_path / "files")}), ("memory", {})):
        settings |= {"set_train_steps": steps, "set_train_epochs": 3}
        given = words(**settings, set_checkpoint_dir=str(tmp_path / "start"))
        run_ranks(job.__file__, ranks, str(dataset), str(tmp_path / kind), *given)
        newest = list_checkpoints(tmp_path / kind)[-1][0]
        whole = copy(newest, tmp_path / "files") if kind == "files" else newest
        found[kind] = load_weights(whole, "class_weights")["weight"]
    before = load_weights(first, "class_weights")["weight"]
    for weight in found.values():
        assert weight.shape == (CLASSES, 16)
        changed = (weight != before).any(dim=1).float().mean()
        assert 0.3 <= changed < 0.9  # one step: the sampled classes only


class Fails(Callback):
    def run_start(self, context):
        raise ZeroDivisionError


def test_files_filled_from_another_copy_of_the_same_step_are_filled_again(dataset, tmp_path):
    first = entry(dataset, tmp_path / "run", **CODED, set_train_steps=3).train().checkpoint
    for name, order in (("other", reversed(range(CLASSES))), ("start", range(CLASSES))):
        (tmp_path / "order.txt").write_text("".join(f"{number}\n" for number in order))
        words = ["checkpoint", "classes", str(first), str(tmp_path / name)]
        main([*words, "--reorder", str(tmp_path / "order.txt")])
    files = {**CODED, "set_weights_file": str(tmp_path / "files"), "set_train_steps": 4}
    failing = entry(dataset, tmp_path / "a", **files, set_checkpoint_dir=str(tmp_path / "other"))
    failing.add_callback(Fails())  # once the files are filled
    with pytest.raises(ZeroDivisionError):
        failing.train()
    run = entry(dataset, tmp_path / "b", **files, set_checkpoint_dir=str(tmp_path / "start")).train()
    weight = load_weights(copy(run.checkpoint, tmp_path / "files"), "class_weights")["weight"]
    before = load_weights(tmp_path / "start", "class_weights")["weight"]
    assert 0.3 <= (weight != before).any(dim=1).float().mean() < 0.9  # one step: the sampled classes only


def test_what_cannot_be_resumed_and_a_flipped_bit_are_refused(dataset, tmp_path, messages):
    files = {**CODED, "set_weights_file": str(tmp_path / "files")}
    first = entry(dataset, tmp_path / "run", **files, set_train_steps=3).train().checkpoint
    with pytest.raises(CheckpointError, match=r"no class weights.* copy"):
        entry(dataset, tmp_path / "b", **CODED, set_checkpoint_dir=str(first)).train()
    with pytest.raises(CheckpointError, match="of its checkpoint of step 3"):
        entry(dataset, tmp_path / "c", **files).train()
    files["set_checkpoint_dir"] = str(first)
    second = entry(dataset, tmp_path / "run", **files, set_train_steps=5).train().checkpoint
    with pytest.raises(CheckpointError, match=r"of step 5, .* of step 3"):
        entry(dataset, tmp_path / "d", **files).train()
    files["set_checkpoint_dir"] = str(second)
    first = entry(dataset, tmp_path / "run", **files, set_train_steps=7).train().checkpoint
    # A flipped bit is found.
    path = tmp_path / "files" / "rank0" / "pages"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    copied = ["copy", first, tmp_path / "whole", "--weights_file", tmp_path / "files"]
    assert main(["checkpoint", *map(str, copied)]) == 1
    assert "page 4 " in messages[-1]
    assert not (tmp_path / "whole").exists()


def test_settings_that_do_not_fit_a_file_are_refused(dataset, tmp_path):
    file = str(tmp_path / "files")
    for change, message in (
        ({"set_row_dtype": "float32"}, "row_dtype"),
        ({"set_sample_ratio": 1.0}, "sample_ratio"),
        ({"set_hard_share": 0.5}, "hard_share"),
        ({"set_upload_dir": "memory://run"}, "uploaded"),
    ):
        with pytest.raises(OptionError, match=message):
            entry(dataset, tmp_path / "run", **{**CODED, **change}, set_weights_file=file).train()


@pytest.mark.parametrize("name", ["files", "files/rank0"])
def test_a_link_in_the_folder_changes_nothing_outside_but_the_folder_may_be_one(dataset, tmp_path, name):
    (tmp_path / "outside").mkdir()
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to(tmp_path / "outside")
    settings = {**CODED, "set_weights_file": str(tmp_path / "files"), "set_train_steps": 1}
    run = entry(dataset, tmp_path / "run", **settings)
    if name == "files":
        run.train()
        return
    with pytest.raises(DataError, match="link"):
        run.train()
    assert not list((tmp_path / "outside").iterdir())


def class_weights(checkpoint):
    return load_weights(checkpoint, "class_weights")["weight"]


def test_a_run_with_8_bit_class_weights_does_all_that_others_do(tmp_path):
    dataset = write_dataset(tmp_path / "data", classes=7, per_class=6)
    larger = write_dataset(tmp_path / "larger", classes=9, per_class=6)
    first = entry(dataset, tmp_path / "first", **INT8).train().checkpoint

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

    for name, settings in (("floats", {}), ("codes", INT8)):
        start = entry(dataset, tmp_path / name, set_pretrained=str(first), **settings, set_lr=1e-12)
        started = class_weights(start.train().checkpoint)
        torch.testing.assert_close(started, trained, atol=float(trained.abs().max()) / 60, rtol=0)

    ins = entry(dataset, tmp_path / "export")
    ins.set_checkpoint_dir(str(first))
    folder = ins.convert_for_prediction(str(tmp_path / "model"), classes=True, graph="none")
    exported = load_file(folder / "classes.safetensors")["weight"]
    np.testing.assert_allclose(exported, torch.nn.functional.normalize(trained).numpy(), atol=1e-6)
