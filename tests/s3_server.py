"""A real S3 server over HTTP for tests: moto's, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import fsspec
import pytest


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Yield the address of a fresh server; skip the test, with the reason, when moto is missing."""
    pytest.importorskip("moto", reason="moto[server] is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"},
    )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/moto-api/", timeout=2).close()
                break
            if process.poll() is not None:
                pytest.fail(f"moto_server ended with {process.returncode}")
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(10)


def use_s3(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Point s3:// URLs of this process and its children at the server."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    monkeypatch.setenv("FSSPEC_S3_ENDPOINT_URL", address)
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # those of a server that is gone
