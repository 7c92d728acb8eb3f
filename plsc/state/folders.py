"""The folders in which runs have saved: a run's own, its versions, and those in its store."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from plsc.checkpoint.retention import checkpoints_in
from plsc.config import Config, Options
from plsc.errors import OptionError
from plsc.storage.cache import folder_for
from plsc.storage.store import Store
from plsc.storage.urls import base_name, is_url, join, parent_of, shown

VERSION_NAME = re.compile(r"version_[0-9]{1,18}")
START_SECONDS = 20.0  # timeout of a store before training starts


@dataclass(frozen=True)
class RunFolder:
    """A folder in which one run saves, and its store: save_dir itself, or one of its versions."""

    version: str
    local: Store
    remote: Store | None

    @property
    def stores(self) -> list[Store]:
        """The folder, and the remote store if there is one."""
        return [self.local] if self.remote is None else [self.local, self.remote]

    def name_of(self, locations: Collection[str]) -> str:
        """Return the name of the checkpoint if one of its paths or URLs is in this folder, else ''."""
        here = {_resolved(store.url) for store in self.stores}
        names = [base_name(location) for location in map(_resolved, locations) if parent_of(location) in here]
        return names[0] if names else ""

    def holds_other_run(self, run_id: str) -> bool:
        """Return whether a checkpoint here has another run id, or the folder is a symbolic link."""
        if self.version and self.local.is_link(""):
            return True
        manifests = [manifest for store in self.stores for _, manifest in checkpoints_in(store)]
        return any(manifest.run_id not in ("", run_id) for manifest in manifests)


def list_run_folders(options: Options | Config) -> list[RunFolder]:
    """Return the folders in which runs may have saved: the versions of save_dir, newest first, then save_dir.

    Raises DataError if a store does not respond.
    """
    local, url = roots_of(options)
    top = open_run_folder(local, url, "")
    names = {name for store in top.stores for name in store.names(only_folders=True)}
    known = sorted(filter(VERSION_NAME.fullmatch, names), key=version_number, reverse=True)
    return [*(open_run_folder(local, url, version) for version in known), top]


def roots_of(options: Options | Config) -> tuple[Path, str | None]:
    """Return the local folder of save_dir, which may be a URL, and the URL of its store, if any."""
    checkpoint = options.checkpoint
    save_dir, upload_dir = checkpoint.save_dir, checkpoint.upload_dir
    if not is_url(save_dir):
        return Path(save_dir), upload_dir
    if upload_dir is not None:
        raise OptionError(
            f"save_dir is a URL, and upload_dir is set too ({shown(upload_dir)}), but checkpoints are "
            "uploaded to one store only; remove one of the two options"
        )
    return folder_for("runs", save_dir), save_dir


def open_run_folder(local: Path, url: str | None, version: str) -> RunFolder:
    """Return the folder of a run; version: '' for save_dir itself."""
    remote = None
    if url is not None:
        remote = Store(join(url, version) if version else url, total_seconds=START_SECONDS)
    return RunFolder(version, Store(local / version), remote)


def version_number(version: str) -> int:
    """Return the number in the name of a version."""
    return int(version.removeprefix("version_"))


def _resolved(location: str) -> str:
    return location.rstrip("/") if is_url(location) else str(Path(location).resolve())
