"""Top-1 and top-5 accuracy on held-out labelled images, against a plain computation."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from plsc import load_network
from plsc.checkpoint import load_weights
from plsc.errors import DataError, OptionError
from plsc.evaluate.embed import ClassificationResult
from tests.distributed.launch import run_ranks
from tests.images import class_folders, write_dataset, write_pair_file
from tests.system.small_entry import entry

pytestmark = pytest.mark.slow
CLASSES = "abcdefghij"


def sort_into_folders(root, classes, per_class, seed):
    """Write a folder of images per class; a seed gives each class its pattern, so other images are noise."""
    flat = write_dataset(root / "flat", len(classes), per_class, seed=seed)
    return class_folders(flat, root / "named", dict(enumerate(classes)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A dataset of ten named classes, and held-out images of five of them, an odd number."""
    root = tmp_path_factory.mktemp("held-out")
    train = sort_into_folders(root / "train", CLASSES, per_class=6, seed=0)
    val = sort_into_folders(root / "val", "cdgij", per_class=3, seed=1)
    for name in "cg":  # images like those of training
        shutil.copy(train / name / "0.png", val / name / "same.png")
    return train, val


def plain_accuracy(checkpoint, val):
    """Return the result on a folder by the formula, in one process."""
    files = sorted(val.glob("*/*.png"))
    pixels = np.stack([np.array(Image.open(file)) for file in files])
    labels = torch.tensor([CLASSES.index(file.parent.name) for file in files])
    with torch.no_grad():
        images = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() - 127.5) / 128
        embeddings = load_network(checkpoint)(images)
    weight = load_weights(checkpoint, "class_weights")["weight"]
    cosines = torch.nn.functional.normalize(embeddings) @ torch.nn.functional.normalize(weight).T
    hits = cosines.argsort(dim=1, descending=True)[:, :5] == labels[:, None]
    count = len(files)
    return ClassificationResult(int(hits[:, 0].sum()) / count, int(hits.sum()) / count, count)


def test_accuracy_while_training_and_in_test_is_that_of_the_saved_weights(folders, tmp_path, messages):
    train, val = folders
    settings = {"set_val_dir": val, "set_with_test": True}
    ins = entry(
        train, tmp_path / "run", **settings, set_train_epochs=3, set_test_period=3, set_monitor="val top1",
        set_calc_acc=True,
    )  # fmt: skip
    seen = []
    ins.add_callback(lambda context: seen.append((context.step, context.metric("val top1"))), "evaluated")
    result = ins.train()
    assert [step for step, _ in seen] == [3, 5, 6, 9, 10, 12, 15]
    expected = plain_accuracy(result.checkpoint, val)
    assert result.evaluation == {"val": expected}
    assert (seen[-1][1], expected.count) == (expected.top1, 17)
    assert result.best_model_score == max(value for step, value in seen if step % 5 == 0)
    entries = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [one["eval"]["val"] for one in entries if "eval" in one][-1] == expected.as_dict()
    assert any(f"val: top-1 {expected.top1:.4f} top-5 {expected.top5:.4f} " in text for text in messages)
    logged = [one for one in entries if "loss" in one]
    assert all(0 <= one["accuracy"] <= one["accuracy_top5"] <= 1 for one in logged)
    assert any(f" top-5 {logged[-1]['accuracy_top5']:.3f} " in text for text in messages)

    later = entry(train, tmp_path / "other", set_checkpoint_dir=result.checkpoint, **settings)
    assert later.test() == result.evaluation
    later.set_limit_test_batches(2)
    later.set_test_batch_size(3)
    assert later.test()["val"].count == 6


def test_two_ranks_count_each_image_once_and_test_on_any_ranks(folders, tmp_path):
    train, val = folders
    run = [str(train), str(tmp_path / "run"), f"set_val_dir={str(val)!r}"]
    test = [*run, "set_checkpoint_dir='last'", "verb=test"]
    job = Path(__file__).parents[1] / "distributed" / "job.py"
    done = run_ranks(job, 2, *run, "set_test_batch_size=4", "--", *test)
    done = [*re.findall(r"ClassificationResult\(.*?\)", done.stdout + run_ranks(job, 3, *test).stdout)]
    assert len(done) == 2 * 2 + 3
    assert set(done) == {repr(plain_accuracy(tmp_path / "run" / "1", val))}


def test_sub_centres_softmax_and_other_row_types_are_loaded_for_test(folders, tmp_path):
    train, val = folders
    for name, settings in {
        "sub": {"set_sub_centers": 2, "set_row_dtype": "bfloat16", "set_val_dir": val},
        "softmax": {"set_loss_type": "softmax", "set_val_dir": val},
    }.items():
        result = entry(train, tmp_path / name, set_with_test=True, **settings).train()
        later = entry(train, tmp_path / "later", set_checkpoint_dir=result.checkpoint, set_val_dir=val)
        assert later.test() == result.evaluation


def test_classes_that_training_lacks_are_refused_before_it(folders, tmp_path):
    train, val = folders
    flat, numbered = train.parent / "flat", tmp_path / "numbered"
    shutil.copytree(val.parent / "flat", numbered)
    (numbered / "label.txt").write_text("images/0_0.png 3\nimages/1_0.png 10\n")
    named = tmp_path / "named"
    shutil.copytree(val, named)
    (named / "g").rename(named / "q")

    def refused(dataset, place, message, error=DataError, **settings):
        ins = entry(dataset, tmp_path / "run", set_with_test=True, set_val_dir=place, **settings)
        with pytest.raises(error, match=message):
            ins.train()

    refused(flat, numbered, r"label 10 at images/1_0\.png .*1 of 2")
    refused(train, named, r"'q' at q/0\.png .*4 of 17")
    refused(flat, val, "names")
    write_pair_file(flat / "val.bin", flat)
    refused(flat, flat, "'val'", OptionError, set_val_targets="val")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("digits", [1, 4])  # 0010 may have lost its zeros in a table
def test_labels_that_may_be_numbers_or_names_of_classes_are_refused(folders, tmp_path, digits, messages):
    train, _ = folders
    flat = train.parent / "flat"
    rows = [f"images/{n}_{k}.png,{10 * n + 10:0{digits}}" for n in range(10) for k in range(6)]
    (flat / "train.csv").write_text("\n".join(["path,class_name", *rows]))
    for label, is_clear in ((3, True), (30, False)):
        (flat / "val.csv").write_text(f"path,label\nimages/2_0.png,{label}\n")
        ins = entry(
            flat / "train.csv", tmp_path / str(label), set_with_test=True, set_val_dir=flat / "val.csv"
        )
        with contextlib.nullcontext() if is_clear else pytest.raises(DataError, match=r"label 30 .*name"):
            ins.train()
            assert any("class numbers" in text for text in messages)
