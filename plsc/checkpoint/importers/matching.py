"""Copy tensors of a file into a network where name and shape match, and report the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plsc.checkpoint.load import StoredTensor
from plsc.errors import CheckpointError, printable

_SHOWN = 5  # names per list
_LONGEST_NAME = 80


@dataclass
class Match:
    """The result of `match_into`.

    Attributes:
        matched: names of the network's tensors that were in the file.
        missing: names that are only in the network.
        unused: names that are only in the file.
        shapes: by name the (shape in the network, shape in the file) that differ.
        share: fraction of the network's numbers that came from the file.
    """

    matched: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    share: float = 0.0

    def lines(self) -> list[str]:
        """Return a summary of a few lines."""
        total = len(self.matched) + len(self.missing) + len(self.shapes)
        lines = [
            f"{len(self.matched)} of the network's {total} tensors match ({self.share:.1%} of its elements)"
        ]
        if self.missing:
            lines.append(f"not in the file: {shorten(self.missing)}")
        if self.unused:
            lines.append(f"not in the network: {shorten(self.unused)}")
        if self.shapes:
            pairs = [
                f"{shortened(name)} {list(here)} in the network, {str(list(there))[:80]} in the file"
                for name, (here, there) in self.shapes.items()
            ]
            lines.append(f"different shape: {shorten(pairs, longest=240)}")
        return lines


def match_into(
    target: Mapping[str, Tensor], tensors: Mapping[str, StoredTensor | Tensor], source: str
) -> Match:
    """Copy tensors with the same name and shape into ``target``, in place; return what matched.

    Names of the target may have the additional prefix ``network.`` of an adapter. Values are converted to
    the target's dtype. Everything is read and checked before the first tensor changes.

    Raises:
        CheckpointError: a value is not finite.
    """
    match = Match()
    taken: dict[str, Tensor] = {}
    left = dict(tensors)
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
        taken[name] = check_finite(value, f"{source}: {shortened(key)}").to(here.dtype)
        match.matched.append(name)
    match.unused = list(left)
    for name, value in taken.items():
        target[name].copy_(value)
    # Not counted: batch norm's num_batches_tracked, which all networks have.
    total = sum(tensor.numel() for tensor in target.values() if tensor.is_floating_point())
    learnt = sum(value.numel() for value in taken.values() if value.is_floating_point())
    match.share = learnt / max(1, total)
    return match


def refuse_no_match(match: Match, source: str, advice: str) -> None:
    """Raise CheckpointError if no parameter came from the file."""
    if not match.share:
        raise CheckpointError(
            f"no tensor in {source} matches the network by name and shape: "
            f"{'; '.join(match.lines()[1:])}; {advice}"
        )


def check_finite(value: Tensor, what: str) -> Tensor:
    """Return the tensor; CheckpointError if it contains NaN or infinity."""
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        raise CheckpointError(f"{what} contains values that are not finite; choose another file")
    return value


def shorten(names: list[str], longest: int = _LONGEST_NAME) -> str:
    """Return the first names and the number of the others."""
    shown = ", ".join(shortened(name, longest) for name in names[:_SHOWN])
    more = len(names) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def shortened(name: str, longest: int = _LONGEST_NAME) -> str:
    """Return a name from a file, cut short and without control characters."""
    text = printable(name)
    return text if len(text) <= longest else text[: longest - 3] + "..."
