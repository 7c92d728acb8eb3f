"""The verbs of ``plsc checkpoint``: each is one entry in VERBS, with its arguments and what it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from plsc.errors import OptionError
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


_CLASSES = (
    Argument("source", str, dataclasses.MISSING, "the checkpoint, which stays as it is", True),
    Argument("destination", str, dataclasses.MISSING, "the checkpoint to write", True),
    Argument("grow", int, None, "so many new classes behind the others"),
    Argument("images", str, None, "of grow: a set whose labels are the new classes, to begin them"),
    Argument("drop", str, None, "file of the classes that leave, one a line"),
    Argument("merge", str, None, "file of lines 'from to': classes that join others"),
    Argument("rows", str, "mean", "of merge: the mean of the rows, or the target's"),
    Argument("reorder", str, None, "file of all classes in their new order, one a line"),
)


def run_classes(source: str, destination: str, images: str | None, **given: Any) -> None:
    """Write a checkpoint with other classes, and say what came of it."""
    from plsc.checkpoint.classes import change_classes
    from plsc.checkpoint.classes_map import MAP_NAME

    if images is None:
        manifest = change_classes(source, destination, **given)
    else:
        from plsc.train.class_images import grow_from_images

        others = [name for name in ("drop", "merge", "reorder") if given[name] is not None]
        if given["grow"] is None or others:
            raise OptionError("--images is for --grow alone")
        manifest = grow_from_images(source, destination, given["grow"], images)
    change = manifest.lineage[-1]
    where = f"; labels: {destination}/{MAP_NAME}" if "map" in change else ""
    print(
        f"wrote {destination}: {change['classes_after']} classes, {change['classes_before']} before{where}"
    )


VERBS = {
    "verify": Verb(
        "read a checkpoint and compare every byte with its checksums",
        lambda: [_CHECKPOINT],
        run_verify,
    ),
    "classes": Verb(
        "write a checkpoint with more, fewer, joined or reordered classes",
        lambda: _CLASSES,
        run_classes,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``plsc checkpoint <verb> --flag ...``; return the exit code."""
    return run_verb("plsc checkpoint", "Look at, check and change checkpoints.", VERBS, arguments)
