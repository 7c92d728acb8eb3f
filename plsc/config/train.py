"""The options of the loop and of checkpoints."""

from __future__ import annotations

import re
from dataclasses import dataclass

from plsc.config.option import at_least, between, declare, more_than, not_empty, of_run, one_of
from plsc.errors import OptionError


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
    log_period: int = of_run(200, "steps between two log lines", "set_log_period(period)", at_least(1))
    with_test: bool = of_run(True, "evaluate val_targets while training", "set_with_test(with_test)")
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


_ONE_SLASH = re.compile(r"(s3a?|gs|gcs|hdfs|webhdfs|abfss?|az|memory|file):/(?!/)")


def _last_checkpoints(number: int) -> str | None:
    return None if number == -1 or number >= 1 else "at least 1, or -1 to keep all"


def _user_name(text: str) -> str | None:
    if not text.strip() or "," in text:  # what follows a comma may be a password: it is not shown
        raise OptionError(
            "checkpoint.hdfs_user is not a plain name; expected the name alone, without a password"
        )
    return None


def _place(text: str) -> str | None:
    if not text.strip():
        return "a path or URL that is not empty"
    return "a URL with two slashes, such as s3://bucket/run" if _ONE_SLASH.match(text) else None


def _url(text: str) -> str | None:
    return None if "://" in text else "an fsspec URL such as hdfs://server/folder"


@dataclass(frozen=True)
class CheckpointOptions:
    """Where the state goes, and where it comes from."""

    save_dir: str = declare(
        "output",
        "folder, or fsspec URL such as s3://bucket/run, for checkpoints, metrics and plots",
        "set_model_save_dir(directory)",
        _place,
    )
    load_dir: str | None = declare(
        None,
        "checkpoint to resume, test or predict with: a folder, a URL, or 'last' or 'best' of save_dir; "
        "training with 'last' begins anew where there is none",
        "set_checkpoint_dir(directory)",
        _place,
    )
    upload_dir: str | None = declare(
        None,
        "fsspec URL of a folder to which each checkpoint is sent, besides save_dir",
        "set_upload_dir(url)",
        _url,
    )
    download_dir: str | None = declare(
        None,
        "fsspec URL of a checkpoint that is fetched to load_dir, or to the cache, and loaded",
        "set_download_dir(url)",
        _url,
    )
    local_dir: str | None = declare(
        None,
        "where checkpoints are on this machine when save_dir is a URL; None: in the cache folder",
        "set_local_save_dir(directory)",
        not_empty,
    )
    hdfs_user: str | None = declare(
        None,
        "user name for HDFS, if not that of the environment (HADOOP_USER_NAME) or the system",
        "set_hdfs_user(name)",
        _user_name,
    )
    new_version: bool = declare(
        False, "save to a new folder save_dir/version_<n>, next to those of earlier runs",
        "set_new_version(flag)",
    )  # fmt: skip
    every_n_epochs: int = declare(
        1, "epochs between two checkpoints; the last epoch has one anyway; 0: that alone",
        "set_save_every_n_epochs(num)", at_least(0),
    )  # fmt: skip
    every_n_steps: int = declare(
        0, "steps between two checkpoints, besides those of epochs; 0: none",
        "set_save_every_n_steps(num)", at_least(0),
    )  # fmt: skip
    keep_last: int = declare(
        5, "number of newest checkpoints to keep; -1 keeps all", "set_max_last_checkpoint_num(num)",
        _last_checkpoints,
    )  # fmt: skip
    save_top_k: int = declare(
        1, "number of best checkpoints to keep besides; -1 keeps all", "set_save_top_k(num)",
        at_least(-1),
    )  # fmt: skip
    monitor: str | None = declare(
        None,
        "metric that makes a checkpoint the best: 'loss', or '<pair file> accuracy'; None: accuracy on "
        "the first pair file, else the loss",
        "set_monitor(metric)",
        not_empty,
    )
    monitor_mode: str = declare(
        "auto", "whether that metric should be high or low: max, min, or auto (min for a loss)",
        "set_monitor_mode(mode)", one_of("auto", "min", "max"),
    )  # fmt: skip
    asynchronous: bool = declare(
        True, "write checkpoints in the background, from a copy in this machine's memory",
        "set_async_save(flag)",
    )  # fmt: skip
    on_error: str = declare(
        "stop", "when a checkpoint cannot be written: stop, or continue without it",
        "set_save_error(policy)", one_of("stop", "continue"),
    )  # fmt: skip
    store_timeout: float = declare(
        120.0, "seconds for which a failing transfer to or from a store is tried again",
        "set_store_timeout(seconds)", more_than(0),
    )  # fmt: skip
