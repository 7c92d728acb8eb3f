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
    metrics.jsonl; evaluation: the last result for each pair file; checkpoint: the last one saved.
    best_model_path: the best checkpoint that is there; best_model_score: its value of best_metric
    (checkpoint.monitor). unsent: checkpoints that are whole on this machine and could not be sent to
    the store. warm_start: what of `model.pretrained` the run began with.
    """

    steps: int
    epochs: int
    metrics: dict[str, Any]
    evaluation: dict[str, VerificationResult] = field(default_factory=dict)
    checkpoint: Path | None = None
    best_model_path: Path | None = None
    best_model_score: float = float("nan")
    best_metric: str = ""
    unsent: list[Path] = field(default_factory=list)
    warm_start: WarmStart | None = None
