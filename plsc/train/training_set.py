"""One of several data sets that a run trains on."""

from __future__ import annotations

from dataclasses import dataclass

from plsc.config import Config


@dataclass(frozen=True)
class TrainingSet:
    """A data set that was opened.

    options: the run's, with those of this data set and its head in place; class_num: its classes;
    num_samples: its images; per_step: how many of them a step has, over all ranks; seed: of its order and of
    its head.
    """

    name: str
    options: Config
    class_num: int
    num_samples: int
    per_step: int
    seed: int
