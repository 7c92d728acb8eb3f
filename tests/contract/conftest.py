"""An empty folder in each kind of store: a mounted drive, memory, a real S3 server, a real HDFS."""

from __future__ import annotations

import fsspec
import pytest

from tests.hdfs_server import hdfs_server
from tests.s3_server import s3_server


@pytest.fixture(scope="session")
def s3():
    with pytest.MonkeyPatch.context() as patch, s3_server() as address:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": address,
            "FSSPEC_S3_ENDPOINT_URL": address,
        }.items():
            patch.setenv(name, value)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket"
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.fixture(scope="session")
def hdfs():
    with hdfs_server() as server:
        yield server


@pytest.fixture(params=["local", "memory", "s3", "hdfs"])
def url(request, tmp_path):
    """An empty folder's URL in each store."""
    name = f"{tmp_path.name}/run"
    if request.param == "local":
        return f"file://{tmp_path}/remote/run"
    if request.param == "memory":
        return f"memory://{name}"
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/{name}"
    return f"{request.getfixturevalue('hdfs').url}/{name}"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PLSC_CACHE_DIR", str(tmp_path / "cache"))
