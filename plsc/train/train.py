"""Train: choose the folder, settle the options, build the run, restore it, run the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from plsc.config import Options
from plsc.config.option import load_function
from plsc.config.train import listed_names
from plsc.errors import OptionError, refusing
from plsc.names import names_code
from plsc.parallel.world import World
from plsc.train.average import WeightAverage
from plsc.train.callbacks import Callback, Callbacks, Logger, UserParts
from plsc.train.folder import Start, open_directories, open_start
from plsc.train.layers import LayerTable, Profile
from plsc.train.log import GradientNorm, Logging, Pictures, check_packages
from plsc.train.loop import Trainer, TrainResult
from plsc.train.restore import restore, start_from_pretrained
from plsc.train.run import Run, build_run, describe_run
from plsc.train.saving import Saver, opened_file
from plsc.train.settle import settle
from plsc.train.snapshot import seed_generators
from plsc.train.targets import HeldOutSet, Target
from plsc.train.watch import DataWait, LearningCheck, Progress, in_temporary_folder, remove_temporary


def run_training(options: Options, world: World, user: UserParts) -> TrainResult:
    """Train from scratch, from the weights of `model.pretrained`, or resume `checkpoint.load_dir`."""
    start = open_start(options, world)
    config = settle(options, start.checkpoint, world.size, user.model)
    check_packages(listed_names(config.train.loggers))
    is_trial = config.train.fast_dev_run
    run = build_run(config, world, user, start.checkpoint)
    if is_trial:
        start = in_temporary_folder(start, world)
    directories = open_directories(config, world, start)
    try:
        add_output(run, start, user.loggers)
        world.log(start.note)
        lines = [f"differs from the checkpoint: {line}" for line in config.differences]
        warm_start = None
        with opened_file(run.head, world, start.checkpoint):
            if start.checkpoint:
                more = restore(run, *start.checkpoint)
                lines += [f"differs from the checkpoint: {line}" for line in more]
            else:
                warm_start = start_from_pretrained(run)
                lines += warm_start.lines() if warm_start else []
                seed_generators(world, config.train.seed)
            for line in [*describe_run(run, start.checkpoint), *lines]:
                world.log(line)
            return Trainer(run, None if is_trial else Saver(run, directories), warm_start).train()
    finally:
        directories.release()
        if is_trial:
            remove_temporary(directories)


def add_output(run: Run, start: Start, loggers: Sequence[Logger] = ()) -> None:
    """Add the callbacks of the options to a run, which write its metrics and warn about problems.

    loggers: the user's, in addition to those of `train.loggers`.
    """
    train, run.folder = run.options.train, start.local
    decay = run.options.optim.ema_decay
    callbacks: list[Callback] = [
        *([WeightAverage(run.network, decay, run.world.backbone_group)] if decay else []),
        *run.callbacks.all,
        DataWait.of(run.data.loader, run.world),
        LearningCheck.of(run, is_resumed=start.checkpoint is not None),
        Progress(),
        *map(partial(named_callback, targets=run.targets), listed_names(train.callbacks)),
    ]
    if not train.fast_dev_run:
        callbacks.append(Logging(loggers, is_same_run=bool(start.resumed)))
    run.callbacks = Callbacks(callbacks, run.network)


def named_callback(name: str, targets: Sequence[Target | HeldOutSet] = ()) -> Callback:
    """Return a callback of `train.callbacks`. Raises OptionError if a custom one cannot be made."""
    if not names_code(name):
        return CALLBACKS[name](targets)
    create = load_function(name, "train.callbacks", "add_callback")
    with refusing(
        f"cannot create the callback {name}", "expected a subclass of plsc.Callback without arguments"
    ):
        callback = create()
    if not isinstance(callback, Callback):
        raise OptionError(f"train.callbacks has {name}, which makes no plsc.Callback")
    return callback


CALLBACKS: dict[str, Callable[[Sequence[Target | HeldOutSet]], Callback]] = {
    "gradient_norm": lambda _: GradientNorm(),
    "images": Pictures,
    "check_shape": lambda _: LayerTable(with_content=False),
    "check_content": lambda _: LayerTable(with_content=True),
    "profile": lambda _: Profile(),
}
