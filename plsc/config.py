"""The options, once: name, type, default, meaning, check and setter of each.

Setters, command-line flags, config files, the docs page and the options in a checkpoint all derive
from this table. An option is named by its path, such as ``train.batch_size``.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import typing
from collections.abc import Iterator, MutableSet
from dataclasses import dataclass, field
from typing import Any

from plsc.data_set import DataSet, read_data_sets
from plsc.errors import OptionError, suggest
from plsc.option import OptionSpec, at_least, between, declare, more_than, not_empty, one_of


def _image_shape(shape: tuple[int, ...]) -> str | None:
    good = len(shape) == 3 and shape[0] in (1, 3) and min(shape) >= 1
    return None if good else "(channels, height, width) with 1 or 3 channels, such as (3, 112, 112)"


def _increasing_steps(steps: tuple[int, ...]) -> str | None:
    rising = all(a < b for a, b in itertools.pairwise(steps))
    return None if rising and all(s > 0 for s in steps) else "increasing positive step numbers"


def _last_checkpoints(number: int) -> str | None:
    return None if number == -1 or number >= 1 else "at least 1, or -1 to keep all"


def _user_name(text: str) -> str | None:
    if not text.strip() or "," in text:  # what follows a comma may be a password: it is not shown
        raise OptionError(
            "checkpoint.hdfs_user is not a plain name; expected the name alone, without a password"
        )
    return None


_ONE_SLASH = re.compile(r"(s3a?|gs|gcs|hdfs|webhdfs|abfss?|az|memory|file):/(?!/)")


def _place(text: str) -> str | None:
    if not text.strip():
        return "a path or URL that is not empty"
    return "a URL with two slashes, such as s3://bucket/run" if _ONE_SLASH.match(text) else None


def _url(text: str) -> str | None:
    return None if "://" in text else "an fsspec URL such as hdfs://server/folder"


_MARGINS = (
    "arcface",
    "softmax",
    "normface",
    "cosface",
    "sphereface",
    "combined",
    "adaface",
    "magface",
    "curricularface",
)
LOSS_TYPES = tuple(f"dist_{name}" for name in _MARGINS) + _MARGINS


def _three_numbers(values: tuple[float, ...]) -> str | None:
    return None if len(values) == 3 else "three numbers: m1, m2, m3"


def _three_shares(values: tuple[float, ...]) -> str | None:
    good = len(values) == 3 and all(0 <= value <= 1 for value in values)
    return None if good else "three numbers from 0 to 1: brightness, contrast, saturation"


def _two_decays(values: tuple[float, ...]) -> str | None:
    good = len(values) == 2 and all(0 <= value < 1 for value in values)
    return None if good else "two numbers from 0 to below 1"


def _rising_pair(values: tuple[float, ...]) -> str | None:
    good = len(values) == 2 and 0 < values[0] < values[1]
    return None if good else "two positive numbers, the lower one first"


def _data_sets(values: tuple[dict[str, Any], ...]) -> None:
    read_data_sets(values, find_option)


def _ratio(value: float) -> str | None:
    return None if 0 < value <= 1 else "a share of the classes in (0, 1]"


@dataclass
class ModelOptions:
    """The backbone."""

    name: str = declare(
        "ResNet50",
        "ResNet18, ResNet34, ResNet50, ResNet101, ResNet152, IResNet18, IResNet34, IResNet50, IResNet100, "
        "IResNet200, SmallResNet, 'torchvision/<name>', 'timm/<name>', or 'package.module:Class' for a "
        "BaseModel of your own",
        "set_model_name(name)",
        not_empty,
    )
    emb_size: int = declare(512, "size of the embedding", "set_emb_size(size)", at_least(1))
    image_shape: tuple[int, int, int] = declare(
        (3, 112, 112),
        "channels, height, width of the input; on the command line [3,112,112]",
        "set_image_shape(shape)",
        _image_shape,
    )
    dropout: float = declare(
        0.4, "dropout before the embedding layer", "set_dropout(ratio)", between(0, 0.99)
    )
    sync_batch_norm: bool = declare(
        False, "batch-norm statistics over the global batch", "set_sync_batch_norm(sync)"
    )
    pretrained: str | None = declare(
        None,
        "weights to start from, where name and shape match: a checkpoint, a .safetensors file, or a state "
        "dict of torch.save; optimizer and position start afresh",
        "set_pretrained(path)",
        not_empty,
    )


@dataclass
class HeadOptions:
    """The classification head."""

    loss_type: str = declare(
        "dist_arcface",
        f"dist_ and one of {', '.join(_MARGINS)}: class rows sharded over the ranks; without dist_, all rows "
        "on every rank",
        "set_loss_type(loss_type)",
        one_of(*LOSS_TYPES),
    )
    class_num: int | None = declare(
        None,
        "number of classes; when not set, the largest label + 1",
        "set_class_num(num)",
        at_least(1),
    )
    margin: float = declare(
        0.5,
        "margin of arcface, adaface, curricularface (radians), cosface (of the cosine), sphereface "
        "(factor of the angle); when not set, 0.5 for arcface and its paper's for each other one",
        "set_margin(margin)",
        at_least(0),
    )
    scale: float = declare(64.0, "scale of the cosines", "set_scale(scale)", more_than(0))
    combined_margins: tuple[float, ...] = declare(
        (1.0, 0.3, 0.2),
        "of the loss combined: m1, m2, m3 in cos(m1 angle + m2) - m3",
        "set_combined_margins(margins)",
        _three_numbers,
    )
    easy_margin: bool = declare(
        False, "no margin where the angle is over 90 degrees; when not set, off for arcface, on for magface",
        "set_easy_margin(easy)",
    )  # fmt: skip
    straight_through: bool = declare(
        False, "of arcface: take the margin as a constant in the gradient, as some implementations do",
        "set_straight_through(flag)",
    )  # fmt: skip
    margin_momentum: float = declare(
        0.99, "of adaface and curricularface: share of the old running statistics",
        "set_margin_momentum(momentum)", between(0, 1),
    )  # fmt: skip
    adaface_h: float = declare(
        0.333, "of adaface: how much the embedding's norm counts", "set_adaface_h(h)", at_least(0)
    )
    magface_norms: tuple[float, ...] = declare(
        (10.0, 110.0),
        "of magface: lowest and highest norm",
        "set_magface_norms(norms)",
        _rising_pair,
    )
    magface_margins: tuple[float, ...] = declare(
        (0.45, 0.8),
        "of magface: margins at these norms",
        "set_magface_margins(margins)",
        _rising_pair,
    )
    magface_lambda: float = declare(
        35.0, "of magface: weight of its regulariser", "set_magface_lambda(weight)", at_least(0)
    )
    sub_centers: int = declare(
        1, "rows a class (sub-centre ArcFace), the nearest counts", "set_sub_centers(num)",
        between(1, 64),
    )  # fmt: skip
    sample_ratio: float = declare(
        1.0,
        "share of a rank's classes that take part in a step (PartialFC); those of the batch always do",
        "set_sample_ratio(ratio)",
        _ratio,
    )
    hard_share: float = declare(
        0.0,
        "share of the sampled classes that are the nearest to the batch, instead of random ones",
        "set_hard_share(share)",
        between(0, 0.99),
    )
    optimizer: str = declare(
        "sgd", "of the sharded class rows: sgd (with optim.momentum), adamw, adagrad (one number a row)",
        "set_head_optimizer(name)", one_of("sgd", "adamw", "adagrad"),
    )  # fmt: skip
    lr_factor: float = declare(
        1.0, "the class rows' learning rate is the backbone's times this", "set_head_lr_factor(factor)",
        more_than(0),
    )  # fmt: skip
    row_dtype: str = declare(
        "float32", "type of the sharded class rows: float32, or bfloat16 (rounded stochastically)",
        "set_row_dtype(dtype)", one_of("float32", "bfloat16"),
    )  # fmt: skip
    state_dtype: str = declare(
        "float32", "type of their optimizer state: float32, bfloat16, or int8 (momentum of sgd only)",
        "set_row_state_dtype(dtype)", one_of("float32", "bfloat16", "int8"),
    )  # fmt: skip
    offload: bool = declare(
        False, "keep class rows and their state in CPU memory; those of a step travel to the GPU",
        "set_head_offload(offload)",
    )  # fmt: skip
    products: str = declare(
        "float32", "type of the factors in the head's matrix products: float32 or bfloat16",
        "set_head_products(dtype)", one_of("float32", "bfloat16"),
    )  # fmt: skip
    keep_mb: float = declare(
        0.0,
        "MiB a rank in which the first pass over the rows may leave its terms for the second, in 16 bits; "
        "where they do not fit, they are computed again",
        "set_head_keep_mb(mebibytes)",
        at_least(0),
    )
    kernels: str = declare(
        "auto", "what computes the head: auto, torch, native (C, on CPUs) or triton (on GPUs)",
        "set_head_kernels(name)", one_of("auto", "torch", "native", "triton"),
    )  # fmt: skip
    tile: int | None = declare(
        None, "class rows at a time; when not set, by the batch size", "set_head_tile(rows)",
        at_least(1),
    )  # fmt: skip


@dataclass
class DataOptions:
    """What is read, and how."""

    dataset_dir: str = declare(
        "./train_data",
        "the training data: a folder (label.txt and images/, one folder of images per class, or base64 "
        "parts), a file or shards of .rec, .parquet, .tar, .csv, .jsonl or .lmdb, or an fsspec URL of one",
        "set_dataset_dir(directory)",
        not_empty,
    )
    datasets: tuple[dict[str, Any], ...] = declare(
        (),
        "several data sets with a head each, instead of dataset_dir: each has a name and a path, and may "
        "have a weight, class_num, loss_type, margin, scale and sample_ratio; add_dataset adds one",
        "set_datasets(datasets)",
        _data_sets,
    )
    train_image_num: int | None = declare(
        None,
        "images per epoch, for readers that cannot tell; when not set, counted",
        "set_train_image_num(num)",
        at_least(1),
    )
    val_targets: str | None = declare(
        None,
        "names of pair files (name.bin in the dataset folder), separated by commas; "
        "when not set, 'lfw' if lfw.bin is there",
        "set_val_targets(targets)",
    )
    num_workers: int = declare(
        2, "threads or processes per rank that read images ahead; 0 reads between the steps",
        "set_num_workers(num)", between(0, 1024),
    )  # fmt: skip
    loader: str = declare(
        "auto",
        "what reads images: threads, processes (for Python code of your own), or auto, which chooses",
        "set_loader(kind)",
        one_of("auto", "threads", "processes"),
    )
    order: str = declare(
        "global",
        "order of an epoch: global (all shuffled), block (neighbours stay near: disks, remote stores), "
        "sequential, or rank_files (rank r reads part r of file_list.txt alone, shuffled)",
        "set_order(order)",
        one_of("global", "block", "sequential", "rank_files"),
    )
    block_samples: int = declare(
        1024, "order block: neighbouring samples that are read together", "set_block_samples(num)",
        at_least(1),
    )  # fmt: skip
    pool_samples: int = declare(
        65536, "order block: samples that are shuffled among each other", "set_pool_samples(num)",
        at_least(1),
    )  # fmt: skip
    reader_shards_itself: bool = declare(
        False,
        "call a generator reader as reader(rank, ranks): it yields this rank's samples only",
        "set_reader_shards_itself(flag)",
    )
    cache: str = declare(
        "none",
        "keep what the first epoch reads: none, memory or disk",
        "set_cache(where)",
        one_of("none", "memory", "disk"),
    )
    cache_bytes: int = declare(
        2 * 2**30,
        "the most bytes that the cache of a rank takes",
        "set_cache_bytes(num)",
        at_least(1),
    )
    cache_decoded: bool = declare(
        False,
        "keep pixels of the network's size, not encoded images: no decoding again, about 8 times the bytes",
        "set_cache_decoded(flag)",
    )
    cache_dir: str | None = declare(
        None,
        "local folder of the disk cache; when not set, the system's for temporary files",
        "set_cache_dir(directory)",
        not_empty,
    )
    last_batch: str = declare(
        "pad",
        "the last batch of an epoch: pad (repeats the epoch's first samples), keep (smaller) or drop",
        "set_last_batch(policy)",
        one_of("pad", "keep", "drop"),
    )
    bad_images: str = declare(
        "stop",
        "a sample that cannot be used: stop the run, skip (left out), or replace (another, drawn by the "
        "seed); what is passed over is counted and listed in bad_samples.txt",
        "set_bad_images(policy)",
        one_of("stop", "skip", "replace"),
    )
    crop_padding: int = declare(
        0, "augmentation: pad by so many black pixels and cut out at random", "set_crop_padding(pixels)",
        between(0, 4096),
    )  # fmt: skip
    colour_jitter: tuple[float, ...] = declare(
        (0.0, 0.0, 0.0),
        "augmentation: vary brightness, contrast and saturation by factors in [1 - x, 1 + x]",
        "set_colour_jitter(strengths)",
        _three_shares,
    )
    low_resolution: float = declare(
        0.0, "augmentation: share of images shrunk to 25-100 % of their size and enlarged again",
        "set_low_resolution(share)", between(0, 1),
    )  # fmt: skip
    random_erasing: float = declare(
        0.0, "augmentation: share of images of which a rectangle, 2-20 % of the area, turns grey",
        "set_random_erasing(share)", between(0, 1),
    )  # fmt: skip
    flip: bool = declare(
        True,
        "mirror half of the training images, and add the mirrored image's embedding in evaluation",
        "set_flip(flip)",
    )
    image_column: str | None = declare(
        None,
        "column (CSV, JSON lines, Parquet) or suffix (tar) of the image; when not set, the usual names",
        "set_image_column(name)",
        not_empty,
    )
    label_column: str | None = declare(
        None,
        "column (CSV, JSON lines, Parquet) or suffix (tar) of the label; when not set, the usual names",
        "set_label_column(name)",
        not_empty,
    )
    label_map: str | None = declare(
        None,
        "file of class names and their ids, .json or lines of name<TAB>id; when not set, the ids are the "
        "ranks of the sorted names",
        "set_label_map(path)",
        not_empty,
    )


@dataclass
class OptimOptions:
    """Optimizer and learning rate."""

    lr: float = declare(
        0.1, "learning rate for a global batch of 1024; scaled in proportion", "set_lr(lr)",
        more_than(0),
    )  # fmt: skip
    optimizer: str = declare(
        "sgd", "optimizer of the network: sgd, adam or adamw; class rows: head.optimizer",
        "set_optimizer(name)", one_of("sgd", "adam", "adamw"),
    )  # fmt: skip
    momentum: float = declare(0.9, "momentum of SGD", "set_momentum(momentum)", between(0, 0.9999))
    betas: tuple[float, ...] = declare(
        (0.9, 0.999), "decay of the two moments of Adam and AdamW", "set_betas(betas)", _two_decays
    )
    weight_decay: float = declare(
        5e-4, "L2 decay of all parameters", "set_weight_decay(decay)", at_least(0)
    )
    schedule: str = declare(
        "step", "how the learning rate falls: step (step_boundaries), polynomial or cosine",
        "set_lr_schedule(name)", one_of("step", "polynomial", "cosine"),
    )  # fmt: skip
    decay_steps: int | None = declare(
        None, "step at which a polynomial or cosine schedule ends; None: the last of the run",
        "set_decay_steps(num)", at_least(1),
    )  # fmt: skip
    decay_power: float = declare(
        1.0, "power of the polynomial schedule", "set_decay_power(power)", more_than(0)
    )
    end_lr_factor: float = declare(
        0.0, "where a polynomial or cosine schedule ends, as a part of the learning rate",
        "set_end_lr_factor(factor)", between(0, 1),
    )  # fmt: skip
    warmup_epochs: int = declare(
        0, "epochs over which the learning rate rises linearly from 0", "set_warmup_epochs(num)",
        at_least(0),
    )  # fmt: skip
    step_boundaries: tuple[int, ...] = declare(
        (100000, 160000, 220000),
        "steps at which the learning rate is multiplied by lr_decay_factor",
        "set_step_boundaries(boundaries)",
        _increasing_steps,
    )
    lr_decay_factor: float = declare(
        0.1, "factor of the learning rate at each boundary", "set_lr_decay_factor(factor)",
        between(0, 1),
    )  # fmt: skip
    clip_norm: float = declare(
        0.0,
        "clip gradients whose norm is larger; 0: no clipping",
        "set_clip_norm(norm)",
        at_least(0),
    )
    clip_scope: str = declare(
        "backbone",
        "gradients that are clipped: backbone, or all (with the class rows: one more pass over them)",
        "set_clip_scope(scope)",
        one_of("backbone", "all"),
    )


@dataclass
class TrainOptions:
    """The loop."""

    batch_size: int = declare(
        128, "training images per rank and step", "set_train_batch_size(batch_size)", at_least(1)
    )
    global_batch_size: int | None = declare(
        None,
        "training images per step over all ranks, instead of batch_size",
        "set_global_batch_size(batch_size)",
        at_least(1),
    )
    micro_batches: int = declare(
        1, "parts of a rank's batch that are computed one after another (gradient accumulation)",
        "set_micro_batches(num)", at_least(1),
    )  # fmt: skip
    test_batch_size: int = declare(
        120, "images per rank in test and predict", "set_test_batch_size(batch_size)", at_least(1)
    )
    epochs: int = declare(120, "passes over the data", "set_train_epochs(num)", at_least(1))
    epoch_steps: int | None = declare(
        None,
        "over several data sets: steps in an epoch of the run; when not set, as many as make the images of "
        "all of them",
        "set_epoch_steps(num)",
        at_least(1),
    )
    steps: int | None = declare(
        None, "stop after this many steps, if before the last epoch", "set_train_steps(num)",
        at_least(1),
    )  # fmt: skip
    calc_acc: bool = declare(
        False, "measure the accuracy of the batch at each logged step", "set_calc_acc(calc)"
    )
    log_period: int = declare(
        200, "steps between two log lines", "set_log_period(period)", at_least(1)
    )
    with_test: bool = declare(
        True, "evaluate val_targets while training", "set_with_test(with_test)"
    )
    test_period: int = declare(
        0, "steps between evaluations, besides each epoch's end; 0: none", "set_test_period(period)",
        at_least(0),
    )  # fmt: skip
    seed: int = declare(
        0, "the one seed of the run: weights, order, augmentation, dropout", "set_seed(seed)",
        between(0, 2**31 - 1),
    )  # fmt: skip
    deterministic: bool = declare(
        False, "refuse operations whose result may differ between runs", "set_deterministic(flag)"
    )
    stop_deadline: float = declare(
        60.0,
        "seconds after SIGINT or SIGTERM in which the state must be saved; then the process ends",
        "set_stop_deadline(seconds)",
        more_than(0),
    )


@dataclass
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


@dataclass
class RuntimeOptions:
    """Device and processes."""

    device: str = declare(
        "auto", "auto, cpu or cuda", "set_device(device)", one_of("auto", "cpu", "cuda")
    )
    backend: str = declare(
        "auto",
        "auto (NCCL on CUDA, gloo elsewhere), gloo or nccl",
        "set_backend(backend)",
        one_of("auto", "gloo", "nccl"),
    )
    timeout: float = declare(
        1800.0, "seconds that a rank waits for the others", "set_timeout(seconds)", more_than(0)
    )
    dtype: str = declare(
        "float32",
        "float32, or float64 for checks, of weights and computation",
        "set_dtype(dtype)",
        one_of("float32", "float64"),
    )
    cpu_threads: int = declare(
        0, "CPU threads per rank; 0 leaves it to torch (torchrun sets 1)", "set_cpu_threads(num)",
        between(0, 4096),
    )  # fmt: skip


@dataclass
class Options:
    """All options of a run, in groups.

    `explicit` holds the paths that somebody set, `adopted` those that came from a checkpoint.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    head: HeadOptions = field(default_factory=HeadOptions)
    data: DataOptions = field(default_factory=DataOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    runtime: RuntimeOptions = field(default_factory=RuntimeOptions)
    explicit: MutableSet[str] = field(default_factory=set)
    adopted: MutableSet[str] = field(default_factory=set)

    def get(self, path: str) -> Any:
        """Return the value of the option at a path such as ``train.batch_size``."""
        spec = find_option(path)
        return getattr(getattr(self, spec.group), spec.name)

    def set(self, path: str, value: Any) -> None:
        """Check and set an option. Raises OptionError with what was expected, what came."""
        spec = find_option(path)
        setattr(getattr(self, spec.group), spec.name, spec.checked(value))
        self.explicit.add(path)

    def data_sets(self) -> list[DataSet]:
        """Return the data sets of `data.datasets`; none if there is one data set, of `data.dataset_dir`."""
        return read_data_sets(self.data.datasets, find_option)

    def add_data_set(self, **values: Any) -> None:
        """Add one to `data.datasets`; see `Entry.add_dataset`."""
        given = {key: value for key, value in values.items() if value is not None}
        one = read_data_sets([given], find_option)[0]
        self.set("data.datasets", (*self.data.datasets, one.as_dict()))

    def set_hdfs(
        self,
        name: str,
        ugi: str | None = None,
        dir_for_save: str | None = None,
        checkpoint_dir: str | None = None,
    ) -> None:
        """Set the options of a remote file system at once; see `Entry.set_hdfs_info`."""
        if not isinstance(name, str) or "://" not in name:
            raise OptionError(
                f"fs_name is {name!r}; expected the URL of a file system, such as hdfs://namenode:9000"
            )
        if ugi is not None:
            # Whatever follows the comma is a password, which goes nowhere, messages included.
            user = str(ugi).split(",", 1)[0].strip()
            if not user:
                raise OptionError("fs_ugi has no user name; expected 'name,password'")
            self.set("checkpoint.hdfs_user", user)
        if dir_for_save is not None:
            self.set("checkpoint.upload_dir", _below(name, dir_for_save))
        if checkpoint_dir is not None:
            self.set("checkpoint.download_dir", _below(name, checkpoint_dir))

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return the options as plain nested values for JSON or YAML."""
        nested: dict[str, dict[str, Any]] = {}
        for spec in all_options():
            value = self.get(spec.path)
            plain = list(value) if isinstance(value, tuple) else value
            nested.setdefault(spec.group, {})[spec.name] = plain
        return nested

    def adopt(self, saved: dict[str, Any], keep: frozenset[str] = frozenset()) -> list[str]:
        """Take the options of a checkpoint where nobody set them here.

        `keep` names paths that are never taken. Unknown options (of a newer version) are passed over.
        Returns a line for each option that was set here to another value.
        """
        differences = []
        for spec in all_options():
            values = saved.get(spec.group)
            if spec.path in keep or not isinstance(values, dict) or spec.name not in values:
                continue
            value = spec.checked(values[spec.name])
            mine = self.get(spec.path)
            if spec.path not in self.explicit:
                setattr(getattr(self, spec.group), spec.name, value)
                self.adopted.add(spec.path)
            elif mine != value:
                differences.append(f"{spec.path}: {mine} here, {value} in the checkpoint")
        return differences


def _below(name: str, folder: str) -> str:
    return folder if "://" in folder else f"{name.rstrip('/')}/{folder.lstrip('/')}"


def all_options() -> Iterator[OptionSpec]:
    """Yield the rows of the option table, group by group."""
    yield from _TABLE.values()


def find_option(path: str) -> OptionSpec:
    """Return the row of an option; OptionError with the nearest names if there is none."""
    spec = _TABLE.get(path)
    if spec is None:
        raise OptionError(f"there is no option {path!r}; {suggest(path, _TABLE)}")
    return spec


def _build_table() -> dict[str, OptionSpec]:
    table = {}
    for group, factory in typing.get_type_hints(Options).items():
        if group in ("explicit", "adopted"):
            continue
        kinds = typing.get_type_hints(factory)
        for item in dataclasses.fields(factory):
            setter, _, argument = item.metadata["setter"].rstrip(")").partition("(")
            spec = OptionSpec(
                group=group,
                name=item.name,
                kind=kinds[item.name],
                default=item.default,
                meaning=item.metadata["meaning"],
                setter=setter,
                argument=argument,
                check=item.metadata["check"],
            )
            table[spec.path] = spec
    return table


_TABLE = _build_table()
