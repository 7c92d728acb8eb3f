"""Errors about stores that cannot be reached, with real clients and no server."""

from __future__ import annotations

import socket

import fsspec
import pytest

from plsc.data.files import read_file_list
from plsc.errors import DataError
from plsc.storage.store import Store
from plsc.storage.urls import exists, reason_of


@pytest.fixture
def nobody() -> str:
    """Yield a local address where no server listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"  # bound, and not listening


@pytest.fixture
def no_credentials(monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    yield
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.mark.filterwarnings("ignore")  # warnings of the client
def test_an_unreachable_hdfs_is_reported_with_duration(nobody):
    url = f"hdfs://{nobody}/run"
    with pytest.raises(DataError) as refused:
        Store(url, total_seconds=0).names()
    message = str(refused.value)
    assert message.startswith(f"{url}: ")
    assert "refused" in message


@pytest.mark.parametrize("ask", [lambda url: Store(url).names(), exists, read_file_list])
def test_missing_s3_credentials_are_reported_and_not_retried(no_credentials, monkeypatch, ask):
    monkeypatch.setattr("plsc.storage.urls.time.sleep", lambda seconds: pytest.fail("asked again"))
    with pytest.raises(DataError, match="Credentials"):
        ask("s3://bucket/run")


def test_an_hdfs_error_is_reported_without_the_java_stack_trace() -> None:
    client = (
        'RPCError("org.apache.hadoop.security.AccessControlException", "Permission denied: user=a'
        "\\n\\tat org.apache.hadoop.hdfs.server.namenode.FSPermissionChecker.check(FS.java:400)"
    )
    reason = reason_of(RuntimeError(client))
    assert reason.endswith("Permission denied: user=a")
    assert "FSPermissionChecker" not in reason
    assert "FSPermissionChecker" not in reason_of(RuntimeError(client.encode().decode("unicode_escape")))
