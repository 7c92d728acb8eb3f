"""Ranks that no launcher has started meet at an address or in a store."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.launch import run_ranks
from tests.distributed.test_elastic import free_port

WORKER = Path(__file__).with_name("world_worker.py")
TWO = """
import os, runpy, sys
children = [os.fork()]
if children[0]:
    children.append(os.fork())
if all(children):
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
else:
    worker, folder, port = sys.argv[1:]
    sys.argv = [worker, str(len(children) - 1), "2", folder, port]
    runpy.run_path(worker, run_name="__main__")
"""


def test_ranks_meet_over_tcp_in_a_file_and_in_a_given_store_and_count_their_local_ranks(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO)
    (tmp_path / "meet").mkdir()
    output = run_ranks(script, 0, str(WORKER), str(tmp_path / "meet"), str(free_port())).stdout
    for rank in range(2):
        for name in ("tcp", "file", "store", "mpi"):
            assert f"rank {rank} met the others: {name}" in output, output


def test_a_rank_uses_the_only_gpu_that_it_sees_unless_another_rank_does():
    output = run_ranks(Path(__file__).with_name("one_gpu_worker.py"), 2).stdout
    assert all(f"rank {rank} is refused" in output for rank in range(2)), output
