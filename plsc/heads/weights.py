"""The class weights of a rank: their first values, the rows of a step, and rows kept in CPU memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from plsc.errors import OptionError
from plsc.spans import span

States = dict[str, Tensor]
"""The optimizer's state of all rows by name, first dimension the rows."""

ROW_DTYPES = ("float32", "bfloat16", "float64")

_BLOCK = 4096
_STANDARD_DEVIATION = 0.01  # of every element, as in the margin-softmax code bases


def read_dtype(name: str, value: str | torch.dtype, known: tuple[str, ...]) -> torch.dtype:
    """Return one of the `known` types, given as torch's or by its name."""
    text = str(value).removeprefix("torch.")
    if text not in known:
        raise OptionError(f"{name} is {value!r}; expected one of {', '.join(known)}")
    return getattr(torch, text)


def hash_key(*parts: int) -> int:
    """Return a 64-bit seed for these integers, in this order: SplitMix64, as everywhere in plsc."""
    key, mask = 0, 2**64 - 1
    for part in parts:
        z = ((key ^ (part & mask)) + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        key = z ^ (z >> 31)
    return key


def initial_rows(
    seed: int,
    start: int,
    stop: int,
    emb_size: int,
    dtype: torch.dtype = torch.float32,
    norm: float | None = None,
) -> Tensor:
    """Return normal rows [stop - start, emb_size] on the CPU, drawn in float32.

    norm: expected norm of a row; None: each element has the standard deviation 0.01.

    Each block of 4096 classes has its own generator, so that a class gets the same row on any number of
    ranks. Threads draw a block each: 6e7 rows of 512 numbers take one core five minutes.
    """
    rows = torch.empty(stop - start, emb_size, dtype=dtype)
    deviation = _STANDARD_DEVIATION if norm is None else norm / math.sqrt(emb_size)

    def fill(block: int) -> None:
        generator = torch.Generator().manual_seed(hash_key(seed, block))
        drawn = torch.empty(_BLOCK, emb_size, dtype=torch.float32)
        drawn.normal_(0, deviation, generator=generator)
        base = block * _BLOCK
        first, last = max(start, base), min(stop, base + _BLOCK)
        rows[first - start : last - start] = drawn[first - base : last - base]

    with ThreadPoolExecutor() as threads:
        list(threads.map(fill, range(start // _BLOCK, -(-stop // _BLOCK))))
    return rows


@dataclass
class Rows:
    """The rows of this rank that take part in a step.

    weight: [rows, D], float64, float32 or bfloat16. bias: [rows] or None. selected: int64 [n], ascending,
    the positions of the n rows that take part; None: all. centers: K rows in sequence make one class.
    cosine: whether rows and embeddings are normalised. first_row: the global number of ``weight[0]``.
    is_compact: `weight` and `bias` hold the selected rows only, in their order: copies on another device.
    """

    weight: Tensor
    bias: Tensor | None = None
    selected: Tensor | None = None
    centers: int = 1
    cosine: bool = True
    first_row: int = 0
    is_compact: bool = False

    def __len__(self) -> int:
        return len(self.weight) if self.selected is None else len(self.selected)

    def of_classes(self, classes: Tensor) -> Rows:
        """Return the same rows with those of some classes in play; int64, ascending."""
        offsets = torch.arange(self.centers, device=classes.device)
        selected = (classes[:, None] * self.centers + offsets).flatten()
        return dataclasses.replace(self, selected=selected)

    def tiles(self, rows: int) -> Iterator[slice]:
        """Yield slices of about `rows` of the n rows; none cuts through a class."""
        step = max(1, rows // self.centers) * self.centers
        for start in range(0, len(self), step):
            yield slice(start, min(start + step, len(self)))

    def positions(self, tile: slice) -> Tensor | slice:
        """Return where the rows of a tile lie in `weight`."""
        if self.selected is None or self.is_compact:
            return tile
        return self.selected[tile]

    def numbers(self, tile: slice) -> Tensor:
        """Return the global numbers of the rows of a tile, int64."""
        if self.selected is not None:
            return self.selected[tile] + self.first_row
        start, stop = tile.start + self.first_row, tile.stop + self.first_row
        return torch.arange(start, stop, device=self.weight.device)


# Offload: the rows of a step are copied from CPU memory (their home) to the device, and back when changed.


@span("copy to device")
def fetch(home: Rows, device: torch.device) -> Rows:
    """Return a copy on the device of the rows in play; `selected` still names their places at home."""
    selected = _places(home)
    return dataclasses.replace(
        home,
        weight=_copy_of(home.weight, selected, device),
        bias=None if home.bias is None else _copy_of(home.bias, selected, device),
        selected=selected.to(device),
        is_compact=True,
    )


@span("copy to device")
def fetch_states(states: States, home: Rows, device: torch.device) -> States:
    """Return copies on the device of the states of the rows in play."""
    return {name: _copy_of(state, _places(home), device) for name, state in states.items()}


@span("copy to device")
def bring_back(rows: Rows, home: Rows, copies: States, states: States) -> None:
    """Write the rows in play and their states back to where `fetch` found them."""
    selected = _places(home)
    home.weight.index_copy_(0, selected, rows.weight.to(home.weight.device))
    for name, copy in copies.items():
        states[name].index_copy_(0, selected, copy.to(states[name].device))


def _places(home: Rows) -> Tensor:
    if home.selected is not None:
        return home.selected
    return torch.arange(len(home.weight), device=home.weight.device)


def _copy_of(tensor: Tensor, selected: Tensor, device: torch.device) -> Tensor:
    taken = tensor.index_select(0, selected)
    if device.type == "cuda":
        return taken.pin_memory().to(device, non_blocking=True)
    return taken.to(device)
