"""The parts of a run that a script brings itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from plsc.data.transform import Transform
from plsc.models import BaseModel
from plsc.models.parameters import Initialization
from plsc.optim.optimizers import Factory
from plsc.optim.schedule import ScheduleFunction
from plsc.run.callbacks import Callback, Logger

TestReader = Callable[[str, str], tuple[Sequence[Any], Sequence[str]]]
"""``reader(dataset_dir, val_targets)``, like plsc.utils.jpeg_reader.test."""


@dataclass
class UserParts:
    """Custom parts of a run, set by a script, that replace those named by options."""

    model: BaseModel | None = None
    train_reader: Any = None
    test_reader: TestReader | None = None
    predict_reader: Any = None
    train_transform: Transform | None = None
    optimizer: Factory | None = None
    schedule: ScheduleFunction | None = None
    initializations: tuple[Initialization, ...] = ()
    callbacks: tuple[Callback, ...] = ()
    loggers: tuple[Logger, ...] = ()
