"""Checkpoints by somebody who knows the format: they run, write, delete and send nothing."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from plsc.checkpoint import read_manifest
from plsc.checkpoint.tools import verify
from plsc.cli import main
from plsc.config import Options, all_options
from plsc.errors import CheckpointError
from tests.images import write_dataset, write_pair_file

SAVED = Path(__file__).parents[1] / "saved" / "format_1"
CODE = "plsc_stranger.net"
URL = "memory://stranger/models"

FOREIGN_STRING = "re:(a+)+$"
HOSTILE = {int: 7, float: 0.123, bool: None, str: FOREIGN_STRING}


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder with data, a copy of the checkpoint, and a module that must not run, as the current one."""
    monkeypatch.setattr("plsc.models.small.WIDTHS", (4, 4, 4, 4))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    faces = write_dataset(tmp_path / "faces", 5, 4)
    write_pair_file(faces / "lfw.bin", faces, 40)
    shutil.copytree(SAVED, tmp_path / "foreign")
    package = tmp_path / "plsc_stranger"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "net.py").write_text(
        "from pathlib import Path\n"
        "from plsc.models import BaseModel\n"
        "from torch import nn\n"
        "Path('ran').touch()\n"
        "class Net(BaseModel):\n"
        "    def __init__(self, width=3, weights=None):\n"
        "        super().__init__()\n"
        "        self.fc = nn.Linear(3 * 16 * 16, width)\n"
        "    def build_network(self, input, label, is_train=True):\n"
        "        return self.fc(input.flatten(1))\n"
    )
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("plsc_stranger")]:
        del sys.modules[name]


def change(folder, **groups):
    """Set options, or fields, of a checkpoint's manifest: ``model={"name": ...}``, ``emb_size=3``."""
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    for name, value in groups.items():
        target = manifest["options"].get(name) if isinstance(value, dict) else None
        if target is None:
            manifest[name] = value
        else:
            target.update(value)
    file.write_text(json.dumps(manifest))


def run(verb, *more):
    common = ["--checkpoint.load_dir", "foreign", "--data.dataset_dir", "faces"]
    return main([verb, *common, "--data.num_workers", "0", *more])


def content(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


CASES = {
    "a network is imported": (
        "predict", {"model": {"name": f"{CODE}:Net"}}, f"--model.name {CODE}:Net"
    ),
    "a network is imported by a run": (
        "train", {"model": {"name": f"{CODE}:Net"}}, f"--model.name {CODE}:Net"
    ),
    "an optimizer writes a file": (
        "train",
        {"optim": {"optimizer": "torch:save", "optimizer_arguments": {"f": "victim"}}},
        "optim.optimizer is 'torch:save' in the checkpoint",
    ),
    "a schedule ends the process": (
        "train", {"optim": {"schedule": "torch:os._exit"}}, "--optim.schedule torch:os._exit"
    ),
    "an argument of an optimizer is a path": (
        "train", {"optim": {"optimizer_arguments": {"eps": "/etc/passwd"}}}, "optimizer_arguments"
    ),
    "a pattern takes forever": (
        "train", {"optim": {"freeze": ["re:(a+)+$"]}}, "optim.freeze is"
    ),
    "a group has a pattern that takes forever": (
        "train", {"optim": {"groups": [{"pattern": "re:(.*)*x", "frozen": True}]}}, "optim.groups is"
    ),
    "an embedding is larger than memory": (
        "predict", {"model": {"emb_size": 10**9}}, "model.emb_size 1000000000, but class weights"
    ),
    "an embedding is larger than memory, in all places": (
        "predict", {"model": {"emb_size": 10**9}, "emb_size": 10**9}, "but class weights"
    ),
    "images are larger than memory": (
        "predict", {"model": {"image_shape": [3, 100000, 100000]}}, "images of [3, 100000, 100000]"
    ),
    "images are larger than numbers": (
        "predict", {"model": {"image_shape": [3, 2**62, 2**62]}}, "images of [3, 4611686018427387904"
    ),
    "classes are more than memory": (
        "train", {"head": {"class_num": 10**12}}, "head.class_num 1000000000000, but class weights"
    ),
    "sub-centres are more than memory": (
        "train", {"head": {"sub_centers": 64}}, "head.sub_centers 64, but class weights"
    ),
    "a batch is larger than memory": (
        "train", {"train": {"batch_size": 10**12}}, "train.batch_size is 1000000000000; expected"
    ),
    "a message moves the cursor": (
        "train", {"plsc_version": "\x1b[2J"}, "manifest.json holds control characters"
    ),
    "a data file is elsewhere": (
        "predict", {"files": {"../faces/label.txt": {"bytes": 1, "crc32": 1}}}, "plain file name"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_is_refused_in_a_line_and_changes_nothing(case, work, capsys):
    verb, changes, said = CASES[case]
    change(work / "foreign", **changes)
    before = content(work)
    assert run(verb) == 1
    error = capsys.readouterr().err
    assert error.startswith("plsc: error: ")
    assert error.count("\n") == 1
    assert said in error
    assert content(work) == before


FILES = {
    "code": lambda folder: (folder / "sitecustomize.py").write_text("1"),
    "an empty file": lambda folder: (folder / ".hidden").touch(),
    "a folder": lambda folder: (folder / "more").mkdir(),
    "a link": lambda folder: (folder / "link").symlink_to("/etc/passwd"),
    "a pickle": lambda folder: torch.save({}, folder / "more.pt"),
}


@pytest.mark.parametrize("kind", FILES)
def test_what_the_manifest_does_not_name_is_not_in_a_checkpoint(kind, work, capsys):
    FILES[kind](work / "foreign")
    with pytest.raises(CheckpointError, match="is not in the manifest"):
        verify(work / "foreign")
    assert run("predict") == 1
    assert "is not in the manifest" in capsys.readouterr().err


def hostile(spec):
    """Return a valid value of an option, other than its default where it is a number or a known name."""
    for value in (7, 0.3, 3.5, not spec.default, CODE, f"{CODE}:Net", URL, "checkpoint", [3, 8, 8],
                  [0.5, 1.5], [0.5, 0.6], [1.0, 2.0, 3.0], [0.1, 0.2, 0.3], [4, 5], ["*"], {"eps": 0.5},
                  [{"pattern": "fc", "lr_factor": 2.0}],
                  [{"pattern": "fc", "rule": "constant", "val": 1}], [{"name": "a", "path": URL}],
                  "float64", "float16", "bfloat16", "gloo", "cpu", "sharded", "on", "always", "adamw",
                  "adagrad", "cosine", "arcface", "continue", "max", "training", "block", "processes",
                  "disk", "drop", "skip", "all", "foreach", "native", "int8"):  # fmt: skip
        try:
            if spec.checked(value) != spec.default:
                return value
        except Exception:
            continue
    raise AssertionError(f"no value for {spec.path}")


NEVER = {
    "checkpoint", "memory", "runtime.device", "runtime.backend", "runtime.timeout",
    "runtime.cpu_threads", "model.pretrained", "model.initialization", "parallel.shard_units",
    "data.dataset_dir", "data.datasets", "data.val_targets", "data.num_workers", "data.loader",
    "data.cache", "data.cache_bytes", "data.cache_decoded", "data.cache_dir", "data.image_column",
    "data.label_column", "data.label_map", "data.class_depth", "speed.fold_batch_norm",
    "speed.overlap_copies", "train.test_batch_size", "train.stop_deadline",
}  # fmt: skip
MODEL = {
    "model.name", "model.emb_size", "model.image_shape", "model.dropout", "data.flip", "runtime.dtype"
}  # fmt: skip


@pytest.mark.parametrize("spec", list(all_options()), ids=lambda spec: spec.path)
def test_a_checkpoint_decides_numbers_and_known_names_alone(spec):
    saved = {spec.group: {spec.name: hostile(spec)}}
    is_never = spec.path in NEVER or spec.group in NEVER
    for use in ("model", "run"):
        is_decided = not is_never and (use == "run" or spec.path in MODEL)
        value = spec.checked(hostile(spec)) if is_decided else spec.default
        if is_decided and isinstance(value, str) and ":" in value:
            with pytest.raises(CheckpointError, match="set it here"):
                Options().resolve(saved, use)
        else:
            config = Options().resolve(saved, use)
            assert config.get(spec.path) == value
            assert config.adopted == ({spec.path} if is_decided else frozenset())
    mine = Options()
    mine.set(spec.path, spec.default) if spec.default is not None else None
    if spec.default is not None:
        assert mine.resolve(saved).get(spec.path) == spec.default


def test_a_run_sends_and_writes_nothing_where_a_checkpoint_says(work):
    places = {"upload_dir": URL, "download_dir": URL, "save_dir": "theirs", "local_dir": "theirs"}
    change(work / "foreign", checkpoint=places)
    change(
        work / "foreign",
        model={"pretrained": "theirs.pt"},
        data={"cache": "disk", "cache_dir": "theirs"},
    )
    assert run("train", "--checkpoint.save_dir", "mine", "--train.with_test", "false") == 0
    assert not (work / "theirs").exists()
    options = read_manifest(work / "mine" / "1").options
    assert options["checkpoint"]["upload_dir"] is None
    assert options["checkpoint"]["save_dir"] == "mine"


def test_a_class_that_the_command_names_is_made_as_it_was_saved(work, capsys):
    from plsc_stranger.net import Net

    from plsc import Entry

    (work / "ran").unlink()
    ins = Entry()
    ins.set_model(Net(5, weights="theirs.pt"))
    ins.set_image_shape((3, 16, 16))
    ins.set_emb_size(5)
    ins.set_dataset_dir("faces")
    ins.set_model_save_dir("saved")
    ins.set_train_epochs(1)
    ins.set_num_workers(0)
    ins.set_with_test(False)
    checkpoint = ins.train().checkpoint
    assert read_manifest(checkpoint).scalars["model_arguments"] == {
        "width": 5, "weights": "theirs.pt"
    }  # fmt: skip
    used = Entry()
    used.set_checkpoint_dir(checkpoint)
    used.set_dataset_dir("faces")
    with pytest.raises(
        CheckpointError, match=rf"set_model_name\('{CODE}:Net'\), or set_model with"
    ):
        used.predict()
    used.set_model_name(f"{CODE}:Net")
    network_given = []
    original = Net.__init__

    def init(self, width=3, weights=None):
        network_given.append((width, weights))
        original(self, width, weights)

    Net.__init__ = init
    assert used.predict().embeddings.shape == (20, 5)
    assert set(network_given) == {(5, None)}  # what looks like a path is not passed
    assert dataclasses.is_dataclass(used.test()["lfw"])
