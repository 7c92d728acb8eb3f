"""Local paths and fsspec URLs: distinguish and split them, call stores with retries, and the cache folder.

Calls to a remote store are retried for a limited time; calls that get no answer are abandoned.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import grp
import hashlib
import html
import math
import os
import posixpath
import pwd
import random
import re
import stat
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from fsspec.callbacks import Callback

from plsc.errors import DataError, OptionError, PlscError, did_you_mean, has_open_secret
from plsc.errors import shown as shown
from plsc.errors import without_secrets as without_secrets
from plsc.version import install

_SCHEME = re.compile(r"^([a-z][a-z0-9+.-]+)(::[a-z][a-z0-9+.-]*)*://", re.IGNORECASE)
_LOCAL = re.compile(r"^(file|local):///+", re.IGNORECASE)
_QUERY = re.compile(r"[?#][^/?#]*=")
_NO_HOST = re.compile(r"^(\w[\w+.-]+:)/$")  # of hdfs:///, the default server, without its last two slashes
# Their rename copies every byte and is not atomic; the same holds for folders of "memory".
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "r2", "memory"}
_LINK = re.compile(r"""\bhref=["']([^"'<>\s]+)""", re.IGNORECASE)
_MOST_ANSWER = 2**27  # bytes of an answer over HTTP; a call asks for at most 64 MiB and 5 MiB ahead
_NOBODY = 65534  # to whom NFS maps root
_LOOK_SECONDS = 0.5
Answer = TypeVar("Answer")
# A retry does not help: the file is missing, or access is denied.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError)
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 8.0
# Also final: missing credentials, by the names in S3 clients, and HDFS's kind of PermissionError.
_DENIED = re.compile(
    "(No|Partial)CredentialsError|CredentialRetrievalError|NoAuthTokenError|AccessControlException"
)
# A separate generator, so that the user's random state does not change.
_jitter = random.Random()
# Where a Java stack trace begins in an HDFS error; the client escapes the line breaks.
_JAVA_TRACE = re.compile(r"(?:\\n|\n)(?:\\t|\t)at ")


async def _http_client(**options: Any) -> Any:
    """Return a client that decompresses nothing, and refuses long answers: a server may ignore the range."""
    import aiohttp

    class Response(aiohttp.ClientResponse):
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
            page = await super().text(*arguments, **named)
            if "<html" in page.lower() and "</html" not in page.lower():  # sent without a length
                raise OSError("the page is cut off")
            found = _LINK.findall(page)
            return "".join(f'<a href="{html.unescape(link).removeprefix("./")}">' for link in found)

    headers = {"Accept-Encoding": "identity"}
    return aiohttp.ClientSession(response_class=Response, auto_decompress=False, headers=headers, **options)


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

    Raises DataError for one of which messages could not tell where its password or query ends.
    """
    if not isinstance(location, str) or _SCHEME.match(location) is None:
        return False
    if (_QUERY.search(location) and re.search(r"\s", location)) or has_open_secret(location):
        raise DataError(
            "a URL has a password without a host, or a blank, '/', '?', '#', '@' or '::' where it could end; "
            "write %20, %2F, %3F, %23, %40 or %3A%3A"
        )
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
    try:
        if protocol == "hdfs":
            return _open_hdfs(url)
        filesystem, path = fsspec.core.url_to_fs(url, **_CLIENT_OPTIONS.get(protocol, {}))
        filesystem.invalidate_cache()  # of listings, which clients keep as long as the process lives
        return filesystem, path
    except Exception as error:  # each client has its own exceptions
        problem = f"cannot be opened ({type(error).__name__}); check the server, port and user"
        if isinstance(error, ImportError):
            extra = _EXTRAS.get(protocol, protocol)
            command = install(extra) if extra in ("hdfs", "s3") else f"pip install {extra}"
            problem = f"needs a client that is not installed; run {command}"
        elif protocol not in fsspec.available_protocols():
            problem = f"has the unknown protocol {protocol!r}"
            problem += did_you_mean(protocol, fsspec.available_protocols())
        raise DataError(f"{shown(url)} {problem}") from None


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


# fsspec's find() and glob() leave out a folder that cannot be listed, so these list each folder themselves.


def find_below(url: str) -> dict[str, str]:
    """Return the paths of all files and folders below a URL, with their types, ``file`` or ``directory``."""
    filesystem, inside = open_filesystem(url)
    if is_object_store(url):  # one flat listing
        described = with_retries(
            lambda: filesystem.find(inside, withdirs=True, detail=True), f"{shown(url)} cannot be listed"
        )
        return {path: described[path]["type"] for path in described}
    found: dict[str, str] = {}
    left = [inside]
    while left:
        below = _list(filesystem, left.pop())
        found |= below
        left += [path for path, kind in below.items() if kind == "directory"]
    return found


def find_matching(pattern: str) -> list[str]:
    """Return the URLs that match a pattern, in which ``*`` matches no ``/``, as in glob.glob."""
    filesystem, inside = open_filesystem(pattern)
    parts = inside.split("/")
    fixed = next((place for place, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    first = "/".join(parts[:fixed])
    found = [first]
    for place, part in enumerate(parts[fixed:], fixed + 1):
        found = [
            path
            for folder in found
            for path, kind in _list(filesystem, folder).items()
            if fnmatch.fnmatchcase(base_name(path), part) and (place == len(parts) or kind == "directory")
        ]
    # What `unstrip_protocol` returns lacks the account of abfs://container@account/.
    before, _, after = pattern.rstrip("/").partition("/".join(parts[fixed:]))
    return [f"{before}{path[len(first) :].lstrip('/')}{after}" for path in found]


def list_folder(url: str) -> dict[str, str]:
    """Return the paths of the files and folders in a folder, with their types as `find_below`."""
    return _list(*open_filesystem(url), url)


def _list(filesystem: Any, folder: str, url: str = "") -> dict[str, str]:
    place = shown(url or filesystem.unstrip_protocol(folder))
    entries = with_retries(lambda: filesystem.ls(folder, detail=True), f"{place} cannot be listed")
    kinds, folder = {one["name"].rstrip("/"): one["type"] for one in entries}, folder.rstrip("/")
    if "http" in filesystem.protocol:  # a page may link to anything
        kinds = {path: kind for path, kind in kinds.items() if is_entry(path, folder)}
    return {path: kind for path, kind in kinds.items() if path != folder}


def is_entry(link: str, folder: str) -> bool:
    """Return whether a link on the page of a folder is that of a file or folder in it."""
    place, _, name = link.rpartition("/")
    decoded = unquote(name)
    is_name = "/" not in decoded and decoded != "." and ".." not in decoded.split("\\")
    return place == folder and is_name and "?" not in name and "#" not in name


def name_in_listing(url: str, name: str) -> str:
    """Return a name that `find_below` gave, decoded as `os.fsdecode`: over HTTP it is percent-encoded."""
    return unquote(name, errors="surrogateescape") if _protocol(url) in ("http", "https") else name


def base_name(location: str) -> str:
    """Return the last part of a path or URL."""
    return location.rstrip("/").rsplit("/", 1)[-1]


def unique_name(location: str) -> str:
    """Return a path, or a URL without secrets and with a hash, as only its query may tell it from others."""
    name = shown(location)
    if name == location:
        return name
    return f"{name} #{hashlib.sha256(location.encode(errors='backslashreplace')).hexdigest()[:12]}"


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
            f"the location {shown(name)[:200]!r} is outside {folder} and {own}/, or has a null byte; "
            "name its prefix in the argument `allowed`"
        )
    return place


def join(folder: str, name: str) -> str:
    """Return a path or URL below a folder."""
    return posixpath.join(folder, name)


def place_of(folder: str, name: str) -> str:
    """Return the path or URL of what `located` returned for a folder, or what the user named."""
    return name if is_url(name) else join(folder, name)


_MISSING = (403, 404, 410)  # S3 says 403 of a missing object to who may not list


def info_of(filesystem: Any, path: str) -> dict[str, Any]:
    """Return what ``info`` does; fsspec's HTTP client says that a file is missing when a server fails."""
    try:
        found: dict[str, Any] = filesystem.info(path)
    except FileNotFoundError as error:
        cause, is_http = error.__cause__, "http" in filesystem.protocol
        is_missing = cause is None or isinstance(cause, FileNotFoundError)
        if is_http and not is_missing and getattr(cause, "status", 500) not in _MISSING:
            raise cause from None  # type: ignore[misc]
        raise
    return found


def exists(location: str) -> bool:
    """Return whether a file exists at a path or URL; DataError if the store does not answer."""
    if not is_url(location):
        return os.path.isfile(location)  # noqa: PTH113 - False, not an error, for a name that is too long
    filesystem, inside = open_filesystem(location)

    def look() -> bool:  # the clients' isfile() returns False when the store does not answer
        try:
            return bool(info_of(filesystem, inside)["type"] == "file")
        except (FileNotFoundError, NotADirectoryError):
            return False

    return with_retries(look, f"{shown(location)} cannot be looked up")


def with_retries(
    call: Callable[[], Answer], what: str, *, attempts: int = 6, total_seconds: float = 60.0
) -> Answer:
    """Return ``call()``, tried up to `attempts` times within `total_seconds`.

    The wait between tries starts at 0.1 s and doubles up to 8 s, with jitter, so that many workers do not
    retry at the same moment. Permanent errors (missing file, access denied) are not retried.

    Args:
        what: start of the error message, such as ``s3://b/k cannot be read``.

    Raises:
        DataError: names the last error and how long it was tried.
    """
    started = time.monotonic()
    pause = _FIRST_WAIT
    attempt = 0
    while True:
        attempt += 1
        try:
            return call()
        except PlscError:
            raise
        except Exception as error:  # each client has its own exceptions
            is_final = isinstance(error, _FINAL) or _DENIED.search(f"{type(error).__name__}: {error}")
            passed = time.monotonic() - started
            left = total_seconds - passed
            if is_final or attempt == attempts or left <= 0:
                tries = f"{attempt} tries" if attempt > 1 else "one try"
                after = "" if is_final else f" after {tries} in {passed:.0f} s"
                # The client's traceback may show a secret.
                raise DataError(f"{what}{after} ({reason_of(error)})") from None
            time.sleep(min(pause * _jitter.uniform(0.75, 1.25), left))
            pause = min(2 * pause, _LONGEST_WAIT)


def reason_of(error: BaseException) -> str:
    """Return a client's error on one line, without passwords and cut to 200 characters."""
    text = _JAVA_TRACE.split(str(getattr(error, "strerror", None) or error), maxsplit=1)[0]
    text = shown(" ".join(text[:10_000].split()), by_client=True)[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class Progress(Callback):
    """Report the bytes of a transfer, as a callback of fsspec, and keep the time of the last ones.

    Raises DataError in the transfer after `most` bytes.
    """

    def __init__(self, on_bytes: Callable[[int], object] | None = None, most: float = math.inf) -> None:
        super().__init__()
        self.last, self._most = time.monotonic(), most
        self._on_bytes, self._reported = on_bytes, 0

    def call(self, *_: Any, **__: Any) -> None:
        """Report what has changed; fewer bytes if another try has begun."""
        self.last = time.monotonic()
        if self.value > self._most:
            raise DataError(f"the file has more than {self._most} bytes")
        new, self._reported = self.value - self._reported, self.value
        if self._on_bytes is not None and new:
            self._on_bytes(new)

    def branched(self, path_1: str, path_2: str, **kwargs: Any) -> Progress:
        """Return itself, for the only file of a transfer."""
        return self


def with_timeout(call: Callable[[], Answer], silence: float, progress: Progress | None = None) -> Answer:
    """Run ``call()`` in a thread and return its result; TimeoutError after `silence` seconds without a byte.

    Python cannot end the thread of an abandoned call. It is a daemon, so it does not keep the process alive.
    """
    progress = progress or Progress()
    progress.absolute_update(0)
    outcome: Future[Answer] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True, name="plsc-store").start()
    while not wait([outcome], _LOOK_SECONDS).done:
        if time.monotonic() - progress.last > silence:
            raise TimeoutError(f"no answer for {silence:g} s")
    return outcome.result()


def cache_folder(*parts: str) -> Path:
    """Return a folder below ``$PLSC_CACHE_DIR``, else ``$XDG_CACHE_HOME/plsc``, else ``~/.cache/plsc``.

    Creates it with mode 700 if missing, because cached data may be private. Raises OSError if that fails, and
    DataError if others may write to it who are in no group of this process.
    """
    root = os.environ.get("PLSC_CACHE_DIR")
    if not root:
        root = str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "plsc")
    folder = Path(root).expanduser()
    folder.parent.mkdir(parents=True, exist_ok=True)
    for part in ("", *parts):
        folder /= part
        folder.mkdir(mode=0o700, exist_ok=True)
        by_group = folder.stat().st_gid not in (os.getegid(), *os.getgroups())
        _check_own(folder, "PLSC_CACHE_DIR", by_group, may_be_shared=not part)
    return folder


def own_folder(folder: Path, variable: str) -> None:
    """Create a folder of code that is run, with mode 700 if missing; variable: that names another one.

    Raises DataError if others may write to it, or to a folder above it: they could exchange it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for place in (folder, *folder.absolute().parents, *folder.resolve().parents):
        _check_own(place, variable, not _is_of_one_user(place.stat().st_gid), may_be_shared=place != folder)


def _check_own(folder: Path, variable: str, by_group: bool, may_be_shared: bool) -> None:
    """Raise DataError if others, or its group, may write to a folder; to a sticky one they may add."""
    at, link = folder.stat(), folder.lstat()
    by_others = stat.S_IWOTH | (stat.S_IWGRP if by_group and at.st_gid != 0 else 0)
    is_open = at.st_mode & by_others and not (may_be_shared and at.st_mode & stat.S_ISVTX)
    if is_open or not {at.st_uid, link.st_uid} <= {os.geteuid(), 0, _NOBODY}:
        raise DataError(
            f"others may write to {folder}, or own it; set {variable} to a folder where only you may"
        )


def _is_of_one_user(group: int) -> bool:
    """Return whether a group is named as this user: systems make one for each, without other members."""
    with contextlib.suppress(KeyError):
        return grp.getgrgid(group).gr_name == pwd.getpwuid(os.geteuid()).pw_name
    return False


def folder_for(kind: str, url: str) -> Path:
    """Return the cache path for a URL, ending in the URL's last part; its parent folder is created.

    kind: of the content, such as ``checkpoints``.
    """
    digest = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]
    return cache_folder(kind, digest) / base_name(shown(url))
