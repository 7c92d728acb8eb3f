"""An output behind an fsspec URL: uploaded, then published."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plsc.data.partition import manifest as manifests
from plsc.data.partition.progress import Progress
from plsc.data.partition.workspace import SUFFIX
from plsc.errors import DataError
from plsc.storage.blocks import streamed
from plsc.storage.retry import reason_of
from plsc.storage.urls import is_object_store, is_url, open_filesystem, shown

_OURS = re.compile(rf"(part_\d+\.txt|{re.escape(manifests.FILE_LIST)})$")


def exists(url: str) -> bool:
    """Whether there is something at the URL that must not be overwritten.

    On an object store, parts without a manifest are what a run that was killed left: nothing.
    """
    filesystem, path = open_filesystem(url)
    with _telling(url):
        if not filesystem.exists(path):
            return False
        if not is_object_store(url):
            return True
        found = filesystem.find(path)
        return any(_OURS.search(name.rsplit("/", 1)[-1]) is None for name in found)


def publish(folder: Path, url: str, manifest: dict[str, Any], progress: Progress) -> None:
    """Upload the files of `folder`, the manifest last, so that the output is there as a whole or not at all.

    Raises DataError if the store fails; what was uploaded is removed then.
    """
    names = [part["name"] for part in manifest["parts"]] + [manifests.FILE_LIST, manifests.NAME]
    progress.begin("uploading", sum((folder / one).stat().st_size for one in names))
    with staged(url) as target:
        put(folder, target, names, progress)


@contextlib.contextmanager
def staged(url: str) -> Iterator[str]:
    """Yield the URL to write the files to; when the block succeeds, the output is at `url`.

    On an object store that is the place itself, and the manifest, written last, publishes.
    Raises DataError if the store fails; what was written is removed when the block does not succeed.
    """
    url = url.rstrip("/")
    parent, _, name = url.rpartition("/")
    target = url if is_object_store(url) else f"{parent}/.{name}{SUFFIX}"
    filesystem, path = open_filesystem(target)
    with _telling(url):
        try:
            if target != url:
                if filesystem.exists(path):  # a run that was killed left it
                    filesystem.rm(path, recursive=True)
                filesystem.makedirs(path, exist_ok=True)
            yield target
            if target != url:
                filesystem.mv(path, open_filesystem(url)[1], recursive=True)
        except BaseException:
            with contextlib.suppress(Exception):
                filesystem.rm(path, recursive=True)
            raise


def put(folder: Path, target: str, names: list[str], progress: Progress) -> None:
    """Upload files of `folder`, in this order."""
    filesystem, path = open_filesystem(target)
    for one in names:
        filesystem.put_file(str(folder / one), f"{path}/{one}")
        progress.add((folder / one).stat().st_size)


def delete(location: str) -> None:
    """Delete a data file. Raises DataError if that fails."""
    with _telling(location):
        if is_url(location):
            filesystem, path = open_filesystem(location)
            filesystem.rm_file(path)
        else:
            Path(location).unlink()


@contextlib.contextmanager
def opened(folder: str, name: str) -> Iterator[Any]:
    """Open a file of an output, local or not, for reading. Raises DataError if it is not there."""
    location = f"{folder.rstrip('/')}/{name}"
    with _telling(location), contextlib.ExitStack() as stack:
        file: Any
        if is_url(location):
            file = stack.enter_context(streamed(location))
        else:
            file = stack.enter_context(Path(location).open("rb", buffering=0))
        yield file


@contextlib.contextmanager
def _telling(location: str) -> Iterator[None]:
    try:
        yield
    except (DataError, AssertionError, TypeError, NameError):
        raise
    except Exception as error:  # each client has exceptions of its own
        reason = getattr(error, "strerror", None) or reason_of(error)  # without passwords
        raise DataError(f"{shown(location)}: {reason}") from error
