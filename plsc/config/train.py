"""Options of the training loop and of checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from plsc.config.option import at_least, between, declare, need, not_empty, of_run
from plsc.errors import OptionError, did_you_mean
from plsc.names import CALLBACKS, LOGGERS, names_code


def listed_names(value: str | Iterable[str]) -> list[str]:
    """Return the names in `train.loggers` or `train.callbacks`, without repetitions."""
    parts = value.split(",") if isinstance(value, str) else value
    return list(dict.fromkeys(filter(None, (part.strip() for part in parts))))


def _loggers(value: str | tuple[str, ...]) -> str | None:
    wrong = [name for name in listed_names(value) if name not in LOGGERS]
    return f"any of {', '.join(LOGGERS)}{did_you_mean(wrong[0], LOGGERS)}" if wrong else None


def _callbacks(value: str | tuple[str, ...]) -> str | None:
    wrong = [name for name in listed_names(value) if name not in CALLBACKS and not names_code(name)]
    near = did_you_mean(wrong[0], CALLBACKS) if wrong else ""
    return f"any of {', '.join(CALLBACKS)}, 'package.module:Class'{near}" if wrong else None


def _limit(value: int | float) -> str | None:
    is_valid = value >= 1 if isinstance(value, int) else 0 < value <= 1
    return None if is_valid else "an integer of at least 1, or a fraction greater than 0.0 and at most 1.0"


@dataclass(frozen=True)
class TrainOptions:
    """Training loop and evaluation."""

    batch_size: int = of_run(
        128, "training images per rank and step", "set_train_batch_size(batch_size)", between(1, 2**24)
    )
    global_batch_size: int | None = of_run(
        None,
        "training images per step over all ranks, instead of batch_size",
        "set_global_batch_size(batch_size)",
        between(1, 2**24),
    )
    micro_batches: int = of_run(
        1, "micro-batches per batch of a rank (gradient accumulation)", "set_micro_batches(num)", at_least(1)
    )
    test_batch_size: int = declare(
        120,
        "images per rank and step in test, predict and evaluation",
        "set_test_batch_size(batch_size)",
        at_least(1),
    )
    epochs: int = of_run(120, "number of epochs", "set_train_epochs(num)", at_least(1))
    steps: int | None = of_run(
        None, "number of steps, instead of epochs", "set_train_steps(num)", at_least(1)
    )
    calc_acc: bool = of_run(False, "log the training accuracy, top-1 and top-5", "set_calc_acc(calc)")
    log_period: int = of_run(200, "steps between log lines", "set_log_period(period)", at_least(1))
    loggers: str | tuple[str, ...] = declare(
        "jsonl",
        "where metrics are written: jsonl, tensorboard, mlflow, wandb; separated by commas, or a list",
        "set_loggers(loggers)",
        _loggers,
    )
    callbacks: str | tuple[str, ...] = declare(
        (),
        "callbacks: gradient_norm (log the norm of the network's gradient), images (draw the first batch of "
        "each epoch and the hardest pairs), check_shape (print the shapes of parameters and outputs of each "
        "layer), check_content (also the first values, mean, standard deviation, and share of zeros, nan and "
        "inf), profile (trace steps 6 to 15 with torch.profiler), or 'package.module:Class'; separated by "
        "commas, or a list",
        "set_callbacks(callbacks)",
        _callbacks,
    )
    with_test: bool = of_run(
        True, "evaluate val_targets and val_dir during training", "set_with_test(with_test)"
    )
    test_period: int = of_run(
        0,
        "steps between additional evaluations; 0: none",
        "set_test_period(period)",
        at_least(0),
        needs=need("train.with_test", True),
    )
    seed: int = of_run(
        0, "random seed of weights, order, augmentation and dropout", "set_seed(seed)", between(0, 2**31 - 1)
    )
    deterministic: bool = of_run(False, "use deterministic algorithms only", "set_deterministic(flag)")
    limit_train_batches: int | float = of_run(
        1.0,
        "batches per epoch: an integer is their number, a fraction their share; 1.0: all",
        "set_limit_train_batches(limit)",
        _limit,
    )
    limit_val_batches: int | float = of_run(
        1.0,
        "as limit_train_batches, for each evaluation during training",
        "set_limit_val_batches(limit)",
        _limit,
    )
    limit_test_batches: int | float = declare(
        1.0, "as limit_train_batches, for test", "set_limit_test_batches(limit)", _limit
    )
    fast_dev_run: bool | int = declare(
        False,
        "run one batch (True) or this many of training, of each evaluation or of test, and save nothing",
        "set_fast_dev_run(flag)",
        at_least(0),
    )


_ONE_SLASH = re.compile(r"(s3a?|gs|gcs|hdfs|webhdfs|abfss?|az|memory|file):/(?!/)")


def _last_checkpoints(number: int) -> str | None:
    return None if number == -1 or number >= 1 else "at least 1, or -1 to keep all"


def _user_name(text: str) -> str | None:
    if not text.strip() or "," in text:  # a password may follow the comma: do not print it
        raise OptionError("checkpoint.hdfs_user is not a plain user name; expected it without a password")
    return None


def _place(text: str) -> str | None:
    if not text.strip():
        return "a non-empty path or URL"
    return "a URL with two slashes, such as s3://bucket/run" if _ONE_SLASH.match(text) else None


def _url(text: str) -> str | None:
    return None if "://" in text else "an fsspec URL such as hdfs://server/folder"


@dataclass(frozen=True)
class CheckpointOptions:
    """Saving and loading of checkpoints."""

    save_dir: str = declare(
        "output",
        "folder or fsspec URL, such as s3://bucket/run, of checkpoints, metrics and plots",
        "set_model_save_dir(directory)",
        _place,
    )
    load_dir: str | None = declare(
        None,
        "checkpoint to resume, test or predict with: a folder, a URL, or 'last' or 'best' in save_dir; "
        "'last' trains from scratch if there is none",
        "set_checkpoint_dir(directory)",
        _place,
    )
    upload_dir: str | None = declare(
        None, "fsspec URL to which each checkpoint is uploaded, too", "set_upload_dir(url)", _url
    )
    download_dir: str | None = declare(
        None,
        "fsspec URL of a checkpoint to load, or of a run (newest checkpoint); downloaded to load_dir, or to "
        "the cache folder",
        "set_download_dir(url)",
        _url,
    )
    hdfs_user: str | None = declare(
        None,
        "HDFS user name; None: HADOOP_USER_NAME or the system's user name",
        "set_hdfs_user(name)",
        _user_name,
    )
    new_version: bool = declare(False, "save to a new folder version_N in save_dir", "set_new_version(flag)")
    every_n_epochs: int = declare(
        1,
        "epochs between checkpoints; the last epoch is always saved; 0: no others",
        "set_save_every_n_epochs(num)",
        at_least(0),
    )
    every_n_steps: int = declare(
        0, "steps between additional checkpoints; 0: none", "set_save_every_n_steps(num)", at_least(0)
    )
    keep_last: int = declare(
        5, "newest checkpoints to keep; -1: all", "set_max_last_checkpoint_num(num)", _last_checkpoints
    )
    save_top_k: int = declare(
        1, "best checkpoints to keep in addition; -1: all", "set_save_top_k(num)", at_least(-1)
    )
    monitor: str | None = declare(
        None,
        "metric of the best checkpoint: 'loss', 'lfw accuracy', 'val top1', ...; None: accuracy of "
        "the first pair file, else top-1 on val_dir, else loss",
        "set_monitor(metric)",
        not_empty,
    )
