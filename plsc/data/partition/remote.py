"""An output behind an fsspec URL: uploaded, then published."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plsc.data.partition import manifest as manifests
from plsc.data.partition.progress import Progress
from plsc.storage.publish import staged

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


def open_store(url: str) -> Store:
    """Return the folder at a path or URL."""
    from plsc.storage.store import Store  # imports fsspec

    return Store(url, silence=_SILENCE)
