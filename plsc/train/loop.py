"""The training loop: next batch, forward, head, backward, step, log, maybe evaluate, maybe save."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

from torch import Tensor

from plsc.data.batch import BadSample, Batch, copied_aside
from plsc.data.samples import BadSampleList
from plsc.evaluate.verification import VerificationResult
from plsc.heads import HeadOutput
from plsc.heads.joint import each_head
from plsc.models.sync_batch_norm import equal_buffers
from plsc.parallel.backbone import whole_parameters
from plsc.parallel.failure import StopSignal
from plsc.parallel.world import World
from plsc.spans import span
from plsc.train.build import Run
from plsc.train.evaluation import evaluate_targets
from plsc.train.guards import (
    LearningCheck,
    epoch_warning,
    interrupted,
    nothing_left,
    slow_start,
    stop_at_bad_weights,
)
from plsc.train.hints import WorkerAdvice
from plsc.train.logs import Mean, Meter, RunLog
from plsc.train.saving import Saver
from plsc.train.step import Step, StepResult
from plsc.train.warm_start import WarmStart

logger = logging.getLogger(__name__)
_SHOWN = 10  # lines on the terminal per rank; a dataset may be bad altogether


class StepWatch(Protocol):
    """Looks on as the steps are made."""

    def begin_step(self) -> None:
        """A step begins; the loop's other work since the step before is done."""
        ...

    def end_step(
        self, batch: Batch, images: int, step_in_epoch: int, wait: float, step: float
    ) -> str | None:
        """A step is made; return a line for the user, or None.

        batch: of this rank; images: of all ranks; step_in_epoch: from 1; wait: seconds until the batch was
        there; step: seconds in all.
        """
        ...


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


class Trainer:
    """Trains a run to its last epoch or step. All methods are collectives.

    watch: looks on; without one, what the loop says of `data.num_workers` once.
    """

    def __init__(self, run: Run, log: RunLog, saver: Saver, watch: StepWatch | None = None) -> None:
        self._run = run
        self._log = log
        self._saver = saver
        self._step = Step(run)
        self._watch = watch or WorkerAdvice(run.loader, run.options.data, run.world)
        self._window = Meter()
        self._since_save = Mean()
        self._last_loss = math.nan
        self._evaluated_at = -1
        self._is_length_told = False
        options = run.options
        classes = [head.class_num for _, head, _ in each_head(run.head, run.rows)]
        starts_afresh = run.resumed_from is None and options.model.pretrained is None
        self._learning = LearningCheck(
            min(options.model.emb_size, *classes),
            run.rate.warmup_steps,
            run.total_steps,
            watches_loss=starts_afresh and not options.head.margin_warmup_steps,
        )
        self._options = run.options.train
        self._position = run.position
        self._first_step = run.position.step + 1
        self._bad_samples = BadSampleReport(
            run.world, run.save_dir, log, run.options.data.bad_images
        )
        self._result = TrainResult(
            run.position.step, run.position.epoch, metrics={}, checkpoint=run.resumed_from
        )

    def train(self) -> TrainResult:
        """Return the outcome.

        Raises TrainingError for a loss that is not finite, TrainingInterrupted after SIGINT or SIGTERM,
        once the state has been saved; DataError and CheckpointError from below.
        """
        if self._is_over():
            self._log.say(nothing_left(self._position.step, self._position.epoch))
        with StopSignal(self._options.stop_deadline) as stop:
            while not self._is_over():
                self._train_epoch(stop)
                self._end_epoch()
            self._result.unsent = self._saver.close()
        self._note_saved()
        return self._result

    def _train_epoch(self, stop: StopSignal) -> None:
        """Train to the end of the epoch, or to the run's last step.

        There may be no step left: a run may resume where an epoch has just ended.
        """
        run, position = self._run, self._position
        run.network.train()
        window = self._window = Meter()
        with closing(self._read()) as batches:
            while not self._made_all_steps():
                self._watch.begin_step()
                window.start_step()
                with span("data"):
                    batch = next(batches, None)
                window.batch_arrived()
                with span("synchronise ranks"):
                    agreed = agree(
                        run.world, batch, run.head.class_num, stop.number, not self._saver.is_done()
                    )
                if not agreed.is_saving:
                    self._saver.settle()
                if agreed.signal:
                    self._save_and_stop(agreed.signal)
                if agreed.has_ended or batch is None:
                    self._check_epoch()
                    position.next_epoch()
                    break
                is_logged = self._is_logged()
                made = self._step.make(batch, agreed.sizes, is_logged)
                self._bad_samples.note(batch.problems)
                position.advance(made.is_skipped)
                window.end_step(made.output.batch, batch.skipped)
                advice = self._watch.end_step(
                    batch, made.output.batch, position.step_in_epoch, window.wait, window.step
                )
                slow = None
                if position.step == self._first_step and not is_logged:
                    slow = slow_start(window.step, self._options.log_period)
                for line in filter(None, (slow, advice)):
                    self._log.say(line)
                self._read_losses(everything=is_logged)
                del batch  # its memory is used again for the next one
                with span("log"):
                    self._log.advance()
                    if is_logged:
                        self._write_metrics(made)
                if self._is_tested():
                    self._evaluate()
                    run.network.train()
                if self._is_saved():
                    self._save()
        if position.step_in_epoch == run.loader.steps_per_epoch:
            position.next_epoch()  # the run's last step was the epoch's last, too

    def _read(self) -> Generator[Batch, None, None]:
        """Yield what is left of the epoch."""
        run, position = self._run, self._position
        batches = run.loader.epoch(position.epoch, position.step_in_epoch)
        if run.options.speed.overlap_copies:
            return copied_aside(batches, run.world.device)
        return batches

    def _read_losses(self, everything: bool = True) -> None:
        """Count the losses that are here; `everything` waits for them."""
        for loss, images in self._step.losses.read(everything):
            self._last_loss = loss
            self._window.add_loss(loss)
            if math.isfinite(loss):
                self._learning.add_loss(self._position.epoch, loss)
                self._since_save.add(loss, images)

    def _check_epoch(self) -> None:
        """Say once that the reader's epochs are of another length than was expected."""
        warning = epoch_warning(
            self._position.epoch, self._position.step_in_epoch, self._run.loader.steps_per_epoch
        )
        if not self._is_length_told:
            self._warn(warning)
            self._is_length_told = warning is not None

    def _end_epoch(self) -> None:
        """Evaluate, save and plot."""
        self._evaluate()
        self._warn(self._learning.rising(self._position.epoch))
        every = self._run.options.checkpoint.every_n_epochs
        if self._is_over() or (every and self._position.epoch % every == 0):
            self._save()
        self._log.plot()
        self._bad_samples.say()

    def _write_metrics(self, made: StepResult) -> None:
        output, report, loss = made.output, self._window.report(), self._last_loss
        metrics: dict[str, Any] = {
            "step": self._position.step,
            "epoch": self._position.epoch,
            "loss": _finite(loss),
            "lr": made.rate,
            "accuracy": _finite(output.accuracy),
            "effective_rank": _finite(output.effective_rank),
            **self._metrics_of_heads(output),
            **self._metrics_of_scaling(),
            **report,
            "skipped_images": sum(self._run.world.all_gather_object(report["skipped_images"])),
            "bad_samples": self._bad_samples.gather(),
        }
        self._result.metrics = metrics
        self._log.step(metrics, self._run.total_steps)
        sizes = [part.batch for part in output.parts.values()] or [output.batch]
        batch = min(sizes) // self._options.micro_batches
        rank = metrics["effective_rank"]
        self._warn(self._learning.spread(self._position.step, rank, batch))
        self._warn(self._learning.rising(self._position.epoch))

    def _warn(self, warning: str | None) -> None:
        if warning:
            self._log.say(warning, logging.WARNING)

    def _metrics_of_scaling(self) -> dict[str, float]:
        """Return the loss scale of the next step, and how many steps were skipped in all."""
        scaler = self._run.scaler
        if scaler is None:
            return {}
        return {"loss_scale": scaler.scale, "skipped_steps": scaler.skipped}

    def _metrics_of_heads(self, output: HeadOutput) -> dict[str, float | None]:
        """Return the measures of each of several heads: ``loss/<name>`` and so on."""
        found: dict[str, float | None] = {}
        for name, part in output.parts.items():
            found[f"loss/{name}"] = _finite(part.mean_loss)
            found[f"accuracy/{name}"] = _finite(part.accuracy)
            found[f"effective_rank/{name}"] = _finite(part.effective_rank)
        return found

    def _evaluate(self) -> None:
        """Judge the network on the pair files, with the same batch-norm statistics on all ranks."""
        run = self._run
        self._read_losses()
        if not run.targets:
            return
        # In this order: buffers are made equal by way of the state dict, which splits a sharded backbone.
        with equal_buffers(run.network, run.world.backbone_group), whole_parameters(run.network):
            results = evaluate_targets(run.network, run.targets, run.options, run.world)
        self._result.evaluation = results
        self._evaluated_at = self._position.step
        plain = {name: result.as_dict() for name, result in self._result.evaluation.items()}
        # At the end of an epoch the position is that of the next one already.
        epoch = self._position.epoch - (self._position.step_in_epoch == 0)
        self._log.evaluation(self._position.step, epoch, plain)

    def _save(self, *, wait: bool = False) -> None:
        """Save at a step boundary."""
        position = self._position
        # Nothing is saved after a bad one.
        self._read_losses()
        stop_at_bad_weights(self._run.world, position, self._run.network)
        self._bad_samples.gather()
        name = str(
            position.epoch - 1
        )  # of the epoch that ended, counted from 0, as in the original
        if position.step_in_epoch:
            name = f"{position.epoch}-step{position.step}"
        metrics = {}
        if self._since_save.count:
            metrics["loss"] = self._since_save.value
        if self._evaluated_at == position.step:
            for target, result in self._result.evaluation.items():
                metrics[f"{target} accuracy"] = result.accuracy
        self._since_save = Mean()
        self._saver.save(name, metrics, wait=wait)
        self._note_saved()

    def _save_and_stop(self, signal_number: int) -> NoReturn:
        """Save what was trained, send what there is time for, and raise TrainingInterrupted."""
        position = self._position
        if position.step_in_epoch:  # else the end of the epoch before was saved already
            self._save(wait=True)
        self._saver.close(seconds=self._options.stop_deadline / 2)
        self._note_saved()
        error = interrupted(signal_number, position.step, self._result.checkpoint)
        self._log.say(str(error))
        raise error

    def _note_saved(self) -> None:
        result, position, best = self._result, self._position, self._saver.best
        result.steps, result.epochs = position.step, position.epoch
        result.checkpoint = self._saver.last or result.checkpoint
        if best is not None:
            result.best_model_path, result.best_model_score = best.path, best.value
            result.best_metric = best.metric

    def _is_logged(self) -> bool:
        """Whether the next step is: each log_period, and the last one of an epoch or of the run."""
        step = self._position.step + 1
        is_last = self._position.step_in_epoch + 1 == self._run.loader.steps_per_epoch
        return step % self._options.log_period == 0 or is_last or step == self._options.steps

    def _is_saved(self) -> bool:
        """Whether every_n_steps asks for a checkpoint now; the end of the epoch may have one anyway."""
        period, position = self._run.options.checkpoint.every_n_steps, self._position
        is_end = position.step_in_epoch == self._run.loader.steps_per_epoch
        return period > 0 and position.step % period == 0 and not is_end

    def _is_tested(self) -> bool:
        """Whether test_period asks for an evaluation now; the end of the epoch has one anyway."""
        period, position = self._options.test_period, self._position
        is_end = position.step_in_epoch == self._run.loader.steps_per_epoch
        return period > 0 and position.step % period == 0 and not is_end

    def _is_over(self) -> bool:
        return self._position.epoch >= self._options.epochs or self._made_all_steps()

    def _made_all_steps(self) -> bool:
        return self._options.steps is not None and self._position.step >= self._options.steps


def _finite(value: Tensor | float | None) -> float | None:
    """Return a measure as a number; None where there is none, as of a step whose embeddings overflowed."""
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else None


@dataclass(frozen=True)
class Agreement:
    """The same on all ranks.

    signal: the number of one that told any rank to stop, 0 for none; has_ended: some rank's reader has no
    more batches; is_saving: some rank still writes a checkpoint; sizes: how many images each rank has in
    this step, None where a label is out of range (the head looks for it, and says which).
    """

    signal: int
    has_ended: bool
    is_saving: bool
    sizes: list[int] | None


def agree(
    world: World, batch: Batch | None, class_num: int, signal: int = 0, is_saving: bool = False
) -> Agreement:
    """Return what the ranks agree on; the arguments are this rank's. A collective.

    batch: None where the reader has ended.
    """
    labels = None if batch is None else batch.labels
    is_wrong = labels is not None and bool(((labels < 0) | (labels >= class_num)).any())
    told = world.gather_numbers(
        signal,
        int(labels is None),
        int(is_saving),
        0 if labels is None else len(labels),
        int(is_wrong),
    )
    signals, ended, saving, sizes, wrong = zip(*told, strict=True)
    return Agreement(
        max(signals), any(ended), any(saving), None if any(wrong) else [int(size) for size in sizes]
    )


class BadSampleReport:
    """Collects what each rank met; rank 0 writes ``bad_samples.txt`` in the run's folder."""

    def __init__(self, world: World, folder: Path, log: RunLog, policy: str) -> None:
        self._world = world
        self._log = log
        self._done = "replaced" if policy == "replace" else "skipped"
        self._list = BadSampleList(folder) if world.is_main else None
        self._pending: list[BadSample] = []
        self._shown: set[str] = set()
        self._is_cut = False

    def note(self, problems: list[BadSample]) -> None:
        """Take what a batch of this rank met; the first few are printed, each in one epoch alone."""
        for problem in problems:
            if problem.text in self._shown:
                continue
            if len(self._shown) < _SHOWN:
                self._shown.add(problem.text)
                logger.warning(f"{self._done}: {problem.text}")
            elif not self._is_cut:
                self._is_cut = True
                logger.warning("further ones are in bad_samples.txt alone")
        self._pending.extend(problems)

    def gather(self) -> int:
        """Bring what all ranks met since the last time into the file; a collective.

        Returns how many different bad samples the run has met, on rank 0; 0 on the others.
        """
        everywhere = self._world.all_gather_object(self._pending)
        self._pending = []
        if self._list is None:
            return 0
        self._list.add([problem for part in everywhere for problem in part])
        return sum(self._list.counts.values())

    def say(self) -> None:
        """Print how many there are of each kind, if there are some."""
        if self._list is not None and self._list.counts:
            self._log.say(f"bad samples: {self._list.summary()}; listed in {self._list.path}")
