"""The look that all our figures share, without any global state of matplotlib."""

from __future__ import annotations

import os
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from plsc.storage.publish import replacing

# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINE_STYLES = ("-", "--", "-.", ":")  # they change when the colours start over
INK = "#333333"
FAINT = "#D9D9D9"


def new_figure(width: float, height: float) -> Figure:
    """Return an empty white figure of ``width`` x ``height`` inches that draws through Agg."""
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def line_look(index: int) -> dict[str, Any]:
    """Return the colour and the line style of curve number ``index``."""
    style = LINE_STYLES[index // len(COLOURS) % len(LINE_STYLES)]
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": style}


def style_axes(axes: Axes) -> None:
    """Give axes a light grid and only the two spines that carry numbers."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#808080")
    axes.tick_params(which="both", color="#808080", labelcolor=INK, labelsize=9)
    axes.xaxis.label.set(color=INK, size=10)
    axes.yaxis.label.set(color=INK, size=10)
    axes.grid(True, color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)


def add_legend(axes: Axes, **placement: Any) -> None:
    """Add a frameless legend whose names are taken as they are, never as TeX."""
    legend = axes.legend(frameon=False, labelcolor=INK, **placement)
    for text in legend.get_texts():
        text.set_parse_math(False)


def save_png(figure: Figure, path: str | os.PathLike[str], dpi: int = 160) -> None:
    """Write ``figure`` as PNG, whole or not at all.

    Raises:
        DataError: the file cannot be written.
    """
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=dpi)
