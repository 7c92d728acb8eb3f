"""Pictures of verification (ROC) and of training (loss, learning rate, accuracy)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from plsc.errors import DataError
from plsc.evaluate.figure import (
    COLOURS,
    INK,
    add_legend,
    line_look,
    new_figure,
    save_png,
    style_axes,
)
from plsc.evaluate.verification import area_under_roc, roc_curve


def plot_roc(
    curves: Mapping[str, tuple[np.ndarray, np.ndarray]], path: str | os.PathLike[str]
) -> None:
    """Draw a ROC of each ``{name: (cosines [P], is_same [P])}`` over a logarithmic FAR axis.

    The axis begins at one false accept among the negatives; left of it nothing is measured.

    Raises:
        DataError: there is no curve, a curve has not both kinds of pairs, or the file cannot be
            written.
    """
    if not curves:
        raise DataError("plot_roc got no curves; give {name: (scores, is_same)}")
    figure = new_figure(5.6, 4.2)
    axes = figure.add_subplot()
    style_axes(axes)
    lowest = 1.0
    for index, (name, (cosines, is_same)) in enumerate(curves.items()):
        far, tar = roc_curve(cosines, is_same)
        least = 1 / int(np.sum(~np.asarray(is_same, dtype=bool)))
        lowest = min(lowest, least)
        # the left edge is the best that one false accept buys
        start = np.searchsorted(far, least, side="right") - 1
        far, tar = np.maximum(far[start:], least), tar[start:]
        # matplotlib leaves out names that begin with an underscore, hence the space
        label = f" {name}  (AUC {area_under_roc(cosines, is_same):.3f})"
        axes.plot(far, tar, label=label, linewidth=1.8, clip_on=False, **line_look(index))
    lowest = min(lowest, 0.1)
    chance = np.geomspace(lowest, 1, 200)
    axes.plot(chance, chance, color="#999999", linewidth=1, linestyle=(0, (2, 2)), label="chance")
    axes.set(xscale="log", xlim=(lowest, 1), ylim=(0, 1.0))
    axes.set(xlabel="False accept rate", ylabel="True accept rate")
    axes.grid(True, which="minor", axis="x", color="#EFEFEF", linewidth=0.4)
    add_legend(
        axes,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.01),
        ncols=1 if len(curves) < 3 else 2,
        fontsize=9,
    )
    figure.set_layout_engine("tight")
    save_png(figure, path)


def plot_metrics(metrics_jsonl: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Draw loss, learning rate, and where they are there accuracy and verification, over steps.

    The file has one JSON object a line, ``{"step": .., "loss": .., "lr": .., "accuracy": ..}`` or
    ``{"step": .., "eval": {name: {"accuracy": ..}}}``. Lines that are torn, as the last one of a
    killed run is, are left out. When a resumed run repeats steps, the later line counts.

    Raises:
        DataError: the file cannot be read, holds no loss yet, or the picture cannot be written.
    """
    series, evaluations = _read_metrics(Path(metrics_jsonl))
    rows = [name for name in ("loss", "accuracy", "eval", "lr") if name in series or name == "eval"]
    if not evaluations:
        rows.remove("eval")
    heights = {"loss": 2.4, "accuracy": 1.7, "eval": 1.7, "lr": 1.2}
    height = sum(heights[row] for row in rows) + 0.6
    figure = new_figure(6.4, height)
    panels = figure.subplots(
        len(rows),
        1,
        sharex=True,
        squeeze=False,
        gridspec_kw={"height_ratios": [heights[row] for row in rows]},
    )[:, 0]
    for row, axes in zip(rows, panels, strict=True):
        style_axes(axes)
        _PANELS[row](axes, evaluations if row == "eval" else series[row])
    panels[-1].set_xlabel("Step")
    panels[-1].xaxis.set_major_formatter(EngFormatter(sep=""))
    panels[-1].set_xlim(
        0, 1.01 * max(1, *series["loss"], *(s for e in evaluations.values() for s in e))
    )
    figure.set_layout_engine("tight", h_pad=0.6)
    figure.align_ylabels(panels)
    save_png(figure, path)


_Points = dict[int, float]  # step -> value


def _read_metrics(path: Path) -> tuple[dict[str, _Points], dict[str, _Points]]:
    series: dict[str, _Points] = {}
    evaluations: dict[str, _Points] = {}
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                record = _record(line)
                step = record.get("step")
                if not _is_number(step) or step < 0:
                    continue
                for key in ("loss", "accuracy", "lr"):
                    value = record.get(key)
                    if _is_number(value):
                        series.setdefault(key, {})[int(step)] = value
                evaluated = record.get("eval")
                for name, result in evaluated.items() if isinstance(evaluated, dict) else ():
                    accuracy = result.get("accuracy") if isinstance(result, dict) else None
                    if _is_number(accuracy):
                        evaluations.setdefault(name, {})[int(step)] = accuracy
    except OSError as error:
        raise DataError(f"cannot read metrics {path}: {error.strerror or error}") from error
    if "loss" not in series:
        raise DataError(
            f"{path} holds no loss to draw; expected a JSON object a line, with step and loss"
        )
    return series, evaluations


def _record(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _is_number(value: Any) -> TypeGuard[float]:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) < 1e300 and math.isfinite(value)


def _arrays(points: _Points) -> tuple[np.ndarray, np.ndarray]:
    steps = sorted(points)
    return np.array(steps, dtype=float), np.array([points[step] for step in steps], dtype=float)


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean of ``window`` values around each one, of fewer near the ends."""
    sums = np.append(0.0, np.cumsum(values))
    middle = np.arange(len(values))
    first = np.maximum(middle - window // 2, 0)
    stop = np.minimum(middle + window // 2 + 1, len(values))
    return (sums[stop] - sums[first]) / (stop - first)


def _draw_noisy(axes: Axes, points: _Points, colour: str) -> None:
    steps, values = _arrays(points)
    window = len(values) // 40 * 2 + 1
    if window < 5:  # too few to smooth
        marker = "o" if len(values) == 1 else None
        axes.plot(steps, values, color=colour, linewidth=1.6, marker=marker, markersize=4)
        return
    axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.7, label="each logged step")
    smooth = _running_mean(values, window)
    axes.plot(steps, smooth, color=colour, linewidth=1.8, label=f"mean over {window}")
    add_legend(axes, fontsize=8.5, loc="best")


def _draw_loss(axes: Axes, points: _Points) -> None:
    _draw_noisy(axes, points, COLOURS[0])
    axes.set_ylabel("Loss")


def _draw_accuracy(axes: Axes, points: _Points) -> None:
    _draw_noisy(axes, points, COLOURS[2])
    axes.set_ylabel("Batch accuracy")


def _draw_learning_rate(axes: Axes, points: _Points) -> None:
    steps, values = _arrays(points)
    axes.plot(steps, values, color=INK, linewidth=1.4)
    axes.set_ylabel("Learning rate")
    axes.set_ylim(0, 1.1 * max(values.max(), 1e-12))


def _draw_evaluations(axes: Axes, evaluations: dict[str, _Points]) -> None:
    for index, (name, points) in enumerate(evaluations.items()):
        steps, values = _arrays(points)
        label = f" {name}  (last {values[-1]:.3f})"
        axes.plot(
            steps, values, marker="o", markersize=3.5, linewidth=1.5, label=label,
            **line_look(index + 1),
        )  # fmt: skip
    axes.set_ylabel("Verification")
    add_legend(axes, fontsize=8.5, loc="best")


_PANELS: dict[str, Any] = {
    "loss": _draw_loss,
    "accuracy": _draw_accuracy,
    "eval": _draw_evaluations,
    "lr": _draw_learning_rate,
}
