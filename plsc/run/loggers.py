"""Destinations of a run's metrics: files and tracking tools."""

from __future__ import annotations

import atexit
import importlib.util
import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from plsc.errors import OptionError
from plsc.run.callbacks import Logger
from plsc.storage.publish import replacing
from plsc.storage.regular import check_inside, open_regular, read_regular

METRICS_NAME = "metrics.jsonl"
PLOT_NAME = "loss.png"
_MOST_BYTES = 2**34  # of a file that a run continues


def scalars(entry: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the finite numbers of an entry except the step, by name.

    The ``loss`` of a step is named ``loss_step``, an accuracy of an evaluation ``eval/lfw/accuracy``.
    """
    numbers: dict[str, float] = {}
    for key, value in entry.items():
        name = prefix + key if prefix else _STEP_NAMES.get(key, key)
        if isinstance(value, Mapping):
            numbers |= scalars(value, f"{name}/")
        elif isinstance(value, (int, float)) and math.isfinite(value) and name != "step":
            numbers[_text(name)] = value
    return numbers


def _text(value: Any) -> str:
    """Return a string in UTF-8, which a path may not be."""
    return str(value).encode("utf-8", "replace").decode()


def _reachable(folder: Path) -> str:
    """Return a path in UTF-8 of a folder, if necessary by a link, which is removed at exit."""
    if _text(folder) == str(folder):
        return str(folder)
    link = Path(tempfile.mkdtemp(), "run")
    link.symlink_to(folder.absolute())
    atexit.register(shutil.rmtree, link.parent)
    return str(link)


_STEP_NAMES = {key: f"{key}_step" for key in ("loss", "accuracy", "accuracy_top5")}  # next to loss_epoch


class JsonLines:
    """Writes metrics.jsonl, one JSON object per line, and at the end of each epoch the plot loss.png.

    Lines after `step`, from an earlier attempt of a resumed run, are removed.
    """

    def __init__(self, folder: Path, step: int, *_: Any) -> None:
        self.path = folder / METRICS_NAME
        _drop_later_lines(self.path, step)
        self._file = open_regular(self.path, mode="ab")
        self._has_loss = False

    def write(self, entry: dict[str, Any]) -> None:
        """Write a line."""
        self._file.write(f"{json.dumps(entry)}\n".encode())
        self._file.flush()
        self._has_loss |= entry.get("mean_loss") is not None
        if "loss_epoch" in entry and self._has_loss:
            from plsc.evaluate.plots import plot_metrics  # importing matplotlib takes a third of a second

            plot_metrics(self.path, self.path.with_name(PLOT_NAME))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Writes TensorBoard events to the folder. Events after `step` are hidden by TensorBoard."""

    def __init__(self, folder: Path, step: int, options: Mapping[str, Any], run_id: str = "") -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self._writer = SummaryWriter(_reachable(folder), purge_step=step + 1)
        for summary in hparams(flat_options(options), {"loss_epoch": 0.0}):
            self._writer._get_file_writer().add_summary(summary)

    def write(self, entry: dict[str, Any]) -> None:
        """Write scalars and pictures."""
        for name, value in scalars(entry).items():
            self._writer.add_scalar(name, value, entry["step"])
        for name, path in entry.get("pictures", {}).items():
            pixels = np.asarray(Image.open(path).convert("RGB"))
            self._writer.add_image(_text(name), pixels, entry["step"], dataformats="HWC")
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


_REFUSED = re.compile(r"[^/\w.\- :]|(?<![^/])(?=\.{0,2}(/|$))")  # MLflow's rule: characters, '', '.', '..'


class MLflow:
    """Writes to a run of MLflow, at MLFLOW_TRACKING_URI. A resumed run continues the run `run_id`.

    Within ``mlflow.start_run()`` of a script, it writes to that run, and does not end it.
    """

    exit_code = 0

    def __init__(self, folder: Path, step: int, options: Mapping[str, Any], run_id: str = "") -> None:
        import mlflow

        self._mlflow = mlflow
        active = mlflow.active_run()
        self._is_own = active is None
        run = active or mlflow.start_run(run_id or None, run_name=_text(folder.name))
        self.run_id: str = run.info.run_id
        # A parameter cannot change.
        known = mlflow.get_run(self.run_id).data.params
        values = [(name, value) for name, value in flat_options(options).items() if name not in known]
        for start in range(0, len(values), 100):  # the limit of MLflow's servers
            mlflow.log_params(dict(values[start : start + 100]))

    def write(self, entry: dict[str, Any]) -> None:
        """Write scalars and pictures."""
        metrics: dict[str, float] = {}
        for given, value in scalars(entry).items():
            name = _REFUSED.sub("_", given)[:240]  # MLflow allows 250 characters
            while name in metrics:
                name += "_"
            metrics[name] = value
        self._mlflow.log_metrics(metrics, step=entry["step"], run_id=self.run_id)
        for path in entry.get("pictures", {}).values():
            self._mlflow.log_artifact(path, "pictures", run_id=self.run_id)

    def close(self) -> None:
        """End the run, unless it is the script's."""
        active = self._mlflow.active_run()
        status = "KILLED" if self.exit_code > 128 else "FAILED" if self.exit_code else "FINISHED"
        if self._is_own and active is not None and active.info.run_id == self.run_id:
            self._mlflow.end_run(status)
        elif self._is_own:  # the script has ended it, or has started another one within it
            self._mlflow.MlflowClient().set_terminated(self.run_id, status)


class WandB:
    """Writes to a run of Weights & Biases. A resumed run continues the run `run_id`.

    If the script has started a run, it writes to that run, and does not end it.
    """

    exit_code = 0

    def __init__(self, folder: Path, step: int, options: Mapping[str, Any], run_id: str = "") -> None:
        check_inside(folder / "wandb", folder)
        import wandb

        self._wandb = wandb
        self._is_own = wandb.run is None
        self._run = wandb.run or wandb.init(
            dir=_reachable(folder),
            id=run_id or None,
            resume="allow",
            settings=wandb.Settings(x_disable_meta=True),  # the command line, with URLs and passwords
        )
        config = json.loads(json.dumps(options, ensure_ascii=False).encode("utf-8", "replace"))
        self._run.config.update(config, allow_val_change=True)
        if self._is_own:
            self._run.define_metric("*", step_metric="step")  # W&B's steps cannot be repeated after a resume
        self.run_id: str = self._run.id

    def write(self, entry: dict[str, Any]) -> None:
        """Write scalars and pictures."""
        pictures = {name: self._wandb.Image(path) for name, path in entry.get("pictures", {}).items()}
        self._run.log({"step": entry["step"], **scalars(entry), **pictures})

    def close(self) -> None:
        """End the run, unless it is the script's."""
        if self._is_own:
            self._run.finish(self.exit_code)


LOGGERS: dict[str, Callable[[Path, int, Mapping[str, Any], str], Logger]] = {
    "jsonl": JsonLines,
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WandB,
}
"""The loggers by name; called with the folder of the run, the step from which it resumes (0: from scratch),
its options without secrets, and the `run_id` that the logger had before the resume."""


def check_packages(names: Iterable[str]) -> None:
    """Raise OptionError if the package of a logger is not installed."""
    for name in names:
        if name != "jsonl" and importlib.util.find_spec(name) is None:
            raise OptionError(
                f"the logger {name!r} needs the package {name}, which is not installed; run "
                f"pip install 'plsc[{name}]'"
            )


def flat_options(options: Mapping[str, Any]) -> dict[str, str | int | float]:
    """Return the options that have a value, by path, such as ``train.batch_size``: numbers and strings."""
    return {
        f"{group}.{name}": value if type(value) in (int, float) else _text(value)
        for group, values in options.items()
        for name, value in values.items()
        if value is not None
    }


def _read_earlier(path: Path) -> str:
    """Return the text of a regular file in its folder, not of a link; empty if there is none."""
    try:
        return read_regular(path, _MOST_BYTES, path.parent).decode(errors="replace")
    except FileNotFoundError:
        return ""


def _drop_later_lines(path: Path, step: int) -> None:
    """Remove lines that an earlier attempt wrote after `step`, and incomplete lines."""
    kept = []
    for line in _read_earlier(path).splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int) and entry["step"] <= step:
            kept.append(line + "\n")
    with replacing(path) as temporary:
        temporary.write_text("".join(kept), encoding="utf-8")
