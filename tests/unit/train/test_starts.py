"""Which run a start continues, where it saves, and what it may delete."""

import dataclasses
import json
import shutil

import pytest

from plsc.checkpoint import list_checkpoints, save
from plsc.errors import CheckpointError
from plsc.parallel.world import World
from plsc.train.folder import RunFolder
from tests.images import write_dataset
from tests.resuming import options_of, train

WORLD = World.single()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "set", classes=6, per_class=3)


@pytest.fixture
def start(dataset, tmp_path):
    """Train, by default for two epochs of two steps, to the folder "run"."""

    def run(world=WORLD, save_dir="run", **changes):
        small = {"train__batch_size": 9, "data__val_targets": "", "checkpoint__keep_last": -1}
        return train(options_of(dataset, tmp_path / save_dir, **{**small, **changes}), world)

    return run


def saved(folder):
    return {path.name: manifest.run_id for path, manifest in list_checkpoints(folder)}


def test_each_start_is_a_run_in_the_next_version_and_last_resumes_the_newest_in_place(
    start, tmp_path, capsys
):
    run = tmp_path / "run"
    for _ in range(3):
        start()
    assert f"{run} contains checkpoints of an earlier run, so this run saves to {run}/version_2" in (
        capsys.readouterr().out
    )
    folders = [run, run / "version_1", run / "version_2"]
    runs = [saved(folder) for folder in folders]
    assert [list(names) for names in runs] == [["0", "1"]] * 3
    assert [len(set(names.values())) for names in runs] == [1, 1, 1]
    assert len({names["1"] for names in runs}) == 3

    start(checkpoint__load_dir="last", train__epochs=3)
    assert saved(run / "version_2") == {**runs[2], "2": runs[2]["1"]}
    start(checkpoint__load_dir=str(run / "1"), train__epochs=3)  # in place, too
    assert saved(run) == {**runs[0], "2": runs[0]["1"]}
    start(checkpoint__load_dir=str(run / "1"), train__epochs=3)  # another course, which is the newest run
    assert saved(run) == {**runs[0], "2": runs[0]["1"]}
    assert list(saved(run / "version_3")) == ["2"]
    shutil.rmtree(run / "version_3")
    start(save_dir="other", checkpoint__load_dir=str(run / "1"), train__epochs=3)
    assert set(saved(tmp_path / "other").values()).isdisjoint({names["1"] for names in runs})
    start(checkpoint__load_dir="last", checkpoint__new_version=True, train__epochs=4)
    assert list(saved(run / "version_3")) == ["3"]
    assert len(list(run.glob("version_*"))) == 3
    for new in (True, True, False):  # the third one, too, because "last" is in the newest version
        start(save_dir="new", checkpoint__new_version=new, train__epochs=1)
    assert [path.name for path in sorted(tmp_path.glob("new/*"))] == [f"version_{n}" for n in range(3)]


def test_ranks_that_a_launcher_started_anew_resume_the_run_of_the_dead(start, tmp_path):
    run, lock = tmp_path / "run", tmp_path / "run/version_1/.lock"
    start()
    launched = dataclasses.replace(WORLD, launch_id="host:/tmp/torchelastic_1/none_2")

    def die() -> None:
        """Have the last run look like that of another process."""
        lock.write_text(json.dumps({**json.loads(lock.read_text()), "pid": 1}))

    start(launched, train__epochs=1)
    before = saved(run / "version_1")
    start(launched, train__epochs=1)  # the same process trains again: another run
    assert list(saved(run / "version_2")) == list(before)
    shutil.rmtree(run / "version_2")
    die()
    for load in (None, str(run / "0"), "best"):  # that the script loaded in its first attempt
        assert start(launched, checkpoint__load_dir=load, train__epochs=3).steps == 6
        die()
    assert set(saved(run / "version_1").values()) == {before["0"]}
    # Before the first checkpoint was saved.
    for path, _ in list_checkpoints(run / "version_1"):
        shutil.rmtree(path)
    start(launched)
    assert list(saved(run / "version_1")) == ["0", "1"]
    die()
    start(dataclasses.replace(launched, launch_id="host:/tmp/torchelastic_3/none_4"))
    assert list(saved(run / "version_2")) == ["0", "1"]


@pytest.mark.parametrize(("way", "version"), [("last", ""), ("path", "version_1"), ("launcher", "version_1")])
def test_a_checkpoint_that_a_killed_run_was_replacing_is_found_by_the_next_start(
    way, version, start, tmp_path, capsys
):
    for _ in range(2 if version else 1):
        start()
    folder = tmp_path / "run" / version
    launched = dataclasses.replace(WORLD, launch_id="host:/tmp/torchelastic_1/none_2")
    note = {"host": "host", "pid": 1, "launches": [launched.launch_id] if way == "launcher" else []}
    (folder / ".lock").write_text(json.dumps(note))
    before = saved(folder)
    (folder / "1").rename(folder / ".replaced-1-0123abcd")
    load = {"last": "last", "path": str(folder / "1"), "launcher": None}[way]
    start(launched, checkpoint__load_dir=load, train__epochs=3)
    shown = capsys.readouterr()
    assert f"a run was killed while it replaced {folder / '1'}; the old version was restored" in shown.err
    assert f"resuming from {folder / '1'} at step 4" in shown.out
    assert saved(folder) == {**before, "2": before["1"]}


def test_a_run_does_not_replace_what_was_saved_while_it_started(start, tmp_path):
    start()
    folder = RunFolder(WORLD, str(tmp_path / "run"), load_dir="last")
    folder.choose()
    start(checkpoint__load_dir="last", train__epochs=3)
    with pytest.raises(CheckpointError, match="meanwhile"), folder.locked(3):
        pass


def test_a_store_is_not_continued_from_an_older_checkpoint_or_after_it_was_deleted(
    start, tmp_path, monkeypatch
):
    monkeypatch.setenv("PLSC_CACHE_DIR", str(tmp_path / "cache"))
    url = f"file://{tmp_path}/store"
    start(checkpoint__save_dir=url)
    elsewhere = RunFolder(WORLD, str(tmp_path / "elsewhere"), upload_dir=url, load_dir="last")
    elsewhere.choose()
    start(checkpoint__save_dir=url, checkpoint__load_dir="last", train__epochs=3)
    with pytest.raises(CheckpointError, match="meanwhile"), elsewhere.locked(4):
        pass
    shutil.rmtree(tmp_path / "store")
    start(checkpoint__save_dir=url, checkpoint__load_dir="last")
    assert list(saved(tmp_path / "store/version_1")) == ["0", "1"]


def test_a_run_deletes_its_own_checkpoints_alone_and_not_the_one_it_resumed(start, tmp_path):
    run = tmp_path / "run"
    start(train__epochs=3)
    for name, run_id in (("0", ""), ("1", "")):  # saved before runs had ids
        file = run / name / "manifest.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "run_id": run_id}))
    few = {"checkpoint__keep_last": 1, "checkpoint__save_top_k": 0}
    start(checkpoint__load_dir="last", train__epochs=6, **few)
    own = saved(run)["2"]
    assert saved(run) == {"0": "", "1": "", "2": own, "5": own}
    assert json.loads((run / "best.json").read_text())["path"] in ("2", "5")

    # Another run's is in the way: what resumes there saves to a version.
    shutil.copytree(run / "5", run / "other")
    file = run / "other/manifest.json"
    file.write_text(file.read_text().replace(own, "another"))
    start(checkpoint__load_dir=str(run / "5"), train__epochs=7, **few)
    assert saved(run) == {"0": "", "1": "", "2": own, "5": own, "other": "another"}
    assert list(saved(run / "version_1")) == ["6"]


def test_a_kill_while_the_best_is_named_leaves_the_one_that_is_named(start, tmp_path, monkeypatch):
    write, named = save.write_best, []

    def killed(*arguments):
        named.append(arguments)
        if len(named) == 4:
            raise KeyboardInterrupt
        write(*arguments)

    monkeypatch.setattr(save, "write_best", killed)
    few = {"checkpoint__keep_last": 1, "checkpoint__save_top_k": 1, "checkpoint__monitor": "loss"}
    with pytest.raises(KeyboardInterrupt):
        start(train__epochs=6, **few)
    assert json.loads((tmp_path / "run" / "best.json").read_text())["path"] in saved(tmp_path / "run")
