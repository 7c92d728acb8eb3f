"""Write datasets in several formats: ``write(location, samples)`` returns the number of samples written.

A sample is (encoded image, label). Samples are written in the given order and read back in it. A file or
folder appears under its name only when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal

import pybase64

from plsc.data.decode import decode_whole
from plsc.data.sources import Source, open_source
from plsc.data.sources.recordio import frame, pack_image
from plsc.errors import DataError, naming
from plsc.machine import Counter
from plsc.storage.disk import publishing, publishing_folder, refuse_existing
from plsc.storage.urls import base_name, is_url, join, shown

Samples = Iterable[tuple[bytes, int]]
Write = Callable[[str, Samples], int]

_MOST_TOLD = 20
_PART = "part-00000"


def write_recordio(location: str, samples: Samples) -> int:
    """Write samples to a ``.rec`` file and its ``.idx``, local or remote; return their number.

    Keys start at 0. Raises DataError if a file exists, cannot be written, or a label is too large.
    """
    count = offset = 0
    idx = location.removesuffix(".rec") + ".idx"
    # Publish the .rec first: it is complete without the .idx, but not the reverse.
    with publishing(idx) as index_file, publishing(location) as file:
        for image, label in samples:
            record = frame(pack_image(image, label, count))
            file.write(record)
            index_file.write(b"%d\t%d\n" % (count, offset))
            offset += len(record)
            count += 1
    return count


def write_base64(location: str, samples: Samples) -> int:
    """Write samples to a new folder of base64 lines, local or remote; return their number.

    A remote folder is complete when file_list.txt, written last, exists. Raises DataError if the folder
    exists or cannot be written.
    """
    if not is_url(location):
        with publishing_folder(location) as folder:
            with (folder / _PART).open("wb", buffering=2**20) as file:
                count = _write_lines(file, samples)
            (folder / "file_list.txt").write_text(f"{_PART}\n")
        return count
    with publishing(join(location, _PART)) as file:
        count = _write_lines(file, samples)
    with publishing(join(location, "file_list.txt")) as file:
        file.write(f"{_PART}\n".encode())
    return count


def _write_lines(file: BinaryIO, samples: Samples) -> int:
    count = 0
    for image, label in samples:
        file.write(b"%b\t%d\n" % (pybase64.b64encode(image), label))
        count += 1
    return count


WRITERS: dict[str, Write] = {
    ".rec": write_recordio,
    "": write_base64,
}
"""Writers by suffix; a name without suffix is a folder of base64 lines."""


def writer_of(location: str) -> Write:
    """Return the writer for a path or URL, by its suffix; DataError if the suffix is unknown."""
    name = base_name(location).lower()
    suffix = name[name.rindex(".") :] if "." in name.lstrip(".") else ""
    if suffix not in WRITERS:
        known = ", ".join(filter(None, WRITERS))
        raise DataError(
            f"{base_name(shown(location))!r}: unknown suffix {suffix!r}; expected {known}, or none"
        )
    return WRITERS[suffix]


@dataclass
class Conversion:
    """The result of a conversion: samples written, samples skipped, first faults, class names left out."""

    written: int = 0
    skipped: int = 0
    faults: list[str] = field(default_factory=list)
    lost_names: int = 0


def convert(
    location: str, destination: str, *, broken: Literal["stop", "skip"] = "stop", **reading: Any
) -> Conversion:
    """Convert the dataset at `location` to `destination`, in the format given by its suffix (`WRITERS`).

    The formats have no room for class names. Both locations may be fsspec URLs. Encoded images are copied
    unchanged. The destination appears when it is complete; existing files are never overwritten.

    Args:
        reading: options of `open_source`.
        broken: ``stop`` at a sample whose bytes cannot be read; ``skip`` leaves it out, and images that
            cannot be decoded, which ``stop`` does not try.

    Raises:
        DataError, OptionError: invalid data or arguments, or the destination cannot be written.
    """
    write = writer_of(destination)
    refuse_existing(destination.rstrip("/"))
    source = open_source(location, **reading)
    done = Conversion(lost_names=len(getattr(source, "class_names", None) or ()))
    done.written = write(destination.rstrip("/"), _samples(source, broken, done))
    return done


def describe(done: Conversion, destination: str) -> str:
    """Return a summary for the user."""
    lines = [f"wrote {done.written} samples to {shown(destination)}"]
    if done.skipped:
        lines[0] += f"; skipped {done.skipped} that cannot be read:"
        lines += [f"  {fault}" for fault in done.faults]
        if done.skipped > len(done.faults):
            lines.append(f"  and {done.skipped - len(done.faults)} more")
    if done.lost_names:
        lines.append(
            f"note: the format has no room for the names of the {done.lost_names} classes; its labels are "
            "numbers, which label_map can choose"
        )
    return "\n".join(lines)


def _samples(source: Source, broken: str, done: Conversion) -> Iterator[tuple[Any, int]]:
    counter = Counter("read", len(source), "samples")
    for index in range(len(source)):
        counter.add()
        try:
            image, label = source[index]
            if broken == "skip":
                with naming(source.name, index):
                    decode_whole(image)
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
