"""Time of a training step with loggers and callbacks, compared with the same run without them.

    python benchmarks/callbacks.py        # a few minutes on two cores

SmallResNet on random images, one rank; the variants take turns. A step is timed from one `step_start` to the
next, without the first ones; the time of a variant is the median over the steps of all its runs, and the
mean, which includes the logged steps, in percent of the run without anything.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch.utils.data import TensorDataset

from plsc import Callback, EarlyStopping, Entry
from plsc.train.callbacks import Context

WARM_UP = 10  # steps


class Clock(Callback):
    """Records the time of every step_start."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def step_start(self, context: Context) -> None:
        """Record the time."""
        self.times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the seconds of each step, without the warm-up."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)][WARM_UP:]


def look_at_layer(context: Context) -> None:
    """Log a metric of a layer's output."""
    context.log("active share", float((context.layer_output("stages.3") > 0).float().mean()))


def look_at_gradients(context: Context) -> None:
    """Log the norm of every gradient."""
    for name, _ in context.network.named_parameters():
        gradient = context.gradient(name)
        if gradient is not None:
            context.log(f"gradient/{name}", float(gradient.norm()))


def nothing(ins: Entry) -> None:
    """Add nothing."""


def usual(ins: Entry) -> None:
    """Use the default logger."""
    ins.set_loggers("jsonl")


def all_loggers(ins: Entry) -> None:
    """Use all loggers that need no server, with the gradient norm and pictures."""
    ins.set_loggers("jsonl", "tensorboard", "mlflow")
    ins.set_callbacks("gradient_norm,images")


def callbacks(ins: Entry) -> None:
    """Add callbacks with the output of a layer and all gradients every 25 steps, and early stopping."""
    ins.add_callback(look_at_layer, "after_forward", every=25, layers=["stages.3"])
    ins.add_callback(look_at_gradients, "after_backward", every=25)
    ins.add_callback(EarlyStopping("mean_loss", patience=1000))


def average(ins: Entry) -> None:
    """Keep a moving average of the weights."""
    ins.set_ema_decay(0.999)


def everything(ins: Entry) -> None:
    """Add all of these."""
    for add in (all_loggers, callbacks, average):
        add(ins)


VARIANTS: dict[str, Callable[[Entry], None]] = {
    "nothing": nothing,
    "metrics.jsonl and plot (default)": usual,
    "all loggers, gradient norm, pictures": all_loggers,
    "callbacks every 25 steps": callbacks,
    "moving average of the weights": average,
    "everything": everything,
}


def run(add: Callable[[Entry], None], steps: int, batch: int, size: int) -> list[float]:
    """Train and return the seconds of each step."""
    images = torch.randint(0, 256, (steps * batch, 3, size, size), dtype=torch.uint8)  # one epoch
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        ins = Entry()
        ins.train_reader = TensorDataset(images, torch.arange(len(images)) % 100)
        ins.set_model_name("SmallResNet")
        ins.set_image_shape((3, size, size))
        ins.set_train_batch_size(batch)
        ins.set_train_steps(steps)
        ins.set_log_period(25)
        ins.set_with_test(False)
        ins.set_num_workers(0)
        ins.set_model_save_dir(folder)
        ins.set_save_every_n_epochs(0)
        logging.getLogger("plsc").setLevel(logging.WARNING)
        ins.set_loggers()
        add(ins)
        ins.add_callback(clock)
        ins.train()
    return clock.seconds()


def main() -> None:
    """Measure all variants in turn and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=48, help="height and width of the images")
    options = parser.parse_args()
    seconds: dict[str, list[list[float]]] = {name: [] for name in VARIANTS}
    for _ in range(options.rounds):
        for name, add in VARIANTS.items():
            seconds[name].append(run(add, options.steps, options.batch, options.size))
    print("| with | median step, ms | of nothing | mean step, ms | of nothing |\n|---|---|---|---|---|")
    for name, rounds in seconds.items():
        cells = []
        middles: list[Callable[[list[float]], float]] = [statistics.median, statistics.fmean]
        for middle in middles:
            pairs = zip(rounds, seconds["nothing"], strict=True)
            ratio = statistics.median(middle(one) / middle(plain) for one, plain in pairs)
            cells.append(f"{1e3 * statistics.median(map(middle, rounds)):.2f} | {100 * ratio:.1f} %")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
