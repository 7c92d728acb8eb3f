"""The options of ``plsc serve``."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from plsc.errors import OptionError


@dataclass(frozen=True)
class ServeOptions:
    """Options of a server."""

    gallery: str | None = field(
        default=None, metadata={"meaning": "gallery to search; by default the classes in the model, if any"}
    )
    store: str | None = field(
        default=None, metadata={"meaning": "SQLite file for enrolled entries; by default MODEL.sqlite"}
    )
    host: str = field(default="127.0.0.1", metadata={"meaning": "address to listen on"})
    port: int = field(default=8000, metadata={"meaning": "port to listen on; 0: any free one"})
    api_key_file: str | None = field(
        default=None, metadata={"meaning": "file with the API key; or set PLSC_API_KEY"}
    )
    far: float | None = field(
        default=None,
        metadata={"meaning": "FAR of the threshold for unknown; by default 1e-3, or the next higher one"},
    )
    threads: int = field(default=0, metadata={"meaning": "threads of onnxruntime; 0: one per core"})
    batch_size: int = field(default=32, metadata={"meaning": "maximum images per forward pass"})
    queue_size: int = field(default=256, metadata={"meaning": "maximum images waiting; more get status 429"})
    max_bytes: int = field(default=16 * 2**20, metadata={"meaning": "maximum bytes per request"})
    max_pixels: int = field(default=32 * 10**6, metadata={"meaning": "maximum pixels per image"})
    timeout: float = field(default=30.0, metadata={"meaning": "seconds to receive a request, and to queue"})

    def __post_init__(self) -> None:
        limits = {"port": 0, "threads": 0, "batch_size": 1, "queue_size": 2, "max_bytes": 1, "max_pixels": 1}
        for name, least in limits.items():
            if getattr(self, name) < least:
                raise OptionError(f"--{name} is {getattr(self, name)}; expected {least} or more")
        if self.port > 65535:
            raise OptionError(f"--port is {self.port}; expected 0..65535")
        if not self.timeout > 0:
            raise OptionError(f"--timeout is {self.timeout}; expected seconds above 0")

    def api_key(self) -> str:
        """Return the key; empty if none is set. Raises OptionError if the file has none."""
        if self.api_key_file is None:
            return os.environ.get("PLSC_API_KEY", "")
        try:
            key = Path(self.api_key_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"--api_key_file {self.api_key_file} cannot be read ({error})") from error
        if not key:
            raise OptionError(f"--api_key_file {self.api_key_file} is empty; write the key to it")
        return key
