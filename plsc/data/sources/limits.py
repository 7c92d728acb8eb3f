"""How large an encoded image may be."""

from __future__ import annotations

from plsc.data.decode import MAX_FILE_BYTES
from plsc.errors import DataError


def check_image_bytes(length: int) -> None:
    """Raise DataError, without the sample's name, for an image of 0 bytes or of over 64 MiB."""
    if length <= 0:
        raise DataError("the image is empty (0 bytes); replace it or take it out", kind="empty")
    if length > MAX_FILE_BYTES:
        raise DataError(
            f"the image has {length} bytes, over the limit of {MAX_FILE_BYTES}; shrink it",
            kind="too large",
        )
