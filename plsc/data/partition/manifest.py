"""What stands in manifest.json beside the parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from plsc.data.partition.inputs import Input, InputCount, total_of
from plsc.data.partition.options import PartitionOptions
from plsc.data.partition.order import ALGORITHM, lines_per_rank
from plsc.data.partition.parts import part_names
from plsc.errors import DataError

NAME = "manifest.json"
FILE_LIST = "file_list.txt"
FORMAT = "plsc-partition-1"
_MOST_BYTES = 256 * 2**20


def counts_of(options: PartitionOptions, total: InputCount) -> dict[str, int]:
    """Return the counts of a manifest. total: of all inputs."""
    each = lines_per_rank(total.lines, options.nranks)
    return {
        "seed": options.seed,
        "nranks": options.nranks,
        "lines": total.lines,
        "lines_per_rank": each,
        "padding_lines": each * options.nranks - total.lines,
        "blank_lines": total.blanks,
        "skipped_lines": total.skipped,
    }


def build(
    options: PartitionOptions,
    inputs: list[Input],
    counts: list[InputCount],
    sizes: list[int],
    checksums: list[int],
) -> dict[str, Any]:
    """Return the manifest. counts: of the inputs; sizes, checksums: of the parts (see parts.checksum)."""
    return {
        "format": FORMAT,
        "algorithm": ALGORITHM,
        **counts_of(options, total_of(counts)),
        "inputs": [
            {
                "name": one.name,
                "size": one.size,
                "lines": count.lines,
                "content_bytes": count.content_bytes,
                "checksum": f"{count.checksum:016x}",
            }
            for one, count in zip(inputs, counts, strict=True)
        ],
        "parts": [
            {"name": name, "size": size, "checksum": f"{checksum:016x}"}
            for name, size, checksum in zip(
                part_names(options.nranks), sizes, checksums, strict=True
            )
        ],
    }


def write(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest and the list of the parts."""
    names = [part["name"] for part in manifest["parts"]]
    (folder / FILE_LIST).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    (folder / NAME).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def parse(data: bytes, name: str) -> dict[str, Any]:
    """Return a manifest whose every entry has its type. Raises DataError for anything else."""
    try:
        manifest = json.loads(data)
        _check(manifest)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{name} is not the manifest of a partition ({error})") from error
    if manifest["algorithm"] != ALGORITHM:
        raise DataError(
            f"{name} was made by {manifest['algorithm']!r}, this version of plsc knows {ALGORITHM!r}"
        )
    return manifest


def read_limited(file: Any) -> bytes:
    """Return the content of an open manifest; DataError if it is too large to be one."""
    data: bytes = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise DataError(f"the manifest is over {_MOST_BYTES} bytes; it is not one of a partition")
    return data


def _check(manifest: Any) -> None:
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"expected format {FORMAT!r}")
    for key in ("seed", "nranks", "lines", "lines_per_rank", "padding_lines"):
        _require(manifest[key], int, key)
    if not 1 <= manifest["nranks"] == len(manifest["parts"]) or manifest["lines"] < 1:
        raise ValueError("the counts contradict each other")
    if manifest["lines_per_rank"] != lines_per_rank(manifest["lines"], manifest["nranks"]):
        raise ValueError("the counts contradict each other")
    _require(manifest["algorithm"], str, "algorithm")
    for kind, numbers in (("inputs", ("size", "lines", "content_bytes")), ("parts", ("size",))):
        _require(manifest[kind], list, kind)
        for entry in manifest[kind]:
            _require(entry, dict, kind)
            for key in ("name", "checksum"):
                _require(entry[key], str, key)
            for key in numbers:
                _require(entry[key], int, key)
            int(entry["checksum"], 16)
    for entry in manifest["parts"]:
        if "/" in entry["name"] or entry["name"] in ("", ".", ".."):
            raise ValueError(f"part {entry['name']!r} is not a name in the folder")


def _require(value: Any, kind: type, key: str) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{key} should be {kind.__name__}, is {value!r:.40}")
