"""Which checkpoints are kept, and which is the best."""

import pytest
import torch

from plsc.checkpoint import Manifest, Retention, Snapshot, save_checkpoint
from plsc.checkpoint.manifest import HeadInfo
from plsc.checkpoint.save import prune
from plsc.parallel.world import World
from plsc.storage.store import Store
from tests.roles import role_of_key


def save(folder, name, step, **metrics):
    scalars = {"metrics": metrics} if metrics else {}
    manifest = Manifest("0", step, 1, 0, 1, 1, {"": HeadInfo(1, [(0, 1)])}, {}, scalars)
    weights = {role_of_key("w"): torch.full((2,), float(step))}
    return save_checkpoint(folder, name, Snapshot(weights, manifest), World.single())


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_latest_and_the_protected_checkpoints_are_kept(tmp_path):
    for step in range(1, 6):
        save(tmp_path, str(step), step)
    assert prune(Store(tmp_path), Retention(-1)) == []
    deleted = prune(Store(tmp_path), Retention(2), protect=["2"])
    assert deleted == ["1", "3"]
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
    assert names(tmp_path) == kept


def test_a_folder_with_other_files_is_kept(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, str(step), step)
    (tmp_path / "1/model").mkdir()
    assert prune(Store(tmp_path), Retention(1)) == ["2"]
    assert names(tmp_path) == ["1", "3"]
