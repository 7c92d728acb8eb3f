"""The folder of an exported model: model.json, which describes it, and the files that it names.

README.md is a model card with the header of the Hugging Face Hub. It shows what the checkpoint and the export
recorded. config.json, and metadata in the ONNX and safetensors files, have the same facts.

The folder contains no code, and nothing of it is executed when it is loaded. Only a torch.export program
(model.pt2) could run code; `plsc.export.open_model` refuses it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, TypedDict

import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from plsc.checkpoint import Manifest
from plsc.checkpoint.manifest import METRICS_KEY, bytes_of, checksum
from plsc.data.alignment import scaled_template
from plsc.errors import CheckpointError, printable, without_secrets
from plsc.evaluate.report import Section, lines_of
from plsc.models import BaseModel
from plsc.models.base_model import constructor_arguments
from plsc.storage.disk import open_regular, read_record
from plsc.storage.urls import base_name, shown
from plsc.values import map_tensors
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
_TASK = "image-feature-extraction"  # of the Hub
_MARKS = re.compile(r"[\\|<\[`]")  # of Markdown
LARGEST_GRAPH, _LARGEST_FILE = 2**31 - 1, 2**38  # bytes; 10^8 classes of 512 values take 2^37.6


class _File(TypedDict, total=False):
    bytes: int
    sha256: str


class _About(TypedDict):
    format: Literal["plsc-model"]
    version: Literal[1]
    options: dict[str, dict[str, Any]]


def write_weights(
    folder: Path, network: BaseModel, options: Mapping[str, Any], manifest: Manifest
) -> dict[str, Any]:
    """Write the weights of a network to a folder, and return the contents of model.json.

    options: those that it was built with, by group and name, as in the manifest of a checkpoint.
    """
    weights = {name: tensor.cpu().contiguous() for name, tensor in network.state_dict().items()}
    write_tensors(folder / WEIGHTS_NAME, weights)
    model = options["model"]
    return {
        "format": "plsc-model",
        "version": 1,
        "plsc": __version__,
        "step": manifest.step,
        "input": describe_input(network, model["image_shape"], trained_on_aligned(manifest)),
        "output": {"shape": ["batch", model["emb_size"]], "normalised": False},
        "flip": options["data"]["flip"] and network.example_input is None,
        "metrics": manifest.scalars.get(METRICS_KEY, {}),
        "options": without_secrets({name: options[name] for name in ("model", "runtime")}),
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


def describe_input(network: BaseModel, image_shape: Sequence[int], is_aligned: bool) -> Any:
    """Return shape, type and preprocessing of images, or shape and type of each tensor, for JSON.

    is_aligned: add the transform of `plsc.data.alignment`, and where it maps the landmarks to.
    """
    if network.example_input is not None:
        return map_tensors(_describe_tensor, network.example_input)
    about: dict[str, Any] = {
        "shape": ["batch", *image_shape],
        "dtype": "float32",
        "channels": "RGB" if image_shape[0] == 3 else "gray",
        "resize": "turned upright by EXIF orientation; bilinear with antialiasing, without a crop",
        "preprocessing": "(x - 127.5) / 128",
    }
    if is_aligned:
        points = scaled_template(*image_shape[1:]).round(4).tolist()
        about["alignment"] = {"transform": "similarity", "landmarks": points}
    return about


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
        most = LARGEST_GRAPH if name in (ONNX_NAME, TRITON_NAME) else _LARGEST_FILE
        found = describe_file(folder, name, size)["sha256"] if size <= most else ""
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    if found != held.get("sha256"):
        raise CheckpointError(f"{file} was changed, is damaged or too large; export the model again")


def checksum_of(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, types, shapes and values of a state dict."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(bytes_of(tensor.contiguous()).numpy().data)
    return digest.hexdigest()


def read_about(folder: Path) -> dict[str, Any]:
    """Return the contents of model.json. Raises CheckpointError if it is not the description of a model."""
    if not os.path.lexists(folder / MODEL_NAME):
        raise CheckpointError(f"{folder} has no {MODEL_NAME}; expected a folder that plsc export has written")
    about: Any = read_record(_About, folder / MODEL_NAME, folder / MODEL_NAME, most=_MOST_BYTES)
    return dict(about)


def facts(about: dict[str, Any], of_graph: bool) -> dict[str, Any]:
    """Return what a user of the graph, or of the weights, must know; about: the contents of model.json."""
    graph, given = about["graph"] if of_graph else {}, about["input"]
    flip = bool(graph.get("flip"))
    found: dict[str, Any] = {
        "fingerprint": "flip-" * flip + about["fingerprint"],
        "embedding_size": about["output"]["shape"][1],
        "normalised": of_graph,
        "flip": flip,
    }
    if isinstance(given, dict) and "preprocessing" in given:  # of images
        found["image_shape"] = given["shape"][1:]
        found |= {name: one for name, one in given.items() if name not in ("shape", "dtype")}
        found["preprocessing"] = f"(x - 127.5) / {DIVISORS[graph.get('layout', 'plain')]:g}"
    return {**found, "thresholds": about["thresholds"]} if "thresholds" in about else found


def add_metadata(folder: Path, about: dict[str, Any]) -> None:
    """Add the facts to the files of an export, and their new sizes and checksums to `about`."""
    for what in {"weights", "classes", "graph"} & about.keys():
        name = about[what]["file"]
        path, held = folder / name, _as_text(facts(about, of_graph=what == "graph"))
        if path.suffix == ".safetensors":
            write_tensors(path, load_file(path), {"format": "pt", **held})
        elif path.suffix == ".onnx":
            import onnx

            model = onnx.load(path)
            onnx.helper.set_model_props(model, held)
            onnx.save(model, path)
        about[what] |= describe_file(folder, name)
    about["weights"] |= asdict(checksum(folder / WEIGHTS_NAME))


def _as_text(values: dict[str, Any]) -> dict[str, str]:
    return {name: one if isinstance(one, str) else json.dumps(one) for name, one in values.items()}


def write_card(folder: Path, about: dict[str, Any], manifest: Manifest, measured: list[Section]) -> None:
    """Write README.md and config.json of an export.

    about: the contents of model.json. manifest: of the checkpoint. measured: the results of the export.
    """
    measured = [replace(one, title=base_name(shown(one.title))) for one in measured]  # without folders
    network, known = about["options"]["model"]["name"], facts(about, of_graph="graph" in about)
    config = {"model_type": "plsc", "architectures": [network], **known}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    limits = ["- The results hold for samples like those that were measured, prepared as above."]
    limits += ["- Results on pairs, of a gallery or per group that are not shown above were not measured."]
    if "graph" in about:
        largest = about["graph"]["difference"]["largest"]
        limits.append(f"- The graph differs from the network by up to {largest:.1e} per value.")
    header: dict[str, Any] = {"library_name": "plsc", "tags": ["plsc", network]}
    header |= {"pipeline_tag": _TASK} if "image_shape" in known else {}
    shown_lines = (line for section in measured for line in lines_of(section))
    # One level lower, and without the pictures and files of a report.
    results = [re.sub("^## ", "### ", line) for line in shown_lines if not line.startswith(("![", "["))]
    lines = [
        *("---", yaml.safe_dump(header, sort_keys=False).rstrip(), "---", ""),
        *(f"# {network}: embeddings of {known['embedding_size']} values", ""),
        *(f"Written by plsc {about['plsc']} from step {about['step']:,} of a run. Input and output:", ""),
        *("| | |", "|---|---|", *(f"| {name} | {one} |" for name, one in _as_text(known).items()), ""),
        *("## Training data", "", *_training_data(manifest), ""),
        *("## Results", "", *(results or ["Nothing was measured.", ""])),
        *("## Limits", "", *limits, ""),
    ]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


def _training_data(manifest: Manifest) -> list[str]:
    """Return a table of the dataset that the checkpoint names."""
    head = manifest.head
    place = str((manifest.options.get("data") or {}).get("dataset_dir") or "not recorded")
    rows = ["| dataset | images | classes |", "|---|---:|---:|"]
    images = "not recorded" if head.num_samples is None else f"{head.num_samples:,}"
    cells = base_name(shown(place)), images, f"{head.class_num:,}"
    line = " | ".join(_MARKS.sub(r"\\\g<0>", printable(cell)) for cell in cells)
    return [*rows, f"| {line} |"]
