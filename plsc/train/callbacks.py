"""A run, and its callbacks: functions and small classes that are called at the events of training.

All ranks call every callback, in the order in which the callbacks were added. A callback that raises ends the
run on all ranks; the last checkpoint is intact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plsc.checkpoint import Retention, ShardedTensor
from plsc.checkpoint.manifest import CALLBACK, OpenedCheckpoint, Role
from plsc.config import Config
from plsc.data.batch import Batch, Transform
from plsc.errors import OptionError, suggest
from plsc.heads import Head, HeadOutput, RowOptimizer
from plsc.heads.weights import decode_rows
from plsc.models import BaseModel
from plsc.models.base_model import Initialization, find_layers, keeping_outputs
from plsc.models.precision import LossScaler
from plsc.optim import Factory, Schedule, ScheduleFunction
from plsc.parallel.backbone import SampleNumbers
from plsc.parallel.world import World
from plsc.train.data import TrainingData
from plsc.train.targets import HeldOutSet, Target, TestReader
from plsc.values import decode, encode


@dataclass
class Position:
    """The position of a run: number of steps and of finished epochs.

    So the next step has the index `step`, and its epoch the index `epoch`, from 0. Log lines count from 1.

    updates: steps that changed the weights, that is, were not skipped; the learning rate depends on it.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    updates: int = 0

    def advance(self, is_skipped: bool = False) -> None:
        """Count a step."""
        self.step += 1
        self.step_in_epoch += 1
        self.updates += not is_skipped

    def next_epoch(self) -> None:
        """Finish the epoch."""
        self.epoch += 1
        self.step_in_epoch = 0


@dataclass(frozen=True)
class Length:
    """The length of a run: epochs of `per_epoch` steps, None if unknown, from a step and an epoch on.

    These are 0, unless a resume has changed the length of an epoch.
    """

    step: int
    epoch: int
    per_epoch: int | None

    @staticmethod
    def of(per_epoch: int | None, checkpoint: OpenedCheckpoint | None) -> Length:
        """Return the length of a new run, or of one that resumes a checkpoint."""
        if checkpoint is None:
            return Length(0, 0, per_epoch)
        manifest = checkpoint[1]
        if per_epoch is not None and manifest.scalars.get("steps_per_epoch") == per_epoch:
            step, epoch = (manifest.scalars.get(f"length_{name}", 0) for name in ("step", "epoch"))
            return Length(step, epoch, per_epoch)
        if per_epoch is not None and manifest.step_in_epoch >= per_epoch:  # a limit is used up
            return Length(manifest.step, manifest.epoch + 1, per_epoch)
        return Length(manifest.step - manifest.step_in_epoch, manifest.epoch, per_epoch)

    def until(self, epochs: int) -> int | None:
        """Return the number of steps after which so many epochs are over; None if it is unknown."""
        if self.per_epoch is None:
            return None
        left = epochs - self.epoch
        return self.step + left * self.per_epoch if left >= 0 else min(self.step, epochs * self.per_epoch)


STEP_EVENTS = {
    "step_start": "before the next batch is read; also when an epoch has no more batches",
    "batch_start": "the batch is read",
    "after_forward": "embeddings and loss are computed; once per micro-batch",
    "after_backward": "gradients are summed over the ranks; before clipping",
    "after_step": "the weights are updated, and the losses that are known are in `losses`",
}
EVENTS = {
    "run_start": "before the first step, after a checkpoint is loaded",
    "epoch_start": "before the first step of an epoch, or of the rest of it after a resume",
    **STEP_EVENTS,
    "logged": "the metrics of a log line are known",
    "evaluation_start": "before an evaluation",
    "evaluated": "the pair files and the held-out set are evaluated",
    "saved": "a checkpoint is complete",
    "epoch_end": "after evaluation, before the checkpoint of the epoch, which an error here does not prevent",
    "run_end": "after the last checkpoint",
    "exception": "an exception ends the run; it is raised again afterwards",
}
"""The events in order, with their meaning."""
CallbackTensors = dict[Role, Tensor | ShardedTensor]


class Logger(Protocol):
    """A destination of metrics. A custom class needs only these two methods."""

    def write(self, entry: dict[str, Any]) -> None:
        """Write the metrics of a step, an evaluation or an epoch.

        ``entry["step"]`` is the step. `scalars` returns the numbers of an entry by name.
        """

    def close(self) -> None:
        """Write what is left, and release all resources."""


class Callback:
    """Base class of callbacks. Define one method per event, named like it: ``def after_step(self, context)``.

    Attributes:
        every: call it only in every n-th step; for events of a step.
        layers: names of the modules of the network whose outputs `Context.layer_output` returns.
        name: key of the state in checkpoints, by default the name of the class.
    """

    every: int = 1
    layers: Sequence[str] = ()
    name: str = ""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in checkpoints, plain values and tensors; that of rank 0 is saved.

        Called on all ranks, also before and after the first step. A ShardedTensor (plsc.checkpoint) has the
        rows of this rank.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state when a run resumes.

        Tensors that `state_dict` already returns before are filled in place.
        """


class FunctionCallback(Callback):
    """Call a function ``f(context)`` at one event."""

    def __init__(
        self, function: Callable[[Context], None], event: str | None, every: int, layers: Sequence[str]
    ) -> None:
        if event is None or event not in EVENTS:
            raise OptionError(
                f"the callback {function!r} is no instance of plsc.Callback, and its event is {event!r}; "
                f"{suggest(str(event), EVENTS)}"
            )
        self.every, self.layers = every, tuple(layers)
        setattr(self, event, function)


@dataclass(eq=False)
class Context:
    """The state of the run, as callbacks see it.

    Attributes:
        options: the options of the run.
        network: the backbone, without wrappers of DDP and torch.compile.
        head: the classification head.
        world: the process groups, for collectives of your own.
        position: its step and epoch.
        total_steps: steps of the run; None for a reader of unknown length.
        folder: the local folder of checkpoints, metrics and plots.
        is_logged: whether the metrics of the current step are logged; from batch_start on.
        losses: (mean loss, images) of the steps whose losses became known since the last after_step or
            epoch_end.
        mean_loss: mean of the finite losses since the last log line; None if there are none.
        data_seconds, step_seconds: of the last step: waiting for its batch, and in total.
        metrics: metrics of the last log line.
        evaluation: results of the last evaluation: a VerificationResult per pair file, and for
            `data.val_dir` a ClassificationResult under ``val``.
        checkpoint: the last complete checkpoint.
        error: the exception, at the event exception.
    """

    options: Config
    network: BaseModel
    head: Head
    world: World
    position: Position
    total_steps: int | None
    folder: Path = field(init=False)
    is_logged: bool = field(default=False, init=False)
    losses: list[tuple[float, int]] = field(default_factory=list, init=False)
    mean_loss: float | None = field(default=None, init=False)
    data_seconds: float = field(default=0.0, init=False)
    step_seconds: float = field(default=0.0, init=False)
    metrics: dict[str, Any] = field(default_factory=dict, init=False)
    evaluation: dict[str, Any] = field(default_factory=dict, init=False)
    checkpoint: Path | None = field(default=None, init=False)
    error: BaseException | None = field(default=None, init=False)
    stop_reason: str = field(default="", init=False)
    scalars: dict[str, float] = field(default_factory=dict, init=False)
    current: CurrentStep = field(init=False)

    def __post_init__(self) -> None:
        self.folder = Path(self.options.checkpoint.save_dir)
        self.current = CurrentStep()

    @property
    def rank(self) -> int:
        """The number of this process."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.world.size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.world.is_main

    @property
    def batch(self) -> Batch:
        """The batch of this rank; from batch_start to after_step, else AttributeError."""
        return self.current.batch

    @property
    def output(self) -> HeadOutput:
        """The output of the head for the global batch; from after_forward to after_step."""
        return self.current.output

    @property
    def step(self) -> int:
        """Number of finished steps; the current one counts from after_step on."""
        return self.position.step

    @property
    def epoch(self) -> int:
        """Number of finished epochs."""
        return self.position.epoch

    @property
    def current_epoch(self) -> int:
        """The epoch of the last step, from 0; at its end, `epoch` is already that of the next one."""
        return self.position.epoch - (self.position.step_in_epoch == 0)

    @property
    def step_in_epoch(self) -> int:
        """Number of finished steps of the current epoch; 0 at epoch_end."""
        return self.position.step_in_epoch

    def layer_output(self, name: str) -> Tensor:
        """Return the output of a module for the batch of this rank, [b, ...], detached.

        From after_forward to after_step; with micro-batches, of those computed so far. Raises KeyError for a
        module that is not in `layers` of a callback that is due in this step.
        """
        return torch.cat(self.current.layers[name])

    def weight(self, name: str) -> Tensor:
        """Return a parameter of the network, or with ``head.weight`` the class weights of this rank.

        Class weights in files are a meta tensor: a step reads only its rows; see ``context.head.all_rows()``.
        """
        weight = self._parameter(name).detach()
        return decode_rows(weight) if name.startswith("head") else weight

    def gradient(self, name: str) -> Tensor | None:
        """Return the gradient of a parameter, from after_backward on; None if it has none.

        Sharded class weights have none: they are updated tile by tile.
        """
        return self._parameter(name).grad

    def log(self, name: str, value: float) -> None:
        """Add a scalar to the metrics of the next log line; only values of rank 0 are written."""
        self.scalars[str(name)] = float(value)

    def stop(self, reason: str) -> None:
        """End the run after this step, with evaluation and a checkpoint. One rank suffices."""
        self.stop_reason = self.stop_reason or reason

    def metric(self, name: str) -> float:
        """Return a metric of the last log line, or ``lfw accuracy``, ``val top1`` of the last evaluation.

        Raises OptionError for an unknown name.
        """
        known = self.evaluation_metrics()
        known |= {key: value for key, value in self.metrics.items() if isinstance(value, (int, float))}
        if name not in known:
            raise OptionError(f"there is no metric {name!r}; {suggest(name, known)}")
        return float(known[name])

    def evaluation_metrics(self) -> dict[str, float]:
        """Return the metrics of the last evaluation that checkpoints store, such as ``lfw accuracy``."""
        return {
            f"{name} {metric}": getattr(result, metric)
            for name, result in self.evaluation.items()
            for metric in result.METRICS
        }

    def _parameter(self, name: str) -> nn.Parameter:
        with suppress(AttributeError):
            if name.startswith("head."):
                return self.head.get_parameter(name.removeprefix("head."))
        return self.network.get_parameter(name)


class CurrentStep:
    """What exists only during a step: batch, output of the head, outputs of layers."""

    batch: Batch
    output: HeadOutput
    layers: dict[str, list[Tensor]]


class Callbacks:
    """The callbacks of a run. Calling it with an event calls those that are due."""

    def __init__(self, callbacks: Sequence[Callback], network: BaseModel) -> None:
        self.all = tuple(callbacks)
        self.are_ours = all(map(_is_ours, callbacks))  # none can change the network
        self._methods = {
            event: [(one, getattr(one, event)) for one in callbacks if hasattr(one, event)]
            for event in EVENTS
        }
        self._watching = [callback for callback in callbacks if callback.layers]
        self._modules = find_layers(network, [name for one in self._watching for name in one.layers])

    def __call__(self, event: str, context: Context) -> None:
        """Call the callbacks that have a method for the event, if they are due in this step."""
        for callback, method in self._methods[event]:
            if event not in STEP_EVENTS or _is_due(callback, event, context.step):
                method(context)

    @contextmanager
    def keeping_outputs(self, context: Context) -> Iterator[None]:
        """Keep the outputs of the layers that callbacks use in this step, by hooks that exist only here."""
        due = [callback for callback in self._watching if _is_due(callback, "after_forward", context.step)]
        names = {name for callback in due for name in callback.layers}
        with keeping_outputs({name: self._modules[name] for name in names}) as context.current.layers:
            yield

    def state(self, of_users: bool = False) -> tuple[dict[str, Any], CallbackTensors]:
        """Return the JSON of the callbacks' states, by name, and their tensors; a collective.

        of_users: without those of plsc, which synchronise averages.
        """
        values: dict[str, Any] = {}
        tensors: CallbackTensors = {}
        for name, callback in self._named():
            if not (of_users and _is_ours(callback)) and (state := callback.state_dict()):
                own: dict[str, Any] = {}
                values[name] = encode(state, f"the state of the callback {name}", own)
                tensors |= {Role(CALLBACK, key, name): tensor for key, tensor in own.items()}
        return values, tensors

    @property
    def names(self) -> set[str]:
        """The names of the callbacks in checkpoints."""
        return {name for name, _ in self._named()}

    def load_state(self, values: Mapping[str, Any], tensors: CallbackTensors) -> None:
        """Restore the callbacks by name; those that the checkpoint does not have keep their initial state."""
        for name, callback in self._named():
            own: dict[str, Any] = {role.name: tensor for role, tensor in tensors.items() if role.of == name}
            if name in values or own:
                state = decode(values.get(name, {}), own)
                callback.load_state_dict({**state, **own} if own else state)  # older states do not list them

    def _named(self) -> Iterator[tuple[str, Callback]]:
        counts: dict[str, int] = {}
        for callback in self.all:
            name = callback.name or type(callback).__name__
            counts[name] = counts.get(name, 0) + 1
            yield (name if counts[name] == 1 else f"{name}-{counts[name]}"), callback


def _is_ours(callback: Callback) -> bool:
    return type(callback).__module__.startswith("plsc.") and not isinstance(callback, FunctionCallback)


def _is_due(callback: Callback, event: str, steps: int) -> bool:
    return (steps + (event != "after_step")) % callback.every == 0


@dataclass(eq=False, kw_only=True)
class Run(Context):
    """A training run: its parts, and what callbacks see of it.

    Attributes:
        trained_network: the backbone wrapped for training: it sums gradients over the ranks.
        optimizer: optimizer of the backbone, and of class weights that are not sharded.
        global_batch: samples per step over all ranks.
        retention: which checkpoints to keep.
        rows: optimizer of sharded class weights.
        mode: its precision: float32, float16 or bfloat16.
        scaler: loss scaler, None if the precision mode needs none.
        samples: the sample numbers of the current batch, for dropout layers.
        settings: initial attributes of the optimizer, and settings of its parameter groups.
        notes: log lines about the run, printed before training.
        is_custom: the network is the user's own.
        length: the length of its epochs.
        callbacks: called at the events of the run.
        buffers: shapes and types of the network's saved buffers at the start; None before.
        unsaved: hashes of the attributes of the optimizer that checkpoints lack, at the last check.
    """

    trained_network: nn.Module
    optimizer: torch.optim.Optimizer
    rows: RowOptimizer | None
    mode: str
    scaler: LossScaler | None
    rate: Schedule
    data: TrainingData
    targets: list[Target | HeldOutSet]
    samples: SampleNumbers
    settings: list[dict[str, Any]]
    notes: list[str]
    is_custom: bool
    length: Length
    global_batch: int
    retention: Retention
    callbacks: Callbacks
    buffers: dict[str, Any] | None = None
    unsaved: dict[str, bytes] = field(default_factory=dict)

    def call(self, event: str) -> None:
        """Call the callbacks at an event."""
        self.callbacks(event, self)


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
