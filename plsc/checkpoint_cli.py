"""The verbs of ``plsc checkpoint``: each is one entry in VERBS, with its arguments and what it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from plsc.verbs import Argument, Verb, run_verb

_CHECKPOINT = Argument(
    "checkpoint", str, dataclasses.MISSING, "a checkpoint folder, such as saved_model/5", True
)


def run_verify(checkpoint: str) -> None:
    """Read a whole checkpoint and compare it with its manifest."""
    from plsc.checkpoint.verify import verify

    manifest = verify(checkpoint)
    size = sum(file.bytes for file in manifest.files.values())
    print(f"{checkpoint} is whole: {len(manifest.files)} files, {size} bytes, step {manifest.step}")


VERBS = {
    "verify": Verb(
        "read a checkpoint and compare every byte with its checksums",
        lambda: [_CHECKPOINT],
        run_verify,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``plsc checkpoint <verb> --flag ...``; return the exit code."""
    return run_verb("plsc checkpoint", "Look at, check and change checkpoints.", VERBS, arguments)
