"""Local paths and fsspec URLs, told apart in one place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from plsc.errors import DataError

_SCHEME = re.compile(r"^([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_EXTRAS = {"hdfs": "hdfs", "s3": "s3", "s3a": "s3", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs"}


def is_url(location: str | Path) -> bool:
    """Whether this is an fsspec URL such as ``s3://bucket/data``, and not a local path."""
    return isinstance(location, str) and _SCHEME.match(location) is not None


def shown(url: str) -> str:
    """Return the URL for messages: a user and password in it are left out."""
    return re.sub(r"(?<=://)[^/@]*@", "", url)


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return (fsspec filesystem, path in it).

    Raises DataError if the protocol is unknown, its client is not installed, or it cannot be reached.
    """
    import fsspec

    protocol = url.split("://", 1)[0].lower()
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        extra = _EXTRAS.get(protocol, protocol)
        install = f"plsc[{extra}]" if extra in ("hdfs", "s3") else extra
        raise DataError(
            f"{shown(url)} needs a client that is not installed; pip install '{install}'"
        ) from error
    except ValueError as error:
        raise DataError(
            f"{shown(url)}: the protocol {protocol!r} is not known to fsspec"
        ) from error
    except Exception as error:  # each client has exceptions of its own
        raise DataError(f"{shown(url)} cannot be opened ({type(error).__name__})") from error
