"""Kill, stop and resume real torchrun jobs with real signals; a node joins a job and dies."""

from __future__ import annotations

import contextlib
import os
import pty
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plsc.checkpoint import list_checkpoints, read_manifest
from tests.distributed.launch import (
    FORKING,
    QUICKLY,
    TORCHRUN,
    Ranks,
    clean_environment,
    of_torchrun,
    run_ranks,
)
from tests.resuming import different, losses_of

JOB = Path(__file__).with_name("job.py")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def uninterrupted(dataset, tmp_path_factory):
    """Train four uninterrupted epochs on 2 ranks; return the folder of the run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run_ranks(JOB, 2, str(dataset), str(folder), "set_train_epochs=4")
    return folder


def start(ranks, *args):
    """Start a job in a session of its own, so that a signal reaches all its processes."""
    script, *words = of_torchrun(JOB, ranks, *args)
    return Ranks(script, 0, *words)


def wait_for(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def worker_pids(process):
    """Return the ranks: the children of the launcher (torchrun or rank server)."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children]


def test_sigterm_saves_at_a_step_boundary_and_the_run_resumes(dataset, uninterrupted, tmp_path):
    save_dir = tmp_path / "run"
    job = start(2, str(dataset), str(save_dir), "set_train_epochs=4")
    metrics = save_dir / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count('"loss"') >= 6, job)
    os.kill(job.pid, signal.SIGTERM)  # torchrun forwards it to all ranks
    output = "".join(job.communicate(timeout=60))
    assert job.returncode != 0
    assert output.count("stopped by SIGTERM after step") == 1, output
    assert "Traceback" not in output.split("torch/distributed/elastic")[0], output
    path, manifest = list_checkpoints(save_dir)[-1]
    assert manifest.step >= 6
    settings = "set_train_epochs=4", f"set_checkpoint_dir={str(path)!r}"
    run_ranks(JOB, 2, str(dataset), str(save_dir), *settings)
    assert losses_of(save_dir) == losses_of(uninterrupted)
    assert different(save_dir / "3", uninterrupted / "3") == []


def test_ctrl_c_in_one_process_saves_and_exits_with_130(dataset, tmp_path):
    save_dir = tmp_path / "run"
    job = start(0, str(dataset), str(save_dir), "set_train_epochs=1000", "set_num_workers=1")
    wait_for((save_dir / "0").exists, job)
    os.killpg(job.pid, signal.SIGINT)
    output = "".join(job.communicate(timeout=60))
    assert job.returncode == 130, output
    assert "stopped by SIGINT after step" in output.strip().splitlines()[-1]
    assert "Traceback" not in output
    path, manifest = list_checkpoints(save_dir)[-1]
    assert f"checkpoint.load_dir {path}" in output
    assert manifest.step > 0


def test_when_a_rank_is_killed_the_others_stop_within_seconds(dataset, tmp_path):
    save_dir = tmp_path / "run"
    job = Ranks(JOB, 3, str(dataset), str(save_dir), "set_train_epochs=1000")
    wait_for((save_dir / "0").exists, job)
    os.kill(worker_pids(job)[-1], signal.SIGKILL)
    output = "".join(job.communicate(timeout=30))  # a collective would wait for 30 minutes
    assert job.returncode != 0
    assert "lost the connection to rank " in output or "SIGKILL" in output
    for path, _ in list_checkpoints(save_dir):
        read_manifest(path)


def start_long_run(dataset, tmp_path, first):
    """Start `plsc launch`, after a line of Python, with a run of which only a signal saves a checkpoint."""
    script, run = tmp_path / "start.py", f"runpy.run_path({str(FORKING)!r}, run_name='__main__')"
    script.write_text(f"import os, runpy, signal\n{first}\n{run}")
    settings = "set_train_epochs=1000000", "set_save_every_n_epochs=1000000"
    workers = "set_num_workers=1", "transform=1"  # in a process
    words = JOB, dataset, tmp_path / "run", *settings, *workers
    return Ranks(script, 0, "--nproc", "1", *map(str, words))


def steps_of(save_dir):
    metrics = save_dir / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def test_ignored_signals_stay_ignored_as_under_nohup_and_another_saves(dataset, tmp_path):
    ignored, save_dir = (signal.SIGHUP, signal.SIGTERM), tmp_path / "run"
    ignore = "for number in {}, {}: signal.signal(number, signal.SIG_IGN)".format(*map(int, ignored))
    job = start_long_run(dataset, tmp_path, ignore)
    wait_for(lambda: steps_of(save_dir) > 3, job)
    for number in ignored:
        for group in {job.pid, *(os.getpgid(pid) for pid in worker_pids(job))}:
            os.killpg(group, number)
    before = steps_of(save_dir)
    wait_for(lambda: steps_of(save_dir) > before + 3, job)
    assert not list_checkpoints(save_dir)
    os.kill(job.pid, signal.SIGINT)
    output = job.communicate(60)
    assert job.returncode == 128 + signal.SIGINT, output
    assert list_checkpoints(save_dir)[-1][1].step > before


def test_a_run_whose_terminal_is_closed_saves(dataset, tmp_path):
    save_dir = tmp_path / "run"
    master, terminal = pty.openpty()
    take = f"one = os.open({os.ttyname(terminal)!r}, os.O_RDWR)"  # the controlling terminal
    job = start_long_run(dataset, tmp_path, f"{take}; [os.dup2(one, stream) for stream in range(3)]")
    wait_for(lambda: steps_of(save_dir) > 3, job)
    os.close(terminal)
    os.close(master)  # as the end of an ssh session
    job.communicate(60)
    assert job.returncode == 128 + signal.SIGHUP
    assert list_checkpoints(save_dir)[-1][1].step > 3


def test_a_process_that_reaches_no_step_boundary_exits_after_the_deadline(tmp_path):
    script = tmp_path / "stuck.py"
    script.write_text(
        "import pathlib, time\n"
        "from plsc.parallel.failure import StopSignal\n"
        "with StopSignal(deadline_seconds=0.5):\n"
        "    pathlib.Path('ready').touch()\n"
        "    time.sleep(60)\n"
        "    time.sleep(60)\n"
    )
    job = Ranks(script, 0, cwd=tmp_path)
    wait_for((tmp_path / "ready").exists, job)
    os.kill(job.pid, signal.SIGTERM)
    output = "".join(job.communicate(timeout=20))
    assert job.returncode == 128 + signal.SIGTERM
    assert "did not end within 0.5 s after SIGTERM" in output


ELASTIC = Path(__file__).with_name("elastic_job.py")


def free_port() -> int:
    """Return a free port, of those that the system does not give to clients, which could take it first."""
    with socket.socket() as probe:
        for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise OSError("no port is free")


def node(ranks: int, port: int, is_host: bool, *args: object) -> list[str]:
    """Return the words that launch one of at most two nodes; the host of the rendezvous must stay alive."""
    settings = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    return [
        str(TORCHRUN), "--nnodes=1:2", "--max-restarts=3", f"--nproc-per-node={ranks}", *QUICKLY,
        "--rdzv-backend=c10d", "--rdzv-id=elastic", f"--rdzv-endpoint=127.0.0.1:{port}",
        "--local-addr=127.0.0.1", f"--rdzv-conf=is_host={is_host},{settings}", str(ELASTIC), *map(str, args),
    ]  # fmt: skip


def test_an_elastic_job_resumes_when_a_node_joins_or_dies(dataset, tmp_path):
    save_dir, port = tmp_path / "run", free_port()
    # Without the variable torch 2.15 does not send the rendezvous address to a node that joins later.
    changes = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    script, *words = node(2, port, True, dataset, save_dir)
    host = Ranks(script, 0, *words, env=changes)

    def is_saved_by(ranks: int) -> bool:
        return any(manifest.world_size == ranks for _, manifest in list_checkpoints(save_dir))

    wait_for(lambda: is_saved_by(2), host)
    joining = [sys.executable, *node(1, port, False, dataset, save_dir)]
    with subprocess.Popen(joining, env=clean_environment(**changes), start_new_session=True) as guest:
        try:
            wait_for(lambda: is_saved_by(3), host)
        finally:
            for pid in (guest.pid, *worker_pids(guest)):  # the launcher first, lest it restarts the rank
                os.kill(pid, signal.SIGKILL)
    (save_dir / "hurry").touch()
    output = "".join(host.communicate(timeout=150))
    assert host.returncode == 0, output
    path, manifest = list_checkpoints(save_dir)[-1]
    assert (path.name, manifest.step, manifest.world_size) == ("11", 276, 2)
    assert manifest.scalars["global_batch"] == 4
    assert sorted(losses_of(save_dir)) == list(range(1, 277))
