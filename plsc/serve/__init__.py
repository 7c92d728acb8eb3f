"""Serve an exported model over HTTP, with a page; and the client of such a server."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plsc.serve.client import Client

__all__ = ["Client"]


def __getattr__(name: str) -> Any:
    if name == "Client":  # imports numpy, which plsc --help does not need
        from plsc.serve.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
