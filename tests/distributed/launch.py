"""Starts real torchrun jobs on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def clean_environment(**changes: str) -> dict[str, str]:
    """The environment without what another launcher left, with plsc importable."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH", "")]))
    return {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **changes}


def command(script: str | Path, ranks: int, *args: str, max_restarts: int = 0) -> list[str]:
    """The command that runs a script on so many ranks; plain Python for 0."""
    python = [sys.executable]
    if ranks:
        # --standalone picks a free port, so that tests can run side by side.
        python += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        python += [f"--max-restarts={max_restarts}"] if max_restarts else []
    return [*python, str(script), *args]


def run_ranks(
    script: str | Path,
    ranks: int,
    *args: str,
    timeout: float = 300,
    check: bool = True,
    env: dict[str, str] | None = None,
    cwd: str | Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a script under torchrun (plain Python for 0 ranks) and return what it printed.

    With `check` a failure fails the test and shows the output.
    """
    done = subprocess.run(
        command(script, ranks, *args),
        env=clean_environment(**(env or {})),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if check:
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done
