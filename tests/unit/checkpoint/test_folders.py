import dataclasses
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from plsc.checkpoint import (
    Manifest,
    Retention,
    Snapshot,
    list_checkpoints,
    load_weights,
    save_checkpoint,
)
from plsc.checkpoint.manifest import HeadInfo
from plsc.checkpoint.remote import clean
from plsc.checkpoint.save import prune
from plsc.parallel.world import World
from plsc.storage.store import Store
from tests.distributed.launch import run_code
from tests.roles import role_of_key

ROOT = Path(__file__).parents[3]
MANIFEST = Manifest("0.1.0", 1, 1, 0, 1, 1, {"": HeadInfo(1, [(0, 1)])})
KILLED = -signal.SIGKILL


def save(folder, name, step, **metrics):
    manifest = dataclasses.replace(MANIFEST, step=step, scalars={"metrics": metrics} if metrics else {})
    weights = {role_of_key("w"): torch.full((100,), float(step))}
    return save_checkpoint(folder, name, Snapshot(weights, manifest), World.single())


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def saved_step(folder):
    (step,) = set(load_weights(folder, "extra")["w"].tolist())
    return step


def die_at(moment, folder, action):
    """Run ``action`` in a child that is killed at the ``moment``-th change of a file below ``folder``.

    Returns whether it lived to the end.
    """
    child = os.fork()
    if child == 0:
        left = moment

        def watch(event, arguments):
            nonlocal left
            changes = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")
            if event in changes and str(folder) in str(arguments[0]):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        try:
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) != KILLED


def every_moment(tmp_path, prepare, action, check):
    """Kill ``action`` at its first change of a file, at its second, and so on until it completes."""
    for moment in range(1, 200):
        folder = tmp_path / str(moment)
        folder.mkdir()
        prepare(folder)
        lived = die_at(moment, folder, lambda folder=folder: action(folder))
        clean(Store(folder))
        check(folder, lived)
        if lived:
            assert moment > 5, "the test saw no change of a file"
            return
    raise AssertionError("the action never ended")


def kill_a_replacing_save(tmp_path):
    def check(folder, lived):
        assert names(folder) == ["last"]
        assert saved_step(folder / "last") in ((2,) if lived else (1, 2))

    every_moment(
        tmp_path, lambda f: save(f, "last", 1), lambda f: save(f, "last", 2), check
    )  # fmt: skip


def kill_a_new_save_and_a_prune(tmp_path):
    def check(folder, lived):
        assert names(folder) in ([["2"]] if lived else [["1"], ["1", "2"], ["2"]])
        assert all(saved_step(folder / name) == int(name) for name in names(folder))

    def act(folder):
        save(folder, "2", 2)
        prune(Store(folder), Retention(1))

    every_moment(tmp_path, lambda f: save(f, "1", 1), act, check)


@pytest.mark.slow
@pytest.mark.parametrize("test", ["kill_a_replacing_save", "kill_a_new_save_and_a_prune"])
def test_a_kill_at_any_moment_leaves_only_complete_checkpoints(test, tmp_path):
    # Forking is safe only without other threads: use a separate process.
    run_code(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from pathlib import Path\n"
        "import torch; torch.set_num_threads(1)\n"
        "from tests.unit.checkpoint import test_folders\n"
        f"test_folders.{test}(Path({str(tmp_path)!r}))\n"
    )


def test_leftovers_are_removed_and_a_hidden_old_version_is_restored(tmp_path):
    save(tmp_path, "7", 1).rename(tmp_path / ".replaced-7-0123abcd")
    save(tmp_path, "8", 2)
    save(tmp_path, "x", 1).rename(tmp_path / ".replaced-8-0123abcd")
    save(tmp_path, "x", 1).rename(tmp_path / ".saving-9-0123abcd")
    (tmp_path / ".deleting-5-0123abcd").mkdir()
    (tmp_path / ".saving-mine").mkdir()
    (tmp_path / ".replaced-notes-0123abcd").touch()
    assert clean(Store(tmp_path)) == ["7"]
    assert names(tmp_path) == [".replaced-notes-0123abcd", ".saving-mine", "7", "8"]
    assert saved_step(tmp_path / "8") == 2


def test_only_valid_checkpoints_are_listed_in_order_of_steps(tmp_path):
    for name, step in (("b", 10), ("a", 9), ("c", 2)):
        save(tmp_path, name, step)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("{")
    save(tmp_path, "hidden", 1).rename(tmp_path / ".saving-hidden-0123abcd")
    assert [path.name for path, _ in list_checkpoints(tmp_path)] == ["c", "a", "b"]


# Which checkpoints are kept, and which is the best.


def test_the_latest_and_the_protected_checkpoints_are_kept(tmp_path):
    for step in range(1, 6):
        save(tmp_path, str(step), step)
    prune(Store(tmp_path), Retention(-1))
    assert len(names(tmp_path)) == 5
    prune(Store(tmp_path), Retention(2), protect=["2"])
    assert names(tmp_path) == ["2", "4", "5"]


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(0, 1, "loss"), ["3", "5"]),
        (Retention(1, 2, "loss"), ["1", "3", "5"]),  # among equals the oldest
        (Retention(1, 2, "lfw accuracy"), ["2", "5"]),  # only one has it
        (Retention(1, -1, "loss"), ["1", "2", "3", "4", "5"]),
        (Retention(0, 3, None), ["5"]),  # the newest always
    ],
)
def test_the_best_by_a_metric_are_kept_too(retention, kept, tmp_path):
    save(tmp_path, "1", 1, loss=2.0)
    save(tmp_path, "2", 2, **{"lfw accuracy": 0.5})
    save(tmp_path, "3", 3, loss=1.0)
    save(tmp_path, "4", 4, loss="small")  # not a number
    save(tmp_path, "5", 5, loss=2.0)
    prune(Store(tmp_path), retention)
    assert [name for name in names(tmp_path) if name != "best.json"] == kept


def test_a_folder_with_other_files_is_kept(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, str(step), step)
    (tmp_path / "1/model").mkdir()
    (tmp_path / "2/shard-00000-0123abcd.safetensors").touch()  # of a save that was killed
    prune(Store(tmp_path), Retention(1))
    assert names(tmp_path) == ["1", "3"]
