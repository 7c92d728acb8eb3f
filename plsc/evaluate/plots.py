"""Plots of evaluation protocols and of training metrics, without matplotlib's global state.

Every function that writes a file raises DataError if it cannot be written.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from plsc.errors import DataError
from plsc.evaluate.curves import area_under, roc_curve
from plsc.storage.publish import replacing

# The palette of Okabe and Ito, suitable for colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINE_STYLES = ("-", "--", "-.", ":")  # the next one whenever the colours repeat
INK = "#333333"
FAINT = "#D9D9D9"


def plot_roc(curves: Mapping[str, tuple[np.ndarray, np.ndarray]], path: str | os.PathLike[str]) -> None:
    """Plot the ROC curves of ``{name: (cosines [P], is_same [P])}`` with a logarithmic FAR axis.

    The axis starts at the FAR of a single false accept.

    Raises:
        DataError: a curve does not have both same and different pairs, or the file cannot be written.
    """
    lowest = 0.1
    with _one_plot(path, columns=1 if len(curves) < 3 else 2) as axes:
        for index, (name, (cosines, is_same)) in enumerate(curves.items()):
            far, tar = roc_curve(cosines, is_same)
            least = 1 / int(np.sum(~np.asarray(is_same, dtype=bool)))
            lowest = min(lowest, least)
            label = f"{name}  (AUC {area_under(far, tar):.3f})"
            # The left edge is the best TAR with at most one false accept.
            start = np.searchsorted(far, least, side="right") - 1
            far, tar = np.maximum(far[start:], least), tar[start:]
            # The space, because matplotlib ignores labels that start with an underscore.
            axes.plot(far, tar, label=f" {label}", linewidth=1.8, clip_on=False, **line_look(index))
        chance = np.geomspace(lowest, 1, 200)
        axes.plot(chance, chance, color="#999999", linewidth=1, linestyle=(0, (2, 2)), label="chance")
        axes.set(xscale="log", xlim=(lowest, 1), ylim=(0, 1.0))
        axes.set(xlabel="False accept rate", ylabel="True accept rate")
        axes.grid(True, which="minor", axis="x", color="#EFEFEF", linewidth=0.4)


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
        for index, (name, (x, rates)) in enumerate(curves.items()):
            inside = np.maximum(x, limits[0])
            axes.plot(
                inside, rates, label=f" {name}", drawstyle="steps-post", linewidth=1.8, **line_look(index)
            )
        axes.set(xscale="log", xlim=limits, ylim=(0, 1.01), xlabel=xlabel, ylabel=ylabel)
        axes.grid(True, which="minor", axis="x", color="#EFEFEF", linewidth=0.4)


def plot_capacity(
    predicted: Mapping[int, tuple[float | None, float, float]], path: str | os.PathLike[str]
) -> None:
    """Plot FPIR over identities: ``{identities: (estimate or None, low, high)}``."""
    with _one_plot(path, columns=2) as axes:
        estimate, low, high = np.array(list(predicted.values()), dtype=float).T  # None: NaN, not drawn
        x = np.array(list(predicted))
        axes.fill_between(x, low, high, color=COLOURS[0], alpha=0.2, linewidth=0, label="90 % interval")
        axes.plot(x, estimate, color=COLOURS[0], linewidth=1.8, label="predicted")
        least = max(1e-5, min(0.1, *high))
        axes.set(xscale="log", yscale="log", xlim=(x[0], x[-1]), ylim=(least / 2, 1))
        axes.set(
            xlabel="Identities in the gallery, one image each", ylabel="FPIR: strangers that are accepted"
        )


def plot_scores(
    cosines: np.ndarray, is_same: np.ndarray, path: str | os.PathLike[str], threshold: float | None = None
) -> None:
    """Plot the histograms of the scores of same and different pairs, each as a fraction of its pairs.

    Args:
        cosines: score of each pair, [P].
        is_same: bool [P].
        path: the PNG file to write.
        threshold: a score to mark.
    """
    is_same, cosines = np.asarray(is_same, dtype=bool), np.asarray(cosines)
    with _one_plot(path, height=3.2, columns=2) as axes:
        edges = np.linspace(cosines.min() - 1e-6, cosines.max() + 1e-6, 61)
        for chosen, name, colour in ((~is_same, "different", COLOURS[1]), (is_same, "same", COLOURS[0])):
            total = int(chosen.sum())
            counts = np.histogram(cosines[chosen], edges)[0] / max(1, total)
            axes.stairs(counts, edges, fill=True, alpha=0.35, color=colour)
            axes.stairs(counts, edges, color=colour, linewidth=1.4, label=f"{name} ({total:,} pairs)")
        if threshold is not None:
            label = f"threshold {threshold:.3f}"
            axes.axvline(threshold, color=INK, linewidth=1, linestyle=(0, (2, 2)), label=label)
        axes.set(xlabel="Score (cosine)", ylabel="Fraction of the pairs", ylim=(0, None))


def plot_metrics(metrics_jsonl: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Plot mean loss, learning rate, and if present batch accuracy and evaluation accuracy, over the steps.

    The file has one JSON object per line, ``{"step": .., "mean_loss": .., "lr": .., "accuracy": ..}`` (or
    ``loss``, of a single batch) or ``{"step": .., "eval": {name: {"accuracy": ..}}}`` (or ``top1``).
    Incomplete lines (of a killed run) are ignored. If a resumed run repeats steps, the later line is used.

    Raises:
        DataError: the file has no loss yet, or the plot cannot be written.
    """
    series, evaluations = _read_metrics(Path(metrics_jsonl))
    drawn: dict[str, Any] = {**series, **({"eval": evaluations} if evaluations else {})}
    rows = [name for name in _PANELS if name in drawn]
    heights = [_PANELS[row][1] for row in rows]
    figure = new_figure(6.4, sum(heights) + 0.6)
    panels = figure.subplots(
        len(rows), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    for row, axes in zip(rows, panels, strict=True):
        style_axes(axes)
        label, _, draw = _PANELS[row]
        draw(axes, drawn[row])
        axes.set_ylabel(label)
    panels[-1].set_xlabel("Step")
    panels[-1].xaxis.set_major_formatter(EngFormatter(sep=""))
    last = max(step for points in (*series.values(), *evaluations.values()) for step in points)
    panels[-1].set_xlim(0, 1.01 * max(1, last))
    figure.set_layout_engine("tight", h_pad=0.6)
    figure.align_ylabels(panels)
    save_png(figure, path)


_Points = dict[int, float]  # step -> value


def _read_metrics(path: Path) -> tuple[dict[str, _Points], dict[str, _Points]]:
    series: dict[str, _Points] = {}
    evaluations: dict[str, _Points] = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            # A killed run leaves an incomplete line; other files have anything.
            with suppress(ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
                record = json.loads(line)
                step = int(record["step"])
                found = [
                    (series, key, record.get(f"mean_{key}", record.get(key)))
                    for key in ("loss", "accuracy", "lr")
                ]
                for name, result in record.get("eval", {}).items():  # accuracy of pairs, top1 of images
                    value = (result or {}).get("accuracy", (result or {}).get("top1"))
                    found.append((evaluations, name, value))
                for points, key, value in found:
                    if value is not None and math.isfinite(value):
                        points.setdefault(key, {})[step] = value
    if "loss" not in series:
        raise DataError(f"{path} has no loss to plot; expected one JSON object per line, with step and loss")
    return series, evaluations


def _arrays(points: _Points) -> tuple[np.ndarray, np.ndarray]:
    steps = sorted(points)
    return np.array(steps, dtype=float), np.array([points[step] for step in steps], dtype=float)


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the centred moving average over ``window`` values, over fewer near the ends."""
    ones = np.ones(window)
    return np.convolve(values, ones, "same") / np.convolve(np.ones_like(values), ones, "same")


def _draw_noisy(axes: Axes, points: _Points, colour: str) -> None:
    steps, values = _arrays(points)
    window = len(values) // 40 * 2 + 1
    if window < 5:  # too few to smooth
        marker = "o" if len(values) == 1 else None
        axes.plot(steps, values, color=colour, linewidth=1.6, marker=marker, markersize=4)
        return
    axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.7, label="each log line")
    smooth = _running_mean(values, window)
    axes.plot(steps, smooth, color=colour, linewidth=1.8, label=f"mean over {window}")
    add_legend(axes, fontsize=8.5, loc="best")


def _draw_learning_rate(axes: Axes, points: _Points) -> None:
    steps, values = _arrays(points)
    axes.plot(steps, values, color=INK, linewidth=1.4)
    axes.set_ylim(0, 1.1 * max(values.max(), 1e-12))


def _draw_evaluations(axes: Axes, evaluations: dict[str, _Points]) -> None:
    for index, (name, points) in enumerate(evaluations.items()):
        steps, values = _arrays(points)
        axes.plot(
            steps, values, marker="o", markersize=3.5, linewidth=1.5,
            label=f" {name}  (last {values[-1]:.3f})", **line_look(index + 1),
        )  # fmt: skip
    add_legend(axes, fontsize=8.5, loc="best")


# The panels from top to bottom: label, height in inches, function.
_PANELS: dict[str, tuple[str, float, Any]] = {
    "loss": ("Mean loss", 2.4, partial(_draw_noisy, colour=COLOURS[0])),
    "accuracy": ("Batch accuracy", 1.7, partial(_draw_noisy, colour=COLOURS[2])),
    "eval": ("Evaluation", 1.7, _draw_evaluations),
    "lr": ("Learning rate", 1.2, _draw_learning_rate),
}


@contextmanager
def _one_plot(path: str | os.PathLike[str], height: float = 4.2, columns: int = 1) -> Iterator[Axes]:
    """Yield the axes of a figure, which gets a legend of so many columns and is written as PNG at the end."""
    figure = new_figure(5.6, height)
    axes = figure.add_subplot()
    style_axes(axes)
    yield axes
    add_legend(axes, loc="lower center", bbox_to_anchor=(0.5, 1.01), ncols=columns, fontsize=9)
    figure.set_layout_engine("tight")
    save_png(figure, path)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty white figure of ``width`` x ``height`` inches with the Agg backend."""
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def line_look(index: int) -> dict[str, Any]:
    """Return the colour and the line style of the curve with this index."""
    style = LINE_STYLES[index // len(COLOURS) % len(LINE_STYLES)]
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": style}


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
