"""Per-rank files: rank r reads part r of a file list, when each node has only its own."""

from __future__ import annotations

from pathlib import Path

from plsc.data.file_list import read_file_list
from plsc.data.sources import open_source
from plsc.data.sources.base import Source
from plsc.data.sources.base64_lines import Base64Source
from plsc.errors import DataError
from plsc.parallel.world import World


def open_rank_source(data_dir: str, world: World) -> Source:
    """Return the source of this rank's part: the r-th of those that ``data_dir/file_list.txt`` names.

    The parts of other ranks need not be on this machine. Raises DataError on all ranks if there is not one
    part for each rank, if one cannot be opened, or if their counts differ: then the ranks would not make
    the same steps. A collective.
    """
    source: Source | None = None
    problem = ""
    try:
        source = _open_part(data_dir, _own_part(data_dir, world))
    except DataError as error:
        problem = str(error)
    everywhere = world.all_gather_object((0 if source is None else len(source), problem))
    for rank, (_, text) in enumerate(everywhere):
        if text:
            raise DataError(f"rank {rank}: {text}")
    counts = [count for count, _ in everywhere]
    few, many = counts.index(min(counts)), counts.index(max(counts))
    if counts[few] != counts[many] or source is None:
        raise DataError(
            f"data.order 'rank_files' needs as many samples on every rank, but rank {few} has "
            f"{counts[few]} and rank {many} has {counts[many]}; partition the data for {world.size} "
            "ranks anew, or use another order"
        )
    return source


def _open_part(data_dir: str, part: str) -> Source:
    """Return the source of one part: base64 lines, unless its name tells another format."""
    is_plain_text = Path(part).suffix.lower() in ("", ".txt", ".b64", ".base64", ".tsv")
    if is_plain_text and not Path(part).is_dir():
        return Base64Source(data_dir, files=[part])
    return open_source(part)


def _own_part(data_dir: str, world: World) -> str:
    parts = read_file_list(data_dir, must_exist=False)
    if len(parts) != world.size:
        raise DataError(
            f"data.order 'rank_files' needs a part for each rank, but {data_dir}/file_list.txt names "
            f"{len(parts)} for {world.size} ranks; start {len(parts)} ranks, or partition the data anew"
        )
    return parts[world.rank]
