"""Writers of data files, one format each: ``write(location, samples)`` returns how many it wrote.

A sample is (encoded image, label); they are written in the order in which they come, and read back in it.
What is written appears under its name when it is whole.
"""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import pybase64
from tqdm import tqdm

from plsc.data.sources import Source, open_source
from plsc.data.sources.recordio import frame, pack_image
from plsc.errors import DataError, OptionError, suggest
from plsc.storage.publish import publishing, publishing_folder, refuse_existing
from plsc.storage.urls import base_name, is_url, join, shown

Samples = Iterable[tuple[bytes, int]]
Write = Callable[[str, Samples], int]

BROKEN_CHOICES = ("stop", "skip")
_MOST_TOLD = 20
_PART = "part-00000"
_SCHEMA = pa.schema(
    [
        pa.field("image", pa.binary(), nullable=False),
        pa.field("label", pa.int64(), nullable=False),
    ]
)
# A reader decodes a whole row group for one image; small groups make random access cheap.
_GROUP_ROWS = 1000
_GROUP_BYTES = 32 * 2**20
_SUFFIXES = {
    b"\xff\xd8\xff": "jpg",
    b"\x89PNG": "png",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II*\0": "tif",
    b"MM\0*": "tif",
}


def write_recordio(location: str, samples: Samples) -> int:
    """Write samples to a ``.rec`` file and its ``.idx``, local or remote; return their number.

    Keys count from 0. Raises DataError if a file exists, cannot be written, or a label is too large.
    """
    count = offset = 0
    idx = location.removesuffix(".rec") + ".idx"
    # The .rec is published first: alone it is whole, the .idx alone is nothing.
    with publishing(idx) as index_file, publishing(location) as file:
        for image, label in samples:
            record = frame(pack_image(image, label, count))
            file.write(record)
            index_file.write(b"%d\t%d\n" % (count, offset))
            offset += len(record)
            count += 1
    return count


def write_parquet(location: str, samples: Samples) -> int:
    """Write samples to a Parquet file, local or remote; return their number.

    Row groups end at 1000 rows or 32 MiB. Images are compressed already and are kept as they are; pages
    carry checksums. Raises DataError if the file exists or cannot be written.
    """
    count = group_bytes = 0
    images: list[bytes] = []
    labels: list[int] = []
    with (
        publishing(location) as file,
        pq.ParquetWriter(
            file, _SCHEMA, compression="none", use_dictionary=["label"], write_page_checksum=True
        ) as writer,
    ):
        for image, label in samples:
            images.append(image)
            labels.append(label)
            group_bytes += len(image)
            count += 1
            if len(images) == _GROUP_ROWS or group_bytes >= _GROUP_BYTES:
                writer.write_table(_table(images, labels))
                images, labels, group_bytes = [], [], 0
        if images:
            writer.write_table(_table(images, labels))
    return count


def _table(images: list[bytes], labels: list[int]) -> pa.Table:
    return pa.table([pa.array(images, pa.binary()), pa.array(labels, pa.int64())], schema=_SCHEMA)


def write_tar(location: str, samples: Samples) -> int:
    """Write samples to a tar file (POSIX ustar), local or remote; return their number.

    The order is that of the file. Raises DataError if the file exists or cannot be written.
    """
    count = 0
    with (
        publishing(location) as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for image, label in samples:
            key = f"{count:09d}"
            _add(archive, f"{key}.{suffix_of(image)}", image)
            _add(archive, f"{key}.cls", str(label).encode())
            count += 1
    return count


def suffix_of(image: bytes) -> str:
    """Return the suffix for an encoded image, by its first bytes; ``jpg`` if they say nothing."""
    if image[:4] == b"RIFF" and image[8:12] == b"WEBP":
        return "webp"
    return next((name for magic, name in _SUFFIXES.items() if image.startswith(magic)), "jpg")


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def write_base64(location: str, samples: Samples) -> int:
    """Write samples to a new folder, local or remote; return their number.

    A remote folder holds a set as soon as its file_list.txt, written last, is there. Raises DataError
    if the folder exists or cannot be written.
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
        if label < 0:
            raise DataError(f"label {label} cannot be written; expected 0 or more")
        file.write(b"%b\t%d\n" % (pybase64.b64encode(image), label))
        count += 1
    return count


WRITERS: dict[str, Write] = {
    ".rec": write_recordio,
    ".parquet": write_parquet,
    ".tar": write_tar,
    "": write_base64,
}
"""By suffix; a name without one is a folder of base64 lines."""


def writer_of(location: str) -> Write:
    """Return the writer for a path or URL, by its suffix; DataError if there is none."""
    name = base_name(location).lower()
    suffix = name[name.rindex(".") :] if "." in name.lstrip(".") else ""
    if suffix not in WRITERS:
        raise DataError(
            f"{base_name(location)!r}: no format is known for {suffix!r}; name a file .rec, .parquet or "
            ".tar, or a folder, without a suffix, for base64 lines"
        )
    return WRITERS[suffix]


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


def _samples(source: Source, broken: str, done: Conversion, progress: bool) -> Iterator[tuple[bytes, int]]:
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
