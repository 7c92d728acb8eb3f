"""The commands of ``plsc checkpoint``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from plsc.cli.parser import REQUIRED, Argument, Command, Group, word
from plsc.config import all_options
from plsc.config.option import names_code


def run_verify(checkpoint: str) -> None:
    """Compare all files of a checkpoint with their checksums."""
    from plsc.checkpoint.remote import verify
    from plsc.storage.store import format_bytes
    from plsc.storage.urls import shown

    manifest = verify(checkpoint)
    size = format_bytes(sum(file.bytes for file in manifest.files.values()))
    more = "" if "head.weight" in manifest.tensors else ", without class weights, which may be in files"
    print(f"{shown(checkpoint)} is intact: {len(manifest.files)} file(s), {size}, step {manifest.step}{more}")


def run_push(source: str, url: str) -> None:
    """Upload checkpoints to a store."""
    from plsc.checkpoint.remote import push
    from plsc.errors import printable

    sent = push(source, url)
    print(f"uploaded {len(sent)} checkpoint(s){': ' * bool(sent)}{printable(', '.join(sent))}")


def run_classes(source: str, destination: str, **given: Any) -> None:
    """Write a checkpoint with other classes, and print the number of classes."""
    from plsc.checkpoint.classes import MAP_NAME, change_classes

    manifest = change_classes(source, destination, **given)
    change = manifest.lineage[-1]
    where = f"; labels: {destination}/{MAP_NAME}" if change["what"] != "grow" else ""
    print(f"wrote {destination}: {change['classes_after']} classes, {change['classes_before']} before{where}")
    print(_training_from(destination, manifest.options))


def _training_from(checkpoint: str, saved: Mapping[str, Any]) -> str:
    """Return what to do next: the command that trains the network and head from these weights on."""
    words, left = ["plsc", "train", "--model.pretrained", checkpoint], []
    for spec in all_options():
        value, default = saved.get(spec.group, {}).get(spec.name), spec.default
        is_data = spec.path in ("data.dataset_dir", "data.format_arguments")
        is_wanted = spec.decides == "model" or spec.group == "head" or is_data
        is_default = value in (None, list(default) if isinstance(default, tuple) else default)
        if not is_wanted or is_default or spec.path == "head.class_num":
            continue
        text = value if isinstance(value, str) else json.dumps(value)
        is_code = names_code(value) and not is_data
        if is_code or not text.isprintable():  # people run what is printed here
            left.append(spec.path)
        elif spec.kind is bool:
            words.append(f"--{spec.path}" if value else f"--no-{spec.path}")
        else:
            words += [f"--{spec.path}", text]
    note = f", and with {', '.join(left)}, which may be code of others" if left else ""
    return f"Next, with a schedule of its own{note}:\n{shlex.join(words)}"


def run_copy(source: str, destination: str, weights_file: str) -> None:
    """Write a copy of a checkpoint with the class weights that are in files."""
    from pathlib import Path

    from plsc.checkpoint.weights_file import copy_complete
    from plsc.storage.store import format_bytes

    manifest = copy_complete(Path(source), Path(destination), Path(weights_file))
    size = format_bytes(sum(file.bytes for file in manifest.files.values()))
    print(f"wrote {destination}: {manifest.class_num} classes, {size}, step {manifest.step}")


def run_import(
    source: str, target: str, model: str | None, emb_size: int | None, image_shape: Any, **given: Any
) -> None:
    """Convert weights from another program to a checkpoint."""
    from plsc.predict.importing import Network, import_checkpoint

    imported = import_checkpoint(source, target, network=Network(model, emb_size, image_shape), **given)
    print("\n".join(imported.lines()))


_CHECKPOINT = word("checkpoint", "a checkpoint: a folder such as saved_model/5, or its fsspec URL")
GROUP = Group(
    "check, copy and change checkpoints",
    {
        "import": Command(
            "convert weights of insightface, PLSC 0.1, safetensors or torch.save to a checkpoint",
            run_import,
            (
                word("source", "a folder of shards, or a weight file"),
                word("target", "the checkpoint folder to write; it must not exist"),
                Argument(
                    "layout", str, "auto", "format: auto, insightface, plsc1, safetensors or state_dict"
                ),
                Argument("model", str, None, "network, as model.name; required if the files do not name it"),
                Argument(
                    "emb_size", int, None, "size of the embedding; required if the files do not contain it"
                ),
                Argument(
                    "image_shape", tuple[int, int, int], None, "required if the files do not contain it"
                ),
                Argument("loss_type", str, None, "loss type; default: that of the layout"),
                Argument("class_num", int, None, "expected number of classes; another number is an error"),
            ),
        ),
        "verify": Command(
            "read all files of a checkpoint and compare their checksums", run_verify, (_CHECKPOINT,)
        ),
        "push": Command(
            "upload a checkpoint, or all checkpoints of a run that are not in the store yet",
            run_push,
            (
                word("source", "a checkpoint folder, or a folder of checkpoints"),
                word("url", "fsspec URL of the folder that holds the run's checkpoints"),
            ),
        ),
        "copy": Command(
            "write a copy of a checkpoint that includes the class weights in head.weights_file",
            run_copy,
            (
                word("source", "the newest checkpoint of a run, which is unchanged"),
                word("destination", "the checkpoint to write"),
                Argument("weights_file", str, REQUIRED, "the folder that was head.weights_file"),
            ),
        ),
        "classes": Command(
            "write a copy of a checkpoint with classes added, dropped, merged or reordered",
            run_classes,
            (
                word("source", "the checkpoint, which is unchanged"),
                word("destination", "the checkpoint to write"),
                Argument("grow", int, None, "number of new classes to add after the existing ones"),
                Argument("drop", str, None, "file of classes to drop, one per line"),
                Argument("merge", str, None, "file of classes to merge, in lines 'from to'"),
                Argument("reorder", str, None, "file of all classes in their new order, one per line"),
            ),
        ),
    },
)
