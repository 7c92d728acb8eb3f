"""Put tensors of a file into a network where name and shape agree, and tell what did not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plsc.checkpoint.load import StoredTensor
from plsc.errors import CheckpointError
from plsc.parallel.backbone import copy_into

_SHOWN = 5  # names a list
_LONGEST_NAME = 80


@dataclass
class Match:
    """What of a file went into a network.

    matched: names here; missing: here, but not in the file; unused: in the file, but not here;
    shapes: name: (shape here, shape in the file). share: of the network's numbers, what came from the file.
    """

    matched: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    share: float = 0.0

    def lines(self) -> list[str]:
        """Return the summary, a few lines of bounded length."""
        total = len(self.matched) + len(self.missing) + len(self.shapes)
        lines = [
            f"{len(self.matched)} of the network's {total} tensors match ({self.share:.1%} of its numbers)"
        ]
        if self.missing:
            lines.append(f"not in the file: {shorten(self.missing)}")
        if self.unused:
            lines.append(f"not in the network: {shorten(self.unused)}")
        if self.shapes:
            pairs = [
                f"{printable(name)} {list(here)} here, {str(list(there))[:80]} there"
                for name, (here, there) in self.shapes.items()
            ]
            lines.append(f"of another shape: {shorten(pairs, longest=240)}")
        return lines


def match_into(
    target: Mapping[str, Tensor], found: Mapping[str, StoredTensor | Tensor], source: str
) -> Match:
    """Copy what agrees into the tensors of ``target``, in place, and return what did.

    Names of the target may lie one level deeper (``network.``, the adapters' own). Numbers are converted to
    the target's type. All is read and checked before the first tensor changes.

    Raises:
        CheckpointError: a number is not finite.
    """
    match = Match()
    taken: dict[str, Tensor] = {}
    left = dict(found)
    for name, here in target.items():
        key = next((k for k in (name, name.removeprefix("network.")) if k in left), None)
        if key is None:
            match.missing.append(name)
            continue
        there = left.pop(key)
        if tuple(there.shape) != tuple(here.shape):
            match.shapes[name] = (tuple(here.shape), tuple(there.shape))
            continue
        value = there if isinstance(there, Tensor) else there.read()
        taken[name] = check_finite(value, f"{source}: {printable(key)}").to(here.dtype)
        match.matched.append(name)
    match.unused = list(left)
    for name, value in taken.items():
        copy_into(target[name], value)
    # Not counted: how many batches a batch norm has seen, which every network has alike.
    total = sum(tensor.numel() for tensor in target.values() if tensor.is_floating_point())
    learnt = sum(value.numel() for value in taken.values() if value.is_floating_point())
    match.share = learnt / max(1, total)
    return match


def refuse_nothing(match: Match, source: str, advice: str) -> None:
    """Raise CheckpointError if nothing that is learnt came from the file."""
    if not match.share:
        raise CheckpointError(
            f"nothing in {source} matches the network: {'; '.join(match.lines()[1:])}; {advice}"
        )


def check_finite(value: Tensor, what: str) -> Tensor:
    """Return the tensor; CheckpointError if it holds a NaN or an infinity."""
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        raise CheckpointError(f"{what} holds numbers that are not finite; choose another file")
    return value


def shorten(names: list[str], longest: int = _LONGEST_NAME) -> str:
    """Return the first names and how many more there are."""
    shown = ", ".join(printable(name, longest) for name in names[:_SHOWN])
    more = len(names) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def printable(name: str, longest: int = _LONGEST_NAME) -> str:
    """Return a name out of a file as it can be shown: cut short, without control characters."""
    text = name if name.isprintable() else ascii(name)[1:-1]
    return text if len(text) <= longest else text[: longest - 3] + "..."
