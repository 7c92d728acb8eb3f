"""Embed batches of images in the worker processes of Spark, Ray and Hugging Face datasets."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from plsc.data.decode import MAX_FILE_BYTES, MAX_PIXELS
from plsc.data.sources.base import read_image
from plsc.errors import CheckpointError, DataError, OptionError
from plsc.export.folder import schema_metadata
from plsc.export.served import ServedModel, open_model
from plsc.storage.urls import is_url, located

EMBEDDING, ERROR = "embedding", "error"
_BATCH = 64  # images per call of onnxruntime


def batch_embedder(
    folder: str | os.PathLike[str], column: str = "image", allowed: Sequence[str] = ()
) -> BatchEmbedder:
    """Return a picklable callable that embeds batches; each process loads the model once, with one thread.

    folder: of ``plsc export``, at the same path on all machines. column: of the images: encoded bytes, paths
    or URLs, or structs with ``bytes`` and ``path``. allowed: prefixes of URLs that may be read, such as
    ``s3://bucket/``. Raises, as does the callable, the errors of `open_model`.
    """
    model = open_model(folder)
    metadata = schema_metadata(model.fingerprint, model.about["input"], "true")
    return BatchEmbedder(model.folder.resolve(), column, metadata, allowed)


@dataclass(frozen=True)
class BatchEmbedder:
    """Add the columns ``embedding`` and ``error`` to a pyarrow RecordBatch or Table, or a dict of columns.

    ``embedding`` is a list (Spark reads none of fixed size) of D float32, L2-normalised; null, and ``error``
    the reason, if an image failed. In a dict: float32 [n, D], NaN if it failed; ``error`` is otherwise "".
    Columns of these names in the batch are replaced.

    metadata: of Arrow schemas: ``plsc.fingerprint``, ``plsc.input`` (preprocessing), ``plsc.normalised``.
    """

    folder: Path
    column: str
    metadata: Mapping[str, str]
    allowed: Sequence[str] = ()

    def __call__(self, batch: Any) -> Any:
        """Return the batch with ``embedding`` and ``error``; KeyError if it has no column of images."""
        is_arrow = isinstance(batch, (pa.RecordBatch, pa.Table))
        vectors, errors = self._embed(batch[self.column].to_pylist() if is_arrow else batch[self.column])
        if not is_arrow:
            return {**batch, EMBEDDING: vectors, ERROR: [error or "" for error in errors]}
        rows = [None if error else row for row, error in zip(vectors, errors, strict=True)]
        batch = batch.select(
            [i for i, name in enumerate(batch.schema.names) if name not in (EMBEDDING, ERROR)]
        )
        batch = batch.append_column(EMBEDDING, pa.array(rows, pa.list_(pa.float32())))
        batch = batch.append_column(ERROR, pa.array(errors, pa.string()))
        ours = {key.encode(): value.encode() for key, value in self.metadata.items()}  # Arrow's are bytes
        return batch.replace_schema_metadata({**(batch.schema.metadata or {}), **ours})

    def in_spark(self, frame: Any) -> Any:
        """Return a Spark DataFrame with both columns, by ``mapInArrow``."""
        from pyspark.sql.types import ArrayType, FloatType, StringType, StructType

        frame = frame.drop(EMBEDDING, ERROR)
        schema = StructType(list(frame.schema.fields))
        schema.add(EMBEDDING, ArrayType(FloatType()), metadata=dict(self.metadata)).add(ERROR, StringType())
        return frame.mapInArrow(lambda batches: map(self, batches), schema)

    def _embed(self, values: Any) -> tuple[np.ndarray, list[str | None]]:
        model = _opened(self.folder, self.metadata["plsc.fingerprint"], os.getpid())
        errors: list[str | None] = [None] * len(values)
        vectors = np.full((len(values), model.emb_size), np.nan, np.float32)
        for first in range(0, len(values), _BATCH):
            images = {}
            for number, value in enumerate(values[first : first + _BATCH], first):
                try:
                    image = _bytes_of(value, self.allowed)
                    images[number] = model.preprocess(image, MAX_FILE_BYTES, MAX_PIXELS)
                except DataError as error:
                    errors[number] = str(error)
            if images:
                vectors[list(images)] = model.embed(np.stack(list(images.values())))
        return vectors, errors


@functools.cache
def _opened(folder: Path, fingerprint: str, process: int) -> ServedModel:
    """Return the model of a process, whose number counts because threads do not survive a fork."""
    model = open_model(folder, threads=1)
    if model.fingerprint != fingerprint:
        raise CheckpointError(f"{folder} is another model on this machine; copy the same to all machines")
    return model


def _bytes_of(data: Any, allowed: Sequence[str]) -> bytes:
    if isinstance(data, Mapping):  # an image of Hugging Face datasets, not decoded
        data = data.get("bytes") or data.get("path")
    if isinstance(data, str):
        # An absolute path, because that must be of an image: an error has the first bytes of other files.
        return read_image(located(data, "/", allowed) if is_url(data) else os.path.abspath(data))  # noqa: PTH100
    if not isinstance(data, bytes):
        wrong = DataError if data is None else OptionError  # this image, or all
        raise wrong(f"an image is {type(data).__name__}; expected encoded bytes, or a path")
    return data
