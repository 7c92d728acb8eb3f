"""The folder of an exported model: model.json, which describes it, and the files that it names.

The folder contains no code, and nothing of it is executed when it is loaded. Only a torch.export program
(model.pt2) could run code; `plsc.export.open_model` refuses it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

from safetensors.torch import save_file
from torch import Tensor

from plsc.checkpoint import Manifest
from plsc.checkpoint.manifest import METRICS_KEY
from plsc.checkpoint.shard_file import bytes_of
from plsc.config import Config
from plsc.data.alignment import scaled_template
from plsc.errors import CheckpointError, without_secrets
from plsc.inputs import map_tensors
from plsc.models import BaseModel
from plsc.models.base_model import constructor_arguments
from plsc.storage.records import read_record
from plsc.storage.regular import open_regular
from plsc.version import __version__

MODEL_NAME = "model.json"
WEIGHTS_NAME = "model.safetensors"
ONNX_NAME = "model.onnx"
TRITON_NAME = f"1/{ONNX_NAME}"  # Triton reads version 1 of a model from the folder 1
TORCH_NAME = "model.pt2"
CLASSES_NAME = "classes.safetensors"
THUMBNAILS_NAME = "thumbnails"
ROC_NAME = "roc.png"
# The layouts: their graphs take images (x - 127.5) / divisor. ArcFaceONNX of insightface scales so, unless
# names of the first eight nodes begin with Sub and Mul; ours begin with node_.
DIVISORS = {"plain": 128, "triton": 128, "insightface": 127.5}
_MOST_BYTES = 2**20  # of model.json
_PIECE = 2**20  # bytes read at a time
_LARGEST_GRAPH, _LARGEST_FILE = 2**31 - 1, 2**38  # bytes; 10^8 classes of 512 values take 2^37.6


class _File(TypedDict, total=False):
    bytes: int
    sha256: str


class _About(TypedDict):
    format: Literal["plsc-model"]
    version: Literal[1]
    options: dict[str, dict[str, Any]]


def write_weights(folder: Path, network: BaseModel, config: Config, manifest: Manifest) -> dict[str, Any]:
    """Write the weights of a network to a folder, and return the contents of model.json.

    config: the options that it was built with. manifest: of its checkpoint.
    """
    weights = {name: tensor.cpu().contiguous() for name, tensor in network.state_dict().items()}
    write_tensors(folder / WEIGHTS_NAME, weights)
    return {
        "format": "plsc-model",
        "version": 1,
        "plsc": __version__,
        "step": manifest.step,
        "input": describe_input(network, config, trained_on_aligned(manifest)),
        "output": {"shape": ["batch", config.model.emb_size], "normalised": False},
        "flip": config.data.flip and network.example_input is None,
        "metrics": manifest.scalars.get(METRICS_KEY, {}),
        "options": without_secrets({name: config.as_dict()[name] for name in ("model", "runtime")}),
        "arguments": constructor_arguments(network),
        "weights": describe_file(folder, WEIGHTS_NAME),  # `add_metadata` adds the CRC-32
        "fingerprint": checksum_of(weights),
    }


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file. As other files, it can be read by everyone who can read its folder."""
    save_file(tensors, path, metadata)  # only by its owner
    path.chmod(path.parent.stat().st_mode & 0o666)


def write_about(folder: Path, about: Mapping[str, Any]) -> None:
    """Write model.json."""
    (folder / MODEL_NAME).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def write_triton_config(folder: Path, about: Mapping[str, Any], most_images: int) -> None:
    """Write config.pbtxt; Triton takes the name from the folder. most_images: per batch."""
    lines = ['backend: "onnxruntime"', f"max_batch_size: {most_images}", "dynamic_batching { }"]
    for what in ("input", "output"):
        name, dims = about["graph"][what], about[what]["shape"][1:]
        lines.append(f'{what} [ {{ name: "{name}" data_type: TYPE_FP32 dims: {dims} }} ]')
    (folder / "config.pbtxt").write_text("\n".join([*lines, ""]), encoding="utf-8")


def trained_on_aligned(manifest: Manifest) -> bool:
    """Return whether the run of a checkpoint aligned its images by `data.landmarks`."""
    return manifest.options.get("data", {}).get("landmarks") is not None


def describe_input(network: BaseModel, config: Config, is_aligned: bool) -> Any:
    """Return shape, type and preprocessing of images, or shape and type of each tensor, for JSON.

    is_aligned: add the transform of `plsc.data.alignment`, and where it maps the landmarks to.
    """
    if network.example_input is not None:
        return map_tensors(_describe_tensor, network.example_input)
    about: dict[str, Any] = {
        "shape": ["batch", *config.model.image_shape],
        "dtype": "float32",
        "channels": "RGB" if config.model.image_shape[0] == 3 else "gray",
        "resize": "turned upright by EXIF orientation; bilinear with antialiasing, without a crop",
        "preprocessing": "(x - 127.5) / 128",
    }
    if is_aligned:
        points = scaled_template(*config.model.image_shape[1:]).round(4).tolist()
        about["alignment"] = {"transform": "similarity", "landmarks": points}
    return about


def schema_metadata(fingerprint: str, about: Any, normalised: str) -> dict[str, str]:
    """Return the metadata of an Arrow or Parquet schema of embeddings; about: by `describe_input`."""
    return {"plsc.fingerprint": fingerprint, "plsc.input": json.dumps(about), "plsc.normalised": normalised}


def _describe_tensor(example: Tensor) -> dict[str, Any]:
    return {"shape": ["batch", *example.shape[1:]], "dtype": str(example.dtype).removeprefix("torch.")}


def describe_file(folder: Path, name: str, expected_bytes: int | None = None) -> dict[str, Any]:
    """Return name, size and SHA-256 of a file, for JSON. OSError for another size than `expected_bytes`."""
    digest = hashlib.sha256()
    with open_regular(folder / name, folder, expected_bytes) as stream:
        while piece := stream.read(_PIECE):
            digest.update(piece)
        return {"file": name, "bytes": stream.tell(), "sha256": digest.hexdigest()}


def check_file(folder: Path, name: str, about: object) -> None:
    """Raise CheckpointError unless a file of a model is as model.json says; `about`: from `describe_file`."""
    file = folder / name
    held = read_record(_File, about, file)
    try:
        size = held.get("bytes", file.stat().st_size)
        if size > (_LARGEST_GRAPH if name in (ONNX_NAME, TRITON_NAME) else _LARGEST_FILE):
            raise CheckpointError(f"{file} has {size} bytes, which is too large")
        found = describe_file(folder, name, size)["sha256"]
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    if found != held.get("sha256"):
        raise CheckpointError(f"{file} was changed or damaged: its SHA-256 differs; export the model again")


def checksum_of(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, types, shapes and values of a state dict."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(bytes_of(tensor.contiguous()).numpy().data)
    return digest.hexdigest()


def read_about(folder: Path) -> dict[str, Any]:
    """Return the contents of model.json. Raises CheckpointError if it is not the description of a model."""
    about: Any = read_record(_About, folder / MODEL_NAME, folder / MODEL_NAME, most=_MOST_BYTES)
    return dict(about)
