"""The snippets of the PLSC guide run as they are written, but for the lines with a comment."""

from __future__ import annotations

import getpass
import inspect
import re
import subprocess
import sys
from base64 import b64encode
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from plsc import Entry
from plsc.checkpoint.manifest import checkpoints_in
from plsc.data.sources import open_source
from plsc.errors import DataError, OptionError
from plsc.models.resnet import SmallResNet
from plsc.storage.store import Store
from plsc.utils import base64_reader
from tests.images import write_dataset, write_pair_file
from tests.system.small_entry import entry, shrink_defaults

ROOT = Path(__file__).parents[2]
SMALL = {
    "model.name": "SmallResNet",
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
READER = """
import random
import os
from PIL import Image
import numpy as np  # the guide forgets this import
from plsc.utils.jpeg_reader import get_train_image_list  # and this one

def arc_train(data_dir):
    label_file = os.path.join(data_dir, 'label.txt')
    train_image_list = None
    with open(label_file, 'r') as f:
        train_image_list = f.readlines()

    train_image_list = get_train_image_list(data_dir)

    def reader():
        for j in range(len(train_image_list)):
            path, label = train_image_list[j]
            path = os.path.join(data_dir, path)
            img = Image.open(path)
            if random.randint(0, 1) == 1:
                img = img.transpose(Image.FLIP_LEFT_RIGHT)
            if img.mode != 'RGB':
                img = img.convert('RGB')
            img = np.array(img).astype('float32').transpose((2, 0, 1))
            yield img, label

    return reader
"""
CUSTOM_DATA = """
import argparse
import batching as paddle  # import paddle
from plsc import Entry
import reader

parser = argparse.ArgumentParser()
parser.add_argument("--data_dir",
                    type=str,
                    default="./data",
                    help="Directory for datasets.")
args = parser.parse_args()

def main():
    ins = Entry()
    ins.set_class_num(6)  # PLSC's default is 85742
    ins.train_reader = paddle.batch(reader.arc_train(args.data_dir), ins.train_batch_size)
    result = ins.train()
    assert result.steps == 4

if __name__ == "__main__":
    main()
"""
BATCHING = """
def batch(reader, batch_size):
    def batched():
        samples = list(reader())
        for first in range(0, len(samples), batch_size):
            yield samples[first : first + batch_size]
    return batched
"""
PARTITION = "tools/process_base64_files.py --data_dir=./dataset --file_list=file_list.txt --nranks=8"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Work in a folder with train_data; small defaults, as the snippets set no sizes."""
    write_dataset(tmp_path / "train_data", classes=6, per_class=4)
    write_pair_file(tmp_path / "train_data/lfw.bin", tmp_path / "train_data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLSC_CACHE_DIR", str(tmp_path / "cache"))
    shrink_defaults(monkeypatch, SMALL)
    return tmp_path


def run(snippet, **replaced):
    for old, new in replaced.items():
        assert old in snippet
        snippet = snippet.replace(old, new)
    names = {"__name__": "__main__"}
    exec(compile(snippet, "snippet", "exec"), names)
    return names


@pytest.mark.slow
def test_parameters_are_uploaded_and_downloaded(hdfs, folder):
    name = hdfs.url.removeprefix("hdfs://")
    replaced = {"you_hdfs_addr": name, "name,passwd": f"{getpass.getuser()},passwd"}
    run(UPLOAD, **replaced)
    store = Store(f"{hdfs.url}/user/{getpass.getuser()}/some_dir")
    assert [one for one, _ in checkpoints_in(store)] == ["0", "1"]

    newest = (folder / "saved_model/1/manifest.json").read_bytes()
    (folder / "saved_model").rename(folder / "elsewhere")
    (folder / "saved_model").mkdir()  # "make sure that the folder ./saved_model exists"
    assert run(DOWNLOAD.replace("ins.train()", "result = ins.train()"), **replaced)["result"].epochs == 2
    assert (folder / "saved_model/manifest.json").read_bytes() == newest

    for ins, checkpoint in ((Entry(), "some_dir/0"), (Entry(), "nothing")):
        ins.set_checkpoint_dir(str(folder / "one"))
        ins.set_hdfs_info(name, f"{getpass.getuser()},passwd", fs_checkpoint_dir=checkpoint)
        if checkpoint == "nothing":
            with pytest.raises(Exception, match="nothing is not a checkpoint"):
                ins.train()
        else:
            assert ins.train().steps == 4


@pytest.mark.parametrize(
    ("fs_name", "directory", "url"),
    [
        ("you_hdfs_addr", "some_dir", "hdfs://you_hdfs_addr/user/name/some_dir"),
        ("hdfs://host:9000/", "runs/a", "hdfs://host:9000/user/name/runs/a"),
        ("s3://bucket", "runs/a", "s3://bucket/runs/a"),
        ("host", "s3://bucket/a", "s3://bucket/a"),
    ],
)
def test_a_relative_folder_is_below_the_home_of_the_user_on_hdfs(fs_name, directory, url):
    ins = Entry()
    ins.set_hdfs_info(fs_name, "name,passwd", directory, fs_checkpoint_dir=directory)
    assert (ins.upload_dir, ins.download_dir, ins.hdfs_user) == (url, url, "name")


def test_base64_files_are_partitioned_and_read(folder):
    (folder / "tools").symlink_to(ROOT / "tools")
    source = open_source(folder / "train_data")
    dataset = folder / "dataset"
    dataset.mkdir()
    for part in range(1, 11):
        lines = [source[index] for index in range(part - 1, len(source), 10)]
        text = "".join(f"{b64encode(image).decode()}\t{label}\n" for image, label in lines)
        (dataset / f"dataset.part{part}").write_text(text)
    (dataset / "file_list.txt").write_text("".join(f"dataset.part{part}\n" for part in range(1, 11)))
    # --output_name: PLSC's names of the files. They are in partition_8, as plsc keeps the inputs.
    subprocess.run([sys.executable, *PARTITION.split(), "--output_name=base64_rank_"], check=True)
    parts = dataset / "partition_8"
    names = [f"base64_rank_{rank}" for rank in range(8)]
    assert (parts / "file_list.txt").read_text().split() == names
    assert {len((parts / name).read_text().splitlines()) for name in names} == {3}
    shape = {"image_shape": (3, 16, 16)}
    first = list(base64_reader.train(parts, "file_list.txt", 6, **shape)(rank=7, ranks=8))
    second = list(base64_reader.train(parts, 6, **shape)(rank=7, ranks=8))
    assert [label for _, label in first] == [label for _, label in second]
    assert len(first) == 3


def test_custom_data(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "argv", ["train.py", "--data_dir", "train_data"])
    (folder / "batching.py").write_text(BATCHING)
    line = "            yield img, label\n"
    fixed = "            img = (img - 127.5) / 128  # PLSC trained on 0..255 here\n"
    for code, error in ((READER, r"\(image - 127.5\) / 128"), (READER, None)):
        (folder / "reader.py").write_text(code if error else code.replace(line, fixed + line))
        for name in ("reader", "batching"):
            sys.modules.pop(name, None)
        if error:
            with pytest.raises(DataError, match=error):
                run(CUSTOM_DATA)
        else:
            run(CUSTOM_DATA)


class Samples(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((3, 16, 16), index / 24), index % 4


class Stream(IterableDataset):
    def __iter__(self):
        yield from ((image.numpy(), label) for image, label in map(Samples().__getitem__, range(24)))


@pytest.mark.parametrize(
    "make",
    [
        Samples,
        Stream,
        lambda: DataLoader(Samples(), batch_size=5, num_workers=1, drop_last=True),
        lambda: lambda: DataLoader(Samples(), batch_size=7),
    ],
    ids=["dataset", "stream", "workers", "function"],
)
def test_a_dataset_or_loader_of_torch_is_a_reader(make, folder):
    ins = entry(folder, folder / "run", set_class_num=4, set_train_image_num=None)
    ins.train_reader = make()
    assert ins.train().steps == 2


def test_a_distributed_sampler_is_refused(folder):
    sampler = torch.utils.data.distributed.DistributedSampler(Samples(), num_replicas=2, rank=0)
    ins = entry(folder, folder / "run", set_class_num=4)
    ins.train_reader = DataLoader(Samples(), sampler=sampler)
    with pytest.raises(OptionError, match="DistributedSampler"):
        ins.train()


PAGE = (ROOT / "docs/migrate.md").read_text().partition("### HDFS")[0]
SIGNATURES = re.findall(r"`(set_\w+)\(([^)`]*)\)`", PAGE)
IMAGE = {"name": "image", "shape": [-1, 3, 32, 32], "dtype": "float32"}
LABEL = {"name": "label", "shape": [-1], "dtype": "int64"}
VALUES = {
    "set_model": SmallResNet(8), "set_input_info": [IMAGE, LABEL], "set_optimizer": "adamw",
    "set_val_targets": "lfw,cfp_fp", "set_loss_type": "arcface", "set_model_parallel": True,
    "set_model_name": "ResNet101", "set_sample_ratio": 0.1, "set_image_shape": [3, 32, 32],
    "set_step_boundaries": [10, 20], "set_lr_decay_factor": 0.2, "set_mixed_precision": True,
    "set_calc_acc": True, "set_with_test": False, "set_hdfs_info": "hdfs://host",
}  # fmt: skip


@pytest.mark.parametrize(("name", "parameters"), SIGNATURES, ids=[name for name, _ in SIGNATURES])
def test_the_setters_of_plsc_have_its_parameters(name, parameters):
    original = inspect.signature(eval(f"lambda {parameters}: None")).parameters
    ours = inspect.signature(getattr(Entry, name)).parameters
    for one in original.values():
        assert one.default in (inspect.Parameter.empty, ours[one.name].default)
    value = VALUES.get(name, "./folder" if "directory" in original else 3)
    required = {one.name for one in original.values() if one.default is inspect.Parameter.empty}
    given = dict.fromkeys(required, value) | ({"fs_ugi": "me,secret"} if "fs_ugi" in required else {})
    ins = Entry()
    getattr(ins, name)(**given)
    if name.removeprefix("set_") in original and required and name != "set_model":
        assert getattr(ins, name.removeprefix("set_")) == value


OTHER_TABLES = (ROOT / "docs/migrate.md").read_text().partition("## From insightface")[2]
BASE_CONFIG = """margin_list network resume save_all_states output embedding_size sample_rate
interclass_filtering_threshold fp16 batch_size optimizer lr momentum weight_decay verbose frequent dali
gradient_acc seed num_workers wandb_key suffix_run_name using_wandb wandb_entity wandb_project
wandb_log_all save_artifacts wandb_resume"""  # the keys of arcface_torch's configs/base.py
CALLS = re.findall(r"`((?:set|add)_\w+\([^`]+\))`", OTHER_TABLES)
ARGUMENTS = {
    "directory": "./folder", "size": 512, "ratio": 0.1, "batch_size": 8, "num": 2, "lr": 0.1, "seed": 1,
    "global_batch": 512, "f": print, "store": torch.distributed.HashStore(),
}  # fmt: skip


@pytest.mark.parametrize("call", sorted(set(CALLS)))
def test_the_calls_in_the_other_tables_are_valid(call):
    eval(f"ins.{call}", {"ins": Entry(), **ARGUMENTS})


def test_all_setters_of_plsc_and_each_key_of_arcface_torchs_base_config_are_listed():
    assert len({name for name, _ in SIGNATURES}) == 30
    listed = re.findall(r"\w+", OTHER_TABLES.partition("## From AdaFace")[0])
    assert set(BASE_CONFIG.split()) <= set(listed)


def test_the_loss_keeps_its_prefix_and_takes_margins():
    ins = Entry()
    ins.set_model_parallel(flag=False)
    assert ins.loss_type == "arcface"
    ins.set_model_parallel(flag=True)
    ins.set_loss_type(loss_type="cosface", margin1=1.0, margin2=0.0, margin3=0.4)
    assert (ins.loss_type, ins.margin) == ("dist_cosface", 0.4)
    ins.set_loss_type("arcface", 1.0, 0.3, 0.2)
    assert ins.loss_type == "dist_combined"
    assert ins.options.get("head.loss_arguments") == {"margins": [1.0, 0.3, 0.2]}
    for wrong, noun in (
        (lambda: ins.set_loss_type("softmax", margin2=0.5), "margin3"),
        (lambda: ins.set_distfc_attr(param_attr={"learning_rate": 2}), "set_head_lr_factor"),
        (lambda: ins.set_distfc_attr(bias_attr=True), "bias"),
        (lambda: ins.set_input_info([{**LABEL, "name": "title_ids"}, LABEL]), "inputs"),
    ):
        with pytest.raises(OptionError, match=noun):
            wrong()
