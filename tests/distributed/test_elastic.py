"""A node joins an elastic job and dies; the job resumes each time."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys

import pytest

from plsc.checkpoint import list_checkpoints
from tests.distributed.launch import clean_environment
from tests.distributed.test_interruption import JOB, wait_for, worker_pids
from tests.images import write_dataset
from tests.resuming import losses_of

pytestmark = pytest.mark.slow


def free_port() -> int:
    """Return a free port, of those that the system does not give to clients, which could take it first."""
    with socket.socket() as probe:
        for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise OSError("no port is free")


def start_node(port: int, is_host: bool, *args: str) -> subprocess.Popen[str]:
    """Start a launcher as one of at most two nodes; the host of the rendezvous must stay alive."""
    settings = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    return subprocess.Popen(
        [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--max-restarts=3",
            "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=elastic",
            f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1",
            f"--rdzv-conf=is_host={is_host},{settings}", str(JOB), *args,
        ],
        # Without the variable torch 2.15 does not send the rendezvous address to a node that joins later.
        env=clean_environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def test_an_elastic_job_resumes_when_a_node_joins_or_dies(tmp_path):
    dataset = write_dataset(tmp_path / "set", classes=13, per_class=7)
    save_dir, port = tmp_path / "run", free_port()
    job = str(dataset), str(save_dir), "set_checkpoint_dir='last'", "set_train_epochs=100000"
    nodes = [start_node(port, True, *job)]

    def newest_is_of(ranks: int) -> bool:
        found = list_checkpoints(save_dir)
        return bool(found) and found[-1][1].world_size == ranks

    try:
        wait_for(lambda: newest_is_of(1), nodes[0])
        nodes.append(start_node(port, False, *job))
        wait_for(lambda: newest_is_of(2), nodes[0])
        doomed = [nodes[1].pid, *worker_pids(nodes[1])]
        for pid in doomed:  # the launcher first, so that it does not restart ranks
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: newest_is_of(1), nodes[0])
        nodes[0].send_signal(signal.SIGTERM)
        output, _ = nodes[0].communicate(timeout=60)
    finally:
        for node in nodes:
            if node.poll() is None:
                for pid in worker_pids(node):
                    os.kill(pid, signal.SIGKILL)
                node.kill()
    grown = "ranks: 2 here, 1 in the checkpoint; the global batch size remains 8, with 4 images per rank"
    assert grown in output, output
    assert "at step" in output.split(grown)[1], output
    _, manifest = list_checkpoints(save_dir)[-1]
    assert (manifest.world_size, manifest.scalars["global_batch"]) == (1, 8)
    assert sorted(losses_of(save_dir)) == list(range(1, manifest.step + 1))
