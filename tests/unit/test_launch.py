"""The arguments of `plsc launch` and the checks of `plsc doctor`."""

import os
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

from plsc.cli import doctor
from plsc.cli.launch import COMMAND, run_launch
from plsc.cli.parser import CommandParser
from plsc.config import Options
from plsc.entry import join_ranks
from plsc.errors import OptionError, PlscError


def read(*words: str) -> dict:
    return CommandParser("plsc launch", COMMAND).read(words)


@pytest.fixture
def launched(monkeypatch):
    """Return a function that launches a script up to what torch is asked to start, and returns that."""
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(rendezvous_handler_registry, "register", lambda *_: None)

    class Asked(Exception):
        pass

    def ask(**settings):
        raise Asked(settings)

    monkeypatch.setattr("torch.distributed.launcher.api.LaunchConfig", ask)

    def launch(words):
        with pytest.raises(Asked) as caught:
            run_launch(**read(*words.split(), "train.py"))
        return caught.value.args[0]

    return launch


def test_what_follows_the_script_is_the_scripts():
    given = read("--devices", "0,2", "--log-dir", "logs", "train.py", "--devices", "1", "-m", "--help")
    assert given["script"] == ["train.py", "--devices", "1", "-m", "--help"]
    assert (given["devices"], given["log_dir"], given["m"]) == ("0,2", "logs", False)
    given = read("--max_restarts", "2", "-m", "plsc.cli", "train")
    assert (given["max_restarts"], given["m"], given["script"]) == (2, True, ["plsc.cli", "train"])


@pytest.mark.parametrize("words", [["--nproc", "2"], ["--device", "0", "train.py"], ["--nproc", "x", "a.py"]])
def test_a_wrong_command_line_is_refused(words):
    with pytest.raises(OptionError, match=r"[Ss]ee plsc launch --help|expected an integer"):
        read(*words)


@pytest.mark.parametrize(
    ("devices", "nproc", "visible", "expected"),
    [
        (None, None, None, (4, "0,1,2,3")),
        (None, 2, None, (2, "0,1")),
        ("all", None, "4,5,6,7", (4, "4,5,6,7")),
        ("0,2", None, None, (2, "0,2")),
        ("2,0", 2, "4,5,6,7", (2, "6,4")),
        ("3", None, None, (1, "3")),
        ("cpu", None, None, (1, "")),
        ("cpu", 3, "4,5,6,7", (3, "")),
        ("4", None, None, None),
        (None, 5, None, None),
        ("0,0", None, None, None),
        ("0,1", 3, None, None),
        ("0-2", None, None, None),
    ],
)
def test_devices_are_ids_or_all_or_the_cpu_and_nproc_a_count(
    devices, nproc, visible, expected, launched, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    os.environ["CUDA_VISIBLE_DEVICES"] = visible or ""
    words = f"--devices {devices} " * bool(devices) + f"--nproc {nproc}" * bool(nproc)
    if expected is None:
        with pytest.raises(OptionError, match="--devices"):
            launched(words)
        return
    assert (launched(words)["nproc_per_node"], os.environ["CUDA_VISIBLE_DEVICES"]) == expected


def test_without_gpus_the_ranks_are_on_the_cpu_and_share_its_cores_unless_threads_are_set(
    launched, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr("plsc.machine.usable_cores", lambda: 8)
    with pytest.raises(OptionError, match="--devices"):
        launched("--devices all")
    os.environ["OMP_NUM_THREADS"] = "5"
    for words, threads in (("--nproc 2", "5"), ("--nproc 3", "2"), ("--nproc 3 --cpu-threads 4", "4")):
        assert launched(words)["nproc_per_node"] == int(words[8])
        assert os.environ["OMP_NUM_THREADS"] == threads
        os.environ.pop("OMP_NUM_THREADS")


def test_machines_are_a_number_or_a_range_and_need_an_endpoint(launched):
    for words, machines in (("--nnodes 1", (1, 1)), ("--nnodes 2:4 --rdzv-endpoint 127.0.0.1:9", (2, 4))):
        found = launched(f"--devices cpu {words}")
        assert (found["min_nodes"], found["max_nodes"]) == machines
    for nnodes in ("0", "two", "3:2", "1:"):
        with pytest.raises(OptionError, match="--nnodes"):
            launched(f"--nnodes {nnodes} --rdzv-endpoint 127.0.0.1:9")
    for endpoint in ("", "--rdzv-endpoint host", "--rdzv-endpoint host:", "--rdzv-endpoint :1"):
        with pytest.raises(OptionError, match="--rdzv-endpoint"):
            launched(f"--nnodes 2 {endpoint}")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"init_method": "tcp://host:1"}, "rank is not set and world size not set; expected a rank from 0"),
        ({"init_method": "file:///x", "rank": 2, "world_size": 2}, "rank is 2 and world size 2"),
    ],
)
def test_a_place_among_the_ranks_must_be_known(values, expected, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    options = Options()
    options.set_together({f"runtime.{name}": value for name, value in values.items()})
    with pytest.raises(OptionError, match=expected):
        join_ranks(options.runtime)


@pytest.mark.parametrize("url", ["tcp://host", "file://relative", "http://host:1", "env:", ""])
def test_an_address_that_no_rank_can_meet_at_is_refused(url):
    with pytest.raises(OptionError, match="expected env://, tcp://host:port, or file:///path"):
        Options().set("runtime.init_method", url)


def test_doctor_fails_when_the_ranks_cannot_connect():
    options = Options()
    options.set_together({"runtime.rank": 0, "runtime.world_size": 2})  # without MASTER_ADDR
    with pytest.raises(PlscError, match="rank 0"):
        doctor.run_doctor(options)


def test_a_link_that_replaces_a_log_is_not_written_through(launched, tmp_path):
    log = tmp_path / "logs/rank0.log"
    (tmp_path / "outside").touch()
    destination = launched(f"--log-dir {log.parent}")["logs_specs"].reify({0: {"RANK": "0"}})
    log.rename(tmp_path / "moved")
    log.symlink_to(tmp_path / "outside")
    Path(destination.stdouts[0]).write_text("of the rank\n")  # as torch opens it
    assert not (tmp_path / "outside").read_text()
    assert (tmp_path / "moved").read_text() == "of the rank\n"
