"""Training continues after a change of classes; memory of a change; a kill during it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from plsc import Entry
from plsc.checkpoint import read_manifest
from plsc.checkpoint.load import read_class_names
from plsc.checkpoint.remote import verify
from plsc.cli import main
from plsc.errors import CheckpointError
from plsc.models.base_model import BaseModel
from tests.distributed import job
from tests.distributed.launch import clean_environment, run_ranks
from tests.images import class_folders, write_dataset
from tests.resuming import compute_in_float64
from tests.resuming import losses_of as losses_by_step
from tests.system.small_entry import entry
from tests.unit.checkpoint.classes_reference import write_checkpoint

pytestmark = pytest.mark.slow

EPOCHS = 6


class Plain(BaseModel):
    """A network without batch norm or dropout, so that runs can be compared step by step."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3 * 16 * 16, 8)

    def build_network(self, input, label, is_train=True):
        return self.fc(input.flatten(1))


def train(dataset, save_dir, epochs, checkpoint=None, class_num=None, pretrained=None):
    """Return the losses of all steps and the last checkpoint; one step per epoch."""
    given = {"set_class_num": class_num, "set_checkpoint_dir": checkpoint, "set_pretrained": pretrained}
    ins = entry(
        dataset, save_dir, set_train_batch_size=64, set_last_batch="keep",
        set_train_epochs=epochs, set_lr=0.5 * 64 / 1024, set_scale=16, set_margin=0.1, set_flip=False,
        set_num_workers=0, set_dataset_dir=str(dataset),
        **{name: value for name, value in given.items() if value is not None},
    )  # fmt: skip
    ins.set_model(Plain())  # drawn with the seed that was set
    result = ins.train()
    return losses_of(save_dir), result.checkpoint


def losses_of(save_dir):
    return list(losses_by_step(save_dir).values())


@pytest.fixture(scope="module", autouse=True)
def _in_float64():
    with pytest.MonkeyPatch.context() as patch:
        compute_in_float64(patch)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    every = write_dataset(root / "every", classes=8, per_class=6)
    six = shutil.copytree(every, root / "six")
    lines = (every / "label.txt").read_text().splitlines(keepends=True)
    (six / "label.txt").write_text("".join(lines[: 6 * 6]))  # of the first six classes
    _, checkpoint = train(six, root / "saved", EPOCHS)
    return every, six, checkpoint


def change(*arguments):
    assert main(["checkpoint", "classes", *map(str, arguments)]) == 0


def test_grown_classes_are_trained_by_a_schedule_of_their_own(trained, tmp_path, capsys):
    every, _, checkpoint = trained
    change(checkpoint, tmp_path / "grown", "--grow", 2)
    new = entry(every, tmp_path / "new", set_train_batch_size=64, set_train_epochs=1)
    new.set_model(Plain())
    new.set_pretrained(tmp_path / "grown")
    new.train()
    assert read_manifest(tmp_path / "new" / "0").class_num == 8
    ins = entry(every, tmp_path / "old", set_train_batch_size=64, set_train_epochs=EPOCHS + 1)
    ins.set_model(Plain())
    ins.set_lr_schedule("polynomial", power=5)
    ins.set_checkpoint_dir(tmp_path / "grown")
    ins.train()
    assert "note: the rest of the schedule" in capsys.readouterr().out


def test_the_printed_command_names_no_code_of_the_checkpoint(trained, tmp_path, capsys):
    shutil.copytree(trained[2], tmp_path / "theirs")
    file = tmp_path / "theirs" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["options"]["head"]["loss_type"] = "os:system"
    file.write_text(json.dumps(manifest))
    change(tmp_path / "theirs", tmp_path / "grown", "--grow", 2)
    printed = capsys.readouterr().out
    assert "os:system" not in printed
    assert "head.loss_type" in printed.splitlines()[-2]


def test_two_ranks_resume_reordered_classes_by_their_names(tmp_path):
    every = write_dataset(tmp_path / "set", classes=5, per_class=4)
    dataset = class_folders(every, tmp_path / "folders", dict(enumerate("01234")))
    (tmp_path / "order.txt").write_text("4\n2\n0\n1\n3\n")

    def start(name, epochs, *more):
        words = ["set_emb_size=8", "set_train_batch_size=10", f"set_train_epochs={epochs}", *more]
        run_ranks(job.__file__, 2, str(dataset), str(tmp_path / name), *words)

    start("first", 1)
    change(tmp_path / "first/0", tmp_path / "changed", "--reorder", tmp_path / "order.txt")
    resumed = [f"set_checkpoint_dir={str(tmp_path / name)!r}" for name in ("first/0", "changed")]
    more = [str(dataset), str(tmp_path / "second"), "set_emb_size=8", "set_train_batch_size=10", resumed[1]]
    start("undisturbed", 2, resumed[0], "--", *more)
    manifest = verify(tmp_path / "changed")
    assert (len(manifest.shards), manifest.heads[""].class_ranges) == (2, [(0, 3), (3, 5)])
    expected = losses_of(tmp_path / "undisturbed")
    assert losses_of(tmp_path / "second") == pytest.approx(expected, rel=1e-3)


@pytest.fixture(scope="module")
def named(trained, tmp_path_factory):
    """A checkpoint of the classes a and c, and a dataset of a, b and c."""
    every, _, _ = trained
    root = tmp_path_factory.mktemp("named")
    two = class_folders(every, root / "two", {0: "a", 2: "c"})
    _, checkpoint = train(two, root / "saved", EPOCHS)
    return checkpoint, class_folders(every, root / "three", dict(enumerate("abc"))), two


def names_in(checkpoint):
    names = read_class_names(Path(checkpoint), read_manifest(checkpoint))
    return [names[number] for number in range(len(names))]


def with_label_file(folders, folder, numbers):
    """Write label.txt for class folders, in the order in which these are read."""
    folder.mkdir()
    lines = []
    for name in sorted(numbers):
        shutil.copytree(folders / name, folder / name)
        lines += [f"{name}/{path.name}\t{numbers[name]}" for path in sorted((folders / name).iterdir())]
    (folder / "label.txt").write_text("\n".join(lines) + "\n")
    return folder


def test_classes_keep_their_labels_when_a_new_folder_sorts_before_them(named, tmp_path):
    checkpoint, three, _ = named
    assert names_in(checkpoint) == ["a", "c"]
    with pytest.raises(CheckpointError, match=r"lacks 1 of the 3 classes .* 'b'; .*NEW --grow 1"):
        train(three, tmp_path / "refused", EPOCHS + 2, checkpoint)
    grown = tmp_path / "grown"
    change(checkpoint, grown, "--grow", 1)
    assert names_in(grown) == ["a", "c", ""]
    losses, last = train(three, tmp_path / "saved", EPOCHS + 2, grown)
    assert names_in(last) == ["a", "c", "b"]
    by_number = with_label_file(three, tmp_path / "numbers", {"a": 0, "b": 2, "c": 1})
    assert train(by_number, tmp_path / "again", EPOCHS + 2, grown)[0] == losses
    assert names_in(tmp_path / "again" / str(EPOCHS + 1)) == ["a", "c", ""]  # labels were numbers
    # Once classes have names, the names are kept.
    train(three, tmp_path / "later", EPOCHS + 3, last)
    assert names_in(tmp_path / "later" / str(EPOCHS + 2)) == ["a", "c", "b"]
    assert predicted(three, last) == {"a": 0, "c": 1, "b": 2}


def test_a_class_without_images_has_no_name_in_a_tar_and_the_run_resumes(trained, tmp_path):
    two = class_folders(trained[0], tmp_path / "two", {0: "a", 2: "c"})
    (two / "b").mkdir()
    _, checkpoint = train(two, tmp_path / "saved", EPOCHS)
    with tarfile.open(tmp_path / "two.tar", "w") as archive:
        for number, image in enumerate(sorted(two.glob("*/*"))):
            fields = {"label": {"a": 0, "c": 2}[image.parent.name], "class_name": image.parent.name}
            (tmp_path / "fields.json").write_text(json.dumps(fields))
            archive.add(image, f"{number}{image.suffix}")
            archive.add(tmp_path / "fields.json", f"{number}.json")
    train(tmp_path / "two.tar", tmp_path / "again", EPOCHS + 1, checkpoint)
    assert names_in(tmp_path / "again" / str(EPOCHS)) == ["a", "b", "c"]


def predicted(folders, checkpoint):
    ins = Entry()
    ins.set_model(Plain())
    ins.set_dataset_dir(folders)
    ins.set_checkpoint_dir(checkpoint)
    prediction = ins.predict()
    names = [Path(name).parent.name for name in prediction.names]
    return dict(zip(names, prediction.labels.tolist(), strict=True))


def test_class_names_follow_their_classes_through_every_change(named, tmp_path):
    checkpoint, three, _ = named
    change(checkpoint, tmp_path / "grown", "--grow", 2)
    assert names_in(tmp_path / "grown") == ["a", "c", "", ""]
    for what, text, expected in [
        ("reorder", "3\n0\n2\n1\n", ["", "a", "", "c"]),
        ("drop", "0\n2\n", ["c", ""]),
        ("merge", "2 1\n", ["a", "c", ""]),
    ]:
        (tmp_path / "list.txt").write_text(text)
        change(tmp_path / "grown", tmp_path / what, f"--{what}", tmp_path / "list.txt")
        assert names_in(tmp_path / what) == expected
    assert predicted(three, tmp_path / "reorder") == {"a": 1, "c": 3, "b": 0}


def test_a_warm_start_matches_class_weights_by_name(named, trained, tmp_path, capsys):
    checkpoint, _, two = named
    (tmp_path / "list.txt").write_text("1\n0\n")
    change(checkpoint, tmp_path / "swapped", "--reorder", tmp_path / "list.txt")
    from_swapped = losses_of_warm_start(two, tmp_path / "a", tmp_path / "swapped")
    assert from_swapped == losses_of_warm_start(two, tmp_path / "b", checkpoint)
    other = class_folders(trained[0], tmp_path / "other", {0: "a", 2: "d"})
    capsys.readouterr()
    losses_of_warm_start(other, tmp_path / "c", checkpoint)
    assert "head.weight has classes with other names" in capsys.readouterr().out


def losses_of_warm_start(dataset, save_dir, checkpoint):
    train(dataset, save_dir, 1, pretrained=checkpoint)
    return losses_of(save_dir)


_MEASURED = """
import sys, numpy as np
from plsc.checkpoint.classes import change_classes
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
before = peak()
rng = np.random.default_rng(0)
source, target, classes = sys.argv[1], sys.argv[2], int(sys.argv[3])
change_classes(source, target + "-merged", merge={c: classes - 1 - c % 5 for c in range(1000)})
change_classes(source, target, reorder=rng.permutation(classes))
print((peak() - before) // 1024)
"""


def test_a_head_of_120_mb_needs_little_memory_and_a_kill_leaves_nothing(tmp_path):
    classes = 30_000
    source, rows = tmp_path / "5", torch.randn(classes, 512)
    tensors = {"head.weight": rows, "rows.weight.momentum_buffer": rows}
    write_checkpoint(source, tensors, {}, [classes // 2, classes])
    new = tmp_path / "6"
    environment = clean_environment()

    command = [sys.executable, "-m", "plsc.cli", "checkpoint", "classes"]
    killed = subprocess.Popen([*command, source, new, "--grow", "15000"], env=environment)
    while killed.poll() is None:
        written = [path.stat().st_size for path in tmp_path.glob(".6.plsc-partial/*")]
        if sum(written) > 2**23:
            os.kill(killed.pid, signal.SIGKILL)
            break
        time.sleep(0.001)
    assert killed.wait() == -signal.SIGKILL, "it was over before it could be killed"
    assert not new.exists()
    verify(source)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".6.plsc-partial", "5"]

    command = [sys.executable, "-c", _MEASURED, source, new, str(classes)]
    measured = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert int(measured.stdout) < 80, f"{measured.stdout} MiB"
    assert verify(new).class_num == classes
    assert read_manifest(f"{new}-merged").class_num == classes - 1000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["5", "6", "6-merged"]
