"""``plsc serve``: serve an exported model over HTTP."""

from __future__ import annotations

from typing import Any

from plsc.cli.parser import Command, arguments_of, word
from plsc.serve.options import ServeOptions


def _serve(model: str, **given: Any) -> None:
    from plsc.serve.server import serve  # imports torch, which --help does not need

    serve(model, ServeOptions(**given))


COMMAND = Command(
    "serve an exported model over HTTP, with a page: embed, compare, search, enrol",
    _serve,
    [word("model", "a folder of plsc export"), *arguments_of(ServeOptions)],
)
