"""Convert weights saved by other programs to a checkpoint: insightface, PLSC 0.1, safetensors, torch.save.

Files of torch.save are read with ``weights_only=True``, which runs no code from the file. Class weights are
read and written piece by piece: they may be larger than the memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plsc.checkpoint.layouts import (
    BIAS,
    INSIGHTFACE,
    INSIGHTFACE_FILE,
    PLSC1,
    PLSC1_FILE,
    WEIGHT,
    Network,
    Source,
    iresnet_source,
    names_in,
    read_insightface,
    read_plsc1,
)
from plsc.checkpoint.manifest import (
    BACKBONE,
    CLASS_WEIGHTS,
    METRICS_KEY,
    Entry,
    HeadInfo,
    Manifest,
    Role,
    TensorInfo,
    entry_of,
    tensor_chunks,
)
from plsc.checkpoint.save import check_destination, info_of, write_shards
from plsc.checkpoint.tensor_files import (
    Match,
    RowParts,
    converted,
    join_rows,
    match_into,
    read_state_dict,
    refuse_no_match,
)
from plsc.config import Options
from plsc.config.data_and_model import ModelOptions
from plsc.errors import CheckpointError, OptionError, suggest
from plsc.models import build_model
from plsc.storage.disk import MANIFEST_NAME, publishing_folder
from plsc.version import __version__

SAFETENSORS, STATE_DICT = "safetensors", "state_dict"
LAYOUTS = ("auto", INSIGHTFACE, PLSC1, SAFETENSORS, STATE_DICT)


@dataclass(frozen=True)
class Imported:
    """The result of an import: path, layout, network, matching tensors, number of classes, and notes."""

    path: Path
    layout: str
    network: str | None
    match: Match | None
    class_num: int
    emb_size: int
    notes: list[str]

    def lines(self) -> list[str]:
        """Return a summary of a few lines."""
        lines = [f"{self.path}: imported from the layout {self.layout}"]
        if self.match is not None:
            lines += [f"{self.network}, embedding size {self.emb_size}", *self.match.lines()]
        if self.class_num:
            lines.append(f"{self.class_num:,} classes")
        return lines + self.notes


def import_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    layout: str = "auto",
    network: Network | None = None,
    loss_type: str | None = None,
    class_num: int | None = None,
) -> Imported:
    """Write the checkpoint folder ``target`` from the weights at ``source``; class weights are streamed.

    It has neither optimizer state nor a position: train from it with `set_pretrained`.

    Args:
        layout: one of LAYOUTS.
        network: the network, if the files do not name it.
        loss_type: overrides the loss type of the files.
        class_num: expected number of classes; any if None.

    Raises:
        OptionError: an unknown layout or network.
        CheckpointError: files are missing, duplicated, damaged, malicious or inconsistent, or the target
            cannot be written. Nothing is published.
    """
    if layout not in LAYOUTS:
        raise OptionError(f"unknown layout {layout!r}; {suggest(layout, LAYOUTS)}")
    target = Path(target)
    check_destination(Path(source), target)
    path, given = Path(source), network or Network()
    layout = _recognise(path) if layout == "auto" else layout
    if layout == INSIGHTFACE:
        weights = read_insightface(path)
    elif layout == PLSC1:
        weights = read_plsc1(path, given)
    else:
        weights = _read_named(path, layout, given)
    weights.network = given.or_else(weights.network)
    if loss_type is not None:
        weights.loss_type = loss_type
    classes = weights.rows[WEIGHT].shape[0] if WEIGHT in weights.rows else 0
    if class_num is not None and classes != class_num:
        raise CheckpointError(f"{source} has {classes} classes; expected {class_num}; are files missing?")
    named = weights.network
    values = {
        **weights.options,
        "head.loss_type": weights.loss_type,
        "head.class_num": classes or None,
        "model.name": named.name,
        "model.emb_size": named.emb_size,
        "model.image_shape": named.image_shape,
    }
    options = Options()
    options.set_together({path: value for path, value in values.items() if value is not None})
    model = options.model
    tensors, match = _network_of(weights, model, options.train.seed, str(source))
    _check_head(weights, model.emb_size)
    _write(target, tensors, weights, options.as_dict(), classes, path.name)
    return Imported(
        target, weights.layout, model.name if match else None, match, classes, model.emb_size, weights.notes
    )


def _recognise(path: Path) -> str:
    if not path.is_dir():
        return SAFETENSORS if path.suffix == ".safetensors" else STATE_DICT
    names = names_in(path)
    patterns = {INSIGHTFACE: INSIGHTFACE_FILE, PLSC1: PLSC1_FILE}
    recognised = [name for name, of in patterns.items() if any(map(of.fullmatch, names))]
    if len(recognised) != 1 or (path / MANIFEST_NAME).exists():
        raise CheckpointError(
            f"{path} is a checkpoint already, or has no known layout, or several; pass --layout: {LAYOUTS}"
        )
    return recognised[0]


def _read_named(path: Path, layout: str, given: Network) -> Source:
    """Return the tensors of one file; class weights are named head.weight (and head.bias).

    `read_state_dict` decides which tensors are class weights. given: the network; not needed for an iresnet
    of insightface, which is recognised.

    Raises:
        CheckpointError: the file is missing, damaged or malicious, or no network is given.
    """
    state, head = read_state_dict(path, follow_links=True)
    if given.name is None:
        source = iresnet_source(state, str(path))
        source.layout = layout
    else:
        source = Source(layout, given, state, is_whole=False)
    for key in (WEIGHT, BIAS):
        if key in head:
            source.rows[key] = join_rows([head[key]], key)
    source.loss_type = "dist_softmax" if BIAS in source.rows else "dist_arcface"
    return source


def _network_of(
    weights: Source, model: ModelOptions, seed: int, source: str
) -> tuple[dict[str, Tensor], Match | None]:
    """Return the tensors of the network, and what matched."""
    if not weights.backbone:
        return {}, None
    with torch.random.fork_rng(devices=[]):  # missing tensors get the values of a new run with this seed
        torch.manual_seed(seed)
        built = build_model(model.name, model.emb_size, model.image_shape, model.dropout, model.neck)
    state = built.state_dict()
    with torch.no_grad():
        match = match_into(state, weights.backbone, source)
    refuse_no_match(match, source, "choose the network with --model, --emb_size and --image_shape")
    lost = [name for name in match.missing if not name.endswith("num_batches_tracked")]
    if weights.is_whole and (lost or match.shapes):
        raise CheckpointError(f"{source} is not a complete {model.name}: {'; '.join(match.lines()[1:])}")
    return state, match


def _check_head(weights: Source, emb_size: int) -> None:
    if WEIGHT not in weights.rows:
        weights.notes.append("no class weights found; a new head will be initialised")
        return
    shape, bias = weights.rows[WEIGHT].shape, weights.rows.get(BIAS)
    is_softmax = weights.loss_type.removeprefix("dist_") == "softmax"
    if shape[1:] != (emb_size,) or (bias and bias.shape) != (shape[:1] if is_softmax else None):
        raise CheckpointError(
            f"the class weights have the shape {list(shape)!s:.80}, the biases {bias and list(bias.shape)}; "
            f"expected [classes, {emb_size}], and biases only for softmax: the loss type is "
            f"{weights.loss_type}"
        )


def _write(
    target: Path,
    tensors: dict[str, Tensor],
    weights: Source,
    saved: dict[str, dict[str, Any]],
    classes: int,
    source: str,
) -> None:
    """Write the data file and then the manifest to a hidden folder, and publish it as the target.

    saved: the options, by group and name.
    """
    for name in ("lr", "schedule", "warmup_steps"):  # a run uses its own values
        del saved["optim"][name]
    entries = [_entry(key, parts) for key, parts in weights.rows.items()]
    infos = {}
    for name, tensor in tensors.items():
        role = Role(BACKBONE, name)
        infos[role.key] = info_of(role, tensor)
        entries.append(entry_of(role.key, tensor))
    for key, parts in weights.rows.items():
        role = Role(CLASS_WEIGHTS, key.removeprefix("head."))
        infos[key] = TensorInfo(parts.shape, "float32", True, role)
    with publishing_folder(target) as temporary:
        manifest = Manifest(
            plsc_version=__version__,
            step=0,
            epoch=0,
            step_in_epoch=0,
            world_size=1,
            emb_size=saved["model"]["emb_size"],
            heads={"": HeadInfo(classes, [(0, classes)], weights.loss_type)},
            options=saved,
            scalars={
                METRICS_KEY: {},
                "imported": {"layout": weights.layout, "from": source, "notes": weights.notes},
            },
            tensors=infos,
            files=write_shards(temporary, [entries]),
        )
        (temporary / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")


def _entry(key: str, parts: RowParts) -> Entry:
    def chunks() -> Iterator[memoryview]:
        for row, piece in parts.pieces(0, parts.shape[0]):
            yield from tensor_chunks(converted(piece, torch.float32, f"{key} from class {row}"))()

    return Entry(key, torch.float32, parts.shape, 0, chunks)
