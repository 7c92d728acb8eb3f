"""An output behind an fsspec URL: uploaded, then published."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plsc.data.partition import manifest as manifests
from plsc.data.partition.progress import Progress
from plsc.errors import DataError
from plsc.storage.blocks import streamed
from plsc.storage.publish import staged
from plsc.storage.retry import reason_of
from plsc.storage.urls import is_url, open_filesystem, shown

if TYPE_CHECKING:
    from plsc.storage.store import Store

_SILENCE = 300.0  # seconds in which a client may say nothing of a large piece that it sends
_OURS = re.compile(rf"(part_\d+\.txt|{re.escape(manifests.FILE_LIST)})$")


def exists(url: str) -> bool:
    """Whether there is something at the URL that must not be overwritten.

    On an object store, parts without a manifest are what a run that was killed left: nothing.
    """
    store = open_store(url)
    if store.can_rename:
        return store.exists()
    store.make_folder()  # makes none: it tells of a bucket that is not there, before the work is done
    return any(_OURS.match(name) is None for name in store.names())


def publish(folder: Path, url: str, manifest: dict[str, Any], progress: Progress) -> None:
    """Upload the files of `folder`, the manifest last, so that the output is there as a whole or not at all.

    Raises DataError if the store fails; what was uploaded is removed then.
    """
    names = [part["name"] for part in manifest["parts"]] + [manifests.FILE_LIST, manifests.NAME]
    progress.begin("uploading", sum((folder / one).stat().st_size for one in names))
    with staged(url, open_store) as target:
        put(folder, target, names, progress)


def put(folder: Path, target: str, names: list[str], progress: Progress) -> None:
    """Upload files of `folder`, in this order."""
    store = open_store(target)
    for one in names:
        store.put(folder / one, one, progress.add)


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


def open_store(url: str) -> Store:
    """Return the folder at a URL."""
    from plsc.storage.store import Store  # imports fsspec

    return Store(url, silence=_SILENCE)


@contextlib.contextmanager
def _telling(location: str) -> Iterator[None]:
    try:
        yield
    except (DataError, AssertionError, TypeError, NameError):
        raise
    except Exception as error:  # each client has exceptions of its own
        reason = getattr(error, "strerror", None) or reason_of(error)  # without passwords
        raise DataError(f"{shown(location)}: {reason}") from error
