"""Ranks that no launcher has started meet at an address or in a store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.distributed.launch import clean_environment
from tests.distributed.test_elastic import free_port

WORKER = Path(__file__).with_name("world_worker.py")


def test_ranks_meet_over_tcp_in_a_file_and_in_a_given_store_and_count_their_local_ranks(tmp_path):
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), "2", str(tmp_path), str(port)],
            env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank, process in enumerate(ranks):
        output, _ = process.communicate(timeout=120)
        for name in ("tcp", "file", "store", "mpi"):
            assert f"rank {rank} met the others: {name}" in output, output
        assert process.returncode == 0, output
