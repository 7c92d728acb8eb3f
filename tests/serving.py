"""A real ``plsc serve`` on a free port, for tests."""

import atexit
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from plsc.serve import Client
from tests.images import write_dataset, write_pair_file
from tests.system.small_entry import entry

ROOT = Path(__file__).parents[1]


@dataclass
class Running:
    process: subprocess.Popen
    port: int

    def client(self, key=""):
        return Client(f"http://127.0.0.1:{self.port}", key)

    def peak_megabytes(self):
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024


@functools.cache
def _exported():
    """Train and export once per process: the copies of `export_model` are as good."""
    folder = Path(tempfile.mkdtemp(prefix="plsc-exported-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_dataset(folder / "faces", classes=6, per_class=4)
    write_pair_file(folder / "faces" / "pairs.bin", folder / "faces")
    result = entry(folder / "faces", folder / "run").train()
    ins = entry(
        folder / "faces", folder / "out", set_val_targets="pairs", set_checkpoint_dir=result.checkpoint
    )
    unseen = write_dataset(folder / "unseen", classes=24, per_class=3, seed=9)
    ins.convert_for_prediction(folder / "model", classes=True, thumbnails=True, unseen=str(unseen))
    return folder


def export_model(folder):
    """Write a network to folder/model, its run to folder/run, its data to folder/faces and folder/unseen.

    The model has classes, thumbnails, thresholds, and the capacity measured on folder/unseen.
    """
    shutil.copytree(_exported(), folder, dirs_exist_ok=True)
    return folder / "model"


@contextmanager
def serving(model, store, *flags, key="", **how):
    """Yield a running server; it is killed at the end. how: arguments of subprocess.Popen."""
    command = [sys.executable, "-m", "plsc.cli", "serve", str(model), "--port", "0", "--store", str(store)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PLSC_API_KEY": key}
    how = {"stdout": subprocess.PIPE, "text": True, "env": environment, **how}
    process = subprocess.Popen([*command, *flags], **how)
    try:
        line = process.stdout.readline()
        found = re.search(r" on http://\S+:(\d+) ", line)
        assert found, f"{line!r}, exit code {process.poll()}"
        yield Running(process, int(found[1]))
    finally:
        process.kill()
        process.wait(60)
        process.stdout.close()
