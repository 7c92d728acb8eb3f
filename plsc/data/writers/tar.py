"""WebDataset tar files: ``<number>.jpg`` and ``<number>.cls`` for each sample."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable

from plsc.storage.publish import publishing

_SUFFIXES = {
    b"\xff\xd8\xff": "jpg",
    b"\x89PNG": "png",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II*\0": "tif",
    b"MM\0*": "tif",
}


def write_tar(location: str, samples: Iterable[tuple[bytes, int]]) -> int:
    """Write samples to a tar file (POSIX ustar), local or remote; return their number.

    The order is that of the file. Raises DataError if the file exists or cannot be written.
    """
    count = 0
    with (
        publishing(location) as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for image, label in samples:
            key = f"{count:09d}"
            _add(archive, f"{key}.{suffix_of(image)}", image)
            _add(archive, f"{key}.cls", str(label).encode())
            count += 1
    return count


def suffix_of(image: bytes) -> str:
    """Return the suffix for an encoded image, by its first bytes; ``jpg`` if they say nothing."""
    if image[:4] == b"RIFF" and image[8:12] == b"WEBP":
        return "webp"
    return next((name for magic, name in _SUFFIXES.items() if image.startswith(magic)), "jpg")


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))
