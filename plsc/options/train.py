"""The options of the loop."""

from __future__ import annotations

from dataclasses import dataclass

from plsc.option import at_least, between, declare, more_than, of_run


@dataclass(frozen=True)
class TrainOptions:
    """The loop."""

    batch_size: int = of_run(
        128,
        "training images per rank and step",
        "set_train_batch_size(batch_size)",
        between(1, 2**24),
    )
    global_batch_size: int | None = of_run(
        None,
        "training images per step over all ranks, instead of batch_size",
        "set_global_batch_size(batch_size)",
        between(1, 2**24),
    )
    micro_batches: int = of_run(
        1, "parts of a rank's batch that are computed one after another (gradient accumulation)",
        "set_micro_batches(num)", at_least(1),
    )  # fmt: skip
    test_batch_size: int = declare(
        120, "images per rank in test and predict", "set_test_batch_size(batch_size)", at_least(1)
    )
    epochs: int = of_run(120, "passes over the data", "set_train_epochs(num)", at_least(1))
    epoch_steps: int | None = of_run(
        None,
        "over several data sets: steps in an epoch of the run; when not set, as many as make the images of "
        "all of them",
        "set_epoch_steps(num)",
        at_least(1),
    )
    steps: int | None = of_run(
        None, "stop after this many steps, if before the last epoch", "set_train_steps(num)",
        at_least(1),
    )  # fmt: skip
    calc_acc: bool = of_run(
        False, "measure the accuracy of the batch at each logged step", "set_calc_acc(calc)"
    )
    log_period: int = of_run(
        200, "steps between two log lines", "set_log_period(period)", at_least(1)
    )
    with_test: bool = of_run(
        True, "evaluate val_targets while training", "set_with_test(with_test)"
    )
    test_period: int = of_run(
        0, "steps between evaluations, besides each epoch's end; 0: none", "set_test_period(period)",
        at_least(0),
    )  # fmt: skip
    seed: int = of_run(
        0, "the one seed of the run: weights, order, augmentation, dropout", "set_seed(seed)",
        between(0, 2**31 - 1),
    )  # fmt: skip
    deterministic: bool = of_run(
        False, "refuse operations whose result may differ between runs", "set_deterministic(flag)"
    )
    stop_deadline: float = declare(
        60.0,
        "seconds after SIGINT or SIGTERM in which the state must be saved; then the process ends",
        "set_stop_deadline(seconds)",
        more_than(0),
    )
