"""Draw the learning-rate schedules by name, for docs/optimizers.md.

python tools/plot_schedules.py [docs/images/schedules.png]
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from plsc.config import Options  # noqa: E402
from plsc.train.build_optim import build_schedule  # noqa: E402

STEPS = 1000
DRAWN = {
    "step (300, 600, 850)": {"schedule": "step", "step_boundaries": (300, 600, 850)},
    "polynomial, power 2": {"schedule": "polynomial", "decay_power": 2.0},
    "cosine": {"schedule": "cosine"},
    "cosine, 3 cycles": {"schedule": "cosine", "cosine_cycles": 3},
    "exponential, end 0.01": {"schedule": "exponential", "end_lr_factor": 0.01},
    "constant": {"schedule": "constant"},
}


def main() -> None:
    """Write the picture."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/images/schedules.png"
    figure, axes = plt.subplots(figsize=(7.5, 3.2), layout="constrained")
    for label, changes in DRAWN.items():
        options = Options()
        for name, value in {"warmup_steps": 50, **changes}.items():
            options.set(f"optim.{name}", value)
        schedule = build_schedule(options, 1.0, STEPS, None, None)
        axes.plot([schedule(step) for step in range(STEPS)], label=label, linewidth=1.2)
    axes.set_xlabel("updates made, of 1000; a warm-up of 50")
    axes.set_ylabel("part of the learning rate")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
