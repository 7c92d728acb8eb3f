"""Open an exported model, and compute embeddings with onnxruntime: in a server, or on a cluster.

The folder may come from anyone: checksums, names of files, and the graph's shapes and work are checked before
the graph runs. Only ONNX is served, because loading a torch.export program can run code.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

import numpy as np
import pyarrow as pa
import torch

from plsc.checkpoint.tensor_files import read_tensors
from plsc.data.batch import to_input
from plsc.data.class_names import ClassNames
from plsc.data.decode import MAX_FILE_BYTES, MAX_PIXELS, ImageShape, count_pixels, decode_image
from plsc.data.sources.base import read_image
from plsc.errors import CheckpointError, DataError, OptionError
from plsc.evaluate.capacity import Capacity
from plsc.export.folder import (
    CLASSES_NAME,
    DIVISORS,
    LARGEST_GRAPH,
    MODEL_NAME,
    ONNX_NAME,
    THUMBNAILS_NAME,
    TORCH_NAME,
    TRITON_NAME,
    WEIGHTS_NAME,
    check_file,
    checksum_of,
    read_about,
)
from plsc.export.graph import INPUT, OUTPUT, missing_package
from plsc.storage.disk import read_record, read_regular
from plsc.storage.urls import is_url, located

if TYPE_CHECKING:
    import onnx

MOST_IMAGE_BYTES = 16 * 2**20
MOST_PIXELS = 32 * 10**6
_DOMAINS = ("", "ai.onnx")  # of operators: the standard ones
_FAR = 1e-3
_MOST_NODES, _MOST_VALUES, _MOST_OPERATIONS = 2**14, 2**31, 2**40  # the last two per image
_FLOAT, _STRING = 1, 8  # element types
_SAME = 1e-2  # between values of embeddings that were computed alone and in a batch
_UNBOUNDED = ("ConvInteger", "ConvTranspose", "DeformConv", "Det", "MaxRoiPool", "RoiAlign")
_SMALL = 1024  # values of a tensor that is computed because the shapes of others depend on it
_COMPUTED = (
    *("Add", "Concat", "Constant", "ConstantOfShape", "Div", "Equal", "Expand", "Gather", "Identity", "Mul"),
    *("Range", "Reshape", "Shape", "Size", "Slice", "Squeeze", "Sub", "Unsqueeze", "Where"),
)
EMBEDDING, ERROR = "embedding", "error"
_BATCH = 64  # images per call of onnxruntime
_Side = Annotated[int, (1, 4096)]


class _Input(TypedDict):
    shape: tuple[Any, Literal[1, 3], _Side, _Side]


class _Output(TypedDict):
    shape: tuple[Any, Annotated[int, (1, 2**16)]]


class _Graph(TypedDict, total=False):
    file: str
    layout: Any
    flip: Any


class _Table(TypedDict):
    table: dict[str, Any]


class _Described(TypedDict):
    input: _Input
    output: _Output
    fingerprint: str


class _Served(_Described, total=False):
    thresholds: dict[Annotated[str, r"1e(0|-\d{1,2})"], Annotated[float, (-1.01, 1.01)]]  # cosine by FAR
    capacity: _Table
    graph: _Graph


def open_model(folder: str | os.PathLike[str], threads: int = 0) -> ServedModel:
    """Open a folder of ``plsc export`` for serving.

    threads: of onnxruntime per call; 0: one per core.

    Raises:
        CheckpointError: the folder is missing, damaged or inconsistent, or has no ONNX graph.
        OptionError: onnxruntime is not installed.
    """
    return ServedModel(Path(folder), threads)


class ServedModel:
    """A model that maps images to L2-normalised embeddings.

    Attributes:
        folder: the folder.
        about: the contents of model.json.
        image_shape: (C, H, W) of the input.
        emb_size: D, the size of the embeddings.
        thresholds: cosine by FAR, ascending; pairs with at least this cosine are accepted.
        capacity: FPIR of galleries of images; None if the model was exported without unseen classes.
        fingerprint: SHA-256 of the weights, after ``flip-`` if the graph adds the mirrored image.
    """

    def __init__(self, folder: Path, threads: int = 0) -> None:
        if missing := missing_package():
            raise OptionError(f"a graph needs {missing}")
        self.folder = folder
        self.about = read_about(folder)
        held = read_record(_Served, self.about, folder / MODEL_NAME)
        self.image_shape: ImageShape = held["input"]["shape"][1:]
        self.emb_size = held["output"]["shape"][1]
        found = held.get("thresholds", {}).items()
        self.thresholds = dict(sorted((float(far), cosine) for far, cosine in found))
        table = held["capacity"]["table"] if "capacity" in held else None
        self.capacity = None if table is None else Capacity.from_dict(table, CheckpointError)
        self.fingerprint: str = held["fingerprint"]
        graph = held.get("graph", {})
        name = graph.get("file")
        if name not in (ONNX_NAME, TRITON_NAME):
            reason = ": a .pt2 file could run code" if name == TORCH_NAME else ""
            raise CheckpointError(
                f"{folder} has the graph {name!r:.100}, but only {ONNX_NAME} is served{reason}; export the "
                "model to ONNX"
            )
        for what, file in (("weights", WEIGHTS_NAME), ("graph", name), ("classes", CLASSES_NAME)):
            if what != "classes" or what in self.about:
                check_file(folder, file, self.about.get(what))
        # Galleries are found by the fingerprint.
        if checksum_of(read_tensors(folder / WEIGHTS_NAME)) != self.fingerprint:
            raise CheckpointError(f"{folder} has the fingerprint of other weights; choose another model")
        if graph.get("flip") is True:  # other embeddings than those of the weights alone
            self.fingerprint = f"flip-{self.fingerprint}"
        self._path = folder / name
        self._scale = np.float32(128 / DIVISORS.get(str(graph.get("layout")), 128))
        self._session = _start(self._path, self.image_shape, threads)
        noise = np.random.default_rng(0).uniform(-1, 1, (2, *self.image_shape)).astype(np.float32)
        both = self._run(noise)
        if not are_normalised(both).all():
            raise CheckpointError(f"{self._path}: an embedding of the graph does not have norm 1")
        if np.abs(both[:1] - self._run(noise[:1])).max() > _SAME:  # batch normalisation in training, say
            raise CheckpointError(f"{self._path}: an embedding depends on the other images of its batch")

    @property
    def default_far(self) -> float | None:
        """1e-3, or the FAR next to it if the evaluation had too few pairs; None without thresholds."""
        known = list(self.thresholds)
        return next((far for far in known if far > 0.999 * _FAR), known[-1] if known else None)

    def embed(self, images: np.ndarray) -> np.ndarray:
        """Return the embeddings, float32 [n, D], L2-normalised, of pre-processed images.

        images: float32 [n, C, H, W], as `preprocess` returns. Raises CheckpointError for another shape or
        dtype.
        """
        if not len(images):
            return np.empty((0, self.emb_size), np.float32)
        return self._run(images)

    def preprocess(
        self, data: bytes, max_bytes: int = MOST_IMAGE_BYTES, max_pixels: int = MOST_PIXELS
    ) -> np.ndarray:
        """Decode an encoded image as in training, and return it as float32 [C, H, W], (x - 127.5) / 128.

        Raises DataError for an image that is damaged or over the limits; nothing over them is decoded.
        """
        if len(data) > max_bytes:
            raise DataError(f"the image has {len(data)} bytes, over the limit of {max_bytes}; shrink it")
        count_pixels(data, max_pixels)
        return to_input(decode_image(data, self.image_shape)[None], "cpu")[0].numpy()

    def class_weights(self) -> tuple[np.ndarray, ClassNames | None]:
        """Return the L2-normalised class weights, float32 [classes, D], and the class names if there are any.

        Raises CheckpointError if the model was exported without them.
        """
        if "classes" not in self.about:
            raise CheckpointError(f"{self.folder} has no class weights; export the model with --classes")
        file = self.folder / CLASSES_NAME
        held = read_tensors(file)
        weight, text, ends = (held.get(name) for name in ("weight", "names.bytes", "names.ends"))
        is_sound = weight is not None and weight.dtype == torch.float32
        is_sound = is_sound and weight.shape[1:] == (self.emb_size,)
        names = None
        if is_sound and text is not None and ends is not None:
            names = ClassNames(text.numpy(), ends.numpy())
            is_sound = (text.dtype, ends.dtype) == (torch.uint8, torch.int64)
            is_sound = is_sound and ends.shape == weight.shape[:1] and names.is_sound()
        if not is_sound:
            raise CheckpointError(
                f"{file}: it has no float32 weight [classes, {self.emb_size}], or damaged class names"
            )
        return weight.numpy(), names

    def thumbnail(self, number: int) -> bytes | None:
        """Return the JPEG picture of a class; None if there is none."""
        with contextlib.suppress(OSError):  # also for a link, which could name any file of the machine
            return read_regular(self.folder / THUMBNAILS_NAME / f"{int(number)}.jpg", 2**20, self.folder)
        return None

    def _run(self, images: np.ndarray) -> np.ndarray:
        with _blaming(self._path, f"it fails on {len(images)} images"):
            given = images if self._scale == 1 else images * self._scale
            found: np.ndarray = self._session.run([OUTPUT], {INPUT: given})[0]
        if found.shape != (len(images), self.emb_size) or found.dtype != np.float32:
            raise CheckpointError(
                f"{self._path} returns {found.dtype} {list(found.shape)} for {len(images)} images; expected "
                f"float32 {[len(images), self.emb_size]}"
            )
        return found


def are_normalised(vectors: np.ndarray) -> np.ndarray:
    """Return for each vector, float32 [n, D], whether its norm is 1, to 1e-3, or exactly 0; bool [n]."""
    squares = np.einsum("ij,ij->i", vectors, vectors)
    return (np.abs(np.sqrt(squares) - 1) <= 1e-3) | (squares == 0)


@contextlib.contextmanager
def _blaming(path: Path, what: str) -> Iterator[None]:
    """Convert errors of onnx, onnxruntime and protobuf, of many kinds, to CheckpointError about a graph."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path}: {what}: {str(error)[:300]}") from error


def _start(path: Path, image_shape: ImageShape, threads: int) -> Any:
    """Return the onnxruntime session of a graph, after checking what it reads and how much it computes."""
    import onnx
    import onnxruntime

    data = read_regular(path, LARGEST_GRAPH)
    with _blaming(path, "it is not an ONNX file"):
        model = onnx.load_model_from_string(data)
    _check_graph(path, model)
    for images in (1, _BATCH):  # sizes may grow with a power of the batch
        _check_work(path, model, (images, *image_shape))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # Without VNNI, products of uint8 and int8 would saturate, of graphs that others have quantised.
    options.add_session_config_entry("session.x64quantprecision", "1")
    with _blaming(path, "onnxruntime cannot load it"):
        return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def _check_graph(path: Path, model: onnx.ModelProto) -> None:
    """Raise CheckpointError unless a graph has only standard operators, no control flow and all its data."""
    attributes = [attribute for node in model.graph.node for attribute in node.attribute]
    tensors = [*model.graph.initializer, *(one.t for one in attributes)]
    tensors += [tensor for one in attributes for tensor in one.tensors]
    outside = next((one.name for one in tensors if one.external_data or one.data_location), None)
    domains = {one.domain for one in (*model.opset_import, *model.graph.node)}
    nodes, opsets = len(model.graph.node), len(model.opset_import)
    for is_wrong, what in (
        (nodes > _MOST_NODES or opsets != 1, f"it has {nodes} nodes of {opsets} operator sets"),
        (outside is not None, f"the tensor {outside!r:.100} is in another file"),
        (not domains <= set(_DOMAINS), f"it has operators of {sorted(domains)!s:.100}"),
        (any(one.HasField("g") or one.graphs for one in attributes), "it has control flow"),
        (any(one.sparse_tensors or one.HasField("sparse_tensor") for one in attributes), "it is sparse"),
        (model.graph.sparse_initializer or model.functions, "it has functions or sparse tensors"),
    ):
        if is_wrong:
            raise CheckpointError(f"{path}: {what}, which plsc does not write")


def _check_work(path: Path, model: onnx.ModelProto, shape: tuple[int, ...]) -> None:
    """Raise CheckpointError unless an image needs a known and limited number of values and operations.

    Values are those of all tensors; operations are values read or written, and multiplications. shape: of a
    batch of images.
    """
    from onnx import defs, helper, shape_inference

    weights, opsets = model.graph.initializer, list(model.opset_import)
    types = {INPUT: helper.make_tensor_type_proto(_FLOAT, shape)}
    types |= {one.name: helper.make_tensor_type_proto(one.data_type, one.dims) for one in weights}
    known = {one.name: one for one in weights if math.prod(one.dims) <= _SMALL}
    values = operations = 0
    for node in model.graph.node:
        names = [name for name in node.input if name]
        with _blaming(path, f"its node {node.name!r:.100}"):
            shapes = [_known_shape(types[name]) for name in names]
            schema = defs.get_schema(node.op_type, opsets[0].version, "")
            given, data = ({name: one[name] for name in names if name in one} for one in (types, known))
            types |= shape_inference.infer_node_outputs(
                schema, node, given, data, opset_imports=opsets, ir_version=model.ir_version
            )
            written = sum(math.prod(_known_shape(types[name])) for name in node.output if name)
            values += written
            operations += written + sum(map(math.prod, shapes)) + _multiplications(node, shapes, written)
            if values > shape[0] * _MOST_VALUES or operations > shape[0] * _MOST_OPERATIONS:
                limits = f"{_MOST_VALUES:.1e} values or {_MOST_OPERATIONS:.1e} operations"
                raise ValueError(f"up to it, an image needs more than {limits}")
            is_known = len(data) == len(given) or node.op_type in ("Shape", "Size")
            if is_known and node.op_type in _COMPUTED and written <= _SMALL:
                known |= _computed(node, dict(zip(names, shapes, strict=True)), data, opsets[0].version)


def _known_shape(about: onnx.TypeProto) -> list[int]:
    """Return the shape of a tensor. Raises ValueError if it is unknown, or the values are strings."""
    tensor = about.tensor_type
    shape = [one.dim_value if one.HasField("dim_value") else -1 for one in tensor.shape.dim]
    if not tensor.HasField("shape") or min(shape, default=0) < 0 or tensor.elem_type == _STRING:
        raise ValueError("a size is known only when the graph runs")
    return shape


def _multiplications(node: onnx.NodeProto, shapes: list[list[int]], written: int) -> int:
    """Return the multiplications of a node, or more; `written` is the number of values of its outputs."""
    kind, sizes = node.op_type, [*map(math.prod, shapes)]
    if kind in _UNBOUNDED or (kind == "Einsum" and len(shapes) > 2):
        raise ValueError(f"the time and memory that a {kind} takes are known only when the graph runs")
    if "MatMul" in kind or kind in ("Einsum", "Gemm"):  # M * N * K, from M * K, K * N and M * N
        return math.isqrt(math.prod(sizes) * written)
    if kind in ("GRU", "LSTM", "RNN"):  # their weights are used once per element of each sequence
        return math.prod(shapes[0][:2]) * sum(sizes[1:3])
    if kind == "Attention":
        return max(sizes) * written
    kernel = [one for about in node.attribute if about.name == "kernel_shape" for one in about.ints]
    if "Conv" in kind:
        kernel = shapes[3 if kind == "QLinearConv" else 1][1:]
    return max(written, *sizes[:1]) * abs(math.prod(kernel)) if kernel else 0


def _computed(
    node: onnx.NodeProto, shapes: dict[str, list[int]], data: dict[str, onnx.TensorProto], version: int
) -> dict[str, onnx.TensorProto]:
    """Return the outputs of a node; inputs that are not in `data` may have any values."""
    from onnx import GraphProto, ValueInfoProto, numpy_helper
    from onnx.reference import ReferenceEvaluator

    graph = GraphProto(node=[node], output=[ValueInfoProto(name=name) for name in node.output])
    arrays = {name: np.broadcast_to(np.uint8(0), shape) for name, shape in shapes.items()}
    arrays |= {name: numpy_helper.to_array(one) for name, one in data.items()}
    found = ReferenceEvaluator(graph, opsets={"": version}).run(None, arrays)
    tensors = map(numpy_helper.from_array, map(np.asarray, found))
    return dict(zip(node.output, tensors, strict=True))


def batch_embedder(
    folder: str | os.PathLike[str], column: str = "image", allowed: Sequence[str] = ()
) -> BatchEmbedder:
    """Return a picklable callable that embeds batches; each process loads the model once, with one thread.

    folder: of ``plsc export``, at the same path on all machines. column: of the images: encoded bytes, paths
    or URLs, or structs with ``bytes`` and ``path``. allowed: prefixes of URLs that may be read, such as
    ``s3://bucket/``. Raises, as does the callable, the errors of `open_model`.
    """
    model = open_model(folder)
    about = json.dumps(model.about["input"])
    metadata = {"plsc.fingerprint": model.fingerprint, "plsc.input": about, "plsc.normalised": "true"}
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
