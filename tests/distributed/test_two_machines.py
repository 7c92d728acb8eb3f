"""`plsc launch` on two machines: two network namespaces, joined by a cable (a veth pair)."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.launch import FORKING, ROOT, clean_environment, run_ranks
from tests.distributed.test_interruption import JOB, steps_of, wait_for
from tests.resuming import different, losses_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(not shutil.which("ip"), reason="ip is not installed (package iproute2)"),
]
NAMED = """
echo "$0" > /proc/sys/kernel/hostname
exec "$@"
"""


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout


class Machine:
    """A network namespace with a cable; its name is a loopback address on itself, as on Debian."""

    def __init__(self, letter: str, number: int, folder: Path) -> None:
        self.name, self.address = f"machine-{letter}", f"10.77.0.{number}"
        self.space, self.cable = f"plsc-{os.getpid()}-{letter}", f"plsc{os.getpid()}{letter}"
        self._folder = folder

    @contextlib.contextmanager
    def exist(self, other: Machine) -> Iterator[None]:
        hosts = Path("/etc/netns", self.space, "hosts")  # `ip netns exec` mounts it on /etc/hosts
        ip("netns", "add", self.space)
        try:
            hosts.parent.mkdir(parents=True)
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n{other.address} {other.name}\n")
            (hosts.parent / "resolv.conf").touch()  # without name servers
            yield
        finally:
            for pid in ip("netns", "pids", self.space).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            ip("netns", "del", self.space)
            shutil.rmtree(hosts.parent, ignore_errors=True)
            with contextlib.suppress(OSError):  # not empty: another's
                hosts.parent.parent.rmdir()

    def connect(self) -> None:
        ip("link", "set", self.cable, "netns", self.space)
        ip("-n", self.space, "addr", "add", f"{self.address}/24", "dev", self.cable)
        ip("-n", self.space, "link", "set", "lo", "up")
        self.turn("up")
        ip("-n", self.space, "route", "add", "default", "dev", self.cable)

    def turn(self, state: str) -> None:
        """Turn the cable up or down."""
        ip("-n", self.space, "link", "set", self.cable, state)

    def launch(self, endpoint: str, ranks: int, *words: str) -> subprocess.Popen[bytes]:
        inside = ["ip", "netns", "exec", self.space, "unshare", "--uts", "sh", "-c", NAMED, self.name]
        command = [sys.executable, str(FORKING), "--nnodes", "2", "--nproc", str(ranks)]
        with self.output.open("wb") as file:
            return subprocess.Popen(
                [*inside, *command, "--devices", "cpu", "--rdzv-endpoint", endpoint, *words],
                env=clean_environment(), cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @property
    def output(self) -> Path:
        return self._folder / f"{self.name}.txt"


@pytest.fixture
def machines(tmp_path):
    first, second = Machine("a", 1, tmp_path), Machine("b", 2, tmp_path)
    probe = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"network namespaces are not allowed here: {probe.stderr.strip()}")
    with first.exist(second), second.exist(first):
        ip("link", "add", first.cable, "type", "veth", "peer", "name", second.cable)
        first.connect()
        second.connect()
        yield first, second


def start(machines, endpoint: str, *words: str):
    return [
        machine.launch(endpoint, ranks, *words)
        for machine, ranks in zip(machines, (2, 1), strict=True)
    ]  # fmt: skip


def end(machines, launchers) -> list[str]:
    """Wait for both and return their output."""
    for launcher in launchers:
        launcher.wait(150)
    return [machine.output.read_text() for machine in machines]


def test_when_the_link_goes_down_both_sides_name_the_other_and_resume_to_the_bits_of_one_machine(
    machines, dataset, tmp_path
):
    job = "set_train_epochs=6", "set_timeout=6"
    words = ("--max-restarts", "1", str(JOB), str(dataset), str(tmp_path / "run"), *job)
    launchers = start(machines, "machine-a:29500", *words)
    wait_for(lambda: steps_of(tmp_path / "run") > 8, launchers[0])
    machines[1].turn("down")
    for machine, launcher in zip(machines, launchers, strict=True):
        wait_for(lambda machine=machine: "lost the connection" in machine.output.read_text(), launcher)
    assert steps_of(tmp_path / "run") < 24
    machines[1].turn("up")
    texts = end(machines, launchers)
    assert [launcher.returncode for launcher in launchers] == [0, 0], texts
    for text, other in zip(texts, ("rank 2 on machine-b", "rank 0 on machine-a"), strict=True):
        assert re.search(rf"lost the connection to .*{other} \(", text), text
    run_ranks(JOB, 3, str(dataset), str(tmp_path / "whole"), *job)
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "whole")
    assert different(tmp_path / "run/5", tmp_path / "whole/5") == []
    assert not list((tmp_path / "run").glob("version_*"))
