"""Start from pretrained weights: load tensors whose name and shape match, initialise all others."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from plsc.checkpoint.all_ranks import own_result
from plsc.checkpoint.importers.matching import (
    Match,
    check_finite,
    match_into,
    refuse_no_match,
    shorten,
    shortened,
)
from plsc.checkpoint.importers.source import RowParts, join_rows
from plsc.checkpoint.importers.tensor_files import read_state_dict
from plsc.checkpoint.load import OpenCheckpoint, StoredTensor, read_class_names
from plsc.checkpoint.manifest import BACKBONE, CLASS_WEIGHTS, STATISTICS
from plsc.checkpoint.remote import fetch
from plsc.heads import Head
from plsc.heads.weights import SCALE_BYTES, decode_rows, encode_rows, scale_bytes
from plsc.run.run import Run
from plsc.storage.store import Store
from plsc.storage.urls import base_name, is_url, parent_of, shown

_FILES = (".safetensors", ".pt", ".pth", ".bin")


@dataclass
class WarmStart:
    """The weights that a run started from.

    source: path or URL. backbone: which tensors of the network matched. head: names of the head's tensors
    that were loaded. head_left: tensors that were not loaded, with the reasons.
    """

    source: str
    backbone: Match
    head: list[str] = field(default_factory=list)
    head_left: dict[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return a summary for the log, a few lines of limited length."""
        lines = [f"starting from the weights of {self.source}:", *self.backbone.lines()]
        if self.head:
            lines.append(f"loaded into the head: {shorten(self.head)}")
        left = [f"{shortened(name)} {why}" for name, why in self.head_left.items()]
        if left:
            lines.append(f"not loaded into the head: {shorten(left, longest=240)}")
        return lines


def start_from_pretrained(run: Run) -> WarmStart | None:
    """Load `model.pretrained`, if set, into network and head; a collective.

    Optimizer, schedule and position are unchanged; also the head's margin statistics if the file has none.

    Raises:
        CheckpointError: on all ranks, if the file is missing, damaged or malicious, or nothing matches.
    """
    location = run.options.model.pretrained
    if location is None:
        return None

    # Judged by the suffix, which is equal on all ranks.
    is_remote_checkpoint = is_url(location) and not location.endswith(_FILES)
    path = fetch(location, run.world) if is_remote_checkpoint else None

    def load() -> WarmStart:
        with torch.no_grad(), _local(location) if path is None else nullcontext(path) as local:
            return _load(run, local, shown(location))

    return own_result(run.world, f"start from {shown(location)}", load)


def _load(run: Run, path: Path, source: str) -> WarmStart:
    backbone: Mapping[str, Tensor | StoredTensor]
    head: Mapping[str, RowParts | StoredTensor]
    names, order = run.data.class_names, None
    with ExitStack() as stack:
        if path.is_dir():
            opened = stack.enter_context(OpenCheckpoint(path))
            kinds = (BACKBONE, CLASS_WEIGHTS, STATISTICS)
            stored = opened.averaged(opened.select(kinds, run.world.rank, run.world.size))
            backbone = {role.name: tensor for role, tensor in stored.items() if role.kind == BACKBONE}
            head = {role.key: tensor for role, tensor in stored.items() if role.kind != BACKBONE}
            saved = None if names is None else read_class_names(path, opened.manifest)
            order = None if names is None or saved is None else saved.numbered(names)
        else:
            backbone, tensors = read_state_dict(path, follow_links=True)
            head = {name: join_rows([t], name) for name, t in tensors.items() if len(t.shape)}
        started = WarmStart(source, match_into(run.network.state_dict(), backbone, source))
        _take_head(run.head, head, order, started)
    if not started.head:
        advice = "use the network and embedding size that were saved (model.name, model.emb_size)"
        refuse_no_match(started.backbone, source, advice)
    return started


def _take_head(
    head: Head,
    tensors: Mapping[str, RowParts | StoredTensor],
    order: np.ndarray | None,
    started: WarmStart,
) -> None:
    """Load class weights and margin statistics if the classes are the same.

    order: the index of each class in the checkpoint; None unless both have class names. Classes without names
    are the same if their number is equal.
    """
    order = np.arange(head.class_num) if order is None else order
    rows = {f"head.{name}": parameter.detach() for name, parameter in head.named_parameters()}
    ours = rows | {f"head.{name}": tensor for name, tensor in head.statistics().items()}
    for name, parts in tensors.items():
        here, is_row = ours.get(name), name in rows
        if here is None:
            started.head_left[name] = "does not exist in this head"
            continue
        shape, added = parts.shape, scale_bytes(here.dtype) if is_row else 0
        if getattr(parts, "is_coded", False):
            shape = (*shape[:-1], shape[-1] - SCALE_BYTES)
        wanted = (*here.shape[:-1], here.shape[-1] - added) if here.ndim else ()
        wanted = (head.class_num, *wanted[1:]) if is_row else wanted
        if shape != wanted:
            started.head_left[name] = f"has shape {str(list(shape))[:80]}, expected {list(wanted)}"
        elif is_row and (order >= head.class_num).any():
            started.head_left[name] = "has classes with other names"
        elif is_row:
            _copy_rows(parts, order[slice(*head.class_range)], here, started.source, name)
            started.head.append(name)
        else:
            value = check_finite(parts.read(), f"{started.source}: {name}")
            here.copy_(value)
            started.head.append(name)


def _copy_rows(
    parts: RowParts | StoredTensor, order: np.ndarray, here: Tensor, source: str, name: str
) -> None:
    """Copy the rows of `parts` with the indices `order`, int64 [rows of `here`], to `here`."""
    if not len(order):
        return
    places = np.argsort(order)
    numbers = order[places]
    for row, piece in parts.pieces(int(numbers[0]), int(numbers[-1]) + 1):
        piece = decode_rows(piece) if getattr(parts, "is_coded", False) else piece
        check_finite(piece, f"{source}: {name}")
        low, high = np.searchsorted(numbers, [row, row + len(piece)])
        values = piece[torch.from_numpy(numbers[low:high] - row)]
        values = encode_rows(values.float()) if here.dtype is torch.int8 else values
        here[torch.from_numpy(places[low:high]).to(here.device)] = values.to(here)


@contextmanager
def _local(location: str) -> Iterator[Path]:
    """Yield the local path of a file or folder; a URL is downloaded to a temporary folder."""
    if not is_url(location):
        yield Path(location)
        return
    with tempfile.TemporaryDirectory(prefix="plsc-pretrained-") as folder:
        name = base_name(location)
        Store(parent_of(location)).get(name, Path(folder) / name)
        yield Path(folder) / name
