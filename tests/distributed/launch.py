"""Start real jobs on the CPU: with torchrun, or with preloaded ranks that start quickly."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FORKING, TORCHRUN = (Path(__file__).with_name(name) for name in ("forking.py", "torchrun.py"))
QUICKLY = "--run-path", "--start-method=fork"  # ranks are forks of the launcher


def clean_environment(**changes: str | None) -> dict[str, str]:
    """Return the environment without launcher variables and those that are None, with plsc importable."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH", "")]))
    changed = {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **changes}
    return {name: value for name, value in changed.items() if value is not None}


def run_code(code: str, *args: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run Python code as a script in a process of its own, and return its output. how: as of `run_ranks`."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(code)
        script.flush()
        return run_ranks(script.name, 0, *args, **how)


def of_torchrun(script: str | Path, ranks: int, *args: str) -> list[str]:
    """Return the script and its arguments that run a script with torchrun; the script alone for 0 ranks."""
    if not ranks:
        return [str(script), *args]
    # --standalone picks a free port, so that tests can run in parallel.
    return [str(TORCHRUN), "--standalone", f"--nproc-per-node={ranks}", *QUICKLY, str(script), *args]


def run_torchrun(script: str | Path, ranks: int, *args: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a script with torchrun (plain Python for 0 ranks) and return its output. how: as of `run_ranks`.

    For tests of torchrun's features, such as its failure summary.
    """
    script, *args = of_torchrun(script, ranks, *args)
    return run_ranks(script, 0, *args, **how)


class Ranks:
    """A script that runs on ranks of rank_server.py (in one process for 0); one at a time per process.

    pid: process of the launcher, which is the parent of the ranks and leads their process group.
    """

    _former: Ranks | None = None

    def __init__(
        self, script: str | Path, ranks: int, *args: str, env: dict[str, str | None] | None = None,
        cwd: str | Path | None = None,
    ) -> None:  # fmt: skip
        if Ranks._former is not None:
            Ranks._former.kill()  # may be left over from a failed test
        Ranks._former = self
        self.returncode: int | None = None
        self._server = _server()
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read at the end
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        request = {
            "script": str(script), "arguments": args, "ranks": ranks, "folder": str(cwd or Path.cwd()),
            "environment": clean_environment(**(env or {})),
        }  # fmt: skip
        self._alive, held = os.pipe()  # the other end is open while a process of the job exists
        descriptors = [self._output.fileno(), self._errors.fileno(), held]
        socket.send_fds(self._server, [json.dumps(request).encode()], descriptors)
        os.close(held)
        self.pid = int(self._server.recv(64))

    def poll(self) -> int | None:
        """Return the exit code of the launcher, or None while it runs."""
        return self.wait(0)

    def wait(self, timeout: float) -> int | None:
        """Return the exit code, or None after the timeout in seconds."""
        if self.returncode is None and select.select([self._server], [], [], timeout)[0]:
            self.returncode = int(self._server.recv(64))
        return self.returncode

    def kill(self) -> None:
        """Kill all ranks with SIGKILL if they run."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait(60)

    def communicate(self, timeout: float = 60) -> tuple[str, str]:
        """Wait and return output and errors; after the timeout, kill the ranks and fail the test."""
        is_late = self.wait(timeout) is None
        self.kill()
        os.read(self._alive, 1)  # until no rank is left, also if the launcher was killed
        os.close(self._alive)
        texts = []
        for file in (self._output, self._errors):
            with file:
                file.seek(0)
                texts.append(file.read())
        assert not is_late, f"it took over {timeout} s\n{texts}"
        return texts[0], texts[1]


@functools.cache
def _server() -> socket.socket:
    """Start rank_server.py once per process; it ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    script = Path(__file__).with_name("rank_server.py")
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-u", str(script), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=clean_environment(OPENBLAS_NUM_THREADS="1"),
            cwd=ROOT,
        )

    def end() -> None:
        ours.close()
        server.wait()

    atexit.register(end)
    return ours


def run_ranks(
    script: str | Path,
    ranks: int,
    *args: str,
    timeout: float = 240,
    check: bool = True,
    env: dict[str, str | None] | None = None,
    cwd: str | Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a script on a number of ranks, or in one process for 0, and return its output.

    With `check` a failure fails the test and shows the output.
    """
    job = Ranks(script, ranks, *args, env=env, cwd=cwd)
    out, err = job.communicate(timeout)
    assert job.returncode == 0 or not check, f"{out}\n{err}"
    assert job.returncode is not None
    return subprocess.CompletedProcess([str(script), *args], job.returncode, out, err)
