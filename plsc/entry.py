"""`Entry`, the high-level interface: setters set options; each action calls one function."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist

from plsc.config import Options
from plsc.config.runtime import AutoMixedPrecisionLists, RuntimeOptions, ScalingArguments
from plsc.config.train import ParameterGroup, listed_names
from plsc.data.batch import Transform
from plsc.errors import OptionError, PlscError, record_failure, without_our_frames
from plsc.machine import on_terminal
from plsc.models import BaseModel
from plsc.models.base_model import Initialization
from plsc.names import name_of
from plsc.optim import Factory, ScheduleFunction
from plsc.original import OriginalSetters
from plsc.parallel.failure import FailureWatch
from plsc.parallel.world import World
from plsc.predict.embeddings import Embeddings
from plsc.predict.exporter import Conversion, run_conversion
from plsc.predict.predict import Images, Prediction, Request, run_prediction
from plsc.predict.protocols import ProtocolData, run_protocol, run_test
from plsc.storage.urls import local_folder, set_hdfs_user
from plsc.train.callbacks import Callback, Context, FunctionCallback, Logger, UserParts
from plsc.train.data import as_reader
from plsc.train.loop import TrainResult
from plsc.train.run import run_training

T = TypeVar("T")


class Entry(OriginalSetters):
    """Train, test and use a classifier over very many classes.

    The same script runs in one process and under torchrun, on CPU and GPU::

        from plsc import Entry

        ins = Entry()
        ins.set_dataset_dir("./train_data")
        ins.set_model_save_dir("./saved_model")
        ins.train()

    Attributes:
        train_reader: a function that returns a generator of (image float32 [C, H, W], label) or of batches
            of these, a torch Dataset of (image, label), or a DataLoader; replaces the dataset folder.
        train_transform: a transform of training images, after resizing, such as
            from torchvision.transforms.v2; its input is uint8 [C, H, W].
        test_reader: ``reader(dataset_dir, val_targets)``, like plsc.utils.jpeg_reader.test.
        predict_reader: like train_reader; a generator may yield images without labels.

    Every option can be read as an attribute, such as ``ins.train_batch_size`` of `set_train_batch_size`.

    User-fixable errors are subclasses of plsc.errors.PlscError.
    """

    # So that a misspelt attribute is an error.
    __slots__ = (
        "_callbacks",
        "_initializations",
        "_loggers",
        "_model",
        "_optimizer",
        "_schedule",
        "_store",
        "_world",
        "predict_reader",
        "test_reader",
        "train_reader",
        "train_transform",
    )

    def __init__(self) -> None:
        self.options = Options()
        self._model_parallel = False
        self.train_reader: Any = None
        self.train_transform: Transform | None = None
        self.test_reader: Any = None
        self.predict_reader: Any = None
        self._model: BaseModel | None = None
        self._optimizer: Factory | None = None
        self._schedule: ScheduleFunction | None = None
        self._initializations: list[Initialization] = []
        self._store: dist.Store | None = None
        self._callbacks: list[Callback] = []
        self._loggers: tuple[Logger, ...] = ()
        self._world: World | None = None

    def set_store(self, store: dist.Store) -> None:
        """Use a custom torch.distributed store for the rendezvous, instead of `runtime.init_method`.

        All ranks must share it, such as a TCPStore. Also call `set_rank` and `set_world_size`.
        """
        self._store = store

    def set_model(self, model: BaseModel) -> None:
        """Use a custom network instead of `model.name`. Raises OptionError unless it is a BaseModel."""
        if not isinstance(model, BaseModel):
            name = getattr(model, "__name__", type(model).__name__)
            raise OptionError(
                f"set_model got {name}; expected an instance of a subclass of "
                "plsc.models.base_model.BaseModel, such as set_model(MyModel())"
            )
        self._model = model
        self.options.set("model.name", name_of(type(model)))

    def set_optimizer(self, optimizer: str | Factory, **arguments: Any) -> None:
        """Set the optimizer of the network, by name or by a factory.

        Args:
            optimizer: a name (sets ``optim.optimizer``, see docs/optimizers.md), or ``f(groups)``, which
                returns a torch.optim.Optimizer over these parameter groups. A named optimizer uses the
                learning rate of set_lr; the optimizer of a factory keeps its own, which the schedule scales.
            **arguments: further arguments of the optimizer; they set ``optim.optimizer_arguments``.

        Raises OptionError for an unknown name or argument, here (nothing changes then) or before training.
        """
        if not isinstance(optimizer, str) and not callable(optimizer):
            raise OptionError(
                f"the optimizer is a {type(optimizer).__name__}; expected a name, or a function that takes "
                "parameter groups and returns a torch.optim.Optimizer (not an optimizer object: the network "
                "may not exist yet)"
            )
        name, factory = (optimizer, None) if isinstance(optimizer, str) else (name_of(optimizer), optimizer)
        self.options.set_together({"optim.optimizer": name, "optim.optimizer_arguments": arguments or None})
        self._optimizer = factory

    def set_lr_schedule(self, schedule: str | dict[str, Any] | ScheduleFunction, **arguments: Any) -> None:
        """Set the learning rate schedule, by name or by a function.

        Args:
            schedule: a name (sets ``optim.schedule``), or ``f(step)``, which returns the factor of the
                learning rate after `step` updates. The function must depend only on the step, so that a
                resumed run gets the same values. If it has an argument `total_steps`, it also receives the
                number of steps of the run, or None if that is unknown.
            **arguments: of a named schedule, such as end_factor of cosine.
        """
        function = None if isinstance(schedule, (str, dict)) else schedule
        super().set_lr_schedule(schedule if function is None else name_of(function), **arguments)
        self._schedule = function

    def add_parameter_group(
        self,
        pattern: str,
        *,
        lr_factor: float = 1.0,
        weight_decay: float | None = None,
        frozen: bool = False,
        **arguments: Any,
    ) -> None:
        """Add a parameter group with its own settings to ``optim.groups``.

        Args:
            pattern: a name of parameters or modules with wildcards, or ``type:`` and a module's class; the
                first matching group is used.
            lr_factor: factor of the learning rate.
            weight_decay: weight decay; None: that of the run.
            frozen: do not train these parameters.
            **arguments: arguments of the optimizer for this group, such as momentum.
        """
        group = ParameterGroup(pattern, lr_factor, weight_decay, frozen, arguments)
        self.set_parameter_groups((*self.options.optim.groups, group.as_dict()))

    def set_initialization(self, pattern: str, rule: str, **arguments: Any) -> None:
        """Add an initialisation rule for parameters. Raises OptionError for an unknown rule.

        Args:
            pattern: as in `add_parameter_group`; the first matching rule is used.
            rule: a function of torch.nn.init: xavier_uniform, xavier_normal, kaiming_uniform, kaiming_normal,
                orthogonal, normal, trunc_normal, uniform or constant.
            **arguments: arguments of that function.
        """
        self._initializations.append(Initialization(pattern, rule, arguments))

    def set_seed(self, seed: int) -> None:
        """Set ``train.seed``, the random seed of the run, and seed torch's generator.

        A custom network that is created after this call has the same initial weights each time.
        """
        super().set_seed(seed)
        torch.manual_seed(seed)

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
        """Train the backbone in float16 with loss scaling; on a CPU, in bfloat16.

        Args:
            use_fp16: False: train in float32. For bfloat16 on a GPU, use `set_precision`.
            init_loss_scaling: initial loss scale, from 1 to 2^24.
            incr_every_n_steps: consecutive finite steps after which the scale is multiplied by incr_ratio.
            decr_every_n_nan_or_inf: consecutive steps with a nan or inf after which the scale is multiplied
                by decr_ratio.
            incr_ratio: factor greater than 1.
            decr_ratio: factor between 0 and 1.
            use_dynamic_loss_scaling: False: keep the scale constant.
            amp_lists: operators that always compute in 16 bits or in float32
                (plsc.AutoMixedPrecisionLists).

        A step with a nan or inf is always skipped. Raises OptionError for an invalid value, and changes
        nothing then. See docs/performance.md.
        """
        amp_lists = amp_lists or AutoMixedPrecisionLists()
        lists = {name: sorted(set(names)) for name, names in vars(amp_lists).items() if names}
        given = ScalingArguments(
            init_loss_scaling, incr_every_n_steps, decr_every_n_nan_or_inf, incr_ratio, decr_ratio,
            use_dynamic_loss_scaling,
        )  # fmt: skip
        defaults = vars(ScalingArguments())
        changed = {name: value for name, value in vars(given).items() if value != defaults[name]}
        self.options.set_together(
            {
                "precision.mode": "float16" if use_fp16 else "float32",
                "precision.scaling_arguments": changed or None,
                "precision.lists": lists or None,
            }
        )

    def add_callback(
        self,
        callback: Callback | Callable[[Context], None],
        event: str | None = None,
        *,
        every: int = 1,
        layers: Sequence[str] = (),
    ) -> None:
        """Call a function or the methods of a Callback at the events of training, on all ranks.

        Args:
            callback: an instance of a class derived from `plsc.Callback`; or ``f(context)``, with an event.
            event: the event of a function, such as ``after_step``; see docs/callbacks.md.
            every: call it only in every n-th step; for events of a step.
            layers: names of modules whose outputs the function reads by ``context.layer_output(name)``.
        """
        if not isinstance(callback, Callback):
            callback = FunctionCallback(callback, event, every, layers)
        self._callbacks.append(callback)

    def set_loggers(self, *loggers: str | Sequence[str] | Logger) -> None:
        """Choose where metrics are written, by ``train.loggers`` and by loggers of your own.

        Args:
            *loggers: names of ``train.loggers``, and objects with the methods ``write(entry)`` and
                ``close()``, which are called on rank 0. See docs/callbacks.md.
        """
        names: list[str] = []
        custom: list[Logger] = []
        for one in loggers:
            if isinstance(one, Sequence):
                names += listed_names(one)
            else:
                custom.append(one)
        super().set_loggers(",".join(names))
        self._loggers = tuple(custom)

    def train(self) -> TrainResult:
        """Train and return the final metrics, evaluation and checkpoints.

        Writes checkpoints to ``<save_dir>/<epoch>/``, and metrics.jsonl and loss.png to ``<save_dir>``. With
        set_checkpoint_dir, training resumes from that checkpoint. SIGINT and SIGTERM save at the next step
        boundary and raise TrainingInterrupted.
        """
        return self._run(run_training)

    def test(
        self,
        protocol: str | None = None,
        *,
        images: str | os.PathLike[str] | None = None,
        pairs: str | os.PathLike[str] | None = None,
        gallery: str | os.PathLike[str] | None = None,
        distractors: str | os.PathLike[str] | None = None,
        templates: str | os.PathLike[str] | None = None,
        groups: str | os.PathLike[str] | None = None,
        output: str | os.PathLike[str] | None = None,
    ) -> dict[str, Any]:
        """Return the results of a checkpoint: a VerificationResult per pair file, by its name.

        With set_val_dir, also a ClassificationResult under ``val``: top-1 and top-5 accuracy. With a
        protocol, return its results by name, and write report.md, report.json and pictures to `output`.

        Args:
            protocol: one of `plsc.names.PROTOCOLS`, such as ``pairs``; see docs/evaluate.md.
            images: a labelled dataset (for ``identify``, the probes), by default that of set_dataset_dir; for
                a text list of pairs or for templates, the folder of the images, by default that of the list.
            pairs: for ``pairs``: a .bin file or a text list; by default the pair files of set_val_targets.
            gallery: for ``identify``: a labelled dataset; by default the first image of every other class.
            distractors: for ``identify``: a dataset of other classes, added to the gallery.
            templates: for ``templates``: the folder of the meta files.
            groups: file with a line ``<image><tab><group>`` per image; adds results such as ``lfw groups``.
            output: folder of the report, by default ``evaluation/<protocol>``.
        """
        data = {
            "images": images, "pairs": pairs, "gallery": gallery, "distractors": distractors,
            "templates": templates, "groups": groups,
        }  # fmt: skip
        places = {name: os.fspath(place) for name, place in data.items() if place is not None}
        if protocol is None and not places:
            return self._run(run_test)
        chosen = ProtocolData(str(protocol), **places)
        folder = local_folder(output or Path("evaluation", chosen.protocol), "output")
        return self._run(partial(run_protocol, data=chosen, output=folder))

    @overload
    def predict(
        self,
        images: Images | None = None,
        *,
        layers: str | Sequence[str] = (),
        field: str | Sequence[str] = "value",
        flatten_result: bool = False,
    ) -> Prediction: ...

    @overload
    def predict(
        self,
        images: Images | None = None,
        *,
        layers: str | Sequence[str] = (),
        field: str | Sequence[str] = "value",
        flatten_result: bool = False,
        output: str | os.PathLike[str],
    ) -> Embeddings: ...

    def predict(
        self,
        images: Images | None = None,
        *,
        layers: str | Sequence[str] = (),
        field: str | Sequence[str] = "value",
        flatten_result: bool = False,
        output: str | os.PathLike[str] | None = None,
    ) -> Prediction | Embeddings:
        """Return the embeddings of the images of the dataset or of predict_reader.

        Args:
            images: other images, without labels: a folder (images at any depth), a file with a path per line,
                or a list of paths or images.
            layers: names of modules whose outputs are returned next to the embeddings.
            field: one or several of ``value``: embeddings and outputs of layers; ``id``: the trained class
                with the highest logit; ``prob``: its softmax probability.
            flatten_result: join the outputs of the layers side by side, as one array [N, ...].
            output: a folder. All ranks write shards of rows to it, as .npy; nothing is gathered. The same
                call resumes an interrupted prediction. Returns the opened folder, like
                `plsc.open_embeddings`.
        """
        fields = (field,) if isinstance(field, str) else tuple(field)
        names = (layers,) if isinstance(layers, str) else tuple(layers)
        request = Request(names, fields, flatten_result)
        folder = None if output is None else local_folder(output, "output")
        return self._run(partial(run_prediction, images=images, request=request, output=folder))

    def convert_for_prediction(
        self,
        output: str | os.PathLike[str] | None = None,
        *,
        graph: str | None = None,
        flip: bool = False,
        classes: bool = False,
        thumbnails: bool = False,
        unseen: str | None = None,
        layout: str = "plain",
    ) -> Path:
        """Write the network of the checkpoint to a new folder, and return the folder.

        It holds model.json, README.md, config.json, the weights, and a graph with L2-normalised output. The
        graph is loaded again and compared with the network on images of the dataset, or random ones if none
        is set; if it differs, nothing is written. If there is a pair file, model.json gets thresholds per
        FAR. `plsc.load_network` and `plsc.export.open_model` load the folder. See docs/model.md.

        Args:
            output: the folder; by default ``<save_dir>/model``.
            graph: ``onnx``, ``torch`` (torch.export), or ``none``: only the weights. By default ``onnx``, if
                the extra `export` is installed.
            flip: add the embedding of the mirrored image, inside the graph.
            classes: also write the class weights.
            thumbnails: also write one image per class.
            unseen: labelled dataset (path or URL) of at least 20 classes that were not trained: model.json
                gets the FPIR of galleries of any size, for ``plsc serve --fpir``.
            layout: ``plain``; ``triton``: the folder is a model of a Triton model repository;
                ``insightface``: model.onnx takes images as insightface scales them.
        """
        conversion = Conversion(graph, flip, classes, thumbnails, unseen, layout)
        folder = None if output is None else Path(output)
        return self._run(partial(run_conversion, output=folder, conversion=conversion))

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which should print and write results."""
        return self._world is None or self._world.is_main

    def _run(self, action: Callable[[Options, World, UserParts], T]) -> T:
        """Run an action on all ranks; if one rank fails, the others stop with its error message."""
        if self.options.checkpoint.hdfs_user is not None:
            set_hdfs_user(self.options.checkpoint.hdfs_user)
        if self._world is None:
            runtime = self.options.runtime
            if runtime.cpu_threads:
                torch.set_num_threads(runtime.cpu_threads)
            self._world = join_ranks(runtime, self._store)
            atexit.register(self._world.close)
        user = UserParts(
            self._model,
            as_reader(self.train_reader, "train_reader"),
            self.test_reader,
            as_reader(self.predict_reader, "predict_reader"),
            self.train_transform,
            self._optimizer,
            self._schedule,
            tuple(self._initializations),
            tuple(self._callbacks),
            self._loggers,
        )
        world = self._world
        try:
            with on_terminal(), FailureWatch(world):
                return action(self.options, world, user)
        except BaseException as error:
            record_failure(error)
            self._world = None  # do not reuse process groups after a failure
            # Other ranks may wait in a collective: they notice the failure when the connections close.
            atexit.unregister(world.close)
            atexit.register(world.close, wait=False)
            if isinstance(error, PlscError):
                raise without_our_frames(error)  # noqa: B904 - its own causes stay
            raise


def join_ranks(runtime: RuntimeOptions, store: dist.Store | None = None) -> World:
    """Join the other ranks as the options say, or in a store; see `World.from_environment`."""
    return World.from_environment(
        runtime.device,
        runtime.backend,
        runtime.timeout,
        init_method=runtime.init_method,
        rank=runtime.rank,
        size=runtime.world_size,
        store=store,
    )
