"""Plot time and memory by the number of classes for all ways, with logarithmic axes.

python benchmarks/plot.py 128 head.png build/benchmarks/*/head.jsonl     # several runs in one picture
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from ways import WAYS


def draw(samples: list[dict[str, Any]], batch: int, title: str, path: Path) -> None:
    """Write a plot of the samples with this batch size: median step in seconds, peak memory in GiB."""
    times: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    peaks: dict[str, dict[int, float]] = defaultdict(dict)
    for sample in samples:
        if sample.get("B") != batch:
            continue
        if sample["kind"] == "time":
            times[sample["way"]][sample["C"]].append(sample["seconds"])
        elif sample["kind"] == "memory":
            peaks[sample["way"]][sample["C"]] = sample["peak"] / 2**30
    medians = {
        way: {classes: statistics.median(seconds) for classes, seconds in by_classes.items()}
        for way, by_classes in times.items()
    }
    figure, panels = plt.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    parts = ((medians, "seconds per step (median)"), (peaks, "peak memory in GiB"))
    colours = matplotlib.color_sequences["tab20"]
    for panel, (values, label) in zip(panels, parts, strict=True):
        for number, way in enumerate(WAYS):
            points = sorted(values.get(way.name, {}).items())
            if points:
                panel.plot(
                    *zip(*points, strict=True),
                    label=way.name,
                    color=colours[number % len(colours)],
                    linestyle="-" if way.is_ours else "--",
                    marker="o" if way.is_ours else "x",
                )
        panel.set(xscale="log", yscale="log", xlabel="classes C", ylabel=label)
        panel.grid(which="both", alpha=0.3)
    handles, names = panels[1].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(batch: str, picture: str, *files: str) -> None:
    """Plot the samples of several runs of head.py."""
    samples = [json.loads(line) for file in files for line in Path(file).read_text().splitlines()]
    machine = next(sample for sample in samples if sample["kind"] == "machine")
    title = f"B = {batch}: {machine['gpu'] or machine['processor']}, torch {machine['torch']}"
    draw(samples, int(batch), title, Path(picture))


if __name__ == "__main__":
    main(*sys.argv[1:])
