"""What is said of stores that cannot be asked: real clients, and nobody who answers."""

from __future__ import annotations

import socket

import fsspec
import pytest

from plsc.data.files import read_file_list
from plsc.errors import DataError
from plsc.storage.retry import reason_of, with_retries
from plsc.storage.store import Store
from plsc.storage.urls import exists


@pytest.fixture
def nobody() -> str:
    """An address of this machine where nobody listens."""
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


@pytest.mark.filterwarnings("ignore")  # the client's own
def test_an_hdfs_that_does_not_answer_is_named_with_how_long_it_was_tried_and_what_to_check(nobody):
    url = f"hdfs://{nobody}/run"
    with pytest.raises(DataError) as refused:
        Store(url, total_seconds=0).names()
    said = str(refused.value)
    assert said.startswith(f"{url}: the folder cannot be listed after one try in ")
    assert "refused" in said
    assert said.endswith("; check that the server runs, and that host and port are right")


@pytest.mark.parametrize(
    "ask",
    [lambda url: Store(url).names(), exists, read_file_list],
    ids=["list", "exists", "file list"],
)
def test_s3_without_credentials_says_which_variables_to_set_and_asks_once(no_credentials, monkeypatch, ask):
    monkeypatch.setattr("plsc.storage.retry.time.sleep", lambda seconds: pytest.fail("asked again"))
    with pytest.raises(DataError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS"):
        ask("s3://bucket/run")


def test_a_refused_permission_is_told_with_what_to_check_and_not_asked_for_again():
    asked = []

    def call():
        asked.append(1)
        raise PermissionError("not for you")

    with pytest.raises(DataError, match=r"it failed \(.*not for you\); check the permissions"):
        with_retries(call, "it failed")
    assert len(asked) == 1


def test_a_fault_of_hdfs_is_told_without_the_stack_of_its_server() -> None:
    client = (
        'RPCError("org.apache.hadoop.security.AccessControlException", "Permission denied: user=a'
        "\\n\\tat org.apache.hadoop.hdfs.server.namenode.FSPermissionChecker.check(FS.java:400)"
    )
    reason = reason_of(RuntimeError(client))
    assert reason.endswith("Permission denied: user=a")
    assert "FSPermissionChecker" not in reason
    assert "FSPermissionChecker" not in reason_of(RuntimeError(client.encode().decode("unicode_escape")))
