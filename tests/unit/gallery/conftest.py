"""A PostgreSQL server with pgvector, and an empty database in it."""

import contextlib

import pytest

from tests.postgres_server import postgres_server


@contextlib.contextmanager
def connected(url):
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


def made_database(server, name):
    """Return the URL of an empty database with pgvector."""
    with connected(server.url()) as connection:
        connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        connection.execute(f"CREATE DATABASE {name}")
    with connected(server.url(name)) as connection:
        connection.execute("CREATE EXTENSION vector")
    return server.url(name)


@pytest.fixture(scope="session")
def server():
    pytest.importorskip("psycopg", reason="plsc-torch[postgres] is not installed")
    yield from postgres_server("synchronous_commit=off", "timezone=Asia/Tokyo")


@pytest.fixture
def database(server):
    return made_database(server, "one")
