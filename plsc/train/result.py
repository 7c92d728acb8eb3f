"""What train() returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plsc.evaluate.verification import VerificationResult
from plsc.train.warm_start import WarmStart


@dataclass
class TrainResult:
    """The outcome of a training run.

    steps: steps made in all; epochs: epochs finished; metrics: the last logged step, as in
    metrics.jsonl; evaluation: the last result for each pair file; checkpoint: the last one saved;
    best_checkpoint, best_metric, best_value: the one with the best verification accuracy on the first
    pair file, or with the lowest loss where nothing was evaluated; warm_start: what of `model.pretrained`
    the run began with.
    """

    steps: int
    epochs: int
    metrics: dict[str, Any]
    evaluation: dict[str, VerificationResult] = field(default_factory=dict)
    checkpoint: Path | None = None
    best_checkpoint: Path | None = None
    best_metric: str = ""
    best_value: float = float("nan")
    warm_start: WarmStart | None = None
