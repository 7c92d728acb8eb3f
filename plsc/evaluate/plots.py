"""Plots of evaluation protocols, without a backend for the whole process.

Every function that writes a file raises DataError if it cannot be written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plsc.evaluate.curves import area_under, roc_curve
from plsc.storage.disk import replacing

STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#808080",
    "axes.labelcolor": "#333333",
    "axes.labelsize": 10,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#D9D9D9",
    "grid.linewidth": 0.6,
    "xtick.color": "#808080",
    "ytick.color": "#808080",
    "xtick.labelcolor": "#333333",
    "ytick.labelcolor": "#333333",
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "legend.labelcolor": "#333333",
    "savefig.dpi": 160,
    "savefig.facecolor": "white",
}
"""matplotlib's settings of our plots; those of the process come back after each."""


def plot_roc(curves: Mapping[str, tuple[np.ndarray, np.ndarray]], path: str | os.PathLike[str]) -> None:
    """Plot the ROC curves of ``{name: (cosines [P], is_same [P])}`` with a logarithmic FAR axis.

    The axis starts at the FAR of a single false accept.

    Raises:
        DataError: a curve does not have both same and different pairs, or the file cannot be written.
    """
    drawn, lowest = {}, 0.1
    for name, (cosines, is_same) in curves.items():
        far, tar = roc_curve(cosines, is_same)
        drawn[f"{name}  (AUC {area_under(far, tar):.3f})"] = far, tar
        lowest = min(lowest, 1 / int(np.sum(~np.asarray(is_same, dtype=bool))))
    plot_rates(drawn, path, "False accept rate", "True accept rate", (lowest, 1.0))


def plot_cmc(curves: Mapping[str, np.ndarray], path: str | os.PathLike[str]) -> None:
    """Plot the cumulative match characteristics of ``{name: rates at rank 1..N}``, with a log rank axis."""
    points = {
        f"{name}  (rank-1 {rates[0]:.3f})": (np.arange(1, len(rates) + 1), rates)
        for name, rates in curves.items()
    }
    plot_rates(points, path, "Rank", "Mates found", (1, max(10, *map(len, curves.values()))))


def plot_rates(
    curves: Mapping[str, tuple[np.ndarray, np.ndarray]],
    path: str | os.PathLike[str],
    xlabel: str,
    ylabel: str,
    limits: tuple[float, float],
) -> None:
    """Plot rates ``{name: (x, rates)}`` as steps, with a logarithmic x axis within `limits`."""
    with _one_plot(path) as axes:
        for name, (x, rates) in curves.items():
            inside = np.maximum(x, limits[0])
            axes.plot(inside, rates, label=f" {name}", drawstyle="steps-post", linewidth=1.8)
        axes.set(xscale="log", xlim=limits, ylim=(0, 1.01), xlabel=xlabel, ylabel=ylabel)
        axes.grid(True, which="minor", axis="x", color="#EFEFEF", linewidth=0.4)


@contextmanager
def _one_plot(path: str | os.PathLike[str]) -> Iterator[Axes]:
    """Yield the axes of a figure, which gets a legend and is written as PNG, atomically, at the end."""
    with matplotlib.rc_context(STYLE), replacing(path) as temporary:
        figure = Figure((5.6, 4.2), layout="tight")
        axes = figure.add_subplot()
        yield axes
        legend = axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.01))
        for text in legend.get_texts():  # names may look like TeX
            text.set_parse_math(False)
        figure.savefig(temporary, format="png")
