"""Models for prediction: a folder with model.json, which describes a network, and its weights in safetensors.

The folder contains no code, and nothing of it is executed when it is loaded.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from plsc import __version__
from plsc.checkpoint import Manifest
from plsc.checkpoint.manifest import Checker
from plsc.checkpoint.retention import METRICS_KEY
from plsc.checkpoint.shard_file import checksum
from plsc.config import Config, Options
from plsc.data.alignment import scaled_template
from plsc.inputs import map_tensors
from plsc.models import BaseModel
from plsc.models.base_model import constructor_arguments, safe_arguments
from plsc.parallel.world import World
from plsc.storage.publish import publishing_folder
from plsc.train.network import build_network

MODEL_NAME = "model.json"
WEIGHTS_NAME = "model.safetensors"
_FORMAT, _VERSION = "plsc-model", 1
_MOST_BYTES = 2**20  # of model.json


def write_model(folder: Path, network: BaseModel, config: Config, manifest: Manifest) -> None:
    """Write a network as a new folder. Raises DataError if the folder exists or cannot be written.

    config: the options that it was built with. manifest: of its checkpoint.
    """
    with publishing_folder(folder) as temporary:
        weights = {name: tensor.cpu().contiguous() for name, tensor in network.state_dict().items()}
        save_file(weights, temporary / WEIGHTS_NAME)
        about = {
            "format": _FORMAT,
            "version": _VERSION,
            "plsc": __version__,
            "step": manifest.step,
            "input": describe_input(network, config, trained_on_aligned(manifest)),
            "output": {"shape": ["batch", config.model.emb_size], "normalised": False},
            "flip": config.data.flip and network.example_input is None,
            "metrics": manifest.scalars.get(METRICS_KEY, {}),
            "options": {name: config.as_dict()[name] for name in ("model", "runtime")},
            "arguments": constructor_arguments(network),
            "weights": asdict(checksum(temporary / WEIGHTS_NAME)),
        }
        (temporary / MODEL_NAME).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def trained_on_aligned(manifest: Manifest) -> bool:
    """Return whether the run of a checkpoint aligned its images by `data.landmarks`."""
    data = manifest.options.get("data")
    return isinstance(data, dict) and data.get("landmarks") is not None


def describe_input(network: BaseModel, config: Config, is_aligned: bool) -> Any:
    """Return shape, type and preprocessing of images, or shape and type of each tensor, for JSON.

    is_aligned: add the transform of `plsc.data.alignment`, and where it maps the landmarks to.
    """
    if network.example_input is not None:
        return map_tensors(_describe_tensor, network.example_input)
    about: dict[str, Any] = {
        "shape": ["batch", *config.model.image_shape],
        "dtype": config.runtime.dtype,
        "channels": "RGB",
        "preprocessing": "(x - 127.5) / 128",
    }
    if is_aligned:
        points = scaled_template(*config.model.image_shape[1:]).round(4).tolist()
        about["alignment"] = {"transform": "similarity", "landmarks": points}
    return about


def _describe_tensor(example: Tensor) -> dict[str, Any]:
    return {"shape": ["batch", *example.shape[1:]], "dtype": str(example.dtype).removeprefix("torch.")}


def read_about(folder: Path) -> dict[str, Any]:
    """Return the contents of model.json. Raises CheckpointError if it is not the description of a model."""
    file = folder / MODEL_NAME
    check = Checker(str(file))
    try:
        with file.open("rb") as stream:
            about = check.mapping(json.loads(stream.read(_MOST_BYTES + 1)), "the description")
    except (OSError, ValueError, RecursionError) as error:
        raise check.wrong(f"it cannot be read ({error})", "choose another model") from error
    if about.get("format") != _FORMAT or about.get("version") != _VERSION:
        raise check.wrong(
            f"its format is {about.get('format')!r}, version {about.get('version')!r}; expected {_FORMAT!r}, "
            f"version {_VERSION}",
            "choose another model, or update plsc",
        )
    check.mapping(about.get("options"), "the options")
    return about


def read_model(
    folder: Path, options: Options, custom: BaseModel | None, world: World
) -> tuple[BaseModel, Config]:
    """Return the network of a folder of `write_model`, and its configuration.

    custom: a custom network to load the weights into. Raises CheckpointError for a damaged folder.
    """
    about, check = read_about(folder), Checker(str(folder / MODEL_NAME))
    config = options.resolve(about["options"], "model")
    if custom is None and ":" in config.model.name:
        config = replace(config, arguments=safe_arguments(about.get("arguments") or {}))
    network = build_network(config, world, custom)
    path = folder / WEIGHTS_NAME
    if not path.is_file() or asdict(checksum(path)) != about.get("weights"):
        raise check.wrong(f"{WEIGHTS_NAME} is missing, or its checksum differs", "choose another model")
    try:
        network.load_state_dict(load_file(path))
    except (SafetensorError, RuntimeError) as error:
        first = str(error).splitlines()[-1].strip()
        raise check.wrong(
            f"the weights do not fit {type(network).__name__}: {first}", "pass the network that was trained"
        ) from error
    return network, config
