"""Asynchronous saving, and saving to real object stores, in real torchrun jobs."""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from unittest import mock

import pytest

from plsc import Entry
from plsc.checkpoint import list_checkpoints
from plsc.checkpoint.manifest import checkpoints_in
from plsc.checkpoint.remote import verify
from plsc.cli import main
from plsc.errors import CheckpointError, NotSavedError, OptionError
from plsc.storage.store import Store
from plsc.train import folder as directories
from plsc.train import saving
from tests.distributed.job import small_entry
from tests.distributed.launch import Ranks, run_ranks
from tests.distributed.test_interruption import wait_for
from tests.resuming import different

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import kill

JOB = Path(__file__).with_name("job.py")
PASSWORD = "swordfish-7"
pytestmark = pytest.mark.slow


def local_run(cache: Path) -> Path:
    """Return the local folder of a run at a URL."""
    return next((cache / "runs").glob("*/run"))


def test_a_run_in_a_store_resumes_on_another_machine_with_the_same_bits(dataset, s3, tmp_path):
    store_url = f"{s3}/run"
    whole = tmp_path / "whole"
    here, there = f"PLSC_CACHE_DIR={tmp_path / 'a'}", f"PLSC_CACHE_DIR={tmp_path / 'b'}"
    keep = "set_max_last_checkpoint_num=1", "set_save_top_k=0", "set_save_every_n_steps=5"
    load = f"set_checkpoint_dir={store_url + '/1'!r}"
    done = run_ranks(
        JOB, 2,
        str(dataset), str(whole), "set_train_epochs=4", "--",
        str(dataset), store_url, here, *keep, "--",
        str(dataset), store_url, there, load, *keep, "set_train_epochs=4",
    )  # fmt: skip
    assert " MB/s)" in done.stdout
    assert re.search(r"uploaded .*to s3://\w+/run \(rank 0 of 2\): .*MB, .*/s", done.stdout)
    assert not local_run(tmp_path / "b").samefile(local_run(tmp_path / "a"))
    assert different(local_run(tmp_path / "b") / "3", whole / "3") == []
    store = Store(store_url)
    assert [manifest.epoch for _, manifest in checkpoints_in(store)] == [2, 4]  # resumed, newest
    assert {"metrics.jsonl", "loss.png"} <= set(store.names())


def test_set_hdfs_info_downloads_and_uploads_and_never_stores_the_password(
    dataset, tmp_path, monkeypatch, capfd, hdfs
):
    monkeypatch.setenv("PLSC_CACHE_DIR", str(tmp_path / "cache"))

    def info(checkpoint: str | None) -> tuple[str, str, str, str | None]:
        return hdfs.url, f"{getpass.getuser()},{PASSWORD}", "/runs/a", checkpoint

    first, second = (
        [str(dataset), str(tmp_path / name), f"set_hdfs_info*={info(checkpoint)}"]
        for name, checkpoint in (("first", None), ("second", "/runs/a/1"))
    )
    fetch = f"set_checkpoint_dir={str(tmp_path / 'fetched')!r}"
    done = run_ranks(JOB, 2, *first, "--", *second, fetch, "set_train_epochs=4", timeout=200)
    assert (tmp_path / "fetched" / "manifest.json").is_file()
    store = Store(f"{hdfs.url}/runs/a")
    assert [name for name, _ in checkpoints_in(store)] == ["0", "1", "2", "3"]
    assert verify(f"{hdfs.url}/runs/a/3").epoch == 4

    hdfs.kill()
    third = small_entry(dataset, tmp_path / "third")
    third.set_hdfs_info(*info(None))
    monkeypatch.setattr(directories, "START_SECONDS", 3.0)
    with pytest.raises(CheckpointError, match=f"{hdfs.url}/runs/a") as down:
        third.train()
    everything = [done.stdout, done.stderr, str(down.value), *capfd.readouterr()]
    everything += [path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(PASSWORD in text for text in everything)


def test_a_folder_is_locked_for_a_second_run_until_the_first_is_killed(dataset, tmp_path):
    save_dir = tmp_path / "run"
    keep = "set_max_last_checkpoint_num=-1"
    first = Ranks(JOB, 0, str(dataset), str(save_dir), "set_train_epochs=1000", keep)
    wait_for((save_dir / "0").exists, first)
    os.kill(first.pid, signal.SIGSTOP)  # it need not train on
    second = small_entry(dataset, save_dir)
    second.set_checkpoint_dir(save_dir / "0")
    with pytest.raises(CheckpointError, match=rf"another run \(process {first.pid} on"):
        second.train()
    first.kill()
    path, manifest = list_checkpoints(save_dir)[-1]
    third = small_entry(dataset, save_dir)
    third.set_checkpoint_dir(path)
    third.set_train_epochs(1000)
    third.set_train_steps(manifest.step + 1)
    assert third.train().steps == manifest.step + 1


def test_saving_beside_training_changes_no_bit(dataset, tmp_path, monkeypatch):
    with monkeypatch.context() as full:
        full.setattr(saving, "available_memory", lambda: 0)  # training then waits for each save
        small_entry(dataset, tmp_path / "apart").train()
    beside = small_entry(dataset, tmp_path / "beside")
    beside.set_save_every_n_steps(2)
    beside.train()
    assert different(tmp_path / "beside" / "1", tmp_path / "apart" / "1") == []


def test_a_step_save_at_the_last_step_is_not_saved_twice_and_offloaded_class_weights_are_not_copied_for_it(
    dataset, tmp_path, capsys
):
    ins = small_entry(dataset, tmp_path / "run")
    ins.set_save_every_n_steps(5)
    ins.set_train_steps(10)
    ins.set_head_offload(True)
    result = ins.train()
    assert result.checkpoint == tmp_path / "run/0-step10"
    said = capsys.readouterr().out.splitlines()
    lines = [line.split(":")[0] for line in said if line.startswith("saved ")]
    assert lines == [f"saved {tmp_path}/run/0-step5", f"saved {tmp_path}/run/0-step10"]
    assert len([line for line in said if "class weights are not copied" in line]) == 1
    assert verify(result.checkpoint).step == 10


def test_on_a_full_disk_the_command_exits_with_3_and_the_older_checkpoints_are_whole(dataset, tmp_path):
    small_entry(dataset, tmp_path / "run").train()
    script = tmp_path / "limited.py"
    script.write_text(
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))\n"
        "from plsc.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    flags = [
        "--data.dataset_dir", dataset, "--data.num_workers", "0", "--train.epochs", "3",
        "--checkpoint.save_dir", tmp_path / "run", "--checkpoint.load_dir", "last",
    ]  # fmt: skip
    done = run_ranks(script, 2, "train", *map(str, flags), check=False)
    assert "ended with exit code 3" in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("plsc:")]
    assert "File too large" in lines[-1]
    assert "last checkpoint" not in done.stdout
    assert (tmp_path / "run/metrics.jsonl").read_text().count("loss_epoch") == 3
    assert [path.name for path, _ in list_checkpoints(tmp_path / "run")] == ["0", "1"]
    assert verify(tmp_path / "run" / "1").epoch == 2
    assert not list((tmp_path / "run").glob(".saving-*"))


def test_a_run_without_its_last_checkpoint_raises_after_its_loggers_are_closed(dataset, tmp_path):
    logger, events = mock.Mock(), []
    ins = small_entry(dataset, tmp_path / "run")
    ins.set_loggers(logger)

    def block(context):
        if context.epoch == 2:
            (tmp_path / "run/1").mkdir()
            (tmp_path / "run/1/notes.txt").touch()

    ins.add_callback(block, "epoch_end")
    ins.add_callback(lambda context: events.append("run_end"), "run_end")
    ins.add_callback(lambda context: events.append("exception"), "exception")
    with pytest.raises(CheckpointError, match="is not a checkpoint") as raised:
        ins.train()
    assert logger.mock_calls[-1] == mock.call.close()
    assert events == ["exception"]
    assert raised.value.exit_code == 3


def test_losing_a_store_raises_at_the_end_and_its_advice_works_when_it_is_back(
    dataset, tmp_path, monkeypatch
):
    share = tmp_path / "share"
    ins = small_entry(dataset, tmp_path / "run")
    ins.set_upload_dir(f"file://{share}/store")
    monkeypatch.setattr(directories, "Store", lambda url, **_: Store(url, total_seconds=1.0))  # of retries

    def lose(context):
        if context.step == 1:
            shutil.rmtree(share)
            share.touch()

    ins.add_callback(lose, "after_step")
    with pytest.raises(NotSavedError, match=r"not uploaded to \S+: 0, 1 \(complete in \S+run\)") as raised:
        ins.train()
    assert raised.value.code == raised.value.exit_code == 3
    assert raised.value.result.unsent == [tmp_path / "run/0", tmp_path / "run/1"]
    push = re.search(r"plsc (checkpoint push \S+ \S+)$", str(raised.value))[1].split()
    assert main(push) == 1
    share.unlink()
    assert main(push) == 0
    assert [name for name, _ in checkpoints_in(Store(f"file://{share}/store"))] == ["0", "1"]


def test_a_password_in_an_option_raises_without_being_shown():
    ins = Entry()
    with pytest.raises(OptionError, match="without a password") as refused:
        ins.set_hdfs_user(f"me,{PASSWORD}")
    assert PASSWORD not in str(refused.value)
    with pytest.raises(OptionError, match="fs_name is '/namenode'; expected a file system") as refused:
        ins.set_hdfs_info("/namenode", f"me,{PASSWORD}")
    assert PASSWORD not in str(refused.value)
    ins.set_model_save_dir(f"s3://me:{PASSWORD}@bucket/run")
    ins.set_upload_dir("s3://b/c")
    ins.set_dataset_dir("nothing")
    with pytest.raises((CheckpointError, OptionError, Exception)) as refused:
        ins.train()
    assert PASSWORD not in str(refused.value)


def test_after_a_kill_in_any_phase_the_newest_checkpoint_is_complete_and_the_run_ends_with_the_same_bits(
    tmp_path, hdfs, monkeypatch
):
    phases = "save", "upload", "retention"
    monkeypatch.setenv("PLSC_CACHE_DIR", "")  # it sets the variable
    words = [str(tmp_path), "--quick", "--store", f"{hdfs.url}/kill", "--phases", *phases]
    monkeypatch.setattr(sys, "argv", ["kill.py", *words])
    kill.main()
    lines = [json.loads(line) for line in (tmp_path / "kill.jsonl").read_text().splitlines()]
    kills = [line for line in lines if "phase" in line]
    for one, phase in zip(kills, phases, strict=True):
        assert phase in one["in_phases"], one
    assert not any(line["problems"] for line in lines), lines
    for place in ("here", "there"):  # a kill may come before the first upload of its run
        assert any(one[place] for one in kills)
    assert lines[-1]["same_bits"]  # the last killed run has finished
