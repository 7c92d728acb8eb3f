"""plsc profile: what it prints and writes, and that it leaves nothing behind but that."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from plsc.cli import main
from plsc.errors import OptionError
from plsc.spans import PREFIX
from tests.distributed.launch import run_ranks
from tests.images import write_dataset
from tests.resuming import Drawing
from tests.system import small_entry

JOB = Path(__file__).resolve().parents[1] / "distributed" / "job.py"
pytestmark = pytest.mark.slow
PHASES = {
    "data", "synchronise ranks", "copy to device", "forward", "head", "logits", "backward",
    "clip gradients", "optimizer", "update class weights", "log", "other",
}  # fmt: skip
OF_RANKS = {"gather batch", "sum over ranks", "scatter embedding gradient", "batch norm over ranks"}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("profile") / "set", classes=6, per_class=8)


def entry(dataset, save_dir):
    return small_entry.entry(dataset, save_dir, set_num_workers=0, set_with_test=True)


def events_of(path):
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def losses(save_dir):
    entries = map(json.loads, (save_dir / "metrics.jsonl").read_text().splitlines())
    return [entry["loss"] for entry in entries if "loss" in entry]


def test_three_ranks_have_a_table_and_a_trace_each_and_nothing_is_saved(dataset, tmp_path):
    done = run_ranks(
        JOB, 3, str(dataset), str(tmp_path / "saved"), "verb=profile", "arguments=(2,)",
        "set_sync_batch_norm=True", "set_clip_norm=1.0", "set_head_offload=True", cwd=tmp_path,
    )  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile"]
    folder = tmp_path / "profile"
    assert sorted(path.name for path in folder.iterdir()) == [
        "operators-rank0.txt", "operators-rank1.txt", "operators-rank2.txt", "profile.json",
        "profile.txt", "trace-rank0.json.gz", "trace-rank1.json.gz", "trace-rank2.json.gz",
    ]  # fmt: skip
    told = json.loads((folder / "profile.json").read_text())
    assert (folder / "profile.txt").read_text() in done.stdout
    assert done.stdout.count("ms per step") == 1  # by one rank
    phases = {phase["name"]: phase for phase in told["phases"]}
    # All is there: the network is small, but each phase takes its microseconds.
    assert phases.keys() == {*PHASES, *OF_RANKS}
    milliseconds = sum(phase["milliseconds"] for phase in told["phases"])
    assert milliseconds == pytest.approx(told["traced_step"])
    assert sum(phase["share"] for phase in told["phases"]) == pytest.approx(1)
    for phase in told["phases"]:
        assert phase["least"] <= phase["milliseconds"] <= phase["most"]
    assert told["ranks"] == 3
    assert min(told["step"], told["images_per_second"]) > 0
    assert told["memory"] > 2**20
    for rank in range(3):
        names = [event.get("name") for event in events_of(folder / f"trace-rank{rank}.json.gz")]
        # The batch; class rows on their way, there and back, and their momentum.
        assert names.count(PREFIX + "copy to device") == 4 * 2
        assert names.count(PREFIX + "update class weights") == 2
        assert names.count(PREFIX + "backward") == 2
        assert "gloo:all_reduce" in names
        operators = (folder / f"operators-rank{rank}.txt").read_text()
        assert "aten::convolution_backward" in operators


def test_the_command_profiles_what_the_options_of_train_say(dataset, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    for name in ("trace-rank7.json.gz", "operators-rank7.txt", "notes.txt"):
        (tmp_path / "out" / name).touch()  # an earlier profile's, and somebody's
    flags = {
        "data.dataset_dir": dataset, "model.name": "SmallResNet", "model.image_shape": "[3,16,16]",
        "model.emb_size": 8, "train.batch_size": 12, "train.micro_batches": 2, "data.num_workers": 0,
        "checkpoint.save_dir": tmp_path / "saved", "steps": 2, "output": tmp_path / "out",
        "head.loss_type": "arcface",
    }  # fmt: skip
    assert main(["profile", *(f"--{name}={value}" for name, value in flags.items())]) == 0
    out = capsys.readouterr().out
    assert "2 steps on 1 rank (cpu)" in out
    assert not any(name in out for name in OF_RANKS)
    assert "update class weights" not in out  # a dense head has none
    assert "aten::convolution_backward" in out
    assert not (tmp_path / "saved").exists()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "notes.txt", "operators-rank0.txt", "profile.json", "profile.txt", "trace-rank0.json.gz",
    ]  # fmt: skip
    for wrong in ("--steps=0", "--steps=x", f"--output={dataset / 'label.txt'}", "--output="):
        assert main(["profile", f"--data.dataset_dir={tmp_path}", wrong]) == 1
        assert capsys.readouterr().err.count("\n") == 1


def test_training_after_a_profile_is_as_without_it_and_a_model_of_ones_own_is_untouched(dataset, tmp_path):
    for name in ("plain", "after"):
        ins = entry(dataset, tmp_path / name)
        torch.manual_seed(5)
        model = Drawing()
        ins.set_model(model)
        if name == "after":
            before = {key: value.clone() for key, value in model.state_dict().items()}
            options = ins.options.as_dict()
            ins.profile(1, tmp_path / "profile")
            assert ins.options.as_dict() == options
            assert all(torch.equal(before[key], v) for key, v in model.state_dict().items())
        ins.train()
    assert losses(tmp_path / "plain") == losses(tmp_path / "after")


def test_a_generator_and_several_heads_are_profiled(dataset, tmp_path):
    ins = entry(dataset, tmp_path / "run")
    ins.set_class_num(4)
    ins.set_num_workers(1)

    def reader():
        for number in range(30):  # two and a half batches: epochs end in between
            yield np.full((3, 16, 16), number, np.float32), number % 4

    ins.train_reader = reader
    assert ins.profile(2, tmp_path / "reader").of("data") > 0

    ins = entry(dataset, tmp_path / "run")
    ins.add_dataset("one", dataset)
    ins.add_dataset("two", dataset, loss_type="dist_softmax")
    result = ins.profile(2, tmp_path / "heads")
    assert result.of("head") > 0
    assert result.of(*(phase.name for phase in result.phases)) == pytest.approx(1)


def test_what_fails_in_the_middle_stops_recording_and_is_told(dataset, tmp_path):
    ins = entry(dataset, tmp_path / "run")
    ins.set_class_num(4)

    def reader():
        for number in range(12 * 9):  # fails in the second traced step
            yield np.zeros((3, 16, 16), np.float32), number % 4
        raise RuntimeError("no more")

    ins.train_reader = reader
    with pytest.raises(RuntimeError, match="no more"):
        ins.profile(2, tmp_path / "out")
    assert not torch.autograd.profiler._is_profiler_enabled
    folder = tmp_path / "folders"  # where each folder is a class
    for label in "ab":
        (folder / label).mkdir(parents=True)
        for name in ("0_0.png", "0_1.png"):
            (folder / label / name).write_bytes((dataset / "images" / name).read_bytes())
    ins = entry(folder, tmp_path / "run")
    with pytest.raises(OptionError, match="every folder is a class"):
        ins.profile(1, folder / "out")
    assert not (folder / "out").exists()


@pytest.mark.parametrize("output", ["x" * 300, "x\0y", "", None, "/dev/full", "/dev/full/x"])
def test_an_output_that_is_no_folder_is_refused_in_a_line(output, dataset, tmp_path):
    with pytest.raises(OptionError, match="output is ") as caught:
        entry(dataset, tmp_path / "run").profile(1, output)
    assert "\n" not in str(caught.value)


class Slow(torch.utils.data.Dataset):
    """Takes its time for each image."""

    def __len__(self):
        return 8 * 47

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.full((3, 16, 16), index % 5, dtype=torch.float32), index % 5


def test_a_run_that_waits_for_its_data_is_told_once_what_to_try(tmp_path, capsys):
    ins = entry("unused", tmp_path / "run")
    ins.set_model(Tiny())
    ins.set_train_batch_size(8)
    ins.train_reader = Slow()
    ins.set_log_period(1000)
    ins.train()
    said = [line for line in capsys.readouterr().out.splitlines() if ") for its batch, with " in line]
    assert len(said) == 1
    assert "0 workers and " in said[0]
    assert "try set_num_workers(" in said[0]


class Tiny(Drawing):
    """Takes no time worth speaking of."""

    def build_network(self, input, label, is_train=True):
        return self.fc(torch.nn.functional.avg_pool2d(input, 4).flatten(1).repeat(1, 2))
