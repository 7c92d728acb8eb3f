"""The same examples in every run, as a failure that comes and goes helps nobody; servers that start once."""

import logging
import uuid

import fsspec
import pytest
from hypothesis import settings

from tests.hdfs_server import hdfs_server
from tests.s3_server import s3_server, use_s3

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def undrawn():
    from tests.undrawn import draw_nothing

    draw_nothing()


@pytest.fixture(scope="session")
def s3_address():
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    with s3_server() as address:
        yield address


@pytest.fixture
def s3(s3_address, monkeypatch):
    """The URL of an empty bucket of a real S3 server, at which s3:// URLs point."""
    use_s3(monkeypatch, s3_address)
    url = f"s3://{uuid.uuid4().hex}"
    fsspec.filesystem("s3").mkdir(url)
    yield url
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.fixture(scope="session")
def hdfs_of_session():
    with hdfs_server() as server:
        yield server


@pytest.fixture
def hdfs(hdfs_of_session):
    """A real HDFS; what a test kills of it is started again before the next one."""
    hdfs_of_session.revive()
    return hdfs_of_session


@pytest.fixture
def messages():
    """Return the list of the messages that are logged, for a handler that the user has configured."""
    texts = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logger = logging.getLogger("plsc")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield texts
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
