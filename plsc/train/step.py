"""One step of training: forward, head, backward, and the update of backbone and class rows."""

from __future__ import annotations

import math
from contextlib import nullcontext

from plsc.data.batch import Batch
from plsc.heads import HeadOutput
from plsc.heads.base import join_outputs
from plsc.marks import Part, mark, mark_backward
from plsc.parallel.gradients import without_sum
from plsc.train.build import Run
from plsc.train.clipping import clip_gradients
from plsc.train.guards import stop_at_bad_loss
from plsc.train.randomness import number_samples, seed_step


class Step:
    """Makes the steps of a run, one at a call, at the run's position. A collective."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._options = run.options.train

    def make(self, batch: Batch, is_logged: bool) -> tuple[HeadOutput, float]:
        """Make one update; return what the head said, and the loss of the global batch.

        is_logged: measure what only a log line needs. Raises TrainingError for a loss that is not finite.
        """
        run = self._run
        rate = run.rate(run.position.step)
        self._set_rate(rate)
        run.optimizer.zero_grad(set_to_none=True)
        output = self._forward_backward(batch, rate, is_logged)
        run.head.sync_gradients()
        with mark(Part.CLIPPING):
            clip = clip_gradients(run) if run.options.optim.clip_norm else 1.0
        with mark(Part.OPTIMIZER):
            run.optimizer.step()
        if run.rows is not None:
            with mark(Part.HEAD_ROWS):
                run.rows.step(clip=clip)
        return output, float(output.mean_loss)

    def _set_rate(self, rate: float) -> None:
        run = self._run
        for group in run.optimizer.param_groups:
            group["lr"] = rate
        if run.rows is not None:
            for group in run.rows.param_groups:
                group["lr"] = rate * run.options.head.lr_factor

    def _forward_backward(self, batch: Batch, rate: float, is_logged: bool) -> HeadOutput:
        """Leave the gradients of the mean loss of the global batch; in micro-batches, one after another."""
        run, device, parts = self._run, self._run.world.device, self._options.micro_batches
        with mark(Part.COPY):
            images = batch.input(device).tensor_split(parts)
            labels = batch.labels.to(device, non_blocking=True).tensor_split(parts)
        numbers = number_samples(run.samples, batch, run.loader, run.first_sample, device)
        split = None if numbers is None else numbers.tensor_split(parts)
        total = 0 if parts == 1 else sum(run.world.all_gather_object(len(batch.labels)))
        outputs: list[HeadOutput] = []
        for part in range(parts):
            is_last = part == parts - 1
            seed_step(self._options.seed, run.position.step, part, run.world)
            run.samples.numbers = None if split is None else split[part]
            # Only the last one sums the gradients over the ranks.
            with nullcontext() if is_last else without_sum(run.forward):
                with mark(Part.FORWARD):
                    embeddings = run.forward(images[part], labels[part], True)
                mark_backward(embeddings)
                with mark(Part.HEAD):
                    output = run.head(
                        embeddings,
                        labels[part],
                        with_accuracy=is_logged and self._options.calc_acc,
                        with_gauge=is_logged,
                    )
                loss = float(output.mean_loss)
                if not math.isfinite(loss):
                    stop_at_bad_loss(
                        run.world, run.save_dir, run.position, loss, rate, list(batch.names)
                    )
                share = output.batch / total if total else 1.0
                with mark(Part.HEAD_BACKWARD):
                    (output.loss if parts == 1 else output.loss * share).backward()
            outputs.append(output)
        return outputs[0] if parts == 1 else join_outputs(outputs)
