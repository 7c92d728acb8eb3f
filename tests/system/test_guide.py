"""The snippets of the PLSC guide run as they are written, but for the lines with a comment."""

from __future__ import annotations

import getpass

import pytest

import plsc.config.options
from plsc.checkpoint.retention import checkpoints_in
from plsc.storage.store import Store
from tests.images import write_dataset, write_pair_file

SMALL = {
    "model.name": "SmallResNet",
    "model.emb_size": 8,
    "model.image_shape": (3, 16, 16),
    "train.batch_size": 12,
    "train.epochs": 2,
}
UPLOAD = """
from plsc import Entry
if __name__ == "__main__":
    ins = Entry()
    ins.set_model_save_dir('./saved_model')
    ins.set_hdfs_info("you_hdfs_addr", "name,passwd", "some_dir")
    ins.train()
"""
DOWNLOAD = """
from plsc import Entry
if __name__ == "__main__":
    ins = Entry()
    ins.set_checkpoint_dir('./saved_model')
    ins.set_hdfs_info("you_hdfs_addr",
                      "name,passwd",
                      fs_checkpoint_dir="some_dir")
    ins.train()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Work in a folder with train_data; small defaults, as the snippets set no sizes."""
    write_dataset(tmp_path / "train_data", classes=6, per_class=4)
    write_pair_file(tmp_path / "train_data/lfw.bin", tmp_path / "train_data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLSC_CACHE_DIR", str(tmp_path / "cache"))
    config = plsc.config.options.Config
    monkeypatch.setattr(plsc.config.options, "Config", lambda: config().changed(SMALL))
    return tmp_path


def run(snippet, **replaced):
    for old, new in replaced.items():
        assert old in snippet
        snippet = snippet.replace(old, new)
    names = {"__name__": "__main__"}
    exec(compile(snippet, "snippet", "exec"), names)
    return names


@pytest.fixture(params=["hdfs", "memory"])
def address(request, tmp_path):
    """Return what replaces "you_hdfs_addr", and the URL of "some_dir" there."""
    if request.param == "memory":
        return f"memory://{tmp_path.name}", f"memory://{tmp_path.name}/some_dir"
    server = request.getfixturevalue("hdfs")
    user = getpass.getuser()
    return server.url.removeprefix("hdfs://"), f"{server.url}/user/{user}/some_dir"


def test_parameters_are_uploaded_and_downloaded(address, folder):
    name, url = address
    # The server of the test knows only its own user.
    replaced = {"you_hdfs_addr": name, "name,passwd": f"{getpass.getuser()},passwd"}
    run(UPLOAD, **replaced)
    assert [one for one, _ in checkpoints_in(Store(url))] == ["0", "1"]

    (folder / "saved_model").rename(folder / "elsewhere")
    (folder / "saved_model").mkdir()  # "make sure that the folder ./saved_model exists"
    ins = run(DOWNLOAD.replace("ins.train()", "result = ins.train()"), **replaced)
    assert ins["result"].epochs == 2
    assert (folder / "saved_model/manifest.json").read_bytes() == (
        folder / "elsewhere/1/manifest.json"
    ).read_bytes()
