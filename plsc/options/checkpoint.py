"""The options of where the state goes, and where it comes from."""

from __future__ import annotations

import re
from dataclasses import dataclass

from plsc.errors import OptionError
from plsc.option import at_least, declare, more_than, not_empty, one_of

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
        False, "save to a new folder save_dir/version_<n>, beside those of earlier runs",
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
        True, "write checkpoints beside training, from a copy in this machine's memory",
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
