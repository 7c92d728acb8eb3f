"""Open an exported model for serving, and compute embeddings with onnxruntime.

The folder may come from anyone: sizes, checksums, names of files and the graph's shapes are checked before
the graph runs. Only ONNX is served, because loading a torch.export program can run code.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from plsc.checkpoint.manifest import Checker
from plsc.data.batch import to_input
from plsc.data.class_names import ClassNames
from plsc.data.decode import ImageShape, decode_image, size_of
from plsc.errors import CheckpointError, DataError
from plsc.export.folder import (
    CLASSES_NAME,
    MODEL_NAME,
    ONNX_NAME,
    THUMBNAILS_NAME,
    TORCH_NAME,
    WEIGHTS_NAME,
    describe_file,
    read_about,
)
from plsc.export.graph import INPUT, OUTPUT, require_onnx

if TYPE_CHECKING:
    import onnx

MOST_IMAGE_BYTES = 16 * 2**20
MOST_PIXELS = 32 * 10**6
_LARGEST_GRAPH = 2**31 - 1  # bytes of a protobuf message
_LARGEST_SIDE, _LARGEST_EMBEDDING = 4096, 2**16
_DOMAINS = ("", "ai.onnx")  # of operators: the standard ones
_ADVICE = "export the model again"


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
        fingerprint: SHA-256 of the network's weights.
    """

    def __init__(self, folder: Path, threads: int = 0) -> None:
        require_onnx()
        self.folder = folder
        self.about = read_about(folder)
        self._check = check = Checker(str(folder / MODEL_NAME))
        self.image_shape = _image_shape(check, self.about)
        self.emb_size = _shape(check, self.about, "output", 1, _LARGEST_EMBEDDING)[0]
        self.thresholds = _thresholds(check, self.about)
        self.fingerprint = check.text(check.item(self.about, "fingerprint"), "the fingerprint")
        graph = check.mapping(self.about.get("graph", {}), "the graph")
        if graph.get("file") != ONNX_NAME:
            held = f"{graph['file']!r}" if graph else "no graph"
            reason = (
                "; a .pt2 file is not loaded, because it could run code"
                if graph.get("file") == TORCH_NAME
                else ""
            )
            raise check.wrong(f"it has {held:.100}, expected {ONNX_NAME}{reason}", "export the model to ONNX")
        for what, name in (("weights", WEIGHTS_NAME), ("graph", ONNX_NAME), ("classes", CLASSES_NAME)):
            if what != "classes" or what in self.about:
                _verify(check, folder / name, check.mapping(self.about.get(what), f"the {what}"))
        self._session = _start(folder / ONNX_NAME, threads)
        found = self._run(np.zeros((1, *self.image_shape), np.float32))
        if found.shape != (1, self.emb_size) or found.dtype != np.float32:
            raise check.wrong(
                f"the graph returns {found.dtype} {list(found.shape)} for one image; expected float32 "
                f"{[1, self.emb_size]}",
                _ADVICE,
            )

    def embed(self, images: np.ndarray) -> np.ndarray:
        """Return the embeddings, float32 [n, D], L2-normalised, of pre-processed images.

        images: float32 [n, C, H, W], as `preprocess` returns. Raises DataError for another shape or dtype.
        """
        if images.dtype != np.float32 or images.shape[1:] != self.image_shape or images.ndim != 4:
            raise DataError(
                f"the images are {images.dtype} {list(images.shape)}; expected float32 "
                f"{['n', *self.image_shape]}"
            )
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
        width, height = size_of(data)
        if width * height > max_pixels:
            raise DataError(
                f"the image has {width}x{height} pixels, over the limit of {max_pixels}; shrink it"
            )
        return to_input(decode_image(data, self.image_shape)[None], "cpu")[0].numpy()

    def class_weights(self) -> tuple[np.ndarray, ClassNames | None]:
        """Return the L2-normalised class weights, float32 [classes, D], and the class names if there are any.

        Raises CheckpointError if the model was exported without them.
        """
        if "classes" not in self.about:
            raise self._check.wrong("it has no class weights", "export the model with --classes")
        check = Checker(str(self.folder / CLASSES_NAME))
        try:
            held = load_file(self.folder / CLASSES_NAME)
        except (SafetensorError, OSError) as error:
            raise check.wrong(f"it cannot be read ({error})", _ADVICE) from error
        weight, text, ends = (held.get(name) for name in ("weight", "names.bytes", "names.ends"))
        if weight is None or weight.dtype != torch.float32 or weight.shape[1:] != (self.emb_size,):
            raise check.wrong(f"it has no float32 weight [classes, {self.emb_size}]", _ADVICE)
        if text is None or ends is None:
            return weight.numpy(), None
        names = ClassNames(text.numpy(), ends.numpy())
        is_sound = (text.dtype, ends.dtype) == (torch.uint8, torch.int64) and ends.shape == weight.shape[:1]
        if not (is_sound and (names.lengths() >= 0).all() and int(ends[-1]) == len(text)):
            raise check.wrong("its class names are damaged", _ADVICE)
        return weight.numpy(), names

    def thumbnail(self, number: int) -> Path | None:
        """Return the JPEG file of a class; None if there is none."""
        path = self.folder / THUMBNAILS_NAME / f"{int(number)}.jpg"
        return path if path.is_file() else None

    def _run(self, images: np.ndarray) -> np.ndarray:
        try:
            return self._session.run([OUTPUT], {INPUT: images})[0]
        except Exception as error:  # onnxruntime has an exception class per status code
            raise CheckpointError(
                f"{self.folder / ONNX_NAME} fails on {len(images)} images: {str(error)[:300]}; {_ADVICE}"
            ) from error


def _image_shape(check: Checker, about: dict[str, Any]) -> ImageShape:
    channels, height, width = _shape(check, about, "input", 3, _LARGEST_SIDE)
    if channels not in (1, 3):
        raise check.wrong(f"the input has {channels} channels; expected 1 or 3", _ADVICE)
    return channels, height, width


def _shape(check: Checker, about: dict[str, Any], what: str, sides: int, largest: int) -> list[int]:
    """Return the shape of the input or output without the batch."""
    held = check.listing(
        check.mapping(about.get(what), f"the {what}").get("shape"), f"the shape of the {what}"
    )
    shape = check.integers(held[1:], f"the shape of the {what}")
    if len(shape) != sides or not all(1 <= side <= largest for side in shape):
        raise check.wrong(f"the {what} has the shape {str(held):.100}; expected {sides + 1} sizes", _ADVICE)
    return shape


def _thresholds(check: Checker, about: dict[str, Any]) -> dict[float, float]:
    held = check.mapping(about.get("thresholds", {}), "the thresholds")
    try:
        found = {float(far): float(cosine) for far, cosine in held.items()}
    except (TypeError, ValueError):
        raise check.wrong("the thresholds are not numbers", _ADVICE) from None
    if not all(0 < far <= 1 and -1.01 <= cosine <= 1.01 for far, cosine in found.items()):
        raise check.wrong("a threshold is not a cosine of a FAR", _ADVICE)
    return dict(sorted(found.items()))


def _verify(check: Checker, path: Path, about: dict[str, Any]) -> None:
    """Raise CheckpointError unless a file has the SHA-256 of model.json."""
    if not path.is_file() or path.is_symlink():
        raise check.wrong(f"{path.name} is missing", _ADVICE)
    if describe_file(path)["sha256"] != about.get("sha256"):
        raise check.wrong(
            f"{path.name} was changed or damaged: its SHA-256 differs from that in {MODEL_NAME}", _ADVICE
        )


def _start(path: Path, threads: int) -> Any:
    """Return the onnxruntime session of a graph, after checking that it reads no other file."""
    import onnx
    import onnxruntime

    check = Checker(str(path))
    if path.stat().st_size > _LARGEST_GRAPH:
        raise check.wrong(f"it has {path.stat().st_size} bytes; an ONNX file has at most 2 GiB", _ADVICE)
    data = path.read_bytes()
    try:
        model = onnx.load_model_from_string(data)
        outside = [one.name for one in _tensors(model) if one.external_data or one.data_location]
    except Exception as error:  # protobuf raises several kinds
        raise check.wrong(f"it is not an ONNX file ({str(error)[:200]})", _ADVICE) from error
    if outside:
        raise check.wrong(f"the tensor {outside[0]!r:.100} is in another file, which is not read", _ADVICE)
    domains = {one.domain for one in model.opset_import} | {one.domain for one in model.graph.node}
    if domains - set(_DOMAINS) or model.functions:
        raise check.wrong("it has operators that are not of the ONNX standard", _ADVICE)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise check.wrong(f"onnxruntime cannot load it: {str(error)[:300]}", _ADVICE) from error
    names = [[one.name for one in side] for side in (session.get_inputs(), session.get_outputs())]
    if names != [[INPUT], [OUTPUT]]:
        raise check.wrong(
            f"its inputs and outputs are {str(names):.200}; expected {INPUT} and {OUTPUT}", _ADVICE
        )
    return session


def _tensors(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    """Return all tensors of a graph, also of the graphs inside its nodes."""
    found, graphs = [], [model.graph]
    while graphs:
        graph = graphs.pop()
        found += graph.initializer
        found += [one for sparse in graph.sparse_initializer for one in (sparse.values, sparse.indices)]
        for node in graph.node:
            for attribute in node.attribute:
                found += [attribute.t, *attribute.tensors]
                graphs += [attribute.g] * attribute.HasField("g") + list(attribute.graphs)
    return found
