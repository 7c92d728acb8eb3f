"""Prediction: embeddings, outputs of layers and classes of images, in memory or streamed to a folder.

The images are those of a source, read by number, or of a generator, read forwards. They are divided into
shards of consecutive rows; shard i is computed by rank i mod ranks, in batches that do not depend on the
other shards. A resumed prediction therefore computes the same bits.
"""

from __future__ import annotations

import logging
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plsc.checkpoint import load_weights
from plsc.checkpoint.load import read_class_names
from plsc.config import Options
from plsc.data.batch import SampleNames
from plsc.data.lists import absolute
from plsc.data.reader import declares_shards, open_reader
from plsc.data.sources import open_images
from plsc.data.sources.base import (
    FileSource,
    IndexedSource,
    Source,
    TorchDatasetSource,
    class_names_of,
    whole_number,
)
from plsc.errors import DataError, OptionError
from plsc.evaluate.embed import ImagesOf, Listed, embed_batches
from plsc.export.folder import checksum_of, describe_input
from plsc.heads import Head
from plsc.machine import Counter
from plsc.models.base_model import dry_run, evaluating, find_layers, keeping_outputs
from plsc.parallel.failure import on_every_rank, on_main_rank
from plsc.parallel.world import World
from plsc.predict.embeddings import (
    EMBEDDINGS,
    FORMAT,
    NAMES,
    VERSION,
    Embeddings,
    find_shards,
    is_intact,
    read_column,
    read_index,
    write_index,
    write_shard,
)
from plsc.predict.network import Trained, open_trained
from plsc.storage.disk import HIDDEN
from plsc.storage.urls import is_url, unique_name
from plsc.train.build import load_head
from plsc.train.callbacks import UserParts
from plsc.train.data import align_source, check_no_landmarks, is_generator_reader, open_labelled
from plsc.train.log import BadSampleReport
from plsc.values import Input

logger = logging.getLogger(__name__)

Images = str | os.PathLike[str] | Sequence[Any]
FIELDS = ("value", "id", "prob")
LABELS, IDS, PROBS, JOINED = "labels", "ids", "probs", "layers"
NUMBERS = "numbers"  # of the images, while shards are computed
_BAD_NAME = "_bad_samples.txt"
MOST_ROWS, MOST_BYTES = 8192, 64 * 2**20  # of a shard


@dataclass
class Prediction:
    """The outputs for N images, in the order of the dataset.

    embeddings: float32 [N, D], not normalised; [N, 0] without the field ``value``. names: path of the file,
    or ``sample <n>`` of a reader. labels: int64 [N], -1 for images without labels. layers: outputs of the
    requested layers, float32 [N, ...], by name. ids: class numbers with the highest logit, int64 [N], and
    probs: their softmax probabilities, float32 [N], or None.
    """

    embeddings: np.ndarray
    names: list[str]
    labels: np.ndarray
    layers: dict[str, np.ndarray] = field(default_factory=dict)
    ids: np.ndarray | None = None
    probs: np.ndarray | None = None


@dataclass(frozen=True)
class Request:
    """What to predict: names of layers, fields of FIELDS, and whether outputs of layers are joined."""

    layers: tuple[str, ...] = ()
    fields: tuple[str, ...] = ("value",)
    flatten: bool = False

    def __post_init__(self) -> None:
        needed = {"value"} if self.layers else {*self.fields}
        taken = {EMBEDDINGS, LABELS, IDS, PROBS, NAMES} & {*self.layers}
        if taken or not self.fields or not {*FIELDS} >= {*self.fields} >= needed:
            raise OptionError(
                f"field is {list(self.fields)}, layers are {list(self.layers)}; expected some of "
                f"{', '.join(FIELDS)}, with layers value, and no layer named as another output"
            )


def run_prediction(
    options: Options,
    world: World,
    user: UserParts,
    images: Images | None = None,
    request: Request | None = None,
    output: Path | None = None,
) -> Prediction | Embeddings:
    """Return the outputs for the images, the dataset or the predict reader; see `Entry.predict`."""
    request = request or Request()
    trained = open_trained(options, world, user.model)
    head = load_head(*trained.checkpoint, world) if {"id", "prob"} & set(request.fields) else None
    samples = open_samples(trained, images, user.predict_reader)
    if not samples.has(0):
        raise DataError(f"{samples.name} contains no images")
    bad = BadSampleReport(world, output, _BAD_NAME)
    predictor = Predictor(trained, head, request, samples, bad)
    return predictor.in_memory() if output is None else predictor.to_folder(output)


@dataclass(frozen=True)
class Predictor:
    """Compute the outputs of a network for samples, shard by shard, on all ranks."""

    trained: Trained
    head: Head | None
    request: Request
    samples: Samples | StreamedSamples
    bad: BadSampleReport

    @property
    def batch(self) -> int:
        """Images per batch and rank."""
        return self.trained.config.train.test_batch_size

    def in_memory(self) -> Prediction:
        """Return all outputs on every rank."""
        total = self.samples.count
        rows = self.batch if total is None else -(-total // self.trained.world.size)
        gathered = self.trained.world.all_gather_object(list(self._shards(rows, frozenset())))
        shards = sorted((shard for part in gathered for shard in part), key=lambda shard: shard[0])
        if not shards:
            raise DataError(f"no image of {self.samples.name} can be used; see the warnings")
        columns = {name: np.concatenate([values[name] for _, values in shards]) for name in shards[0][1]}
        labels = columns.pop(LABELS)
        embeddings = columns.pop(EMBEDDINGS, np.empty((len(labels), 0), np.float32))
        ids, probs = columns.pop(IDS, None), columns.pop(PROBS, None)
        names = self.samples.names(columns.pop(NUMBERS).tolist())
        if total is not None and total > len(names):
            self.trained.world.log(f"left out {total - len(names):,} of {total:,} images", logging.WARNING)
        return Prediction(embeddings, names, labels, columns, ids, probs)

    def to_folder(self, folder: Path) -> Embeddings:
        """Write all outputs as shards, except those that are there already; a collective."""
        world, samples, about = self.trained.world, self.samples, self._describe()
        doing = f"write {folder}"
        files, rows = on_main_rank(world, doing, lambda: _begin(folder, about))
        kept = self._check(folder, files, rows)
        if kept:
            world.log(f"{folder}: {len(kept):,} shards are complete; predicting the others")
        written = dict(kept)
        left = None if samples.count is None else samples.count - sum(one["rows"] for one in kept.values())
        for number, columns in self._shards(rows, frozenset(kept), Counter("predicted about", left)):
            if number in kept:  # computed because another rank needed this one's class weights
                continue
            names = samples.names(columns.pop(NUMBERS).tolist())
            file = write_shard(folder, number, names, columns)
            written[number] = {"file": file, "rows": len(names)}

        self.bad.gather()
        self.bad.log_summary()
        parts = world.all_gather_object(written)
        everything = {number: shard for part in parts for number, shard in part.items()}
        shards = [everything[number] for number in sorted(everything)]

        def finish() -> None:
            total = sum(shard["rows"] for shard in shards)
            index = {"rows_per_shard": rows, "count": total, "shards": shards, "complete": True}
            write_index(folder, {**about, **index})

        on_main_rank(world, doing, finish)
        opened = Embeddings(folder)
        world.log(f"wrote {len(opened):,} rows in {len(shards):,} shards to {folder}")
        return opened

    def _describe(self) -> dict[str, Any]:
        """Return what the index records of the model, its input and the output."""
        config, world = self.trained.config, self.trained.world
        path, manifest = self.trained.checkpoint
        columns, is_aligned = self._describe_columns(), config.data.landmarks is not None
        model = {
            "checkpoint": str(path),
            "step": manifest.step,
            "name": config.model.name,
            "weights": on_main_rank(
                self.trained.world, f"read {path}", lambda: checksum_of(load_weights(path))
            ),
        }
        if self.head is not None:
            files = sorted((name, info.crc32) for name, info in manifest.files.items())
            model["files"] = f"{zlib.crc32(repr(files).encode()):08x}"  # with the class weights
        total, ranks = self.samples.count, world.size
        row = 64 + sum(math.prod(column["shape"]) * 4 + 4 for column in columns.values())
        most = max(1, min(MOST_ROWS, MOST_BYTES // row))
        rounds = -(-total // (most * ranks)) if total else 1
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": model,
            "input": describe_input(self.trained.network, config.model.image_shape, is_aligned),
            "flip": False,
            "precision": "float32",
            "columns": columns,
            "dataset": self.samples.place,
            "images": total,
            "rows_per_shard": -(-total // (rounds * ranks)) if total else most,
        }

    def _describe_columns(self) -> dict[str, Any]:
        """Return dtype and shape of a row of each column, from blank images."""
        with keeping_outputs(find_layers(self.trained.network, self.request.layers)) as kept:
            embedding = dry_run(self.trained.network, self.trained.config.model.image_shape)
            values = self._values(embedding.float().cpu().numpy(), kept)
        about = {name: {"dtype": "float32", "shape": list(array.shape[1:])} for name, array in values.items()}
        about[LABELS] = {"dtype": "int64", "shape": []}
        if "id" in self.request.fields:
            about[IDS] = {"dtype": "int64", "shape": []}
        if "prob" in self.request.fields:
            about[PROBS] = {"dtype": "float32", "shape": []}
        return {**about, NAMES: {"dtype": "object", "shape": []}}

    def _shards(
        self, rows: int, kept: frozenset[int], progress: Counter | None = None
    ) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """Yield number and columns of each shard of this rank that is not in `kept`.

        With a head, the ranks compute their shards of a round together, unless all of them are in `kept`.
        """
        ranks, total = self.trained.world.size, self.samples.count
        for first in count(0, ranks):
            if not self.samples.has(first * rows):
                return
            shard = first + self.trained.world.rank
            needed = range(first, first + ranks) if self.head is not None else (shard,)
            if all(number in kept or (total is not None and number * rows >= total) for number in needed):
                continue
            columns = self._compute(shard * rows, rows, progress)
            if columns:
                yield shard, columns

    def _compute(self, start: int, rows: int, progress: Counter | None) -> dict[str, np.ndarray]:
        """Return the columns of the rows from `start`, empty if there are none."""
        parts: list[dict[str, np.ndarray]] = []
        embedded = embed_batches(
            self.trained.network,
            self.samples.parts(start, start + rows, self.batch),
            self.trained.config.model.image_shape,
            device=self.trained.world.device,
            name=self.samples.name,
            num_threads=self.samples.threads,
            bad_images="skip" if self.trained.config.data.bad_images == "skip" else "stop",
            is_late=not self.request.layers,  # `kept` has the outputs of the last batch
        )
        with (
            evaluating(self.trained.network),
            torch.inference_mode(),
            keeping_outputs(find_layers(self.trained.network, self.request.layers)) as kept,
            closing(embedded),
        ):
            for batch, embedding in embedded:
                self.bad.add(batch.problems)
                if len(batch):
                    assert isinstance(batch.names, SampleNames)
                    values, numbers = self._values(embedding, kept), np.array(batch.names.samples)
                    columns = {**values, LABELS: batch.labels.numpy(), NUMBERS: numbers}
                    parts.append(columns | self._classes(embedding))
                    if progress is not None and self.trained.world.is_main:  # it stands for all ranks
                        progress.add(len(embedding) * self.trained.world.size)
            if self.head is not None:  # take part in the searches of the other ranks
                for _ in range(len(parts), -(-rows // self.batch)):
                    self._classes(np.empty((0, self.head.emb_size), np.float32))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}

    def _values(self, embedding: np.ndarray, kept: dict[str, list[Tensor]]) -> dict[str, np.ndarray]:
        if "value" not in self.request.fields:
            return {}
        outputs = {}
        for name in self.request.layers:
            last = kept[name][-1:]
            kept[name].clear()
            if not last or len(last[0]) != len(embedding):
                raise OptionError(f"the layer {name!r} returns no tensor [batch, ...]; choose another layer")
            outputs[name] = last[0].float().cpu().numpy()
        if self.request.flatten and outputs:
            flat = [output.reshape(len(output), -1) for output in outputs.values()]
            outputs = {JOINED: np.concatenate(flat, axis=1)}
        return {EMBEDDINGS: embedding, **outputs}

    def _classes(self, embedding: np.ndarray) -> dict[str, np.ndarray]:
        if self.head is None:
            return {}
        ids, probs = self.head.classify(torch.from_numpy(embedding).to(self.trained.world.device))
        columns = {"id": (IDS, ids.cpu().numpy()), "prob": (PROBS, probs.float().cpu().numpy())}
        return dict(columns[name] for name in FIELDS[1:] if name in self.request.fields)

    def _check(self, folder: Path, files: dict[int, str], rows: int) -> dict[int, dict[str, Any]]:
        """Return the intact shards of these images by number; damaged ones are deleted. A collective."""
        rank, ranks = self.trained.world.rank, self.trained.world.size

        def check() -> dict[int, dict[str, Any]]:
            kept = {}
            for number in sorted(files)[rank::ranks]:
                path = folder / files[number]
                if not is_intact(path):
                    logger.warning(f"{path} is damaged and will be computed again")
                    path.unlink()
                    continue
                names, stop = read_column(path, NAMES).tolist(), (number + 1) * rows
                stop = stop if self.samples.count is None else min(stop, self.samples.count)
                if not self.samples.have(range(number * rows, stop), names, read_column(path, LABELS)):
                    raise DataError(
                        f"{path} has other images or labels than {self.samples.name}; choose another folder"
                    )
                kept[number] = {"file": path.name, "rows": len(names)}
            return kept

        parts = on_every_rank(self.trained.world, f"read {folder}", check)
        return {number: shard for part in parts for number, shard in part.items()}


class Samples:
    """The images of a source, read by number."""

    def __init__(self, source: Source, name: str, threads: int) -> None:
        self.source, self.name, self.count = source, name, len(source)
        self.place = absolute(name) if is_url(name) or os.path.exists(name) else name  # noqa: PTH110
        # A custom Dataset may not be thread-safe.
        self.threads = 0 if isinstance(source, TorchDatasetSource) else threads
        self._where: Callable[[int], Any] = source.name
        if isinstance(source, FileSource):
            self._where = source.path
        self.has_paths = self._where != source.name

    def has(self, number: int) -> bool:
        """Return whether there is an image of this number."""
        return number < self.count

    def parts(self, start: int, stop: int, batch: int) -> Iterator[ImagesOf]:
        """Yield the images from `start` to `stop` in batches."""
        stop = min(stop, self.count)
        for first in range(start, stop, batch):
            yield ImagesOf(self.source, range(first, min(first + batch, stop)))

    def names(self, numbers: Iterable[int]) -> list[str]:
        """Return the names of images."""
        return [unique_name(str(self._where(number))) for number in numbers]

    def have(self, numbers: range, names: list[str], labels: np.ndarray) -> bool:
        """Return whether these names, with their labels, are those of some images, in their order."""
        known: Iterator[Any] = iter(self.names(numbers))
        stored: Iterator[Any] = iter(names)
        if isinstance(self.source, IndexedSource):  # another one would have to read its images
            own = self.source.labels()[numbers.start : numbers.stop].tolist()
            known, stored = zip(known, own, strict=True), zip(names, labels.tolist(), strict=True)
        return all(one in known for one in stored)


class StreamedSamples:
    """The images of a generator, which can only be read forwards; every rank reads all of them."""

    name = place = "the predict reader"
    count, threads = None, 0

    def __init__(self, reader: Any, example: Input | None) -> None:
        arguments = (0, 1) if declares_shards(reader) else ()
        self._samples = _images_and_labels(open_reader(reader, example, *arguments))
        self._position = 0
        self._next = next(self._samples, None)

    def has(self, number: int) -> bool:
        """Skip the images before this number; return whether there are more."""
        while self._next is not None and self._position < number:
            self._take()
        return self._next is not None

    def parts(self, start: int, stop: int, batch: int) -> Iterator[ImagesOf]:
        """Yield the images from `start` to `stop` in batches."""
        while self.has(start) and self._position < stop:
            first, images, labels = self._position, [], []
            while self._next is not None and self._position < min(first + batch, stop):
                image, label = self._take()
                images.append(image)
                labels.append(label)
            listed = Listed(images, self.name, labels, first)
            yield ImagesOf(listed, range(first, self._position))

    def _take(self) -> tuple[Any, int]:
        taken = self._next
        assert taken is not None
        self._next = next(self._samples, None)
        self._position += 1
        return taken

    def names(self, numbers: Iterable[int]) -> list[str]:
        """Return the names of images."""
        return [f"sample {number}" for number in numbers]

    def have(self, numbers: range, names: list[str], labels: np.ndarray) -> bool:
        """Return whether all of these names are those of some images; labels: not compared."""
        return set(names) <= set(self.names(numbers))


def open_samples(trained: Trained, images: Images | None, reader: Any) -> Samples | StreamedSamples:
    """Return the images; classes with names are numbered as in the head, new ones after them."""
    data, is_strict = trained.config.data, trained.config.data.bad_images == "stop"
    source: Source
    if images is not None:
        name = str(images) if isinstance(images, (str, os.PathLike)) else "the list"
        source = align_source(open_images(images, data.allowed), data.landmarks, is_strict)
        return Samples(source, name, data.num_workers)
    if reader is None:
        source = open_labelled(data.dataset_dir, data.format_arguments, data.landmarks, is_strict)
    else:
        check_no_landmarks(data.landmarks, "a reader")
        if is_generator_reader(reader, "predict_reader"):
            return StreamedSamples(reader, trained.network.example_input)
        source = TorchDatasetSource(reader)
    class_names, saved = class_names_of(source), read_class_names(*trained.checkpoint)
    if class_names is not None and saved is not None:
        assert isinstance(source, IndexedSource)
        source.renumber(saved.numbered(class_names))
    return Samples(source, str(data.dataset_dir), data.num_workers)


def _images_and_labels(samples: Any) -> Iterator[tuple[Any, int]]:
    for index, sample in enumerate(samples):
        if isinstance(sample, (tuple, list)) and sample:
            name = f"sample {index} of the predict reader"
            yield sample[0], whole_number(sample[1], name) if len(sample) > 1 else -1
        else:
            yield sample, -1


def _begin(folder: Path, about: dict[str, Any]) -> tuple[dict[int, str], int]:
    """Return the shards in the folder and the rows per shard; write the index if the folder is new."""
    if not folder.exists() or all(HIDDEN.fullmatch(path.name) for path in folder.iterdir()):
        folder.mkdir(parents=True, exist_ok=True)
        write_index(folder, {**about, "complete": False})
        return {}, about["rows_per_shard"]
    index, is_complete = read_index(folder), False
    with suppress(DataError):
        Embeddings(folder)
        is_complete = True  # its images may have changed since, under the same names
    if is_complete:
        raise DataError(f"{folder} is complete; use it, or choose another folder")
    for name in ("model", "input", "flip", "precision", "columns", "images", "dataset"):
        ours, theirs = about[name], index.get(name)
        if name == "model":  # at another place, it is the same model
            ours, theirs = ({**(model or {}), "checkpoint": ""} for model in (ours, theirs))
        if ours != theirs:
            raise DataError(f"{folder} is of a prediction with different {name}: {theirs}, not {ours}")
    return find_shards(folder), index["rows_per_shard"]
