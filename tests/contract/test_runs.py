"""Complete runs in every kind of store: train, save, prune, restart, resume, share a store."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem

from plsc.checkpoint.manifest import checkpoints_in
from plsc.parallel.world import World
from plsc.storage.store import Store
from plsc.storage.urls import open_filesystem
from plsc.train.folder import RunFolder
from plsc.train.loop import TrainResult
from tests.images import write_dataset
from tests.resuming import losses_of, options_of, train

pytestmark = pytest.mark.slow
WORLD = World.single()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "set", classes=6, per_class=3)


def settings(dataset, save_dir, **changes):
    small = {"train__batch_size": 9, "data__val_targets": "", "checkpoint__keep_last": 1}
    return options_of(dataset, save_dir, **{**small, **changes})


def start(dataset, save_dir, **changes) -> TrainResult:
    return train(settings(dataset, save_dir, **changes), WORLD)


def content(store: Store) -> dict[str, bytes]:
    """Return every byte of the checkpoints in a store."""
    return {
        f"{name}/{file}": store.read(f"{name}/{file}", 2**30)
        for name, _ in checkpoints_in(store)
        for file in store.names(name)
    }


def ids(store: Store) -> set[str]:
    return {manifest.run_id for _, manifest in checkpoints_in(store)}


def test_a_run_saves_prunes_restarts_and_resumes_in_every_store(url, dataset, tmp_path, monkeypatch, capsys):
    start(dataset, url, train__epochs=3)
    store, again = Store(url), Store(f"{url}/version_1")
    best = json.loads(store.read("best.json", 1000))["path"]
    assert {name for name, _ in checkpoints_in(store)} == {"2", best}
    assert "metrics.jsonl" in store.names()
    first = content(store)
    capsys.readouterr()

    start(dataset, url, train__epochs=2)
    assert f"{url} contains checkpoints of an earlier run, so this run saves to {url}/version_1" in (
        capsys.readouterr().out
    )
    assert "1" in [name for name, _ in checkpoints_in(again)]

    monkeypatch.setenv("PLSC_CACHE_DIR", str(tmp_path / "another machine"))
    last = {"checkpoint__load_dir": "last"}
    assert start(dataset, url, **last, train__epochs=4).steps == 8
    assert [manifest.step for _, manifest in checkpoints_in(again)][-1] == 8
    # The checkpoint that was resumed is kept.
    assert {"1", "3"} <= {name for name, _ in checkpoints_in(again)}
    assert len(ids(again)) == 1
    assert content(store) == first
    assert "version_2" not in store.names()

    assert RunFolder(WORLD, url, load_dir="last").find()[1].step == 8
    named = json.loads(again.read("best.json", 1000))["path"]
    assert RunFolder(WORLD, url, load_dir="best").find()[1] == dict(checkpoints_in(again))[named]


def test_a_run_that_resumes_from_the_store_of_another_one_changes_nothing_there(
    url, dataset, tmp_path, capsys
):
    start(dataset, tmp_path / "a", checkpoint__upload_dir=url, checkpoint__keep_last=-1)
    store = Store(url)
    theirs = content(store)
    assert {name.split("/")[0] for name in theirs} == {"0", "1"}

    start(dataset, tmp_path / "b", checkpoint__load_dir=f"{url}/0", train__epochs=4)
    assert content(store) == theirs
    assert store.names(only_folders=True) == ["0", "1"]

    # The same with a copy of it that the user made.
    shutil.copytree(tmp_path / "a/0", tmp_path / "copy/0")
    start(dataset, tmp_path / "c", checkpoint__load_dir=str(tmp_path / "copy/0"), train__epochs=4)
    assert content(store) == theirs

    # And with a run that uploads its own checkpoints there, too.
    start(
        dataset, tmp_path / "d", checkpoint__load_dir=f"{url}/0", checkpoint__upload_dir=url,
        checkpoint__new_version=True, train__epochs=4,
    )  # fmt: skip
    start(dataset, tmp_path / "e", checkpoint__upload_dir=url)
    assert content(store) == theirs
    runs = [store, *(Store(f"{url}/version_{n}") for n in (1, 2))]
    assert [len(ids(run)) for run in runs] == [1, 1, 1]
    assert len(set.union(*map(ids, runs))) == 3
    own = Store(tmp_path / "b")
    assert ids(own).isdisjoint(set.union(*map(ids, runs)))
    assert checkpoints_in(own)[-1][1].step == 8


def test_a_growing_log_and_a_failed_upload_do_not_stop_the_run(dataset, tmp_path, monkeypatch, capsys):
    copy = LocalFileSystem.put_file

    def growing(self, path1, path2, **kwargs):
        if path1.endswith("metrics.jsonl"):
            with Path(path1).open("a") as file:
                file.write(json.dumps({"step": 0}) + "\n")
        return copy(self, path1, path2, **kwargs)

    monkeypatch.setattr(LocalFileSystem, "put_file", growing)
    sent = tmp_path / "sent"
    start(dataset, tmp_path / "run", checkpoint__upload_dir=f"file://{sent}")
    assert losses_of(sent).keys() == {1, 2, 3, 4}
    assert (sent / "best.json").is_file()

    blocked = tmp_path / "blocked"
    (blocked / "metrics.jsonl/in the way").mkdir(parents=True)
    start(dataset, tmp_path / "run2", checkpoint__upload_dir=f"file://{blocked}")
    assert (blocked / "best.json").is_file()
    assert "metrics.jsonl" in capsys.readouterr().err


def test_label_files_and_class_folders_in_a_store_are_trained_on(url, dataset, tmp_path):
    filesystem, inside = open_filesystem(url)
    for name in ("label.txt", *(f"images/{path.name}" for path in (dataset / "images").iterdir())):
        folder, _, image = name.rpartition("/")
        copies = [f"labels/{name}", *([f"folders/class{image[0]}/{image}"] if folder else [])]
        for copy in copies:
            filesystem.makedirs(f"{inside}/{copy}".rpartition("/")[0], exist_ok=True)
            filesystem.pipe_file(f"{inside}/{copy}", (dataset / name).read_bytes())
    local = start(dataset, tmp_path / "local", train__epochs=1)
    for kind in ("labels", "folders"):
        result = start(f"{url}/{kind}", tmp_path / kind, train__epochs=1)
        assert result.steps == local.steps
        if kind == "labels":
            assert result.metrics["loss"] == local.metrics["loss"]
