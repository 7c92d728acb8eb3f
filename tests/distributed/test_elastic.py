"""A node joins an elastic job and dies; the job resumes each time."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from plsc.checkpoint import list_checkpoints
from tests.distributed.launch import QUICKLY, TORCHRUN, Ranks, clean_environment
from tests.distributed.test_interruption import wait_for, worker_pids
from tests.images import write_dataset
from tests.resuming import losses_of

pytestmark = pytest.mark.slow
JOB = Path(__file__).with_name("elastic_job.py")


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
        "--local-addr=127.0.0.1", f"--rdzv-conf=is_host={is_host},{settings}", str(JOB), *map(str, args),
    ]  # fmt: skip


def test_an_elastic_job_resumes_when_a_node_joins_or_dies(tmp_path):
    dataset = write_dataset(tmp_path / "set", classes=13, per_class=7)  # 23 steps per epoch
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
