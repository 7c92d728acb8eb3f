"""The training loop: next batch, forward, head, backward, update, log, evaluate, save."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from plsc.data.batch import Batch, copied_in_side_stream
from plsc.errors import DataError, NotSavedError, TrainingInterrupted
from plsc.evaluate.embed import EvaluatedNetwork
from plsc.parallel.backbone import equal_buffers
from plsc.parallel.failure import StopSignal
from plsc.parallel.world import World, gather_rows, span
from plsc.train.callbacks import CurrentStep, Position, Run
from plsc.train.log import BadSampleReport, Meter
from plsc.train.restore import WarmStart
from plsc.train.saving import Saver
from plsc.train.step import Step, StepResult, stop_at_bad_weights
from plsc.train.targets import evaluate_targets
from plsc.train.watch import WeightAverage

STOP_SECONDS = 60.0
"""How long a run may take to save and upload its state after a signal to stop."""

# Metrics that only logged steps compute.
_GAUGES = ("accuracy", "accuracy_top5")


@dataclass
class TrainResult:
    """The outcome of a training run.

    Attributes:
        steps: number of steps, including those before a resume.
        epochs: number of finished epochs.
        metrics: metrics of the last logged step, as in metrics.jsonl.
        evaluation: the last result of each pair file (VerificationResult), and of `data.val_dir`
            (ClassificationResult) under ``val``.
        checkpoint: the last checkpoint that was saved.
        best_model_path: the best checkpoint in the save folder.
        best_model_score: its value of the metric of `checkpoint.monitor`.
        unsent: checkpoints that are complete on this machine but could not be uploaded.
        warm_start: the weights that were loaded from `model.pretrained`.
    """

    steps: int
    epochs: int
    metrics: dict[str, Any]
    evaluation: dict[str, Any] = field(default_factory=dict)
    checkpoint: Path | None = None
    best_model_path: Path | None = None
    best_model_score: float = float("nan")
    unsent: list[Path] = field(default_factory=list)
    warm_start: WarmStart | None = None


class Trainer:
    """Trains a run to its last epoch or step. All methods are collectives.

    saver: None to save nothing.
    """

    def __init__(self, run: Run, saver: Saver | None = None, warm_start: WarmStart | None = None) -> None:
        self._run = run
        self._saver = saver
        self._is_stopped = False
        self._is_checked = False
        self._unlogged: StepResult | None = None
        self._options = run.options.train
        self._position = run.position
        self._step = Step(run)
        self._losses = self._step.losses
        self._window = Meter()
        self._evaluated_at = -1
        self._saved_at = run.position.step
        self._has_warned_of_length = False
        self._bad_samples = BadSampleReport(run.world, run.folder)
        self._result = TrainResult(run.position.step, run.position.epoch, metrics={}, warm_start=warm_start)
        if saver is not None:
            run.checkpoint = saver.last

    def train(self) -> TrainResult:
        """Train and return the result.

        Raises TrainingError for a loss that is not finite, TrainingInterrupted after a signal to stop,
        once the state has been saved, NotSavedError, DataError or CheckpointError.
        """
        run = self._run
        if self._is_over():
            self._run.world.log(nothing_left(self._position.step, self._position.epoch))
        try:
            self._run.call("run_start")
            if self._saver is not None:
                self._saver.check()
            self._stop_if_asked()
            with StopSignal(STOP_SECONDS, shows=self._run.world.is_main) as stop:
                while not self._is_over():
                    self._train_epoch(stop)
                missing = self._saver.close() if self._saver is not None else ""
            self._update_result()
            self._run.call("run_end")
            saved = self._result.checkpoint or "none saved"
            run.world.log(f"trained {self._result.steps} steps; last checkpoint: {saved}")
        except BaseException as error:
            if isinstance(error, Exception) and self._saver is not None:  # not the second Ctrl-C
                self._saver.wait(STOP_SECONDS)
            run.error = error
            self._run.call("exception")
            raise
        text = missing and f"the run has ended after step {self._position.step}, but {missing}"
        self._run.world.log(text, logging.ERROR)
        if text := self._run.world.broadcast_object(text):  # no rank ends before rank 0 has logged it
            raise NotSavedError(text, self._result)
        return self._result

    def _train_epoch(self, stop: StopSignal) -> None:
        """Train to the end of the epoch or to the last step of the run; then evaluate, save and plot."""
        run, position = self._run, self._position
        run.network.train()
        self._run.call("epoch_start")
        self._window = Meter()
        has_ended, first = False, position.step
        with closing(self._read()) as batches:
            # A run may resume at the end of an epoch: then no step is left.
            while not (has_ended or self._is_last_step_made()):
                has_ended = not self._train_step(batches, stop)
        expected = run.data.loader.steps_per_epoch
        is_new = position.step > first and not self._has_warned_of_length
        if has_ended and is_new and (line := epoch_warning(position, expected)):
            self._has_warned_of_length = True
            run.world.log(line, logging.WARNING)
        # The last step of the run may also be the last one of the epoch.
        if has_ended or position.step_in_epoch == expected:
            position.next_epoch()
        self._end_epoch()
        self._bad_samples.log_summary()

    def _end_epoch(self) -> None:
        """Evaluate and save; an error of the evaluation or a callback is raised after the save."""
        run, position = self._run, self._position
        self._read_losses()
        failure: Exception | None = None
        try:
            self._evaluate()
            self._run.call("epoch_end")
        except Exception as error:
            # During the evaluation, only a DataError is raised on all ranks: others may wait in a collective.
            is_evaluated = not run.targets or self._evaluated_at == position.step
            if not (is_evaluated or run.world.size == 1 or isinstance(error, DataError)):
                raise
            failure = error
        run.losses.clear()
        has_failed = self._stop_if_asked(failure is not None)
        every = run.options.checkpoint.every_n_epochs
        # After a failed evaluation or callback, too: the epoch's training is not lost.
        if has_failed or self._is_over() or (every and position.epoch % every == 0):
            self._save(wait=has_failed)
        if failure is not None:
            raise failure

    def _train_step(self, batches: Generator[Batch, None, None], stop: StopSignal) -> bool:
        """Run the next step, then log, evaluate and save if due; return False at the end of the epoch."""
        run, position, window = self._run, self._position, self._window
        self._run.call("step_start")
        window.start_step()
        with span("data"):
            batch = next(batches, None)
        window.batch_arrived()
        with span("synchronise ranks"):
            is_saving = self._saver is not None and not self._saver.is_done()
            # One collective tells every rank of signals, ends of data, finished saves and stops: all act in
            # the same step.
            is_stopping, reads_labels = bool(run.stop_reason), getattr(run.head, "reads_labels", False)
            status = exchange_status(
                run.world, batch, run.head.class_num, stop.number, is_saving, is_stopping, reads_labels
            )
        if self._saver is not None and not status.is_saving:
            self._saver.finish_save()
            self._report_saved(self._saver)
        if status.signal:
            self._save_and_stop(status.signal)
        if status.is_stopping:
            self._is_stopped = True
            return not status.has_ended
        if status.has_ended or batch is None:
            if self._unlogged is not None:
                self._read_losses()
                run.current.output = self._unlogged.output
                self._log(self._unlogged)
                self._unlogged, run.current = None, CurrentStep()
            return False
        is_logged = self._is_logged()
        run.current.batch, run.is_logged = batch, is_logged
        self._run.call("batch_start")
        made = self._step.make(batch, status.sizes, is_logged)
        self._bad_samples.add(batch.problems)
        position.advance(made.is_skipped)
        window.end_step(made.output.batch, len(batch.problems))
        run.data_seconds, run.step_seconds = window.wait, window.step
        self._read_losses(everything=is_logged)
        self._run.call("after_step")
        if not self._is_checked:  # optimizers and callbacks create state in the first step
            self._is_checked = True
            if self._saver is not None:
                self._saver.check()
        with span("log"):
            if is_logged:
                self._log(made)
        # The last step of an epoch of unknown length is logged once the epoch has ended.
        is_kept = not is_logged and run.data.loader.steps_per_epoch is None
        self._unlogged = made if is_kept else None
        run.losses.clear()
        run.current = CurrentStep()
        del batch  # its memory is reused for the next one
        if self._is_due(self._options.test_period):
            self._evaluate()
            run.network.train()
        if self._is_due(run.options.checkpoint.every_n_steps):
            self._save()
        return True

    def _read(self) -> Generator[Batch, None, None]:
        """Yield the remaining batches of the epoch."""
        run, position = self._run, self._position
        # An epoch's number decides its order and random changes.
        batches = run.data.loader.epoch(position.epoch, position.step_in_epoch)
        return copied_in_side_stream(batches, run.world.device)

    def _read_losses(self, everything: bool = True) -> None:
        """Collect losses that are available; with `everything`, wait for all of them."""
        self._run.losses += self._losses.read(everything)
        self._run.mean_loss = self._losses.since_log.value

    def _log(self, made: StepResult) -> None:
        """Collect the metrics of the last step, and call the callbacks that write them."""
        run, output, report = self._run, made.output, self._window.report()
        metrics: dict[str, Any] = {
            "step": self._position.step,
            "epoch": self._position.epoch,
            "loss": _finite(self._losses.last),
            "mean_loss": self._losses.since_log.take(),
            "lr": made.rate,
            **{name: _finite(getattr(output, name)) for name in _GAUGES},
            **report,
            "skipped_images": sum(run.world.all_gather_object(report["skipped_images"])),
            "bad_samples": self._bad_samples.gather(),
        }
        if run.scaler is not None:
            metrics |= {"loss_scale": run.scaler.scale, "skipped_steps": run.scaler.skipped}
        metrics = {**{name: _finite(value) for name, value in run.scalars.items()}, **metrics}
        run.scalars = {}
        self._result.metrics = run.metrics = metrics
        self._run.call("logged")

    def _evaluate(self) -> None:
        """Evaluate the network on pair files and held-out set, with identical batch-norm statistics."""
        run = self._run
        self._read_losses()
        if not run.targets:
            return
        try:
            self._run.call("evaluation_start")
            with equal_buffers(run.network, run.world.backbone_group):
                options = run.options
                evaluated = EvaluatedNetwork(
                    run.network,
                    run.world,
                    options.model.image_shape,
                    options.train.test_batch_size,
                    options.data.num_workers,
                    options.data.flip,
                )
                results = evaluate_targets(evaluated, run.targets, run.head)
        except Exception:
            for average in (one for one in run.callbacks.all if isinstance(one, WeightAverage)):
                average.evaluated(run)  # the weights of the network again
            raise
        self._result.evaluation = run.evaluation = results
        self._evaluated_at = self._position.step
        self._run.call("evaluated")

    def _save(self, *, wait: bool = False) -> None:
        """Save a checkpoint at a step boundary."""
        run, position = self._run, self._position
        # Check all losses first: nothing is saved after one that is not finite.
        self._read_losses()
        stop_at_bad_weights(run.world, position, run.network)
        self._bad_samples.gather()
        # The number of the epoch that ended, counted from 0, as in the original PLSC.
        name = str(position.epoch - 1)
        if position.step_in_epoch:
            name = f"{position.epoch}-step{position.step}"
        loss = self._losses.since_save.take()
        metrics = {} if loss is None else {"loss": loss}
        if self._evaluated_at == position.step:
            metrics |= run.evaluation_metrics()
        if self._saver is not None:
            self._saver.save(name, metrics, wait=wait)
        self._saved_at = position.step
        self._update_result()

    def _save_and_stop(self, signal_number: int) -> NoReturn:
        """Save, upload until the deadline, and raise TrainingInterrupted."""
        position = self._position
        # Between two epochs, too: not every epoch is saved (checkpoint.every_n_epochs).
        if position.step > self._saved_at:
            self._save(wait=True)
        saver = self._saver
        # The other half is for what has to end after the uploads, before a scheduler kills the process.
        missing = saver.close(seconds=STOP_SECONDS / 2) if saver is not None else ""
        self._update_result()
        saved = None if saver is None else self._result.checkpoint
        error = interrupted(signal_number, position.step, saved, missing)
        self._run.world.log(str(error))
        raise error

    def _update_result(self) -> None:
        result, position, saver = self._result, self._position, self._saver
        result.steps, result.epochs = position.step, position.epoch
        if saver is None:
            return
        result.checkpoint, result.unsent = saver.last, list(saver.unsent)
        if saver.best is not None:
            name, result.best_model_score = saver.best
            result.best_model_path = saver.folder.path / name
        self._report_saved(saver)

    def _report_saved(self, saver: Saver) -> None:
        """Call the callbacks if another checkpoint is complete."""
        if self._run.checkpoint != saver.last:
            self._run.checkpoint = saver.last
            self._run.call("saved")

    def _is_logged(self) -> bool:
        """Return whether to log the next step; the first of the run only if its length is unknown."""
        step, length = self._position.step + 1, self._run.data.loader.steps_per_epoch
        is_last = step == self._options.steps or self._position.step_in_epoch + 1 == length
        return step % self._options.log_period == 0 or is_last or (length is None and step == 1)

    def _is_due(self, period: int) -> bool:
        """Return whether a periodic action is due; not at the end of an epoch or of the run: it follows."""
        position = self._position
        is_end = position.step_in_epoch == self._run.data.loader.steps_per_epoch or self._is_last_step_made()
        return period > 0 and position.step % period == 0 and not is_end

    def _stop_if_asked(self, has_failed: bool = False) -> bool:
        """End the run if a callback of any rank asks for it; return whether any rank has failed."""
        reason = self._run.stop_reason
        is_asked, failed = self._run.world.all_reduce_max(int(bool(reason)), int(has_failed))
        self._is_stopped = self._is_stopped or bool(is_asked)
        if self._is_stopped and reason:
            self._run.world.log(f"stopped after step {self._position.step}: {reason}")
        return bool(failed)

    def _is_over(self) -> bool:
        is_last_epoch = self._options.steps is None and self._position.epoch >= self._options.epochs
        return is_last_epoch or self._is_last_step_made()

    def _is_last_step_made(self) -> bool:
        has_all = self._options.steps is not None and self._position.step >= self._options.steps
        return has_all or self._is_stopped


def _finite(value: Tensor | float | None) -> float | None:
    """Return a metric as a float, None if it is missing or not finite, as after an overflow."""
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else None


@dataclass(frozen=True)
class StepStatus:
    """The status of all ranks before a step, identical on all ranks.

    signal: number of a signal that any rank received, 0 for none. has_ended: some rank has no more batches.
    is_saving: some rank is still writing a checkpoint. is_stopping: a callback of some rank ends the run.
    sizes: images per rank in this step; None if a label is out of range (the head then reports it).
    """

    signal: int
    has_ended: bool
    is_saving: bool
    is_stopping: bool
    sizes: list[int] | None


def exchange_status(
    world: World,
    batch: Batch | None,
    class_num: int,
    signal: int = 0,
    is_saving: bool = False,
    is_stopping: bool = False,
    with_labels: bool = False,
) -> StepStatus:
    """Exchange the status of this rank with all others before a step; a collective.

    batch: None at the end of the epoch. with_labels: set its `all_labels`.
    """
    labels = None if batch is None else batch.labels
    is_wrong = labels is not None and bool(((labels < 0) | (labels >= class_num)).any())
    gathered = world.gather_numbers(
        signal,
        int(labels is None),
        int(is_saving),
        int(is_stopping),
        0 if labels is None else len(labels),
        int(is_wrong),
    )
    signals, ended, saving, stopping, sizes, wrong = zip(*gathered, strict=True)
    known_sizes = None if any(wrong) else [int(size) for size in sizes]
    if with_labels and known_sizes and batch is not None and not any(ended):
        batch.all_labels = gather_rows(batch.labels, known_sizes, world.control_group)
    return StepStatus(max(signals), any(ended), any(saving), any(stopping), known_sizes)


def nothing_left(step: int, epoch: int) -> str:
    """Return a line for a resumed run that has no steps left."""
    return (
        f"nothing left to train: the run has finished {step} steps and {epoch} epochs; to continue, increase "
        "train.epochs or train.steps"
    )


def epoch_warning(position: Position, expected: int | None) -> str | None:
    """Return a warning if an epoch ends after another number of steps than expected, else None."""
    if expected is None or position.step_in_epoch == expected:
        return None
    return (
        f"epoch {position.epoch + 1} had {position.step_in_epoch} steps, but {expected} were expected; "
        "correct data.train_image_num: warm-up, log lines and resuming depend on it"
    )


def interrupted(number: int, step: int, checkpoint: Path | None, missing: str = "") -> TrainingInterrupted:
    """Return the error after a signal; checkpoint: the saved state, missing: what is not saved, if any."""
    where = "" if missing else "nothing had been trained, so nothing was saved"
    if checkpoint is not None:
        where = f"the state was saved to {checkpoint}; resume with checkpoint.load_dir {checkpoint}"
    parts = (f"stopped by {signal.Signals(number).name} after step {step}", where, missing)
    return TrainingInterrupted("; ".join(filter(None, parts)), number)
