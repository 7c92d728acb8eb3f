"""The commands that run with the options: ``train``, ``test``, ``export`` and others; and ``plan``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plsc.cli.parser import REQUIRED, Argument, Command, describe_options, word
from plsc.config import Options
from plsc.config.option import at_least
from plsc.config.text import render_options
from plsc.errors import OptionError
from plsc.names import PROTOCOLS
from plsc.storage.disk import replacing
from plsc.storage.urls import local_folder

if TYPE_CHECKING:
    from plsc.entry import Entry


def _with_entry(action: Callable[..., None]) -> Callable[..., None]:
    """Return a command that calls an action with the Entry of the options, and of a checkpoint if given."""

    def run(options: Options, checkpoint: str | None = None, **given: Any) -> None:
        from plsc.entry import Entry  # imports torch, which --help does not need

        if checkpoint is not None:
            options.set("checkpoint.load_dir", checkpoint)
        entry = Entry()
        entry.options = options
        action(entry, **given)

    return run


def _predict(entry: Entry, output: str, images: str | None, layers: str, field: str, **given: Any) -> None:
    path = local_folder(output, "--output")
    if path.suffix not in (".npz", "") or not path.absolute().parent.is_dir():
        raise OptionError(
            f"--output is {output}; expected an .npz file or a folder (no suffix), in an existing folder"
        )
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


def _options(wanted: str) -> None:
    print(describe_options(wanted))


def _plan(options: Options, ranks: int | None, device_gb: float) -> None:
    from plsc.plan import plan  # imports torch

    print(plan(options.values, ranks, device_gb).render())


_CHECKPOINT = word("checkpoint", "a checkpoint: a folder such as saved_model/5, its URL, last or best", None)
_NETWORK = ("model.name", "model.emb_size", "model.image_shape")
_READING = ("data.dataset_dir", "data.num_workers", "data.flip", "train.test_batch_size")

COMMANDS = {
    "train": Command(
        "train a network from scratch, or resume from --checkpoint.load_dir",
        _with_entry(lambda entry: entry.train()),
        options=(
            "data.dataset_dir", "data.val_targets", "data.val_dir", "data.num_workers", *_NETWORK,
            "head.loss_type", "head.scale", "head.sample_ratio", "train.batch_size",
            "train.epochs", "optim.lr", "precision.mode", "checkpoint.save_dir", "checkpoint.load_dir",
        ),
        example="--data.dataset_dir faces --train.batch_size 64 --checkpoint.save_dir runs/faces",
    ),
    "plan": Command(
        "estimate the memory of a training run, and whether it fits; flags as of plsc train",
        _plan,
        [
            Argument(
                "ranks", int, None, "number of ranks; default: --runtime.world_size, or 1", check=at_least(1)
            ),
            Argument("device_gb", float, 80.0, "memory of a device in GB"),
        ],
        options=(
            *_NETWORK, "head.loss_type", "head.class_num", "head.sample_ratio", "head.sub_centers",
            "train.batch_size", "precision.mode", "optim.optimizer",
        ),
        example="--ranks 8 --head.class_num 10000000 --train.batch_size 128",
    ),
    "options": Command(
        "print the options, their defaults and setters: all, of a group, or those that have a word",
        _options,
        [word("wanted", "a group such as head, or a word such as margin", "")],
        example="schedule",
    ),
    "config": Command(
        "print all options with values, defaults and descriptions, as YAML",
        lambda options: print(render_options(options)),
        options=(),
        example="--train.batch_size 64 > run.yaml",
    ),
    "test": Command(
        "test a network on pair files or held-out images, or by a protocol",
        _with_entry(lambda entry, **how: entry.test(**how)),
        [
            _CHECKPOINT,
            Argument("protocol", str, None, f"write a report; one of {', '.join(PROTOCOLS)}"),
            Argument("images", str, None, "labelled dataset; pairs, templates: folder of their images"),
            Argument("pairs", str, None, "pairs: a .bin file or a text list; default: --data.val_targets"),
            Argument("gallery", str, None, "identify: labelled dataset; default: a part of images"),
            Argument("distractors", str, None, "identify: dataset of other classes, added to the gallery"),
            Argument("templates", str, None, "templates: folder of the meta files"),
            Argument("groups", str, None, "file with the group of each image, for results per group"),
            Argument("output", str, None, "folder of the report; default: evaluation/PROTOCOL"),
        ],
        options=("data.val_targets", "data.val_dir", *_READING, "model.name", "checkpoint.load_dir"),
        example="saved_model/7 --protocol pairs --pairs pairs.txt --images faces",
    ),
    "predict": Command(
        "write the embeddings of the dataset's images to an .npz file, or as shards to a folder",
        _with_entry(_predict),
        [
            _CHECKPOINT,
            Argument("output", str, "embeddings.npz", "file or folder to write; a folder is resumed"),
            Argument("images", str, None, "folder or list file of images, instead of the dataset"),
            Argument("layers", str, "", "names of modules whose outputs are also written"),
            Argument("field", str, "value", "outputs to write: value, id, prob"),
            Argument("flatten_result", bool, False, "join the outputs of the layers as one array"),
        ],
        options=(*_READING, "model.name", "checkpoint.load_dir"),
        example="saved_model/7 --images photos --output embeddings.npz",
    ),
    "export": Command(
        "write the network of a checkpoint as a folder for serving: weights, graph and description",
        _with_entry(lambda entry, model, **given: entry.convert_for_prediction(model, **given)),
        [
            dataclasses.replace(_CHECKPOINT, default=REQUIRED),
            word("model", "the folder to write; it must not exist"),
            Argument("graph", str, "onnx", "onnx, torch (torch.export), or none"),
            Argument("flip", bool, False, "add the embedding of the mirrored image, inside the graph"),
            Argument("classes", bool, False, "also write the class weights and names"),
            Argument("thumbnails", bool, False, "also write one image per class"),
            Argument("unseen", str, None, "dataset of classes that were not trained, for plsc serve --fpir"),
            Argument("layout", str, "plain", "plain, triton (a model of a model repository) or insightface"),
        ],
        options=("data.dataset_dir", "data.val_targets", "data.val_dir", "model.name"),
        example="saved_model/7 model --classes --unseen others",
    ),
}  # fmt: skip
