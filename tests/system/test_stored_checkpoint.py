"""A stored checkpoint is read as before; one of an attacker cannot run code, write, delete or upload.

Two ranks saved it at step 2 of 6, in the middle of an epoch: AdamW, and CosFace whose classes are sampled and
updated by Adagrad.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from plsc import Entry
from plsc.checkpoint import read_manifest
from plsc.checkpoint.manifest import OFFSETS_KEY, PLACES_KEY, entry_of, write_shard
from plsc.checkpoint.remote import verify
from plsc.cli import main
from plsc.config import Options, all_options
from plsc.errors import CheckpointError, DataError
from plsc.storage.disk import FolderLock, lock_note, open_regular
from plsc.storage.store import Store, clean
from tests.images import write_dataset, write_pair_file
from tests.resuming import losses_of
from tests.system.small_entry import entry

SAVED = Path(__file__).parents[1] / "saved" / "format_4"
CODE = "plsc_stranger.net"
URL = "memory://stranger/models"


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A working directory with data, a copy of the checkpoint, and a module that must not be run."""
    monkeypatch.setattr("plsc.models.resnet.SMALL_WIDTHS", (4, 4, 4, 4))
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


# Resumed by one rank, which draws other classes.
LOSSES = {3: 1.6539366, 4: 1.4653594, 5: 1.3717589, 6: 1.2819481}
ACCURACY = 0.975
EMBEDDING = (-0.1691543, 0.1415846, -0.0041926)


def test_a_stored_checkpoint_is_valid_and_resumes_tests_and_predicts_as_the_code_that_saved_it(work):
    assert read_manifest(SAVED).format_version == 4
    verify(SAVED)
    ins = Entry()
    ins.set_checkpoint_dir(SAVED)
    ins.set_dataset_dir("faces")
    ins.set_model_save_dir("saved")
    ins.set_with_test(False)
    ins.train()
    assert losses_of(work / "saved") == pytest.approx(LOSSES, rel=1e-4)
    assert ins.test()["lfw"].accuracy == pytest.approx(ACCURACY)
    assert ins.predict().embeddings[0][:3] == pytest.approx(EMBEDDING, rel=1e-4)


ON_DISK = """
    run/.saving-0/shard-00001.safetensors run/.saving-0/.saving-manifest.json
    run/.saving-0/.saving-manifest.json>run/.saving-0/manifest.json run/.saving-0 run/.saving-0>run/0 run
    files/rank0/pages files/rank0/journal files/rank0/new>files/rank0/header.json
    files/rank0/header.json files/rank0
""".split()  # noqa: SIM905


def test_what_is_saved_is_on_the_disk_before_it_has_its_name(work, monkeypatch):
    done, sync, replace = [], os.fsync, os.replace

    def synced(file):
        done.append(str(Path(f"/proc/self/fd/{file}").readlink()))
        sync(file)

    def replaced(old, new, **how):
        done.append(f"{old}>{new}")
        replace(old, new, **how)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    how = {"set_row_dtype": "int8", "set_head_optimizer": "adagrad", "set_sample_ratio": 0.3}
    entry("faces", "run", **how, set_weights_file="files").train()
    events = (re.sub(r"-[0-9a-f]{8,16}(?=\W|$)", "", one.replace(f"{work}/", "")) for one in done)
    assert [one for one in ON_DISK if one not in events] == []  # in this order


CASES = {
    "a network is imported": ("predict", {"model": {"name": f"{CODE}:Net"}}, f"to '{CODE}:Net'"),
    "a network is imported by a run": ("train", {"model": {"name": f"{CODE}:Net"}}, "model.name here"),
    "an optimizer writes a file": (
        "train", {"optim": {"optimizer": "torch:save", "optimizer_arguments": {"f": "victim"}}}, "torch:save"
    ),
    "an argument of an optimizer is a path": (
        "train", {"optim": {"optimizer_arguments": {"eps": "/etc/passwd"}}}, "optimizer_arguments"
    ),
    "a pattern takes forever": ("train", {"optim": {"freeze": ["re:(a+)+$"]}}, "optim.freeze"),
    "a group has a pattern that takes forever": (
        "train", {"optim": {"groups": [{"pattern": "re:(.*)*x", "frozen": True}]}}, "optim.groups is"
    ),
    "an embedding is larger than memory": (
        "predict", {"model": {"emb_size": 10**9}, "emb_size": 10**9}, "but its class weights"
    ),
    "images are larger than numbers": (
        "predict", {"model": {"image_shape": [3, 2**62, 2**62]}}, "do not fit SmallResNet"
    ),
    "sub-centres are more than memory": ("train", {"head": {"sub_centers": 64}}, "but its class weights"),

    "a message moves the cursor": ("train", {"plsc_version": "\x1b[2J"}, "contains control characters"),
    "a batch is 16 million images": (
        "train", {"train": {"batch_size": 2**24}, "scalars": {"global_batch": 2**24}}, "16777216 images"
    ),
    "a buffer is larger than numbers": (
        "train", {"head": {"execution": {"keep_mb": 1e308}}}, "keep_mb is 1e+308"
    ),

}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_checkpoint_is_refused_and_changes_nothing(case, work, capsys):
    verb, changes, message = CASES[case]
    change(work / "foreign", **changes)
    before = content(work)
    assert run(verb) == 1
    error = capsys.readouterr().err
    assert error.startswith("plsc: error: ")
    assert error.count("\n") == 1
    assert message in error
    assert content(work) == before


def test_files_that_the_manifest_does_not_name_are_refused(work, capsys):
    for name, make in (
        ("sitecustomize.py", Path.touch), (".hidden", Path.touch), ("more", Path.mkdir),
        ("link", lambda path: path.symlink_to("/etc/passwd")),
    ):  # fmt: skip
        path = work / "foreign" / name
        make(path)
        with pytest.raises(CheckpointError, match="is not in the manifest"):
            verify(work / "foreign")
        path.rmdir() if name == "more" else path.unlink()
    path.touch()
    assert run("predict") == 1
    assert "is not in the manifest" in capsys.readouterr().err


def without(folder, parts):
    """Remove tensors whose keys contain one of ``parts`` from a checkpoint, which stays valid otherwise."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        with safe_open(folder / name, "pt") as file:
            kept = {
                key: file.get_tensor(key)
                for key in file.keys()  # noqa: SIM118
                if not any(part in key for part in parts)
            }
            notes = json.loads(file.metadata()[PLACES_KEY])
        starts = {key: sum(notes[key][OFFSETS_KEY][:1]) for key in kept}
        (folder / name).unlink()
        info = write_shard(folder / name, [entry_of(key, value, starts[key]) for key, value in kept.items()])
        manifest["files"][name] = dataclasses.asdict(info)
    held = manifest["tensors"].items()
    manifest["tensors"] = {key: info for key, info in held if not any(part in key for part in parts)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


ABSENT = {
    "a huge embedding": ("predict", {"model": {"emb_size": 10**9}}, "do not fit SmallResNet"),
    "huge images": ("predict", {"model": {"image_shape": [3, 9008, 9008]}}, "do not fit SmallResNet"),
    "many classes": ("train", {"head": {"class_num": 10**11}}, "has no class weights"),
}  # fmt: skip


@pytest.mark.parametrize("case", ABSENT)
def test_sizes_that_contradict_the_tensors_are_refused(case, work, capsys):
    verb, changes, message = ABSENT[case]
    without(work / "foreign", ["neck.fc", "head.weight", "rows."])
    change(work / "foreign", **changes)
    assert run(verb) == 1
    assert message in capsys.readouterr().err


def test_metrics_that_are_not_finite_are_left_out(work):
    for metrics in ([1], {"loss": 10**400}, {"\ud800": 1}):
        change(work / "foreign", scalars={"metrics": metrics})
        assert read_manifest(work / "foreign").metrics == {}


def test_a_hidden_folder_is_not_restored_outside(work):
    shutil.copytree(work / "foreign", work / "run" / ".replaced-..-0123abcd")
    before = content(work)
    assert clean(Store(work / "run")) == []
    assert content(work) == before


def test_a_lock_whose_note_is_damaged_or_that_is_a_pipe_or_device_is_not_read(tmp_path):
    lock = tmp_path / ".lock"
    for text in ("[" * 10**5, '{"pid": 1e999, "host": 1}', '{"pid": 1, "host": "a", "launches": 5}'):
        lock.write_text(text)
        assert lock_note(tmp_path) == {}
    lock.unlink()
    os.mkfifo(lock)
    assert lock_note(tmp_path) == {}
    with pytest.raises(DataError, match=r"cannot write .*\.lock"):
        FolderLock(tmp_path)
    lock.unlink()
    lock.symlink_to("/dev/zero")
    assert lock_note(tmp_path) == {}


@pytest.mark.parametrize("write", ["lock", "r+b"])
def test_a_file_with_another_name_is_not_written(write, tmp_path):
    """An unpacked archive may have hard links that lead outside."""
    (tmp_path / "run").mkdir()
    (tmp_path / "thesis").write_text("mine")
    os.link(tmp_path / "thesis", tmp_path / "run" / ".lock")
    with pytest.raises((DataError, OSError), match="hard link"):
        FolderLock(tmp_path / "run") if write == "lock" else open_regular(tmp_path / "run/.lock", mode=write)
    assert (tmp_path / "thesis").read_text() == "mine"
    (tmp_path / "thesis").unlink()
    FolderLock(tmp_path / "run").release()


def test_links_in_the_folder_of_a_run_are_replaced_and_a_linked_version_is_resumed_elsewhere(work):
    options = ["--checkpoint.load_dir", "last", "--checkpoint.save_dir", "run", "--no-train.with_test"]
    shutil.copytree(work / "foreign", work / "run" / "0")
    shutil.copytree(work / "foreign", work / "private" / "1")
    (work / "run" / "version_9").symlink_to(work / "private")
    for name in ("run/loss.png", "out.npz"):
        (work / name).symlink_to(work / "faces" / "label.txt")
    before = content(work / "private"), content(work / "faces")
    assert run("train", *options, "--checkpoint.keep_last", "1") == 0
    assert run("predict", "--output", "out.npz") == 0
    assert (content(work / "private"), content(work / "faces")) == before
    assert (work / "run" / "version_10").is_dir()
    assert not (work / "out.npz").is_symlink()


def test_flags_of_torchs_optimizers_are_not_resumed(work):
    scalars = json.loads((work / "foreign" / "manifest.json").read_text())["scalars"]
    groups = [{"maximize": 1, "dampening": 10**300, "weight_decay": -1e300}]
    change(work / "foreign", scalars={**scalars, "optimizer_groups": groups})
    assert run("train", "--checkpoint.save_dir", "mine", "--no-train.with_test") == 0


def hostile(spec):
    """Return a valid value of an option that is not its default, if it is a number or a known name."""
    for value in (7, 0.3, 3.5, not spec.default, CODE, f"{CODE}:Net", URL, "checkpoint", [3, 8, 8],
                  [0.5, 1.5], [0.5, 0.6], [1.0, 2.0, 3.0], [0.1, 0.2, 0.3], [4, 5], ["*"], {"eps": 0.5},
                  [{"pattern": "fc", "lr_factor": 2.0}],
                  [{"pattern": "fc", "rule": "constant", "val": 1}], [{"name": "a", "path": URL}],
                  "float64", "float16", "bfloat16", "gloo", "cpu", "sharded", "on", "adamw",
                  "adagrad", "cosine", "arcface", "max", "training", "block", "processes",
                  "disk", "drop", "skip", "all", "foreach", "native", "int8", "linear",
                  {"image_column": "b"}, {"name": "balanced", "balance": 0.2},
                  {"name": "cosine", "steps": 7},
                  {"incr_ratio": 7.0}, {"kernels": "torch"}, {"custom_black_list": ["relu"]}, {"a": 7.0},
                  "tensorboard", "profile", "file:///tmp/a", "memory:1G"):  # fmt: skip
        try:
            if spec.checked(value) != spec.default:
                return value
        except Exception:
            continue
    raise AssertionError(f"no value for {spec.path}")


NEVER = {
    "checkpoint", "memory", "runtime.device", "runtime.backend", "runtime.timeout", "runtime.init_method",
    "runtime.rank", "runtime.world_size",
    "runtime.cpu_threads", "model.pretrained",
    "data.dataset_dir", "data.val_targets", "data.val_dir", "data.num_workers",
    "data.cache",
    "data.format_arguments", "data.landmarks", "head.weights_file",
    "train.test_batch_size",
    "train.loggers", "train.callbacks", "train.limit_test_batches",
    "train.fast_dev_run",
}  # fmt: skip
MODEL = {
    "model.name", "model.emb_size", "model.image_shape", "model.dropout", "model.neck", "data.flip",
}  # fmt: skip


@pytest.mark.parametrize("spec", list(all_options()), ids=lambda spec: spec.path)
def test_a_checkpoint_sets_only_numbers_and_known_names(spec):
    saved = {spec.group: {spec.name: hostile(spec)}}
    is_never = spec.path in NEVER or spec.group in NEVER
    for use in ("model", "run"):
        is_decided = not is_never and (use == "run" or spec.path in MODEL)
        value = spec.checked(hostile(spec)) if is_decided else spec.default
        if is_decided and isinstance(value, str) and ":" in value:
            with pytest.raises(CheckpointError, match="numbers and known names"):
                Options().resolve(saved, use)
        else:
            config = Options().resolve(saved, use)
            assert config.get(spec.path) == value
            assert config.adopted == ({spec.path} if is_decided else frozenset())
    mine = Options()
    mine.set(spec.path, spec.default) if spec.default is not None else None
    if spec.default is not None:
        assert mine.resolve(saved).get(spec.path) == spec.default


def test_a_run_neither_uploads_nor_writes_where_a_checkpoint_says(work):
    places = {"upload_dir": URL, "download_dir": URL, "save_dir": "theirs", "local_dir": "theirs"}
    theirs = {"model": {"pretrained": "theirs.pt"}, "data": {"cache": "theirs:1M"}}
    change(work / "foreign", checkpoint=places, **theirs)
    assert run("train", "--checkpoint.save_dir", "mine", "--no-train.with_test") == 0
    assert not (work / "theirs").exists()
    options = read_manifest(work / "mine" / "1").options
    assert options["checkpoint"]["upload_dir"] is None
    assert options["checkpoint"]["save_dir"] == "mine"


def test_a_network_class_named_on_the_command_line_is_built_as_saved(work, capsys):
    from plsc_stranger.net import Net

    (work / "ran").unlink()
    run_of_net = entry("faces", "saved", set_model=Net(5, weights="theirs.pt"), set_emb_size=5)
    checkpoint = run_of_net.train().checkpoint
    assert read_manifest(checkpoint).scalars["model_arguments"] == {"width": 5}  # no path or URL
    used = Entry()
    used.set_checkpoint_dir(checkpoint)
    used.set_dataset_dir("faces")
    with pytest.raises(CheckpointError, match=rf"model\.name here, to '{CODE}:Net'"):
        used.predict()
    used.set_model_name(f"{CODE}:Net")
    network_given = []
    original = Net.__init__

    def init(self, width=3, weights=None):
        network_given.append((width, weights))
        original(self, width, weights)

    Net.__init__ = init
    assert used.predict().embeddings.shape == (20, 5)
    assert set(network_given) == {(5, None)}
    assert dataclasses.is_dataclass(used.test()["lfw"])
