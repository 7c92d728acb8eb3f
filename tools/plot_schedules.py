"""Draw the learning-rate schedules by name, for docs/optimizers.md.

python tools/plot_schedules.py [docs/images/schedules.png]
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from plsc.evaluate.plots import add_legend, new_figure, save_png, style_axes  # noqa: E402
from plsc.train.build import build_schedule  # noqa: E402

STEPS = 1000
DRAWN = {
    "step (300, 600, 850)": {"name": "step", "boundaries": (300, 600, 850)},
    "polynomial, power 2": {"name": "polynomial", "power": 2.0},
    "cosine": "cosine",
    "constant": "constant",
}


def main() -> None:
    """Write the picture."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/images/schedules.png"
    figure = new_figure(8, 3.2)
    axes = figure.add_axes((0.08, 0.16, 0.62, 0.78))
    for label, chosen in DRAWN.items():
        schedule = build_schedule(chosen, 1.0, 50, STEPS, lambda epochs: None, None)
        axes.plot([schedule(step) for step in range(STEPS)], label=label)
    axes.set_xlabel("updates made, of 1000; a warm-up of 50")
    axes.set_ylabel("part of the learning rate")
    style_axes(axes)
    add_legend(axes, loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=9)
    save_png(figure, path, dpi=100)


if __name__ == "__main__":
    main()
