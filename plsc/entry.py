"""The facade: setters fill the options, each verb calls one function."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from plsc.config import Options
from plsc.config.model import Initialization
from plsc.config.optim import ParameterGroup
from plsc.config.option import name_of
from plsc.config.runtime import AutoMixedPrecisionLists
from plsc.config.setters import Setters
from plsc.data.transform import Transform
from plsc.errors import OptionError, record_failure
from plsc.evaluate.verification import VerificationResult
from plsc.models import BaseModel
from plsc.optim.optimizers import Factory
from plsc.parallel.failure import FailureWatch
from plsc.parallel.world import World
from plsc.profiling import ProfileResult, run_profile
from plsc.storage.urls import set_hdfs_user
from plsc.terminal import on_terminal
from plsc.train.build import UserParts
from plsc.train.class_tools import run_dominant
from plsc.train.evaluation import Prediction, run_prediction, run_test
from plsc.train.loop import TrainResult, run_training
from plsc.train.optim import ScheduleFunction, check_schedule_function

T = TypeVar("T")


class Entry(Setters):
    """Train, test and use a classifier over very many classes.

    The same script runs in one process and under torchrun, on CPU and GPU::

        from plsc import Entry

        ins = Entry()
        ins.set_dataset_dir("./train_data")
        ins.set_model_save_dir("./saved_model")
        ins.train()

    Attributes:
        train_reader: a function that returns a generator of (CHW float32 image, label), or a map-style
            torch Dataset of (image, label), instead of the dataset folder.
        train_transform: a transform of the training images, after resizing and the built-in augmentation:
            of torchvision.transforms.v2 (it gets a uint8 tensor [C, H, W]), or one that is called as
            ``f(image=array)["image"]``, as those of albumentations.
        test_reader: ``reader(dataset_dir, val_targets)``, as plsc.utils.jpeg_reader.test.
        predict_reader: as train_reader; a generator may yield images without labels.

    Errors that a user can fix are subclasses of plsc.errors.PlscError.
    """

    def __init__(self) -> None:
        self.options = Options()
        self.train_reader: Any = None
        self.train_transform: Transform | None = None
        self.test_reader: Any = None
        self.predict_reader: Any = None
        self._model: BaseModel | None = None
        self._optimizer: Factory | None = None
        self._schedule: ScheduleFunction | None = None
        self._store: dist.Store | None = None
        self._world: World | None = None

    def set_store(self, store: dist.Store) -> None:
        """Let the ranks meet in a torch.distributed store of your own, instead of `runtime.init_method`.

        It must be shared by all ranks, such as a TCPStore; `set_rank` and `set_world_size` number them.
        """
        if not isinstance(store, dist.Store):
            raise OptionError(f"the store is a {type(store).__name__}; expected a torch.distributed.Store")
        self._store = store

    def set_model(self, model: BaseModel) -> None:
        """Use a network of your own instead of `model.name`; OptionError unless it is a BaseModel."""
        if not isinstance(model, BaseModel):
            is_class = isinstance(model, type)
            found = f"the class {model.__name__}" if is_class else f"a {type(model).__name__}"
            raise OptionError(
                f"the model is {found}; expected an instance of a class derived from "
                "plsc.models.base_model.BaseModel"
            )
        self._model = model
        self.options.set("model.name", name_of(type(model)))

    def set_optimizer(self, optimizer: str | Factory, **arguments: Any) -> None:
        """Use an optimizer for the network: by name, or by a factory of your own.

        optimizer: a name, which sets ``optim.optimizer``, see docs/optimizers.md; or ``f(groups)``, which
        returns a torch.optim.Optimizer over these parameter groups: a function, a class, a functools.partial.
        A named one takes its learning rate from set_lr; of a factory's, the schedule multiplies its own.
        arguments: more of the optimizer's settings; they set ``optim.optimizer_arguments``.

        OptionError for an unknown name or argument, here (and nothing changes) or when training begins.
        """
        if not isinstance(optimizer, str) and not callable(optimizer):
            raise OptionError(
                f"the optimizer is a {type(optimizer).__name__}; expected a name, or a function that takes "
                "parameter groups and returns a torch.optim.Optimizer (the network's parameters may not "
                "exist yet)"
            )
        name, factory = (optimizer, None) if isinstance(optimizer, str) else (name_of(optimizer), optimizer)
        self.options.set_together({"optim.optimizer": name, "optim.optimizer_arguments": arguments or None})
        self._optimizer = factory

    def set_lr_schedule(self, schedule: str | ScheduleFunction) -> None:
        """Let the learning rate follow a schedule: one by name, or a function of your own.

        schedule: a name, which sets ``optim.schedule``; or ``f(step)``, which returns what the learning rate
        is multiplied by once `step` updates were made. It must depend on the step alone: resuming asks
        it again. With an argument `total_steps` it is told the run's steps, None where they are not known.
        """
        if isinstance(schedule, str):
            super().set_lr_schedule(schedule)
            self._schedule = None
            return
        check_schedule_function(schedule)
        super().set_lr_schedule(name_of(schedule))
        self._schedule = schedule

    def add_parameter_group(
        self,
        pattern: str,
        *,
        lr_factor: float = 1.0,
        weight_decay: float | None = None,
        l1_decay: float | None = None,
        frozen: bool = False,
        **arguments: Any,
    ) -> None:
        """Train the parameters that a pattern matches in their own way: add a group to ``optim.groups``.

        pattern: a name of parameters or modules with wildcards, ``type:`` and a module's class, or ``re:``
        and a regular expression; the first group that matches counts. lr_factor: of the learning rate.
        weight_decay, l1_decay: instead of the run's. frozen: not trained at all. arguments: settings of the
        optimizer, such as momentum.
        """
        group = ParameterGroup(pattern, lr_factor, weight_decay, l1_decay, frozen, arguments)
        self.set_parameter_groups((*self.options.optim.groups, group.as_dict()))

    def set_initialization(self, pattern: str, rule: str, **arguments: Any) -> None:
        """Let parameters begin by a rule: add one to ``model.initialization``.

        pattern: as in `add_parameter_group`. rule: xavier_uniform, xavier_normal, kaiming_uniform,
        kaiming_normal, orthogonal, normal, trunc_normal, uniform or constant, of torch.nn.init, with their
        arguments. The first rule that matches a parameter counts.
        """
        rules = self.options.model.initialization
        one = Initialization(pattern, rule, arguments)
        self.set_initializations((*rules, one.as_dict()))

    def set_seed(self, seed: int) -> None:
        """Set ``train.seed``, the one seed of the run, and torch's generator.

        So a model of your own that is made after this call starts from the same weights each time.
        """
        super().set_seed(seed)
        torch.manual_seed(seed)

    def add_dataset(
        self,
        name: str,
        path: str | os.PathLike[str],
        weight: float = 1.0,
        *,
        class_num: int | None = None,
        loss_type: str | None = None,
        margin: float | None = None,
        scale: float | str | None = None,
        sample_ratio: float | None = None,
    ) -> None:
        """Train on several data sets, each with its own classes and head: add one to ``data.datasets``.

        name: of letters, digits, _ and -; the head's in logs and checkpoints. path: as `set_dataset_dir`
        takes it. weight: its share of the images of a step, next to the weights of the others. The rest: of
        its head alone; what is not given is as the run's. OptionError for a name that is there, or a wrong
        value.

        See docs/several.md.
        """
        self.options.add_data_set(
            name=name,
            path=path,
            weight=weight,
            class_num=class_num,
            loss_type=loss_type,
            margin=margin,
            scale=scale,
            sample_ratio=sample_ratio,
        )

    def set_mixed_precision(
        self,
        use_fp16: bool,
        init_loss_scaling: float = 1.0,
        incr_every_n_steps: int = 2000,
        decr_every_n_nan_or_inf: int = 2,
        incr_ratio: float = 2.0,
        decr_ratio: float = 0.5,
        use_dynamic_loss_scaling: bool = True,
        amp_lists: AutoMixedPrecisionLists | None = None,
    ) -> None:
        """Train the backbone in float16, with a scaled loss; on a CPU, which has no use for it, in bfloat16.

        use_fp16: False trains in float32. For bfloat16 on a GPU, which needs no scaling: `set_precision`.
        init_loss_scaling: what the loss is multiplied with at first, from 1 to 2^24. incr_every_n_steps:
        after so many finite steps in a row the scale is multiplied by incr_ratio, more than 1.
        decr_every_n_nan_or_inf: after so many steps in a row with a nan or inf by decr_ratio, between 0 and
        1. use_dynamic_loss_scaling: False leaves the scale as it is. amp_lists: what stays float32, or is
        forced to 16 bits (plsc.AutoMixedPrecisionLists). A step with a nan or inf is skipped in any case.
        See docs/precision.md.

        Raises OptionError for a wrong value, and changes nothing then.
        """
        if not isinstance(use_fp16, bool):
            raise OptionError(f"use_fp16 is {use_fp16!r}; expected True or False")
        if not isinstance(amp_lists, AutoMixedPrecisionLists | None):
            raise OptionError(
                f"amp_lists is {amp_lists!r}; expected plsc.AutoMixedPrecisionLists(custom_white_list, "
                "custom_black_list), or None"
            )
        lists = amp_lists or AutoMixedPrecisionLists()
        self.options.set_together(
            {
                "precision.mode": "float16" if use_fp16 else "float32",
                "precision.init_loss_scaling": init_loss_scaling,
                "precision.incr_every_n_steps": incr_every_n_steps,
                "precision.decr_every_n_nan_or_inf": decr_every_n_nan_or_inf,
                "precision.incr_ratio": incr_ratio,
                "precision.decr_ratio": decr_ratio,
                "precision.use_dynamic_loss_scaling": use_dynamic_loss_scaling,
                "precision.white_list": lists.white_list,
                "precision.black_list": lists.black_list,
            }
        )

    def set_hdfs_info(
        self,
        fs_name: str,
        fs_ugi: str | None = None,
        fs_dir_for_save: str | None = None,
        fs_checkpoint_dir: str | None = None,
    ) -> None:
        """Fetch a checkpoint from HDFS before training, and send there each one that is saved.

        fs_name: the file system, such as ``hdfs://namenode:9000``. fs_ugi: "name,password"; the name is the
        HDFS user. HDFS's simple authentication has no place for the password, and it is kept nowhere.
        fs_dir_for_save: folder there for the checkpoints of set_model_save_dir. fs_checkpoint_dir: a
        checkpoint there, which is fetched to the folder of set_checkpoint_dir (else to the cache) and loaded.

        The same as set_upload_dir and set_download_dir with URLs. Raises OptionError for a name that is
        no URL.
        """
        if not isinstance(fs_name, str) or "://" not in fs_name:
            raise OptionError(
                f"fs_name is {fs_name!r}; expected the URL of a file system, such as hdfs://namenode:9000"
            )
        values: dict[str, str] = {}
        if fs_ugi is not None:
            # What follows the comma is a password, which goes nowhere, messages included.
            values["checkpoint.hdfs_user"] = str(fs_ugi).split(",", 1)[0].strip()
        for option, folder in (
            ("upload_dir", fs_dir_for_save),
            ("download_dir", fs_checkpoint_dir),
        ):
            if folder is not None:
                is_url = "://" in folder
                url = folder if is_url else f"{fs_name.rstrip('/')}/{folder.lstrip('/')}"
                values[f"checkpoint.{option}"] = url
        self.options.set_together(values)

    def train(self) -> TrainResult:
        """Train and return the final metrics, evaluation and checkpoints.

        Writes checkpoints to ``<save_dir>/<epoch>/``, and metrics.jsonl and loss.png beside them. With
        set_checkpoint_dir it goes on from there. SIGINT and SIGTERM save at the next step boundary and
        raise TrainingInterrupted.
        """
        return self._together(run_training)

    def profile(self, steps: int = 20, output: str | os.PathLike[str] = "profile") -> ProfileResult:
        """Make some steps of the training and return where their time goes; nothing is trained or saved.

        steps: how many are split into parts, 1 to 1000; about twice as many are made. output: a folder for
        the table, a trace of each rank for the usual viewers, and its slowest operators.

        See docs/profiling.md.
        """
        return self._together(partial(run_profile, steps=steps, output=output))

    def test(self) -> dict[str, VerificationResult]:
        """Return the verification of a checkpoint's network on every pair file, by its name."""
        return self._together(run_test)

    def predict(self) -> Prediction:
        """Return the embeddings of the dataset's images, or of predict_reader's."""
        return self._together(run_prediction)

    def keep_dominant(self, output: str | os.PathLike[str]) -> Path:
        """Write the checkpoint of set_checkpoint_dir to `output` with one row a class; return its path.

        Of each class's sub-centres the one that most of its training images are nearest to stays.
        """
        return self._together(partial(run_dominant, output=Path(output)))

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that should print and write."""
        return self._world is None or self._world.is_main

    def _together(self, verb: Callable[[Options, World, UserParts], T]) -> T:
        """Run a verb on all ranks; when one fails, the others stop with its message."""
        if self.options.checkpoint.hdfs_user is not None:
            set_hdfs_user(self.options.checkpoint.hdfs_user)
        if self._world is None:
            runtime = self.options.runtime
            if runtime.cpu_threads:
                torch.set_num_threads(runtime.cpu_threads)
            self._world = World.from_options(runtime, self._store)
            atexit.register(self._world.close)
        user = UserParts(
            self._model,
            self.train_reader,
            self.test_reader,
            self.predict_reader,
            self.train_transform,
            self._optimizer,
            self._schedule,
        )
        world = self._world
        try:
            with on_terminal(), FailureWatch(world):
                return verb(self.options, world, user)
        except BaseException as error:
            record_failure(error)
            self._world = None  # what failed once is not used again
            # Its peers may hang in a collective: they hear of it when the connections close.
            atexit.unregister(world.close)
            atexit.register(world.close, wait=False)
            raise
