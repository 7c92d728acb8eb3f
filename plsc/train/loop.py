"""The training loop: next batch, forward, head, backward, step, log, maybe evaluate, maybe save."""

from __future__ import annotations

import math
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from plsc.data.batch import Batch
from plsc.heads import HeadOutput
from plsc.heads.base import join_outputs
from plsc.models.sync_batch_norm import equal_buffers
from plsc.parallel.gradients import without_sum
from plsc.parallel.signals import StopSignal
from plsc.train.bad_samples import BadSampleReport
from plsc.train.build import Run
from plsc.train.checkpointing import save
from plsc.train.clipping import clip_gradients
from plsc.train.evaluation import evaluate_targets
from plsc.train.guards import collapse_warning, interrupted, stop_at_bad_loss
from plsc.train.logs import RunLog
from plsc.train.meter import Meter
from plsc.train.randomness import number_samples, seed_step
from plsc.train.result import TrainResult


class Trainer:
    """Trains a run to its last epoch or step. All methods are collectives."""

    def __init__(self, run: Run, log: RunLog) -> None:
        self._run = run
        self._log = log
        self._options = run.options.train
        self._position = run.position
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
        with StopSignal(self._options.stop_deadline) as stop:
            while self._position.epoch < self._options.epochs and not self._made_all_steps():
                loss = self._train_epoch(stop)
                self._end_epoch(loss)
        return self._result

    def _train_epoch(self, stop: StopSignal) -> float | None:
        """Train to the end of the epoch, or to the run's last step; return the mean loss of its steps.

        The steps before a resume count. None if there was none: an epoch without a batch.
        """
        run, position = self._run, self._position
        run.network.train()
        window, is_over = Meter(), False
        with closing(run.loader.epoch(position.epoch, position.step_in_epoch)) as batches:
            while not self._made_all_steps():
                window.start_step()
                batch = next(batches, None)
                window.batch_arrived()
                # One small collective a step: was anybody told to stop, has anybody's reader ended?
                signal_number, ended = run.world.agree_max(stop.number, int(batch is None))
                if signal_number:
                    if position.step_in_epoch:  # else the end of the epoch before was saved already
                        self._result.checkpoint = self._save()
                    raise interrupted(signal_number, position.step, self._result.checkpoint)
                if ended or batch is None:
                    is_over = True
                    break
                is_logged = self._is_logged()
                output, loss = self._train_step(batch, is_logged)
                self._bad_samples.note(batch.problems)
                position.advance(loss)
                window.end_step(output.batch, batch.skipped, loss)
                del batch  # its memory is used again for the next one
                self._log.advance()
                if is_logged:
                    self._write_metrics(output, loss, window)
                if self._is_tested():
                    self._evaluate()
                    run.network.train()
        mean_loss = position.mean_loss()
        if is_over or position.step_in_epoch == run.loader.steps_per_epoch:
            position.next_epoch()  # the run's last step may be the epoch's last, too
        return mean_loss

    def _train_step(self, batch: Batch, is_logged: bool) -> tuple[HeadOutput, float]:
        """Make one update; return what the head said, and the loss of the global batch."""
        run, step = self._run, self._position.step
        rate = run.rate(step)
        for group in run.optimizer.param_groups:
            group["lr"] = rate
        if run.rows is not None:
            run.rows.param_groups[0]["lr"] = rate * run.options.head.lr_factor

        run.optimizer.zero_grad(set_to_none=True)
        output = self._forward_backward(batch, rate, is_logged)
        run.head.sync_gradients()
        clip = clip_gradients(run) if run.options.optim.clip_norm else 1.0
        run.optimizer.step()
        if run.rows is not None:
            run.rows.step(clip=clip)
        return output, float(output.mean_loss)

    def _forward_backward(self, batch: Batch, rate: float, is_logged: bool) -> HeadOutput:
        """Leave the gradients of the mean loss of the global batch; in micro-batches, one after another."""
        run, device, parts = self._run, self._run.world.device, self._options.micro_batches
        images = batch.input(device).tensor_split(parts)
        labels = batch.labels.to(device, non_blocking=True).tensor_split(parts)
        numbers = number_samples(run.samples, batch, run.loader, run.first_sample, device)
        split = None if numbers is None else numbers.tensor_split(parts)
        total = 0 if parts == 1 else sum(run.world.all_gather_object(len(batch.labels)))
        outputs: list[HeadOutput] = []
        for part in range(parts):
            is_last = part == parts - 1
            seed_step(self._options.seed, self._position.step, part, run.world)
            run.samples.numbers = None if split is None else split[part]
            # Only the last one sums the gradients over the ranks.
            with nullcontext() if is_last else without_sum(run.forward):
                embeddings = run.forward(images[part], labels[part], True)
                output = run.head(
                    embeddings,
                    labels[part],
                    with_accuracy=is_logged and self._options.calc_acc,
                    with_gauge=is_logged,
                )
                loss = float(output.mean_loss)
                if not math.isfinite(loss):
                    stop_at_bad_loss(
                        run.world, run.save_dir, self._position, loss, rate, list(batch.names)
                    )
                share = output.batch / total if total else 1.0
                (output.loss if parts == 1 else output.loss * share).backward()
            outputs.append(output)
        return outputs[0] if parts == 1 else join_outputs(outputs)

    def _end_epoch(self, loss: float | None) -> None:
        """Evaluate, save and plot."""
        self._evaluate()
        checkpoint = self._save(loss)
        self._log.plot()
        self._log.say(f"saved {checkpoint}")
        self._bad_samples.say()

    def _write_metrics(self, output: HeadOutput, loss: float, window: Meter) -> None:
        report = window.report()
        metrics: dict[str, Any] = {
            "step": self._position.step,
            "epoch": self._position.epoch,
            "loss": loss,
            "lr": self._run.rate(self._position.step - 1),
            "accuracy": None if output.accuracy is None else float(output.accuracy),
            "mean_cosine": None if output.mean_cosine is None else float(output.mean_cosine),
            **report,
            "skipped_images": sum(self._run.world.all_gather_object(report["skipped_images"])),
            "bad_samples": self._bad_samples.gather(),
        }
        self._result.metrics = metrics
        self._log.step(metrics, self._run.total_steps)
        warning = collapse_warning(self._position.step, metrics["mean_cosine"])
        if warning:
            self._log.say(warning)

    def _evaluate(self) -> None:
        """Judge the network on the pair files, with the same batch-norm statistics on all ranks."""
        run = self._run
        if not run.targets:
            return
        with equal_buffers(run.network, run.world.backbone_group):
            results = evaluate_targets(run.network, run.targets, run.options, run.world)
        self._result.evaluation = results
        plain = {name: result.as_dict() for name, result in self._result.evaluation.items()}
        # At the end of an epoch the position is that of the next one already.
        epoch = self._position.epoch - (self._position.step_in_epoch == 0)
        self._log.evaluation(self._position.step, epoch, plain)

    def _save(self, loss: float | None = None) -> Path:
        """Save at a step boundary; `loss` is that of the epoch, None when it was cut short."""
        position, best = self._position, self._run.best
        self._bad_samples.gather()
        name = str(
            position.epoch - 1
        )  # of the epoch that ended, counted from 0, as in the original
        if position.step_in_epoch:
            name = f"{position.epoch}-step{position.step}"
        if loss is not None:
            metric, value = self._score(loss)
            best.note(name, metric, value)
        checkpoint = save(self._run, name)
        result = self._result
        result.steps, result.epochs, result.checkpoint = position.step, position.epoch, checkpoint
        if best.name is not None:
            result.best_checkpoint = self._run.save_dir / best.name
            result.best_metric, result.best_value = best.metric, best.value
        return checkpoint

    def _score(self, loss: float) -> tuple[str, float]:
        """Return what the best checkpoint is chosen by: accuracy on the first pair file, or loss."""
        for name, verification in self._result.evaluation.items():
            return f"{name} accuracy", verification.accuracy
        return "loss", loss

    def _is_logged(self) -> bool:
        """Whether the next step is: each log_period, and the last one of an epoch or of the run."""
        step = self._position.step + 1
        is_last = self._position.step_in_epoch + 1 == self._run.loader.steps_per_epoch
        return step % self._options.log_period == 0 or is_last or step == self._options.steps

    def _is_tested(self) -> bool:
        """Whether test_period asks for an evaluation now; the end of the epoch has one anyway."""
        period, position = self._options.test_period, self._position
        is_end = position.step_in_epoch == self._run.loader.steps_per_epoch
        return period > 0 and position.step % period == 0 and not is_end

    def _made_all_steps(self) -> bool:
        return self._options.steps is not None and self._position.step >= self._options.steps
