"""Start from given weights: what matches by name and shape is taken, all else begins afresh."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from plsc.checkpoint.agree import on_every_rank
from plsc.checkpoint.fetch import fetch
from plsc.checkpoint.importers.matching import (
    Match,
    check_finite,
    match_into,
    printable,
    refuse_nothing,
    shorten,
)
from plsc.checkpoint.importers.plsc_checkpoint import read_checkpoint_weights
from plsc.checkpoint.importers.row_parts import RowParts, join_rows
from plsc.checkpoint.importers.state_dict import read_state_dict
from plsc.checkpoint.roles import head_prefix
from plsc.heads import Head
from plsc.heads.joint import JointHead, each_head
from plsc.storage.names import base_name, parent_of
from plsc.storage.store import Store
from plsc.storage.urls import is_url, shown
from plsc.train.build import Run

_FILES = (".safetensors", ".pt", ".pth", ".bin")


@dataclass
class WarmStart:
    """What a run started from.

    source: path or URL; backbone: what of the network was there; head: names of the head's tensors that
    were taken; head_left: name: why it was not.
    """

    source: str
    backbone: Match
    head: list[str] = field(default_factory=list)
    head_left: dict[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return the summary for the log, a few lines of bounded length."""
        lines = [f"starting from the weights of {self.source}:", *self.backbone.lines()]
        if self.head:
            lines.append(f"taken for the head: {shorten(self.head)}")
        left = [f"{printable(name)} {why}" for name, why in self.head_left.items()]
        if left:
            lines.append(f"not taken for the head: {shorten(left, longest=240)}")
        return lines


def start_from_pretrained(run: Run) -> WarmStart | None:
    """Load `model.pretrained`, if it is set, into network and head; a collective.

    Optimizer, schedule and position are left as they are, and the head's margin statistics too where the
    file has none.

    Raises:
        CheckpointError: on all ranks alike: no such file, a damaged or malicious one, or nothing in it
            matches.
    """
    location = run.options.model.pretrained
    if location is None:
        return None

    say = print if run.world.is_main else None
    path = fetch(location, run.world, say=say) if _is_remote_checkpoint(location) else None

    def load() -> WarmStart:
        with torch.no_grad(), _local(location) if path is None else nullcontext(path) as local:
            return _load(run, local, shown(location))

    return on_every_rank(run.world, f"start from {shown(location)}", load)[run.world.rank]


def _load(run: Run, path: Path, source: str) -> WarmStart:
    backbone: Mapping[str, Tensor | RowParts]
    if path.is_dir():
        backbone, head = read_checkpoint_weights(path, run.world.rank, run.world.size)
    else:
        backbone, tensors = read_state_dict(path, follow_links=True)
        head = {name: join_rows([t], name) for name, t in tensors.items() if len(t.shape)}
    started = WarmStart(source, match_into(run.network.state_dict(), backbone, source))
    _take_head(run.head, head, started)
    if not started.head:
        advice = (
            "choose the network and embedding size that were saved (set_model_name, set_emb_size)"
        )
        refuse_nothing(started.backbone, source, advice)
    return started


def _take_head(head: Head | JointHead, found: dict[str, RowParts], started: WarmStart) -> None:
    """Take the class rows if the number of classes is the same, and the margin's statistics with them."""
    rows: dict[str, tuple[Tensor, Head]] = {}
    whole: dict[str, Tensor] = {}
    for of, one, _ in each_head(head, None):
        prefix = head_prefix(of)
        rows.update({f"{prefix}.{name}": (p.detach(), one) for name, p in one.named_parameters()})
        whole.update({f"{prefix}.{name}": tensor for name, tensor in one.named_buffers()})
    for name, parts in found.items():
        here, owner = rows.get(name, (whole.get(name), None))
        if here is None:
            started.head_left[name] = "is not in this head"
            continue
        wanted = (owner.class_num, *here.shape[1:]) if owner is not None else tuple(here.shape)
        if parts.shape != wanted:
            started.head_left[name] = f"is {str(list(parts.shape))[:80]}, here {list(wanted)}"
        elif owner is not None:
            _copy_rows(parts, *owner.class_range, here, started.source, name)
            started.head.append(name)
        else:
            value = check_finite(parts.parts[0], f"{started.source}: {name}")
            here.copy_(value)
            started.head.append(name)


def _copy_rows(
    parts: RowParts, first: int, last: int, here: Tensor, source: str, name: str
) -> None:
    for row, piece in parts.pieces(first, last):
        check_finite(piece, f"{source}: {name}")
        here[row - first : row - first + len(piece)].copy_(piece)


def _is_remote_checkpoint(location: str) -> bool:
    """Whether a URL is that of a checkpoint folder: by its name, which is the same on every rank."""
    return is_url(location) and not location.endswith(_FILES)


@contextmanager
def _local(location: str) -> Iterator[Path]:
    """Give the path of a local file or folder, fetched into a temporary folder if it is at a URL."""
    if not is_url(location):
        yield Path(location)
        return
    with tempfile.TemporaryDirectory(prefix="plsc-pretrained-") as folder:
        name = base_name(location)
        Store(parent_of(location)).get(name, Path(folder) / name)
        yield Path(folder) / name
