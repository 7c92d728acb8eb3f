"""Plots of evaluation protocols and of training metrics, without matplotlib's global state.

Every function that writes a file raises DataError if it cannot be written.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from plsc.errors import DataError
from plsc.evaluate.curves import area_under, roc_curve
from plsc.storage.disk import replacing

INK = "#333333"
FAINT = "#D9D9D9"


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


def plot_metrics(metrics_jsonl: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Plot mean loss and learning rate over the steps.

    The file has one JSON object per line, such as ``{"step": .., "mean_loss": .., "lr": ..}`` (or ``loss``,
    of a single batch). Incomplete lines (of a killed run) are ignored. If a resumed run repeats steps, the
    later line is used.

    Raises:
        DataError: the file has no loss yet, or the plot cannot be written.
    """
    series = _read_metrics(Path(metrics_jsonl))
    figure = new_figure(6.4, 4.2)
    panels = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": (2, 1)})
    for axes, key, label in zip(panels, ("loss", "lr"), ("Mean loss", "Learning rate"), strict=True):
        style_axes(axes)
        points = sorted(series.get(key, {}).items())
        marker = "o" if len(points) == 1 else None
        axes.plot([x for x, _ in points], [y for _, y in points], color=INK, linewidth=1.4, marker=marker)
        axes.set_ylabel(label)
    panels[-1].set_ylim(0, None)
    panels[-1].set_xlabel("Step")
    panels[-1].xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.set_layout_engine("tight", h_pad=0.6)
    figure.align_ylabels(panels)
    save_png(figure, path)


_Points = dict[int, float]  # step -> value


def _read_metrics(path: Path) -> dict[str, _Points]:
    series: dict[str, _Points] = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            # A killed run leaves an incomplete line; other files have anything.
            with suppress(ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
                record = json.loads(line)
                step = int(record["step"])
                for key in ("loss", "lr"):
                    value = record.get(f"mean_{key}", record.get(key))
                    if value is not None and math.isfinite(value):
                        series.setdefault(key, {})[step] = value
    if "loss" not in series:
        raise DataError(f"{path} has no loss to plot; expected one JSON object per line, with step and loss")
    return series


@contextmanager
def _one_plot(path: str | os.PathLike[str]) -> Iterator[Axes]:
    """Yield the axes of a figure, which gets a legend and is written as PNG at the end."""
    figure = new_figure(5.6, 4.2)
    axes = figure.add_subplot()
    style_axes(axes)
    yield axes
    add_legend(axes, loc="lower center", bbox_to_anchor=(0.5, 1.01), fontsize=9)
    figure.set_layout_engine("tight")
    save_png(figure, path)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty white figure of ``width`` x ``height`` inches with the Agg backend."""
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def style_axes(axes: Axes) -> None:
    """Add a light grid, and hide the top and right spines."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#808080")
    axes.tick_params(which="both", color="#808080", labelcolor=INK, labelsize=9)
    axes.xaxis.label.set(color=INK, size=10)
    axes.yaxis.label.set(color=INK, size=10)
    axes.grid(True, color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)


def add_legend(axes: Axes, **placement: Any) -> None:
    """Add a frameless legend without TeX parsing of the labels."""
    legend = axes.legend(frameon=False, labelcolor=INK, **placement)
    for text in legend.get_texts():
        text.set_parse_math(False)


def save_png(figure: Figure, path: str | os.PathLike[str], dpi: int = 160) -> None:
    """Write ``figure`` as PNG, atomically."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=dpi)
