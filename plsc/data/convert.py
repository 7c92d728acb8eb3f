"""Write the samples of any source in another format, with the same order and labels."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from plsc.data.sources import Source, open_source
from plsc.data.writers import writer_of
from plsc.errors import DataError, OptionError, suggest
from plsc.storage.publish import refuse_existing
from plsc.storage.urls import shown

BROKEN_CHOICES = ("stop", "skip")
_MOST_TOLD = 20


@dataclass
class Conversion:
    """What was done: samples written, samples left out, and the first faults, each with its sample's name."""

    written: int = 0
    skipped: int = 0
    faults: list[str] = field(default_factory=list)


def convert(
    location: str,
    destination: str,
    *,
    broken: str = "stop",
    progress: bool = True,
    **reading: Any,
) -> Conversion:
    """Write the set at `location` (`open_source`) to `destination`, in the format of its suffix.

    ``.rec``, ``.parquet``, ``.tar``; a name without a suffix is a folder of base64 lines. Both may be fsspec
    URLs. Images stay the bytes they are, and are not decoded. Nothing is to be seen under the destination's
    name before all of it is written, and nothing is overwritten.

    reading: options of `open_source`. broken: a sample that cannot be read stops the work, or, with ``skip``,
    is left out and counted. Raises DataError and OptionError.
    """
    if broken not in BROKEN_CHOICES:
        raise OptionError(f"broken is {broken!r}; {suggest(broken, BROKEN_CHOICES)}")
    write = writer_of(destination)
    refuse_existing(destination.rstrip("/"))
    source = open_source(location, **reading)
    done = Conversion()
    done.written = write(destination.rstrip("/"), _samples(source, broken, done, progress))
    return done


def describe(done: Conversion, destination: str) -> str:
    """Return what was done, for the user's eyes."""
    lines = [f"wrote {done.written} samples to {shown(destination)}"]
    if done.skipped:
        lines[0] += f"; left out {done.skipped} that cannot be read:"
        lines += [f"  {fault}" for fault in done.faults]
        if done.skipped > len(done.faults):
            lines.append(f"  and {done.skipped - len(done.faults)} more")
    return "\n".join(lines)


def _samples(
    source: Source, broken: str, done: Conversion, progress: bool
) -> Iterator[tuple[bytes, int]]:
    numbers: Any = range(len(source))
    for index in tqdm(numbers, unit=" samples", disable=not progress or not sys.stderr.isatty()):
        try:
            image, label = source[index]
            if not isinstance(image, bytes):
                raise DataError(
                    f"{source.name(index)}: is decoded ({type(image).__name__}); only encoded images "
                    "can be converted"
                )
        except DataError as error:
            if broken == "stop":
                raise
            done.skipped += 1
            if len(done.faults) < _MOST_TOLD:
                done.faults.append(str(error))
            continue
        yield image, label
    if done.skipped == len(source):
        raise DataError(f"none of the {len(source)} samples can be read: {done.faults[0]}")
