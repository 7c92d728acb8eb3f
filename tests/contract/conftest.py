"""An empty folder in each kind of store: a mounted drive, a real S3 server, a real HDFS."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["local", "s3", "hdfs"])
def url(request, tmp_path):
    """Return an empty folder's URL in each store."""
    name = f"{tmp_path.name}/run"
    if request.param == "local":
        return f"file://{tmp_path}/remote/run"
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/{name}"
    return f"{request.getfixturevalue('hdfs').url}/{name}"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PLSC_CACHE_DIR", str(tmp_path / "cache"))
