"""The commands that run with the options: ``train``, ``test``, ``export`` and others; and ``plan``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from plsc.cli.parser import REQUIRED, Argument, Command, word
from plsc.config import Options
from plsc.config.text import render_options
from plsc.errors import OptionError
from plsc.names import PROTOCOLS
from plsc.storage.publish import replacing
from plsc.storage.urls import local_folder

logger = logging.getLogger(__name__)


def _entry(options: Options) -> Any:
    from plsc.entry import Entry  # imports torch, which --help does not need

    entry = Entry()
    entry.options = options
    return entry


def _train(options: Options) -> None:
    entry = _entry(options)
    result = entry.train()
    if entry.is_main:
        logger.info("trained %d steps; last checkpoint %s", result.steps, result.checkpoint or "(none saved)")


def _test(options: Options, **how: Any) -> None:
    _entry(options).test(**how)


def _predict(
    options: Options, output: str, images: str | None, layers: str, field: str, **given: Any
) -> None:
    path = local_folder(output, "--output")
    if path.suffix not in (".npz", ".parquet", ""):
        raise OptionError(
            f"--output is {output}; expected the name of an .npz file, a folder, or a folder whose name ends "
            "in .parquet"
        )
    if not path.absolute().parent.is_dir():
        raise OptionError(
            f"--output is {output}, but the folder {path.parent} does not exist; create it first"
        )
    entry = _entry(options)
    how = {"layers": _listed(layers), "field": _listed(field), **given}
    if path.suffix != ".npz":
        entry.predict(images, output=path, **how)
        return
    prediction = entry.predict(images, **how)
    if entry.is_main:
        _write_prediction(path, prediction)


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _write_prediction(path: Path, prediction: Any) -> None:
    import numpy as np

    optional = {"ids": prediction.ids, "probs": prediction.probs}
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(
            file,
            embeddings=prediction.embeddings,
            names=np.array(prediction.names),
            labels=prediction.labels,
            **prediction.layers,
            **{name: values for name, values in optional.items() if values is not None},
        )
    print(f"wrote the predictions of {len(prediction.labels)} images to {path}")


def _keep_dominant(options: Options, output: str) -> None:
    _entry(options).keep_dominant(output)


def _export(options: Options, checkpoint: str, model: str, reports: str, **given: Any) -> None:
    options.set("checkpoint.load_dir", checkpoint)
    _entry(options).convert_for_prediction(model, reports=_listed(reports), **given)


def _config(options: Options) -> None:
    print(render_options(options))


def _plan(options: Options, ranks: int | None, device_gb: float) -> None:
    from plsc.plan import plan  # imports torch

    print(plan(options.values, ranks, device_gb).render())


COMMANDS = {
    "train": Command(
        "train a network from scratch, or resume from --checkpoint.load_dir", _train, takes_options=True
    ),
    "test": Command(
        "test the network of --checkpoint.load_dir on pair files or held-out images, or by a protocol",
        _test,
        [
            Argument("protocol", str, None, f"write a report; one of {', '.join(PROTOCOLS)}"),
            Argument("images", str, None, "labelled dataset; pairs, templates: folder of their images"),
            Argument("pairs", str, None, "pairs: a .bin file or a text list; default: --data.val_targets"),
            Argument("gallery", str, None, "identify: labelled dataset; default: a part of images"),
            Argument("distractors", str, None, "identify: dataset of other classes, added to the gallery"),
            Argument("templates", str, None, "templates: folder of the meta files"),
            Argument("groups", str, None, "file with the group of each image, for results per group"),
            Argument("output", str, "evaluation", "folder of the report"),
        ],
        takes_options=True,
    ),
    "predict": Command(
        "write the embeddings of the dataset's images to an .npz file, or as shards to a folder",
        _predict,
        [
            Argument("output", str, "embeddings.npz", "file or folder to write; a folder is resumed"),
            Argument("images", str, None, "folder or list file of images, instead of the dataset"),
            Argument("layers", str, "", "names of modules whose outputs are also written"),
            Argument("field", str, "value", "outputs to write: value, id, prob"),
            Argument("flatten_result", bool, False, "join the outputs of the layers as one array"),
        ],
        takes_options=True,
    ),
    "dominant": Command(
        "reduce the checkpoint of --checkpoint.load_dir to the dominant sub-centre of each class",
        _keep_dominant,
        [Argument("output", str, REQUIRED, "checkpoint to write")],
        takes_options=True,
    ),
    "export": Command(
        "write the network of a checkpoint as a folder for serving: weights, graph and description",
        _export,
        [
            word("checkpoint", "a checkpoint: a folder such as saved_model/5, its fsspec URL, last or best"),
            word("model", "the folder to write; it must not exist"),
            Argument("graph", str, "onnx", "onnx, torch (torch.export), or none"),
            Argument("precision", str, "float32", "float32, float16, int8 (onnx) or bfloat16 (torch)"),
            Argument("flip", bool, False, "add the embedding of the mirrored image, inside the graph"),
            Argument("classes", bool, False, "also write the class weights and names"),
            Argument("thumbnails", bool, False, "also write one image per class"),
            Argument("unseen", str, None, "dataset of classes that were not trained, for plsc serve --fpir"),
            Argument("layout", str, "plain", "plain, triton (a model of a model repository) or insightface"),
            Argument("reports", str, "", "folders of plsc test --protocol, which README.md shows; by commas"),
        ],
        takes_options=True,
    ),
    "config": Command(
        "print all options with values, defaults and descriptions, as YAML", _config, takes_options=True
    ),
    "plan": Command(
        "estimate the memory of a training run, and whether it fits; flags as of plsc train",
        _plan,
        [
            Argument("ranks", int, None, "number of ranks; default: --runtime.world_size, or 1"),
            Argument("device_gb", float, 80.0, "memory of a device in GB"),
        ],
        takes_options=True,
    ),
}
