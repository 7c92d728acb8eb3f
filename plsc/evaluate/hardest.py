"""A contact sheet of the pairs that the embeddings judge worst."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import SubFigure

from plsc.data.decode import decode_image
from plsc.errors import DataError
from plsc.evaluate.figure import COLOURS, INK, new_figure, save_png

_SIDE = 128  # pixels of an image on the sheet
_GAP = 6  # white pixels between the two of a pair
_COLUMNS = 3


def plot_hardest_pairs(
    images: Sequence[bytes],
    is_same: np.ndarray,
    scores: np.ndarray,
    path: str | os.PathLike[str],
    count: int = 12,
) -> None:
    """Draw the different pairs of highest and the same pairs of lowest cosine, worst first, each once.

    Args:
        images: 2P encoded images; pair p is images 2p and 2p + 1.
        is_same: bool [P].
        scores: cosine of each pair, [P].
        path: the PNG to write.
        count: pairs of each kind; fewer where there are fewer.

    Raises:
        DataError: the lengths do not fit, an image cannot be decoded, or the file cannot be written.
    """
    is_same, scores = np.asarray(is_same, dtype=bool), np.asarray(scores)
    if not len(images) == 2 * len(is_same) == 2 * len(scores) or not len(images):
        raise DataError(
            f"{len(images)} images, {len(is_same)} flags and {len(scores)} scores do not fit; "
            "expected two images, one flag and one score for each pair"
        )
    ranked = np.argsort(scores, kind="stable")
    different = _distinct(images, ranked[~is_same[ranked]][::-1], count)
    same = _distinct(images, ranked[is_same[ranked]], count)
    blocks = (
        ("Different classes, highest cosine", COLOURS[1], different),
        ("Same class, lowest cosine", COLOURS[0], same),
    )
    rows = max(1, *(-(-len(pairs) // _COLUMNS) for _, _, pairs in blocks))
    figure = new_figure(10, 0.6 + rows * 1.02)
    halves = figure.subfigures(1, 2, squeeze=False, wspace=0.02)[0]
    for half, (title, colour, pairs) in zip(halves, blocks, strict=True):
        _draw_block(
            half, title, colour, [(_pair(images, p), float(scores[p])) for p in pairs], rows
        )
    save_png(figure, path)


def _distinct(images: Sequence[bytes], pairs: np.ndarray, count: int) -> list[int]:
    """Return the first pairs that do not show the same two images again, in whatever order."""
    chosen: dict[frozenset[bytes], int] = {}
    for pair in pairs:
        if len(chosen) == count:
            break
        chosen.setdefault(frozenset(images[2 * pair : 2 * pair + 2]), int(pair))
    return list(chosen.values())


def _draw_block(
    half: SubFigure, title: str, colour: str, pairs: list[tuple[np.ndarray, float]], rows: int
) -> None:
    inches = 0.6 + rows * 1.02
    half.text(0.5, 1 - 0.27 / inches, title, ha="center", va="center", size=12, color=colour,
              weight="bold")  # fmt: skip
    grid = half.subplots(
        rows,
        _COLUMNS,
        squeeze=False,
        gridspec_kw={
            "left": 0.03, "right": 0.97, "bottom": 0.26 / inches, "top": 1 - 0.5 / inches,
            "hspace": 0.32, "wspace": 0.08,
        },
    )  # fmt: skip
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, (picture, cosine) in zip(grid.flat, pairs, strict=False):
        axes.imshow(picture, interpolation="antialiased")
        caption = f"{cosine:.3f}".replace("-", "\N{MINUS SIGN}")
        axes.text(0.5, -0.05, caption, transform=axes.transAxes, ha="center", va="top",
                  size=9, color=INK)  # fmt: skip
    if not pairs:
        half.text(0.5, 0.5, "none", ha="center", size=10, color=INK)


def _pair(images: Sequence[bytes], pair: int) -> np.ndarray:
    """Return both images as the network takes them, squeezed to a square, with a thin frame."""
    sheet = np.full((_SIDE, 2 * _SIDE + _GAP, 3), 255, np.uint8)
    for place, left in enumerate((0, _SIDE + _GAP)):
        index = 2 * int(pair) + place
        try:
            picture = decode_image(images[index], (3, _SIDE, _SIDE))
        except DataError as error:
            raise DataError(f"image {index} of the pairs: {error}") from error
        square = sheet[:, left : left + _SIDE]
        square[:] = 200
        square[1:-1, 1:-1] = picture.permute(1, 2, 0).numpy()[1:-1, 1:-1]
    return sheet
