"""Check a checkpoint without loading it."""

from __future__ import annotations

import os
from pathlib import Path

from plsc.checkpoint.layout import check_checksums, check_files
from plsc.checkpoint.manifest import Manifest, read_manifest


def verify(path: str | os.PathLike[str]) -> Manifest:
    """Return the manifest of a checkpoint whose files are all there, with the bytes that were saved.

    For one process; a file is read once, in pieces.

    Raises:
        CheckpointError: the first fault, with the name of the file.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    check_checksums(folder, manifest, sorted(manifest.files))
    return manifest
