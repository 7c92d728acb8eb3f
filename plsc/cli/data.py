"""The commands of ``plsc data``."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from plsc.cli.parser import REQUIRED, Argument, Command, Group, arguments_of, word
from plsc.config.data_and_model import FormatArguments
from plsc.config.option import Size, at_least, one_of
from plsc.version import install


def run_partition(verify: bool, allowed: str | None, **given: Any) -> None:
    """Partition the data, or verify a partition; print the result."""
    from plsc.data import partition
    from plsc.storage.urls import shown

    options = partition.PartitionOptions(**given, allowed=allowed or ())
    manifest = partition.verify(options) if verify else partition.partition(options)
    output = shown(options.output)
    print(
        f"{f'{output} is intact' if verify else f'wrote {output}'}: {manifest['lines']} lines, "
        f"{manifest['nranks']} parts of {manifest['lines_per_rank']} lines, "
        f"{manifest['padding_lines']} of them padding"
    )


ALLOWED = Argument("allowed", str, None, "prefixes of URLs that lists may name: s3://bucket/,https://host/")
_LOCATION = word("location", "the dataset: a file, a folder, or an fsspec URL (docs/data.md)")
_READING = tuple(arguments_of(FormatArguments))


def run_convert(location: str, destination: str, **options: Any) -> None:
    """Convert a dataset and print the result."""
    from plsc.data.writers import convert, describe

    print(describe(convert(location, destination, **options), destination))


def run_inspect(location: str, check: int, seed: int, **reading: Any) -> None:
    """Print an overview of a dataset."""
    from plsc.data.overview import inspect_dataset
    from plsc.data.sources import open_source

    print(inspect_dataset(open_source(location, **reading), checked=check, seed=seed).render())


def run_split(location: str, out: str, **options: Any) -> None:
    """Split a dataset into lists; print what was written and the commands that use it."""
    from plsc.data.lists import describe, split

    print(describe(split(location, out, **options), out))


def run_clean(model: str, location: str, out: str, second: str | None, **reading: Any) -> None:
    """Embed a dataset, propose changes, and print the summary."""
    from plsc.clean.review import clean

    models = [model] if second is None else [model, second]
    _review(partial(clean, location), out, [(one, location) for one in models], **reading)


def run_overlap(model: str, location: str, other: str, out: str, **reading: Any) -> None:
    """Embed two datasets, propose to remove from the first one what both have, and print the summary."""
    from plsc.clean.review import overlap

    _review(partial(overlap, location, other), out, [(model, location), (model, other)], **reading)


def _review(write: Callable[..., list[str]], out: str, used: list[tuple[str, str]], **reading: Any) -> None:
    """Embed datasets, write the proposed changes, and print the summary. used: model and dataset of each."""
    from plsc.clean.review import refuse_finished
    from plsc.data.lists import read_listing
    from plsc.gallery.gallery import import_faiss
    from plsc.storage.disk import check_inside
    from plsc.storage.urls import local_folder, shown

    network = reading.pop("model.name")
    reading = {name: value for name, value in reading.items() if value not in (None, ())}
    folder = local_folder(out, "out")
    refuse_finished(folder)
    import_faiss()  # this and invalid data fail here, before images are embedded
    for location in dict.fromkeys(place for _, place in used):
        read_listing(location, **reading)
    folder.mkdir(parents=True, exist_ok=True)
    names = ("embeddings", "embeddings2")
    for name in names:
        check_inside(folder / name, folder)
    found = [
        _embeddings(*one, folder / name, network, reading) for one, name in zip(used, names, strict=False)
    ]
    print(*write(folder, found, **reading), sep="\n")
    words = ["plsc", "data", "apply", shown(used[0][1]), str(folder / "changes.tsv"), "OUT"]
    for name, value in reading.items():
        words += [f"--{name}", shown(str(value))]
    print("Next, after looking at the page and editing the changes:", shlex.join(words), sep="\n")


def _embeddings(model: str, location: str, folder: Path, network: str | None, reading: dict[str, Any]) -> Any:
    """Return the embeddings of a dataset: those in the folder `model`, or of this checkpoint, in `folder`."""
    from plsc.entry import Entry
    from plsc.predict.embeddings import INDEX_NAME, open_embeddings

    if Path(model, INDEX_NAME).is_file():
        return open_embeddings(model)
    entry = Entry()
    entry.set_checkpoint_dir(model)
    entry.set_dataset_dir(location, **reading)
    entry.set_bad_images("skip")
    if network is not None:
        entry.set_model_name(network)
    return entry.predict(output=folder)


def run_apply(location: str, changes: str, out: str, **reading: Any) -> None:
    """Write the list of a dataset after changes; print its counts and the command that uses it."""
    from plsc.clean.changes import apply_changes
    from plsc.data.lists import train_command

    applied = apply_changes(location, changes, out, **reading)
    before, after, done = (applied["counts"][when] for when in ("before", "after", "changes"))
    print(
        f"wrote {Path(out, 'list.tsv')}: {after['images']:,} of {before['images']:,} images, "
        f"{after['classes']:,} classes ({before['classes']:,} before), by {done['move']:,} moves, "
        f"{done['remove']:,} removals and {done['merge']:,} merges"
    )
    if new := applied["new_classes"]:
        print(f"{len(new):,} new classes: {', '.join(new[:10])}{', ...' if len(new) > 10 else ''}")
    print("Next:", train_command(out, "list.tsv", applied["folder"]), sep="\n")


def run_pack(folder: str, archive: str) -> None:
    """Pack a folder and print the result."""
    from plsc.data.pack import pack
    from plsc.storage.urls import shown

    done = pack(folder, archive)
    print(f"packed {done.files} files, {done.content_bytes} bytes, into {shown(archive)}")


def run_unpack(archive: str, folder: str, max_bytes: int | None) -> None:
    """Unpack an archive and print the result."""
    from plsc.data.pack import unpack

    done = unpack(archive, folder, max_bytes)
    print(f"unpacked {done.files} files, {done.content_bytes} bytes, into {folder}; the checksum matches")


_FOLDER = word("folder", "the local folder")
_ARCHIVE = word("archive", "the archive: a path or fsspec URL that ends in .tar.zst")
_MAX_BYTES = Argument("max_bytes", Size, None, "most bytes of all files; default: 100 times the archive")
_OUT = word("out", "the new local folder")
_MODEL = word("model", "a checkpoint (folder or fsspec URL), or a folder of plsc predict with this dataset")
_NETWORK = Argument("model.name", str, None, "custom network of a checkpoint, as module:Class")
_REVIEW = word("out", "the local folder for the result; an interrupted command continues in it")
_DESTINATION = word("destination", "file to write, ending in .rec, or a folder (no suffix) for base64 lines")
GROUP = Group(
    "prepare, convert and inspect datasets",
    {
        "partition": Command(
            "shuffle base64 lines across files and split them into one part per rank",
            run_partition,
            (
                Argument("data_dir", str, REQUIRED, "folder or fsspec URL of the data files"),
                Argument("nranks", int, REQUIRED, "number of parts, one per rank"),
                Argument("file_list", str, "file_list.txt", "list of the files: name in data_dir, or path"),
                Argument("output_dir", str, None, "output folder or URL; default: data_dir/partition_nranks"),
                Argument("output_name", str, None, "start of the names of the parts; PLSC had base64_rank_"),
                Argument("seed", int, 0, "seed of the shuffle"),
                Argument("memory", Size, 512 * 2**20, "memory limit, without interpreter and page cache"),
                Argument("workers", int, None, "number of threads; default: one per core, at most 8"),
                Argument("tmp_dir", str, None, "folder for temporary files; default: next to the output"),
                Argument("engine", str, "local", f"local, or spark ({install('spark')})"),
                Argument("master", str, None, "URL of the Spark cluster; default: Spark's configuration"),
                Argument("bad_lines", str, "stop", "what to do with an invalid line: stop or skip"),
                Argument("verify", bool, False, "check an existing output against its inputs; write nothing"),
                ALLOWED,
            ),
        ),
        "convert": Command(
            "convert a dataset to another format, with the same order and labels",
            run_convert,
            (
                _LOCATION,
                _DESTINATION,
                *_READING,
                Argument(
                    "broken",
                    str,
                    "stop",
                    "a sample that cannot be read: stop or skip, which decodes the images to try",
                    check=one_of("stop", "skip"),
                ),
            ),
        ),
        "inspect": Command(
            "count samples and classes, find damaged images",
            run_inspect,
            (
                _LOCATION,
                *_READING,
                Argument("landmarks", str, None, "file of landmarks, as data.landmarks: check aligned faces"),
                Argument("check", int, 10_000, "random samples to decode; 0: all", check=at_least(0)),
                Argument("seed", int, 0, "seed of the random samples"),
            ),
        ),
        "split": Command(
            "split a dataset into lists of images: for training, and for tests on held-out classes or images",
            run_split,
            (
                _LOCATION,
                _OUT,
                Argument("held_out", float, 0.1, "share that is held out, above 0 and below 1"),
                Argument(
                    "by",
                    str,
                    "class",
                    "what is held out: whole classes (class), or a share of each (image)",
                    check=one_of("class", "image"),
                ),
                Argument("halves", bool, False, "instead, divide the images of each class in two"),
                Argument("seed", int, 0, "seed of the choice"),
                *_READING,
            ),
        ),
        "clean": Command(
            "find wrong labels, duplicates, classes to merge; write a page and changes",
            run_clean,
            (
                _MODEL,
                _LOCATION,
                _REVIEW,
                Argument(
                    "second", str, None, "checkpoint trained on half2.tsv; model is then trained on half1.tsv"
                ),
                _NETWORK,
                *_READING,
            ),
        ),
        "overlap": Command(
            "find classes and images that two datasets share; write a page and a file of changes",
            run_overlap,
            (
                word("model", "a checkpoint (folder or fsspec URL)"),
                _LOCATION,
                word("other", "the other dataset, in the same format"),
                _REVIEW,
                _NETWORK,
                *_READING,
            ),
        ),
        "apply": Command(
            "write the list of images after a file of changes; the dataset is unchanged",
            run_apply,
            (_LOCATION, word("changes", "the file of changes (docs/clean.md)"), _OUT, *_READING),
        ),
        "pack": Command("pack a folder into one archive with checksums", run_pack, (_FOLDER, _ARCHIVE)),
        "unpack": Command(
            "unpack an archive of `plsc data pack` into a new folder, and verify the checksums",
            run_unpack,
            (_ARCHIVE, _FOLDER, _MAX_BYTES),
        ),
    },
)
