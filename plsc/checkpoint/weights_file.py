"""Class weights and their optimizer states in a file on a local disk, of which a step touches a few pages.

A page is 32 consecutive classes: int8 rows (`plsc.heads.weights.encode_rows`) and their states, class by
class. Pages are drawn, read, written and journaled as a whole. A page that was never written gets its initial
values when it is read, so a new file is only allocated.

    folder/header.json       layout, id, checksum, and the boot id of the system while the file is in use
    folder/pages             the pages, which change in place
    folder/journal-<mark>    checksums of all pages at a checkpoint, and the old bytes of those that changed
                             after it, to undo the changes (rollback.py)

`open` with the mark of a checkpoint undoes all changes after it, so a killed process loses nothing. A power
cut may lose writes: a file that was in use then is refused.

The checksums are in memory, 4 bytes per page; each page that is read is compared with its own. Only those at
a checkpoint are stored: later changes are undone, so a kill between a page and its checksum is harmless.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plsc.checkpoint.load import OpenCheckpoint, StoredTensor, check_checksums, check_files
from plsc.checkpoint.manifest import (
    CLASS_OPTIMIZER,
    CLASS_WEIGHTS,
    MANIFEST_NAME,
    Entry,
    FileInfo,
    Manifest,
    OpenedCheckpoint,
    Role,
    TensorInfo,
    bytes_of,
    read_manifest,
    shard_name,
    write_shard,
)
from plsc.checkpoint.rollback import (
    NEW,
    START,
    Journal,
    checksums_of,
    damaged,
    mark_of,
    replace_file,
    step_of,
)
from plsc.checkpoint.save import check_destination
from plsc.data.native import crc32, move_blocks
from plsc.errors import CheckpointError, OptionError, TrainingError
from plsc.heads.sampling import count_pages
from plsc.heads.weights import PAGE, SCALE_BYTES, States, initial_pages
from plsc.parallel.failure import on_every_rank
from plsc.parallel.world import World
from plsc.storage.disk import FolderLock, check_inside, open_regular, publishing_folder, read_record, sync

_FORMAT = 2  # the only one that is read: nothing was released before it
_LARGEST_HEADER = 2**20  # bytes
_THREADS = 8  # requests to the disk at a time
_PIECE_BYTES = 2**25  # of class weights that are copied at a time
_CHUNK = 2**15  # values that torch computes in one thread; the others compute the step
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def rank_folder(folder: str | Path, rank: int) -> Path:
    """Return the folder of a rank's class weights in `head.weights_file`.

    Raises DataError if a link leads out of `head.weights_file`, because files would be created there.
    """
    check_inside(path := Path(folder, f"rank{rank}"), folder)
    return path


@dataclass(frozen=True)
class _Column:
    """Bytes [begin, end) of the record of a class: dtype and shape of the weights, or of a state."""

    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass
class _Pages:
    """Pages in memory: number int64 [n], sorted; data uint8 [n, bytes]."""

    number: Tensor
    data: Tensor

    def at(self, index: Tensor) -> _Pages:
        """Return a copy of the pages at these places."""
        # Not data[index]: torch takes six times as long for it.
        return _Pages(self.number[index], self.data.index_select(0, index))

    def among(self, wanted: Tensor) -> _Pages:
        """Return the pages whose number is in `wanted`."""
        return self.at(torch.isin(self.number, wanted, assume_unique=True).nonzero()[:, 0])


class WeightsFile:
    """The class weights of one rank in a folder. Not thread-safe.

    A step calls `hold` for the classes it uses, `read`, and `write` for those it updates. Writes run in the
    background; an error in one is raised by all later calls.

    Args:
        folder: of this rank, on a local disk.
        classes: the classes of this rank.
        emb_size: embedding size D.
        seed: of the initial class weights, see `plsc.heads.weights.initial_rows`.
    """

    def __init__(self, folder: Path, classes: range, emb_size: int, seed: int) -> None:
        self.folder, self.classes = folder, classes
        self._initial = (seed, emb_size)
        self._width = emb_size + SCALE_BYTES
        self.columns = {"weight": _Column(0, self._width, torch.int8, (self._width,))}
        self._count = count_pages(classes)
        self._pages = -1
        self._lock: FolderLock | None = None
        self._threads = ThreadPoolExecutor(_THREADS, "plsc-pages")
        self._reader, self._writer = ThreadPoolExecutor(1, "plsc-read"), ThreadPoolExecutor(1, "plsc-write")
        self._expecting: Future[_Pages] | None = None
        self._writing: Future[None] | None = None
        self.add_states({})

    def add_states(self, states: States) -> None:
        """Add the states of the optimizer to the layout; only their dtypes and shapes are used."""
        for name, state in states.items():
            begin, self._width = self._width, self._width + state[:1].numel() * state.dtype.itemsize
            self.columns[name] = _Column(begin, self._width, state.dtype, tuple(state.shape[1:]))
        nothing = torch.empty(0, dtype=torch.int64)
        self._held = self._expected = _Pages(nothing, nothing.byte().view(0, 1))
        self._journal = Journal(self.folder, PAGE * self._width, self._count)
        self._checksums = np.zeros(self._count, np.uint32)  # of the pages; 0: never written

    @classmethod
    def existing(cls, folder: Path, classes: range, emb_size: int) -> WeightsFile:
        """Return the class weights in a folder, with the states in its header; not opened yet."""
        header = _read_header(folder)
        try:
            file = cls(folder, classes, emb_size, header["seed"])
            columns = {name: kind for name, kind in header["columns"].items() if name != "weight"}
            file.add_states({n: torch.empty(1, *s, dtype=getattr(torch, d)) for n, (d, s) in columns.items()})
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, MemoryError) as error:
            raise damaged(folder, "header.json", f"is not the header of class weights ({error})") from error
        return file

    def __enter__(self) -> WeightsFile:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(TrainingError) if error else contextlib.nullcontext():
            self.close()  # the first error is raised, not a second one here

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self._count * PAGE * self._width

    # Opening and closing.

    def open(self, mark: str | None = None) -> None:
        """Open the file at the state of a checkpoint, or create a new one without `mark`.

        Raises:
            CheckpointError: the file does not have that state, or is damaged.
            OptionError: the folder cannot be used.
        """
        try:
            with self._reporting():
                self._lock = FolderLock(self.folder)
                if mark is None:
                    self._create()
                else:
                    self._open_pages(mark)
                    for newer in self._undo(mark):  # a kill meanwhile does no harm
                        self._journal.delete(newer)
                self._write_header(_boot_id())
                self._journal.begin(mark or START, self._checksums)
        finally:
            if not self._journal.is_open:
                self._release()

    def close(self) -> None:
        """Wait for writes and flush the files, which can then be used after a power cut."""
        if self._pages < 0:
            return
        with contextlib.suppress(TrainingError):  # was raised, or is of changes after the last checkpoint
            self._finish_writes()
        for pool in (self._reader, self._writer, self._threads):
            pool.shutdown()
        with self._reporting(), contextlib.ExitStack() as stack:
            stack.callback(self._release)
            stack.callback(self._journal.close)
            os.fsync(self._pages)
            self._journal.close()
            self._write_header("")
            sync(self.folder / "header.json")
            sync(self.folder)

    def _release(self) -> None:
        if self._pages >= 0:
            os.close(self._pages)
            self._pages = -1
        if self._lock is not None:
            self._lock.release()

    def begin(self, mark: str) -> None:
        """Journal later changes as those after this checkpoint; call it before that is published."""
        self._finish_writes()
        with self._reporting():
            self._journal.begin(mark, self._checksums)

    def has(self, mark: str) -> bool:
        """Return whether the file can be opened at the state of this checkpoint."""
        return mark in self._journal.marks()

    def forget(self, mark: str) -> None:
        """Delete the journals of earlier checkpoints than this one, which is published."""
        for older in self._journal.marks():
            if older < mark:
                self._journal.delete(older)

    def _open_pages(self, mark: str) -> None:
        self._check_header(mark)
        with open_regular(self.folder / "pages", self.folder, buffering=0, mode="r+b") as file:
            self._pages = os.dup(file.fileno())
        if os.fstat(self._pages).st_size != self.nbytes:
            raise damaged(self.folder, "pages", f"does not have {self.nbytes} bytes")

    def _undo(self, mark: str) -> list[str]:
        """Write back all pages changed after a checkpoint, the newest first; return the later marks."""
        marks = [newer for newer in reversed(self._journal.marks()) if newer >= mark]
        checksums = [self._journal.read(newer) for newer in marks]  # before a change
        for newer in marks:
            self._journal.read(newer, self._write_back)
        self._checksums = checksums[-1]
        return marks[:-1]

    def _write_back(self, numbers: np.ndarray, data: np.ndarray) -> None:
        self._transfer(True, _Pages(torch.from_numpy(numbers), torch.from_numpy(data)))

    # A step.

    def hold(self, rows: Tensor, *, is_first: bool = True) -> None:
        """Keep the pages of these rows in memory, int64, sorted; if not `is_first`, in addition."""
        if self._pages < 0:
            self.open()
        if self._expecting is not None:
            self._expected, self._expecting = self._expecting.result(), None
        wanted = torch.unique_consecutive(self._page_of(rows))
        parts = [self._held.among(wanted) if is_first else self._held]
        parts.append(self._expected.among(wanted[~torch.isin(wanted, parts[0].number)]))
        missing = wanted[~torch.isin(wanted, torch.cat([part.number for part in parts]))]
        if len(missing):
            self._finish_writes()
        parts.append(self._load(missing))
        number = torch.cat([part.number for part in parts])
        data = torch.cat([part.data for part in parts if len(part.data)])
        self._held = _Pages(number, data).at(number.argsort())

    def expect(self, pages: Tensor) -> None:
        """Read these pages in the background, except those held now; the next step will hold them."""
        missing, writing = pages[~torch.isin(pages, self._held.number)], self._writing

        def load() -> _Pages:
            if writing is not None:  # the last step may have changed some of them
                writing.result()
            return self._load(missing)

        self._expecting = self._reader.submit(load)

    def read(self, rows: Tensor | slice, name: str = "weight") -> Tensor:
        """Return the weights or a state of some rows; from the disk if their pages are not held."""
        if self._pages < 0:
            self.open()
        if isinstance(rows, slice):
            rows = torch.arange(rows.start, rows.stop)
        column, pages, wanted = self.columns[name], self._held, self._page_of(rows)
        if not bool(torch.isin(wanted, pages.number).all()):
            self._finish_writes()
            pages = self._load(torch.unique(wanted))
        records = pages.data.view(-1, self._width)[:, column.begin : column.end]
        taken = records.index_select(0, self._records_of(rows, pages))
        return taken.contiguous().view(column.dtype).view(len(rows), *column.shape)

    def write(self, rows: Tensor, values: States) -> None:
        """Replace weights and states of rows that are held; journal and write their pages."""
        self._finish_writes()
        held = self._held
        changed = torch.searchsorted(held.number, torch.unique_consecutive(self._page_of(rows)))
        first = changed[torch.from_numpy(self._journal.lacks(held.number[changed].numpy()))]
        old = held.at(first[torch.from_numpy(self._checksums[held.number[first].numpy()] != 0)])
        records, places = held.data.view(-1, self._width).numpy(), self._records_of(rows, held).numpy()
        for name, column in self.columns.items():
            value = values[name].cpu().contiguous().view(len(rows), -1).view(torch.uint8)
            records[places, column.begin : column.end] = value.numpy()
        after = held if len(changed) == len(held.number) else held.at(changed)

        def save() -> None:
            with self._reporting():
                self._journal.append(old.number.numpy(), old.data.numpy())
            self._transfer(True, after)

        self._writing = self._writer.submit(save)

    def pieces(self) -> Iterator[Tensor]:
        """Yield the indices of all rows in order, about 32 MiB at a time; no page is split."""
        skipped, pages = self.classes.start % PAGE, max(1, _PIECE_BYTES // (PAGE * self._width))
        for page in range(0, self._count, pages):
            end = min(len(self.classes), (page + pages) * PAGE - skipped)
            yield torch.arange(max(0, page * PAGE - skipped), end)

    def _finish_writes(self) -> None:
        """Wait for the writes of the last step. Raises TrainingError."""
        if self._writing is not None:
            self._writing.result()  # after an error, it raises in each later call too
            self._writing = None

    def _page_of(self, rows: Tensor) -> Tensor:
        return (rows + self.classes.start % PAGE) // PAGE

    def _records_of(self, rows: Tensor, pages: _Pages) -> Tensor:
        """Return the index of each row among the records of `pages`."""
        slot = (rows + self.classes.start % PAGE) % PAGE
        return torch.searchsorted(pages.number, self._page_of(rows)) * PAGE + slot

    # Pages on the disk.

    def _load(self, number: Tensor) -> _Pages:
        """Return pages from the disk; those that were never written with initial values."""
        pages = _Pages(number, torch.empty(len(number), PAGE * self._width, dtype=torch.uint8))
        self._transfer(False, pages)
        new = torch.from_numpy(np.flatnonzero(self._checksums[number.numpy()] == 0))
        pages.data.index_fill_(0, new, 0)
        weights = pages.data.view(len(number), PAGE, self._width)[..., : self.columns["weight"].end]
        seed, emb_size = self._initial
        block, several = self.classes.start // PAGE, max(1, _CHUNK // (PAGE * emb_size))

        for some in new.split(several):
            drawn = initial_pages(seed, (number[some] + block).tolist(), emb_size)
            weights[some] = drawn.view(torch.uint8).view(len(some), *weights.shape[1:])
        return pages

    def _transfer(self, is_write: bool, pages: _Pages) -> None:
        """Read or write pages, several at a time: a disk is slow with one request at a time.

        Raises TrainingError; CheckpointError if one that is read does not have its checksum.
        """
        share = -(-len(pages.number) // _THREADS) or 1

        def transfer(first: int) -> None:
            number, data = (one.numpy()[first : first + share] for one in (pages.number, pages.data))
            with self._reporting():
                move_blocks(self._pages, is_write, number, data)
            found, expected = checksums_of(data), self._checksums[number]
            if is_write:
                self._checksums[number] = found
            elif len(wrong := number[(found != expected) & (expected != 0)]):
                raise damaged(self.folder, "pages", f"is damaged: page {wrong[0]} has a wrong checksum")

        list(self._threads.map(transfer, range(0, len(pages.number), share)))

    # The folder.

    def _layout(self) -> dict[str, Any]:
        seed, emb_size = self._initial
        kinds = {
            name: [str(c.dtype).removeprefix("torch."), list(c.shape)] for name, c in self.columns.items()
        }
        classes = [self.classes.start, self.classes.stop]
        return {"classes": classes, "emb_size": emb_size, "seed": seed, "norm": None, "columns": kinds}

    def _write_header(self, boot: str) -> None:
        header = {"format": _FORMAT, "id": self._journal.key, "boot": boot, **self._layout()}
        text = json.dumps({**header, "crc32": _checksum(header)}).encode()
        os.close(replace_file(self.folder / "header.json", np.frombuffer(text, np.uint8)))

    def _create(self) -> None:
        """Create the files. Those of a run that had not published a checkpoint are replaced.

        A run that was killed in its first save may have a journal of that save; it still has the first one.
        """
        saved = self._journal.marks()
        others = {path.name for path in self.folder.iterdir()} - {".lock", NEW}  # of a killed run
        if (saved and START not in saved) or (others and "header.json" not in others):
            step = step_of(saved[-1]) if saved else 0
            has = f"the class weights of a run, of its checkpoint of step {step}" if saved else "other files"
            raise OptionError(
                f"{self.folder} has {has}; resume it, or set head.weights_file to an empty folder"
            )
        if others:
            _read_header(self.folder)
        self._journal.key = secrets.token_hex(8)
        self._write_header("")
        for mark in saved:
            if mark != START:  # kept, or a kill now would leave files that look like those of a checkpoint
                self._journal.delete(mark)
        self._pages = replace_file(self.folder / "pages")
        if self.nbytes:
            os.posix_fallocate(self._pages, 0, self.nbytes)

    def _check_header(self, mark: str) -> None:
        """Raise CheckpointError unless the files belong to this run and have the state of the checkpoint."""
        reason = ""
        if not self.has(mark):
            steps = " and ".join(str(step_of(other)) for other in self._journal.marks() if other != START)
            reason = (
                f"has the class weights of step {steps or 'none'}, not of this checkpoint of step "
                f"{step_of(mark)}; resume the newest checkpoint of the run that used them, on as many ranks"
            )
        else:
            header, layout = _read_header(self.folder), self._layout()
            if odd := [name for name in layout if header.get(name) != layout[name]]:
                reason = (
                    f"has class weights that have {odd[0]} {header.get(odd[0])}, but this run has "
                    f"{layout[odd[0]]}; use the options and the number of ranks that they were made with"
                )
            elif header.get("boot") not in ("", _boot_id()):
                reason = (
                    "may lack some changes: the system was restarted while the class weights were in use; "
                    "delete the folder and start again"
                )
            self._journal.key = str(header.get("id"))
        if reason:
            raise CheckpointError(f"{self.folder} {reason}; or resume a copy from `plsc checkpoint copy`")

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TrainingError(
                f"cannot read or write {error.filename or self.folder}: {error.strerror}; head.weights_file "
                "must be a folder on a local disk with space. The last checkpoint can be resumed"
            ) from error


def _read_header(folder: Path) -> dict[str, Any]:
    where = f"{folder / 'header.json'}, the description of class weights,"
    header = read_record(dict[str, Any], folder / "header.json", where, most=_LARGEST_HEADER)
    if header.pop("crc32", None) != _checksum(header) or header.get("format") != _FORMAT:
        text = f"is not the header of class weights in format {_FORMAT} (the only one read), or is damaged"
        raise damaged(folder, "header.json", text)
    return header


def _checksum(header: dict[str, Any]) -> int:
    return crc32(json.dumps(header).encode())


def _boot_id() -> str:
    """Return an id of this start of the system; 'unknown' where there is none."""
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return "unknown"


# Files and checkpoints: open them at one, copy them into one.


@contextlib.contextmanager
def opened_at(file: WeightsFile, world: World, checkpoint: OpenedCheckpoint | None) -> Iterator[None]:
    """Open the files of all ranks at the state of a checkpoint, or new ones, and close them at the end.

    If the checkpoint itself has class weights (from `copy_complete`), new files are filled with them. Raises
    CheckpointError on all ranks if a folder cannot be used, or does not have that state.
    """
    with file:
        on_every_rank(world, "open the class weights", lambda: _open(file, world, checkpoint))
        yield


def _open(file: WeightsFile, world: World, checkpoint: OpenedCheckpoint | None) -> None:
    if checkpoint is None:
        file.open()
        return
    mark = mark_of(checkpoint[1].step, checkpoint[1].run_id)
    is_complete = Role(CLASS_WEIGHTS, "weight").key in checkpoint[1].tensors
    if file.has(mark) or not is_complete:
        file.open(mark)
        return
    file.open()
    stored = OpenCheckpoint(*checkpoint).select((CLASS_WEIGHTS, CLASS_OPTIMIZER), world.rank, world.size)
    _fill(file, stored)  # without a mark: that of a copy with other classes is the same


def _fill(file: WeightsFile, stored: dict[Role, StoredTensor]) -> None:
    """Write the class weights and states of a checkpoint to a new file."""
    weight = Role(CLASS_WEIGHTS, "weight")
    tensors = {}
    for name, column in file.columns.items():
        role = weight if name == "weight" else Role(CLASS_OPTIMIZER, name, weight.key)
        found = stored.get(role)
        if found is None or (found.dtype, found.shape[1:]) != (column.dtype, column.shape):
            raise CheckpointError(
                f"the checkpoint has no {role.key} of {column.dtype} {list(column.shape)} per class; use the "
                "embedding size, data types and optimizer of the class weights that were saved"
            )
        tensors[name] = found
    first = file.classes.start
    for rows in file.pieces():
        file.hold(rows)
        values = {
            name: torch.empty(len(rows), *column.shape, dtype=column.dtype)
            for name, column in file.columns.items()
        }
        for name, value in values.items():
            tensors[name].read_into(value, first + int(rows[0]))
        file.write(rows, values)


def copy_complete(source: Path, destination: Path, weights_file: Path) -> Manifest:
    """Copy a checkpoint with its class weights, so that it needs no files; return the new manifest.

    The files are set back to the state of the checkpoint, as when it is resumed. They must not be in use.

    weights_file: the folder of `head.weights_file`, with the files of all ranks.

    Raises:
        CheckpointError: a part is missing or damaged; nothing is published.
        OptionError: the destination cannot be created, or a run uses the files.
    """
    check_destination(source, destination)
    manifest = read_manifest(source)
    check_files(source, manifest)
    check_checksums(source, manifest, sorted(manifest.files))
    tensors, files = dict(manifest.tensors), dict(manifest.files)
    with publishing_folder(destination) as temporary:
        for name in manifest.files:
            shutil.copyfile(source / name, temporary / name)
        for rank, file in _files_of(manifest, weights_file):
            path = temporary / shard_name(rank)
            infos, files[path.name] = _write(file, manifest, path)
            tensors |= infos
        result = dataclasses.replace(manifest, tensors=tensors, files=files)
        (temporary / MANIFEST_NAME).write_text(result.to_json(), encoding="utf-8")
    return result


def _files_of(manifest: Manifest, folder: Path) -> Iterator[tuple[int, WeightsFile]]:
    """Yield the rank and file of all class weights of a checkpoint that are not in itself."""
    if Role(CLASS_WEIGHTS, "weight").key not in manifest.tensors:
        for rank, (start, stop) in enumerate(manifest.head.class_ranges):
            if start < stop or not rank:
                path = rank_folder(folder, rank)
                yield rank, WeightsFile.existing(path, range(start, stop), manifest.emb_size)


def _write(file: WeightsFile, manifest: Manifest, path: Path) -> tuple[dict[str, TensorInfo], FileInfo]:
    weight, class_num = Role(CLASS_WEIGHTS, "weight"), manifest.head.class_num
    with file:
        file.open(mark_of(manifest.step, manifest.run_id))
        infos, entries = {}, []
        for name, column in file.columns.items():
            role = weight if name == "weight" else Role(CLASS_OPTIMIZER, name, weight.key)
            kind = str(column.dtype).removeprefix("torch.")
            infos[role.key] = TensorInfo((class_num, *column.shape), kind, True, role)
            of_rank = (len(file.classes), *column.shape)
            entries.append(
                Entry(role.key, column.dtype, of_rank, file.classes.start, partial(_chunks, file, name))
            )
        return infos, write_shard(path, entries)


def _chunks(file: WeightsFile, name: str) -> Iterator[memoryview]:
    for rows in file.pieces():
        yield bytes_of(file.read(rows, name)).numpy().data
