"""Benchmarks whose processes are forks, which start without seconds of imports."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.distributed.launch import ROOT, run_ranks


def run_here(monkeypatch: Any, script: Any, *arguments: object) -> None:
    """Run a benchmark, a module, in this process; the processes that it starts are its own."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", [script.__file__, *map(str, arguments)])
    script.main()


def run_in_forks(monkeypatch: Any, script: Any, *arguments: object) -> None:
    """Run a benchmark in this process, and its processes as forks of the server of ranks."""
    is_running = threading.Lock()

    def run_child(command: list[str], timeout: float | None, **env: str) -> tuple[list[dict], str | None]:
        ranks = 0
        if command[:2] == ["-m", "torch.distributed.run"]:
            ranks, command = int(command[3].partition("=")[2]), command[4:]
        with is_running:
            done = run_ranks(command[0], ranks, *command[1:], check=False, env=env, cwd=ROOT)
        samples = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return samples, f"failed: {done.stderr[-2000:]}" if done.returncode else None

    def run(command: list[str], **_: Any) -> None:
        with is_running:
            run_ranks(command[1], 0, *command[2:], cwd=ROOT)

    folder = Path(script.__file__).parent
    for module in list(sys.modules.values()):
        if Path(getattr(module, "__file__", None) or "/").parent == folder and hasattr(module, "run_child"):
            monkeypatch.setattr(module, "run_child", run_child)
    monkeypatch.setattr(subprocess, "run", run)
    run_here(monkeypatch, script, *arguments)
