"""Serve an exported model over HTTP, with a page: the options of the server; and its client."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plsc.config.option import Size, at_least, between, check_fields, declare, more_than
from plsc.errors import OptionError, refusing
from plsc.storage.disk import read_regular

if TYPE_CHECKING:
    from plsc.serve.client import Client

__all__ = ["Client", "ServeOptions"]


@dataclass(frozen=True)
class ServeOptions:
    """Options of a server. Raises OptionError for invalid values."""

    gallery: str | None = declare(None, "gallery to search; by default the classes in the model, if any")
    store: str | None = declare(None, "entries: SQLite file or postgresql:// URL; by default MODEL.sqlite")
    host: str = declare("127.0.0.1", "address to listen on")
    port: int = declare(8000, "port to listen on; 0: any free one", check=between(0, 65535))
    api_key_file: str | None = declare(None, "file with the API key; or set PLSC_API_KEY")
    far: float | None = declare(
        None, "FAR of the threshold for unknown; by default 1e-3, or the next higher one"
    )
    fpir: float | None = declare(
        None, "share of strangers that a search accepts: its threshold follows the number of enrolled images"
    )
    threads: int = declare(0, "threads of onnxruntime; 0: one per core", check=at_least(0))
    batch_size: int = declare(32, "maximum images per forward pass", check=at_least(1))
    queue_size: int = declare(256, "maximum images waiting; more get status 429", check=at_least(2))
    max_bytes: Size = declare(16 * 2**20, "maximum bytes per request", check=at_least(1))
    max_pixels: int = declare(32 * 10**6, "maximum pixels per image", check=at_least(1))
    timeout: float = declare(30.0, "seconds to decode an image, and to queue", check=more_than(0))

    def __post_init__(self) -> None:
        check_fields(self)

    def api_key(self) -> str:
        """Return the key; empty if none is set. Raises OptionError if the file has none."""
        if self.api_key_file is None:
            return os.environ.get("PLSC_API_KEY", "")
        with refusing(f"--api_key_file {self.api_key_file} cannot be read"):
            key = read_regular(self.api_key_file, 2**16).decode().strip()
        if not key:
            raise OptionError(f"--api_key_file {self.api_key_file} is empty; write the key to it")
        return key


def __getattr__(name: str) -> Any:
    if name == "Client":  # imports numpy, which plsc --help does not need
        from plsc.serve.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
