"""Local paths and fsspec URLs: distinguish and split them, and open file systems."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from plsc.errors import DataError, OptionError, did_you_mean
from plsc.errors import shown as shown
from plsc.errors import without_secrets as without_secrets
from plsc.storage.retry import with_retries
from plsc.version import install

_SCHEME = re.compile(r"^([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_LOCAL = re.compile(r"^(file|local):///+", re.IGNORECASE)
_BLANK = re.compile(r"://(?=[^/?#]*\s)(?:(?!::).)*@|[?#][^/?#]*=.*\s")
_NO_HOST = re.compile(r"^(\w[\w+.-]+:)/$")  # of hdfs:///, the default server, without its last two slashes
# Their rename copies every byte and is not atomic; the same holds for folders of "memory".
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "r2", "memory"}
_LINK = re.compile(r"""\bhref=["']([^"'<>\s]+)""", re.IGNORECASE)
_MOST_ANSWER = 2**27  # bytes of an answer over HTTP; a call asks for at most 64 MiB and 5 MiB ahead


async def _http_client(**options: Any) -> Any:
    """Return a client that decompresses nothing, and refuses long answers: a server may ignore the range."""
    import aiohttp

    class Answer(aiohttp.ClientResponse):
        async def read(self) -> bytes:
            if self._body is None:
                body = bytearray()
                async for part in self.content.iter_any():
                    body += part
                    if len(body) > _MOST_ANSWER:
                        self.close()
                        raise DataError(f"{shown(str(self.url))}: the server sent over {_MOST_ANSWER} bytes")
                self._body = bytes(body)
            return await super().read()

        async def text(self, *arguments: Any, **named: Any) -> str:
            """Return the links of a page alone, for which fsspec searches in cubic time."""
            found = _LINK.findall(await super().text(*arguments, **named))
            return "".join(f'<a href="{link}">' for link in found)

    headers = {"Accept-Encoding": "identity"}
    return aiohttp.ClientSession(response_class=Answer, auto_decompress=False, headers=headers, **options)


# Options for clients that wait minutes for a server that is down: retries are done in `retry` instead.
_CLIENT_OPTIONS: dict[str, dict[str, Any]] = {
    "hdfs": {
        "dfs.client.failover.max.attempts": "4",
        "dfs.client.failover.sleep.base.millis": "100",
        "dfs.client.failover.sleep.max.millis": "500",
    },
    "s3": {
        "config_kwargs": {
            "retries": {"max_attempts": 2},
            "connect_timeout": 5,
            "read_timeout": 60,
        }
    },
}
_CLIENT_OPTIONS["s3a"] = _CLIENT_OPTIONS["s3"]
_CLIENT_OPTIONS["http"] = _CLIENT_OPTIONS["https"] = {"get_client": _http_client}
_EXTRAS = {"hdfs": "hdfs", "s3": "s3", "s3a": "s3", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs"}


def is_url(location: object) -> bool:
    """Return whether this is an fsspec URL such as ``s3://bucket/data``, not a local path.

    Raises DataError for one with a blank in its user, password or query: messages could not tell
    where such a password ends.
    """
    if not isinstance(location, str) or _SCHEME.match(location) is None:
        return False
    if _BLANK.search(location):
        raise DataError("a URL has a blank in its user, password or query; write it as %20")
    return True


def is_object_store(url: str) -> bool:
    """Return whether the store of this URL lacks an atomic rename, so the last file publishes."""
    return _protocol(url) in _OBJECT_STORES


def set_hdfs_user(name: str) -> None:
    """Use this user name for new HDFS connections of this process and its children."""
    os.environ["HADOOP_USER_NAME"] = name  # read when a client is created


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return (fsspec filesystem, path in it).

    Raises DataError if the protocol is unknown, its client is not installed, or it cannot be opened. The
    client's message is left out, because it may contain parts of a password.
    """
    import fsspec

    protocol = _protocol(url)
    for part in url.partition("?")[0].split("::"):  # chained URLs
        if shown(part) != part and "@" not in part.split("/")[2]:
            raise DataError(f"{shown(url)} has a '/' in its user name or password; write it as %2F")
    try:
        if protocol == "hdfs":
            return _open_hdfs(url)
        return fsspec.core.url_to_fs(url, **_CLIENT_OPTIONS.get(protocol, {}))
    except ImportError as error:
        extra = _EXTRAS.get(protocol, protocol)
        command = install(extra) if extra in ("hdfs", "s3") else f"pip install {extra}"
        raise DataError(f"{shown(url)} needs a client that is not installed; run {command}") from error
    except ValueError:
        near = did_you_mean(protocol, fsspec.available_protocols())
        raise DataError(
            f"{shown(url)}: unknown protocol {protocol!r}; expected a local path, or a protocol of fsspec, "
            f"such as s3 or hdfs{near}"
        ) from None
    except Exception as error:  # each client has its own exceptions
        raise DataError(
            f"{shown(url)} cannot be opened ({type(error).__name__}); check the server, port and user"
        ) from None


# HDFS clients by process, server and user.
_hdfs_clients: dict[tuple[int, str, str | None], Any] = {}


def _open_hdfs(url: str) -> tuple[Any, str]:
    """Return (file system, path), with the client cached here instead of by fsspec.

    A forked process clears fsspec's cache. Destroying an HDFS client waits for threads that do not exist
    after a fork, so it would hang. Here the parent's client is kept, unused.
    """
    import fsspec

    server = url.split("://", 1)[1].split("/", 1)[0]
    key = (os.getpid(), server, os.environ.get("HADOOP_USER_NAME"))
    if key not in _hdfs_clients:
        _hdfs_clients[key] = fsspec.core.url_to_fs(url, skip_instance_cache=True, **_CLIENT_OPTIONS["hdfs"])[
            0
        ]
    client = _hdfs_clients[key]
    return client, client._strip_protocol(url)


def _protocol(url: str) -> str:
    return url.split("://", 1)[0].lower()


def base_name(location: str) -> str:
    """Return the last part of a path or URL."""
    return location.rstrip("/").rsplit("/", 1)[-1]


def parent_of(location: str) -> str:
    """Return the folder of a path or URL."""
    return location.rstrip("/").rsplit("/", 1)[0] if is_url(location) else str(Path(location).parent)


def local_path(location: str) -> str:
    """Return the path of a ``file://`` URL, so that links and pipes are checked; others unchanged."""
    return _LOCAL.sub("/", location)


def local_folder(location: str | os.PathLike[str], what: str) -> Path:
    """Return the path of a local folder. Raises OptionError for a URL, which Path would cut to ``s3:/``."""
    if is_url(os.fspath(location)):
        raise OptionError(f"{what} is the URL {shown(os.fspath(location))}; expected a local folder")
    return Path(location)


def located(name: str, folder: str, allowed: Sequence[str] = (), listing: str = "") -> str:
    """Return a location that came out of data, normalised. Raises DataError unless it may be opened.

    It may be relative, inside `folder` (links are checked when it is opened); absolute, if the file that has
    it, `listing` (default: in `folder`), is local; a URL of the protocol and host, or bucket, of `listing`;
    or below one of the prefixes `allowed`, which the user named (a string: with commas). A chain (``::``) is
    never followed. Otherwise, data could have any server called.
    """
    name, own = local_path(name), listing or folder
    own = "/".join(own.split("/")[:3]) if is_url(own) else ""
    place = name if is_url(name) else posixpath.normpath(name)
    is_absolute = place.startswith("/")
    if is_absolute or is_url(place):
        named = allowed.split(",") if isinstance(allowed, str) else allowed
        prefixes = [f"{local_path(one).rstrip('/')}/" for one in named if one]
        prefixes += [_NO_HOST.sub(r"\1///", f"{local_path(one).rstrip('/')}/") for one in (own, folder)]
        is_inside = place.startswith(tuple(prefixes))
    else:
        is_inside = place.split("/")[0] not in (".", "..")
    if is_url(place) or (is_url(folder) and not is_absolute):  # what clients and servers decode
        parts = re.split(r"[/\\]", unquote(name))
        is_inside = is_inside and "::" not in name and ".." not in parts and name.isprintable()
    if not name or "\0" in name or not is_inside:
        raise DataError(
            f"the location {name[:200]!r} {'has a null byte' if chr(0) in name else f'is outside {folder}'}; "
            f"expected a relative path inside it, or one that starts with {own}/ or with a prefix in the "
            "argument `allowed`"
        )
    return place


def join(folder: str, name: str) -> str:
    """Return a path or URL below a folder."""
    return posixpath.join(folder, name)


def exists(location: str) -> bool:
    """Return whether a file exists at a path or URL; DataError if the store does not answer."""
    if not is_url(location):
        return os.path.isfile(location)  # noqa: PTH113 - False, not an error, for a name that is too long
    filesystem, inside = open_filesystem(location)

    def look() -> bool:  # the clients' isfile() returns False when the store does not answer
        try:
            return bool(filesystem.info(inside)["type"] == "file")
        except (FileNotFoundError, NotADirectoryError):
            return False

    return with_retries(look, f"{shown(location)} cannot be looked up")
