"""The same examples in every run, as a failure that comes and goes helps nobody; servers that start once."""

import logging
import os
import signal
import uuid
from collections import Counter
from pathlib import Path

import fsspec
import pytest
from hypothesis import settings

from tests.hdfs_server import hdfs_server
from tests.postgres_server import postgres_server
from tests.s3_server import s3_server, use_s3

# The files that take longest, the first ones first: at the end they would leave a core idle.
LONGEST = """
    system/test_benchmarks.py distributed/test_saving.py unit/heads/test_triton.py system/test_clean.py
    distributed/test_interruption.py distributed/test_two_machines.py system/test_partition_spark.py
    system/test_export_networks.py contract/test_stores.py system/test_serve.py distributed/test_ranks.py
    distributed/test_launch.py unit/gallery/test_postgres.py system/test_embed_at_scale.py
    unit/train/test_acceleration.py system/test_demo.py
    system/test_warm_start.py system/test_partition.py system/test_protocols.py system/test_entry.py
    system/test_classes.py system/test_native_builds.py system/test_docs.py unit/data/test_loader.py
    unit/test_export.py contract/test_runs.py system/test_guide.py
""".split()  # noqa: SIM905

# Processes that tests start must not inherit what nohup or a shell in the background ignores.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Start the longest files first, then those with many tests (with --no-loadscope-reorder of xdist)."""
    places = {str(Path(__file__).parent / name): number for number, name in enumerate(LONGEST)}
    counts = Counter(item.path for item in items)
    items.sort(key=lambda item: (places.get(str(item.path), len(places)), -counts[item.path], item.path))


@pytest.fixture(scope="session", autouse=True)
def surroundings(tmp_path_factory):
    from tests.undrawn import draw_nothing

    os.environ["PLSC_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
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
    yield hdfs_of_session
    if hdfs_of_session.processes["namenode"].poll() is not None:
        hdfs_of_session.kill("datanode")  # without a name node, it would keep a core busy


@pytest.fixture(scope="session")
def postgres():
    pytest.importorskip("psycopg", reason="plsc-torch[postgres] is not installed")
    yield from postgres_server("synchronous_commit=off", "timezone=Asia/Tokyo")


@pytest.fixture
def database(postgres):
    """The URL of an empty database with pgvector of a real PostgreSQL server."""
    return postgres.make_database("one")


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
