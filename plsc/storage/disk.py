"""Files and folders on disk: opened safely, read as typed JSON, locked, and published whole.

Files to read may come from anyone, or users name them. A named pipe would block, a device may have no end,
and a link could have any file of this machine read and copied: only regular files are opened, and links in a
folder must lead to targets inside it. `read_record` reads JSON.

Data are written under a hidden name in the same folder, synced, then renamed. A lock keeps a second process
out. It is released when its process ends; the next process removes unfinished files.

Checkpoints and other folders with a manifest, local or remote, are published by `publish`, `withdraw` and
`clean` in plsc/storage/store.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import functools
import io
import json
import os
import re
import secrets
import shutil
import socket
import stat
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import (
    Annotated,
    Any,
    BinaryIO,
    Literal,
    NoReturn,
    TypedDict,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)
from weakref import WeakSet

from plsc.errors import CheckpointError, DataError, PlscError
from plsc.storage.urls import (
    base_name,
    is_url,
    join,
    local_folder,
    open_filesystem,
    parent_of,
    reason_of,
    shown,
    with_retries,
)

AnyPath = str | bytes | os.PathLike[str]


def open_regular(
    path: AnyPath,
    folder: AnyPath | None = None,
    size: int | None = None,
    buffering: int = -1,
    mode: str = "rb",
) -> Any:
    """Open a regular file to be read in binary; OSError, with the reason in `strerror`, if it is refused.

    folder: its folder; None if the user named the file. size: the bytes that it must have. mode: or ``r+b``,
    or ``ab``, which may create the file and refuses a link; both refuse a file with a second name.
    """

    def open_flags(name: str, flags: int) -> int:  # without O_NONBLOCK, opening a named pipe would block
        return os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW * bool(flags & os.O_CREAT), 0o666)

    try:
        file = open(path, mode, buffering, opener=open_flags)  # noqa: SIM115
    except ValueError as error:  # a zero byte, or characters that no file name can have
        raise OSError(errno.EINVAL, str(error), repr(path)) from error
    status, reason = os.fstat(file.fileno()), ""
    if not stat.S_ISREG(status.st_mode):
        reason = "it is not a regular file"
    elif mode != "rb" and status.st_nlink > 1:
        reason = "it has another name (a hard link), maybe outside its folder; replace it by a copy"
    elif size not in (None, status.st_size):
        reason = f"it has {status.st_size} bytes; expected {size}"
    elif folder is not None:
        reason = _way_out(path, folder, "it", file.fileno())
    if reason:
        file.close()
        raise OSError(errno.EINVAL, reason, os.fsdecode(path))
    return file


def read_regular(path: AnyPath, limit: int, folder: AnyPath | None = None) -> bytes:
    """Return the bytes of a file as `open_regular` does; OSError if there are more than `limit`."""
    with open_regular(path, folder) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"it has {size} bytes; expected at most {limit}", os.fsdecode(path))
        data: bytes = file.read(size)
        return data


def without_mark(text: bytes, place: str) -> bytes:
    """Return the start of a text file without the byte order mark of UTF-8; DataError if it is UTF-16."""
    if re.match(rb"\xff\xfe|\xfe\xff|([\t-~]\0|\0[\t-~]){2}", text):
        raise DataError(f"{place} is UTF-16 text; save it as UTF-8")
    return text.removeprefix(b"\xef\xbb\xbf")


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError also for NaN, Infinity and a repeated name."""
    return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_distinct)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)  # the last value of a name
    if len(found) < len(pairs):
        raise ValueError("an object has the same name twice")
    return found


def check_inside(path: AnyPath, folder: AnyPath) -> None:
    """Raise DataError if links lead from a path in a folder out of it; the user has named any other path."""
    path, folder = (os.path.abspath(os.fsdecode(one)) for one in (path, folder))  # noqa: PTH100
    if path.startswith(os.path.join(folder, "")) and (reason := _way_out(path, folder, path)):  # noqa: PTH118
        raise DataError(reason)


def _way_out(path: AnyPath, folder: AnyPath, name: str, descriptor: int = -1) -> str:
    """Return a message if a path, open as `descriptor`, is outside a folder by links; '' if it is inside."""
    try:
        target = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - faster than realpath
    except OSError:
        target = os.path.realpath(os.fsdecode(path))
    root = os.fsdecode(folder)
    inside = (os.path.join(one, "") for one in (root, os.path.realpath(root)))  # noqa: PTH118
    if any(f"{target}/".startswith(one) for one in inside):
        return ""
    return (
        f"{name} is a link that leaves {root}; replace links by what they lead to (cp -rL), or mount it there"
    )


Record = TypeVar("Record")
FileName = Annotated[str, r"(?#a plain file name)(?!\.\.?$)[^/\\\0-\x1f\x7f-\x9f]+"]  # of a folder
Text = Annotated[str, r"(?s).*"]  # may have control characters, as names that are data do
Size = Annotated[int, (1, 2**40)]

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a terminal may interpret them
_DEEPEST = 50  # levels of JSON; Python's recursion limit allows some hundred
_NAMES: dict[Any, str] = {dict: "an object", list: "a list", int: "an integer in", Literal: "one of"}


def read_record(
    kind: type[Record],
    json: Any,
    where: object,
    error: type[PlscError] = CheckpointError,
    most: int = 2**26,
) -> Record:
    """Return JSON as a record; every value is checked.

    Args:
        kind: a dataclass, for which unknown names are refused; a TypedDict, for which they are not; or
            ``dict[str, Any]``. Their fields are of such kinds, `Any`, `Literal`, ``X | None``, ``list[X]``,
            ``tuple``, a NamedTuple (as a list), ``str``, ``bool``, ``int`` (of 0 or more), finite ``float``,
            or ``Annotated`` with the limits of a number, (lowest, highest), or the pattern of a string.
        json: the text as bytes; a file, opened as by `open_regular` in its folder; or a value from a text.
        where: the text's path or URL, for messages.
        error: raised for a text that is no such record, over `most` bytes, nested more than 50 levels, or
            that has control characters.
    """
    problem = "cannot be read"
    try:
        if isinstance(json, Path):
            json = read_regular(json, most, json.parent)
        if isinstance(json, bytes):
            if len(json) > most:
                raise ValueError(f"it has {len(json)} bytes; expected at most {most}")
            problem = "is not JSON"
            json = parse_json(json.decode())
        problem = "is damaged"
        record: Record = _typed(kind, json, "it", 0)
    except (OSError, ValueError, RecursionError) as cause:
        raise error(f"{where} {problem}: {str(getattr(cause, 'strerror', None) or cause)[:400]}") from cause
    return record


_hints = functools.cache(functools.partial(get_type_hints, include_extras=True))


@functools.cache
def _parts_of(kind: Any) -> tuple[Any, tuple[Any, ...], Any, bool]:
    """Return a kind without Annotated and None, its arguments, its limits, and whether it may be None."""
    limits, is_optional = None, False
    while (origin := get_origin(kind)) in (Annotated, types.UnionType, Union):
        is_optional |= origin is not Annotated
        kind, limits = get_args(kind)[0], get_args(kind)[-1] if origin is Annotated else None
        if is_typeddict(limits):  # which mypy should take for any dictionary
            kind, limits = limits, None
    return origin or kind, get_args(kind), limits, is_optional


def _typed(kind: Any, value: Any, place: str, depth: int) -> Any:
    """Return a JSON value as a kind. Raises ValueError. place: names the value in messages."""
    if depth > _DEEPEST:
        raise ValueError(f"it is nested more than {_DEEPEST} levels")
    kind, parts, limits, is_optional = _parts_of(kind)
    if value is None and is_optional:
        return None
    if isinstance(value, str) and limits is None and _CONTROL.search(value):
        raise ValueError(f"{place:.80} contains control characters")
    if kind is Any:
        kind, parts = type(value), (Any, Any)
        if kind not in (dict, list):
            return value
    is_exact = dataclasses.is_dataclass(kind)
    if isinstance(value, dict) and (kind is dict or is_exact or is_typeddict(kind)):
        hints = {} if kind is dict else _hints(kind)  # in their order: the format and its version first
        names = [*filter(value.__contains__, hints), *(name for name in value if name not in hints)]
        of_name, of_value = parts or (str, Any)
        found = {}
        for name in names:
            if name not in hints:
                _typed(of_name, name, f"a name in {place:.80}", depth)
            inner = f"{name!r:.80} of {place:.80}" if depth or name not in hints else name
            found[name] = _typed(hints.get(name, of_value), value[name], inner, depth + 1)
        odd = hints.keys() - value.keys() - getattr(kind, "__optional_keys__", set())
        odd |= value.keys() - hints.keys() if is_exact else set()
        if odd:
            state = "missing" if odd & hints.keys() else "unknown"
            raise ValueError(f"{min(odd)!r:.80} is {state} in {place}")
        return kind(**found) if is_exact else found
    if isinstance(value, list) and isinstance(kind, type) and issubclass(kind, (list, tuple)):
        parts = tuple(_hints(kind).values()) if hasattr(kind, "_fields") else parts
        if kind is list or parts[-1] is ...:
            parts = parts[:1] * len(value)
        if len(parts) == len(value):
            items = [_typed(*pair, place, depth + 1) for pair in zip(parts, value, strict=True)]
            return kind(*items) if hasattr(kind, "_fields") else kind(items)
    elif kind is Literal:
        limits = parts
        if (type(value), value) in [(type(part), part) for part in parts]:
            return value
    elif kind is int or kind is float:
        limits = limits or ((0, 2**63 - 1) if kind is int else (-sys.float_info.max, sys.float_info.max))
        if type(value) in (int, kind) and limits[0] <= value <= limits[1]:
            return kind(value)
    elif type(value) is kind and (limits is None or re.fullmatch(limits, value)):
        return value
    of = "" if limits is None else f" {limits}"
    raise ValueError(f"{place} is {repr(value)[:80]}, expected {_NAMES.get(kind, kind.__name__)}{of}")


# Hidden names.

# The last file written to a folder in a store: a folder that has it is complete.
MANIFEST_NAME = "manifest.json"
SAVING, REPLACED, DELETING = ".saving-", ".replaced-", ".deleting-"
HIDDEN = re.compile(r"(\.saving-|\.replaced-|\.deleting-)([^.].*)-[0-9a-f]{8}")  # [^.] excludes ".."
WORKSPACE_SUFFIX = ".plsc-partial"
_LOCK_NAME = ".lock"
_PATIENCE = 3.0  # seconds; a process that was just killed may not have exited yet
_BUFFER = 4 * 2**20


def hidden_name(name: str, prefix: str = SAVING) -> str:
    """Return a new name that matches `HIDDEN`, such as ``.saving-5-0f3a9b1c``."""
    return f"{prefix}{name}-{secrets.token_hex(4)}"


def sync(path: str | os.PathLike[str]) -> None:
    """Flush a file's data, or a folder's directory entries, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Locks.


def _try_lock(descriptor: int) -> bool:
    """Return whether the lock was acquired; also True on a file system that does not support locks.

    A record lock would go as soon as this process closes another descriptor of the file, such as to read it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


class FolderLock:
    """Prevent a second run from using a folder while this process lives.

    A context manager. Forked children, which may live longer, close their descriptor of it.

    Args:
        folder: the folder to lock; created if missing.
        note: JSON fields stored in the lock file with the host and the process id. `lock_note` reads them,
            also after the lock is released.
    """

    def __init__(self, folder: Path, note: dict[str, Any] | None = None) -> None:
        """Acquire the lock. Raise DataError, naming the other process, if it is taken."""
        with _as_data_error(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with _as_data_error(folder / _LOCK_NAME):  # such as a pipe
            self._file = open_regular(folder / _LOCK_NAME, buffering=0, mode="ab")
        _HELD.add(self)
        give_up = time.monotonic() + _PATIENCE
        while not _try_lock(self._file.fileno()):
            if time.monotonic() > give_up:
                self.release()
                there = lock_note(folder)
                holder = f" (process {there['pid']} on {there['host']})" if there else ""
                raise DataError(
                    f"another run{holder} is using {folder}; wait for it, stop it, or choose another folder"
                )
            time.sleep(0.1)
        content = {"host": socket.gethostname(), "pid": os.getpid(), **(note or {})}
        with _as_data_error(folder / _LOCK_NAME):
            self._file.truncate(0)
            self._file.write(json.dumps(content).encode())

    def release(self) -> None:
        """Release the lock."""
        self._file.close()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_HELD: WeakSet[FolderLock] = WeakSet()


def _release_in_child() -> None:
    for lock in _HELD:
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)


class _Holder(TypedDict):
    pid: int
    host: Text


class _Note(_Holder, total=False):
    launches: list[str]


def lock_note(folder: Path) -> dict[str, Any]:
    """Return what the last lock holder stored: host, pid and launches; empty if unknown."""
    try:
        note = read_record(_Note, folder / _LOCK_NAME, _LOCK_NAME, DataError, 2**24)
    except DataError:  # the file may hold anything
        return {}
    return {"launches": [], **note, "host": ascii(note["host"])[1:-1][:100]}


# Files and folders that commands write.


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], *, is_synced: bool = True) -> Iterator[Path]:
    """Yield a temporary path that replaces the local file `path` when the block succeeds.

    When the block fails, `path` is unchanged and the temporary file is removed. Raises DataError if the file
    cannot be written (missing folder, no permission, full disk).
    """
    path = Path(path)
    temporary = path.with_name(hidden_name(path.name))
    try:
        with _as_data_error(path):
            yield temporary
            if is_synced:
                sync(temporary)
            temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


@contextlib.contextmanager
def publishing(location: str | Path) -> Iterator[BinaryIO]:
    """Yield a binary file that appears at a path or URL when the block succeeds.

    Missing local parent folders are created. When the block fails, nothing is published and what was
    written is removed. Raises DataError if the name exists or cannot be written.
    """
    location = str(location)
    refuse_existing(location)
    if is_url(location):
        with _publishing_remotely(location) as file:
            yield file
        return
    path = Path(location)
    with _as_data_error(path), Workspace(path.parent, path.name) as work:
        with (work.path / path.name).open("xb", buffering=_BUFFER) as file:
            yield file
        work.publish(path, path.name)


@contextlib.contextmanager
def publishing_folder(path: str | Path) -> Iterator[Path]:
    """Yield a hidden folder next to the local `path`; it is renamed to `path` when the block succeeds.

    Raises DataError as `publishing` does; OptionError for a URL.
    """
    path = local_folder(path, "the new folder")
    refuse_existing(str(path))
    with _as_data_error(path), Workspace(path.parent, path.name) as work:
        yield work.path
        work.publish(path)


class Workspace:
    """The folder ``.<name>.plsc-partial`` in `parent`, locked while this process lives.

    Files left by an earlier, killed run are removed. Leaving the context removes the folder unless it was
    published. Raises DataError if another run holds the lock.

    mode: permissions of the folder, less those that the umask removes.
    """

    def __init__(self, parent: Path, name: str, mode: int = 0o777) -> None:
        self.path = parent / f".{name}{WORKSPACE_SUFFIX}"
        self._name = name
        self._is_published = False
        with _as_data_error(parent / name):
            parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._claim(mode)
            for entry in list(self.path.iterdir()):
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_published:
            with contextlib.suppress(OSError):
                shutil.rmtree(self.path)
        os.close(self._lock)

    def publish(self, target: Path, inner: str = "") -> None:
        """Rename the folder, or the file `inner` in it, to `target`. Raises DataError if `target` exists."""
        with _as_data_error(target):
            for inside, _, files in os.walk(self.path):
                for name in (*files, "."):
                    sync(Path(inside, name))
            refuse_existing(str(target))  # created by another process in the meantime
            (self.path / inner).rename(target)
            self._is_published = not inner
            sync(target.parent)

    def _claim(self, mode: int) -> int:
        while True:
            is_new = False
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode)
                is_new = True
            try:
                lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue  # the run that held it has just ended
            if not _try_lock(lock):
                os.close(lock)
                raise DataError(
                    f"another run is working on {self._name} (it holds {self.path}); wait for it or stop it"
                )
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(status := os.fstat(lock), os.lstat(self.path)):
                    if is_new or status.st_uid == os.geteuid():
                        return lock
                    os.close(lock)
                    raise DataError(f"{self.path} belongs to another user; remove it, or use another folder")
            os.close(lock)  # the folder was published or removed between open and lock


def refuse_existing(location: str) -> None:
    """Raise DataError if a file or folder of this name exists, local or remote."""
    if is_url(location):
        filesystem, inside = open_filesystem(location)
        there = with_retries(
            lambda: bool(filesystem.exists(inside)), f"{shown(location)} cannot be looked up"
        )
    else:
        there = os.path.lexists(location)
    if there:
        raise DataError(f"{shown(location)} already exists; remove it, or choose another name")


@contextlib.contextmanager
def _as_data_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror or error}; nothing was published"
        raise DataError(f"cannot write {path}: {reason}") from error


@contextlib.contextmanager
def _publishing_remotely(url: str) -> Iterator[BinaryIO]:
    # Write under a hidden name: some clients publish a partial file when a writer fails.
    filesystem, inside = open_filesystem(url)
    name = join(parent_of(inside), hidden_name(base_name(inside)))
    try:
        with filesystem.open(name, "wb", block_size=64 * 2**20) as file:
            sink: Any = _Sink(file)
            yield sink
        size = filesystem.info(name)["size"]
        refuse_existing(url)  # again: in an object store, the move would replace it
        filesystem.mv(name, inside)
        # Some clients do nothing and report nothing when they cannot rename.
        if filesystem.info(inside)["size"] != size:
            raise OSError("the file was not renamed")
    except PlscError:
        raise
    except Exception as error:  # each client has its own exceptions
        raise DataError(f"cannot write {shown(url)} ({reason_of(error)})") from error
    finally:
        with contextlib.suppress(Exception):
            if filesystem.exists(name):
                filesystem.rm(name)


class _Sink(io.RawIOBase):
    """A client's file with tell(), which some lack; closing it does not close the client's file."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file = file
        self._position = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: Any) -> int:
        data = bytes(data)
        self._file.write(data)
        self._position += len(data)
        return len(data)
