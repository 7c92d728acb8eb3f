"""The verbs of ``plsc data``: each is one entry in VERBS, with its arguments and what it runs."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plsc.errors import OptionError, worded
from plsc.verbs import Argument, Verb, run_verb


def partition_arguments() -> list[Argument]:
    """Return the flags of `plsc data partition`, from the fields of PartitionOptions."""
    from plsc.data.partition import PartitionOptions

    kinds = typing.get_type_hints(PartitionOptions)
    return [
        Argument(
            option.name,
            _without_none(kinds[option.name]),
            option.default,
            option.metadata["meaning"],
        )
        for option in dataclasses.fields(PartitionOptions)
    ]


def run_partition(**given: Any) -> None:
    """Partition, verify, or only look, and say in a line what came of it."""
    from plsc.data.partition import PartitionOptions, partition, verify
    from plsc.storage.urls import shown

    options = PartitionOptions(**given)
    manifest = verify(options) if options.verify else partition(options)
    counts = (
        f"{manifest['lines']} lines, {manifest['nranks']} parts of {manifest['lines_per_rank']} lines, "
        f"{manifest['padding_lines']} of them padding"
    )
    output = shown(options.output)
    if options.verify:
        print(f"{output} is whole: {counts}")
    elif options.dry_run:
        left_out = (
            f"{manifest['blank_lines']} blank and {manifest['skipped_lines']} bad lines left out"
        )
        print(f"would write {output}: {counts}; {left_out}; {manifest['content_bytes']} bytes")
    else:
        print(f"wrote {output}: {counts}")


_LOCATION = Argument(
    "location",
    str,
    dataclasses.MISSING,
    "the set: a file, a folder, or an fsspec URL of one (docs/formats.md)",
    positional=True,
)
_READING = (
    Argument(
        "image_column", str, None, "column or suffix that holds the image, if it is not the usual"
    ),
    Argument(
        "label_column", str, None, "column or suffix that holds the label, if it is not the usual"
    ),
    Argument(
        "label_map", str, None, "file of class names and ids; sorted names count from 0 without it"
    ),
    Argument("class_depth", int, None, "depth of the folders that are classes, if they are nested"),
)


def convert_arguments() -> list[Argument]:
    """Return the arguments of `plsc data convert`."""
    meaning = "what to write: .rec, .parquet or .tar, or a folder, without suffix, for base64 lines"
    destination = Argument("destination", str, dataclasses.MISSING, meaning, positional=True)
    broken = Argument(
        "broken", str, "stop", "a sample that cannot be read: stop, or skip (left out)"
    )
    return [_LOCATION, destination, *_READING, broken]


def run_convert(location: str, destination: str, **options: Any) -> None:
    """Convert, and say in a line what came of it."""
    from plsc.data.convert import convert, describe

    print(describe(convert(location, destination, **options), destination))


def inspect_arguments() -> list[Argument]:
    """Return the arguments of `plsc data inspect`."""
    return [
        _LOCATION,
        *_READING,
        Argument("check", int, 10_000, "samples to decode, drawn at random; 0: all"),
        Argument("sheet", str, None, "PNG file to write: pictures of samples and their labels"),
        Argument("sheet_images", int, 64, "pictures on that sheet"),
        Argument("seed", int, 0, "of what is drawn"),
    ]


def run_inspect(
    location: str, check: int, sheet: str | None, sheet_images: int, seed: int, **reading: Any
) -> None:
    """Print what a set holds, and write its sheet."""
    from plsc.data.contact_sheet import write_contact_sheet
    from plsc.data.overview import look_at
    from plsc.data.sources import open_source

    if check < 0:
        raise OptionError(f"--check is {check}; expected a number of samples, or 0 for all")
    if sheet is not None:  # before all that is read for it
        _check_sheet(sheet, sheet_images)
    source = open_source(location, **reading)
    print(look_at(source, checked=check, seed=seed).render())
    if sheet is not None:
        count = write_contact_sheet(source, sheet, images=sheet_images, seed=seed)
        print(f"wrote {count} pictures to {sheet}")


def _check_sheet(sheet: str, sheet_images: int) -> None:
    if sheet_images < 1:
        raise OptionError(f"--sheet_images is {sheet_images}; expected at least 1")
    if not sheet.lower().endswith(".png"):
        raise OptionError(f"--sheet is {sheet!r}; expected a name that ends in .png")
    folder = Path(sheet).absolute().parent
    if not folder.is_dir():
        raise OptionError(f"--sheet is {sheet!r}, but there is no folder {folder}; make it first")


def pack_arguments() -> list[Argument]:
    """Return the arguments of `plsc data pack`."""
    folder = Argument("folder", str, dataclasses.MISSING, "the local folder", positional=True)
    meaning = "the archive, a path or fsspec URL that ends in .tar.zst"
    return [folder, Argument("archive", str, dataclasses.MISSING, meaning, positional=True)]


def run_pack(folder: str, archive: str) -> None:
    """Pack a folder, and say in a line what came of it."""
    from plsc.data.pack import pack
    from plsc.storage.urls import shown

    done = pack(folder, archive)
    print(f"packed {done.files} files, {done.content_bytes} bytes, into {shown(archive)}")


def run_unpack(archive: str, folder: str) -> None:
    """Unpack an archive, and say in a line what came of it."""
    from plsc.data.pack import unpack

    done = unpack(archive, folder)
    print(
        f"unpacked {done.files} files, {done.content_bytes} bytes, into {folder}; all checksums right"
    )


VERBS = {
    "partition": Verb(
        "shuffle base64 lines over all files and split them into one part a rank",
        partition_arguments,
        run_partition,
    ),
    "convert": Verb(
        "write a set in another format, with the same order and labels",
        convert_arguments,
        run_convert,
    ),
    "inspect": Verb(
        "count samples and classes, find broken images, write a sheet of pictures",
        inspect_arguments,
        run_inspect,
    ),
    "pack": Verb("put a folder into one archive with checksums", pack_arguments, run_pack),
    "unpack": Verb(
        "extract such an archive into a new folder, and check it",
        lambda: pack_arguments()[::-1],
        run_unpack,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``plsc data <verb> --flag ...``; return the exit code."""
    with worded(_in_flags):
        return run_verb("plsc data", "Prepare, convert and look at datasets.", VERBS, arguments)


def _in_flags(text: str) -> str:
    from plsc.flags import in_flags  # imports all options, for messages alone

    return in_flags(text, short=True)


def _without_none(kind: Any) -> Any:
    if isinstance(kind, types.UnionType):
        return next(part for part in typing.get_args(kind) if part is not type(None))
    return kind
