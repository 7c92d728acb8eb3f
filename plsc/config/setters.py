"""The setters of Entry, one per option.

Written by tools/generate.py from the table in plsc/config; edit that instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plsc.config import Options


class Setters:
    """Setters that check a value and put it into `options`; OptionError says what was expected."""

    options: Options

    def set_model_name(self, name: str) -> None:
        """Set ``model.name``: ResNet18, ResNet34, ResNet50, ResNet101, ResNet152, IResNet18, IResNet34,
        IResNet50, IResNet100, IResNet200, SmallResNet, 'torchvision/<name>', 'timm/<name>', or
        'package.module:Class' for a BaseModel of your own. Default: 'ResNet50'.
        """
        self.options.set("model.name", name)

    def set_emb_size(self, size: int) -> None:
        """Set ``model.emb_size``: size of the embedding. Default: 512."""
        self.options.set("model.emb_size", size)

    def set_image_shape(self, shape: Sequence[int]) -> None:
        """Set ``model.image_shape``: channels, height, width of the input; on the command line
        [3,112,112]. Default: (3, 112, 112).
        """
        self.options.set("model.image_shape", shape)

    def set_dropout(self, ratio: float) -> None:
        """Set ``model.dropout``: dropout before the embedding layer. Default: 0.4."""
        self.options.set("model.dropout", ratio)

    def set_neck(self, parts: str) -> None:
        """Set ``model.neck``: layers between features and embedding, joined by '-': norm (batch norm),
        dropout, linear. Default: 'norm-dropout-linear-norm'.
        """
        self.options.set("model.neck", parts)

    def set_sync_batch_norm(self, sync: bool) -> None:
        """Set ``model.sync_batch_norm``: batch-norm statistics over the global batch. Default: False."""
        self.options.set("model.sync_batch_norm", sync)

    def set_pretrained(self, path: str | None) -> None:
        """Set ``model.pretrained``: weights to start from, where name and shape match: a checkpoint, a
        .safetensors file, or a state dict of torch.save; optimizer and position start afresh. Default:
        None.
        """
        self.options.set("model.pretrained", path)

    def set_initializations(self, rules: Sequence[dict[str, Any]]) -> None:
        """Set ``model.initialization``: first values of parameters by rule: each has a pattern, a rule
        (xavier_uniform, xavier_normal, kaiming_uniform, kaiming_normal, orthogonal, normal,
        trunc_normal, uniform, constant) and its arguments; the first that matches counts;
        set_initialization adds one. Default: ().
        """
        self.options.set("model.initialization", rules)

    def set_loss_type(self, loss_type: str) -> None:
        """Set ``head.loss_type``: dist_ and one of softmax, normface, arcface, cosface, sphereface,
        combined, adaface, magface, curricularface: class rows sharded over the ranks; without dist_,
        all rows on every rank. Default: 'dist_arcface'.
        """
        self.options.set("head.loss_type", loss_type)

    def set_class_num(self, num: int | None) -> None:
        """Set ``head.class_num``: number of classes; when not set, the largest label + 1. Default: None."""
        self.options.set("head.class_num", num)

    def set_margin(self, margin: float) -> None:
        """Set ``head.margin``: margin of the loss: an angle in radians; of cosface, of the cosine; of
        sphereface, a factor of the angle; when not set, 0.5 for arcface and its paper's for each other
        one. Default: 0.5.
        """
        self.options.set("head.margin", margin)

    def set_margin_warmup_steps(self, num: int) -> None:
        """Set ``head.margin_warmup_steps``: steps over which the margin rises linearly to its full value;
        0: the full margin from the start. Default: 0.
        """
        self.options.set("head.margin_warmup_steps", num)

    def set_scale(self, scale: float | str) -> None:
        """Set ``head.scale``: scale of the cosines; auto: sqrt(2) ln(C - 1) for C classes (AdaCos), 64
        from 10,000 classes on. Default: 'auto'.
        """
        self.options.set("head.scale", scale)

    def set_combined_margins(self, margins: Sequence[float]) -> None:
        """Set ``head.combined_margins``: of the loss combined: m1, m2, m3 in cos(m1 angle + m2) - m3.
        Default: (1.0, 0.3, 0.2).
        """
        self.options.set("head.combined_margins", margins)

    def set_easy_margin(self, easy: bool) -> None:
        """Set ``head.easy_margin``: no margin where the angle is over 90 degrees; when not set, off for
        arcface, on for magface. Default: False.
        """
        self.options.set("head.easy_margin", easy)

    def set_straight_through(self, flag: bool) -> None:
        """Set ``head.straight_through``: of arcface: take the margin as a constant in the gradient, as
        some implementations do. Default: False.
        """
        self.options.set("head.straight_through", flag)

    def set_margin_momentum(self, momentum: float) -> None:
        """Set ``head.margin_momentum``: of adaface and curricularface: share of the old running
        statistics. Default: 0.99.
        """
        self.options.set("head.margin_momentum", momentum)

    def set_adaface_h(self, h: float) -> None:
        """Set ``head.adaface_h``: of adaface: how much the embedding's norm counts. Default: 0.333."""
        self.options.set("head.adaface_h", h)

    def set_magface_norms(self, norms: Sequence[float]) -> None:
        """Set ``head.magface_norms``: of magface: lowest and highest norm. Default: (10.0, 110.0)."""
        self.options.set("head.magface_norms", norms)

    def set_magface_margins(self, margins: Sequence[float]) -> None:
        """Set ``head.magface_margins``: of magface: margins at these norms. Default: (0.45, 0.8)."""
        self.options.set("head.magface_margins", margins)

    def set_magface_lambda(self, weight: float) -> None:
        """Set ``head.magface_lambda``: of magface: weight of its regulariser. Default: 35.0."""
        self.options.set("head.magface_lambda", weight)

    def set_initial_norm(self, norm: float | None) -> None:
        """Set ``head.initial_norm``: expected norm of the class weights of a class at the start; when not
        set, each element has the standard deviation 0.01. Default: None.
        """
        self.options.set("head.initial_norm", norm)

    def set_sub_centers(self, num: int) -> None:
        """Set ``head.sub_centers``: rows a class (sub-centre ArcFace), the nearest counts. Default: 1."""
        self.options.set("head.sub_centers", num)

    def set_sample_ratio(self, ratio: float) -> None:
        """Set ``head.sample_ratio``: share of a rank's classes that take part in a step (PartialFC); those
        of the batch always do. Default: 1.0.
        """
        self.options.set("head.sample_ratio", ratio)

    def set_hard_share(self, share: float) -> None:
        """Set ``head.hard_share``: share of the sampled classes that are the nearest to the batch, instead
        of random ones. Default: 0.0.
        """
        self.options.set("head.hard_share", share)

    def set_head_optimizer(self, name: str) -> None:
        """Set ``head.optimizer``: of the sharded class rows: sgd (with optim.momentum), adamw, adagrad
        (one number a row). Default: 'sgd'.
        """
        self.options.set("head.optimizer", name)

    def set_head_lr_factor(self, factor: float) -> None:
        """Set ``head.lr_factor``: the class rows' learning rate is the backbone's times this. Default:
        1.0.
        """
        self.options.set("head.lr_factor", factor)

    def set_head_weight_decay(self, decay: float | None) -> None:
        """Set ``head.weight_decay``: L2 decay of the class rows; when not set, optim.weight_decay.
        Default: None.
        """
        self.options.set("head.weight_decay", decay)

    def set_row_dtype(self, dtype: str) -> None:
        """Set ``head.row_dtype``: type of the sharded class rows: float32, or bfloat16 (rounded
        stochastically). Default: 'float32'.
        """
        self.options.set("head.row_dtype", dtype)

    def set_row_state_dtype(self, dtype: str) -> None:
        """Set ``head.state_dtype``: type of their optimizer state: float32, bfloat16, or int8 (momentum of
        sgd only). Default: 'float32'.
        """
        self.options.set("head.state_dtype", dtype)

    def set_head_offload(self, offload: bool) -> None:
        """Set ``head.offload``: keep class rows and their state in CPU memory; those of a step travel to
        the GPU. Default: False.
        """
        self.options.set("head.offload", offload)

    def set_head_products(self, dtype: str) -> None:
        """Set ``head.products``: type of the factors in the head's matrix products: float32, bfloat16, or
        auto (bfloat16 if precision.mode has 16 bits, else float32). Default: 'auto'.
        """
        self.options.set("head.products", dtype)

    def set_head_keep_mb(self, mebibytes: float) -> None:
        """Set ``head.keep_mb``: MiB per rank in which the first pass over the rows may leave its terms for
        the second, in 16 bits; where they do not fit, they are computed again. Default: 0.0.
        """
        self.options.set("head.keep_mb", mebibytes)

    def set_head_kernels(self, name: str) -> None:
        """Set ``head.kernels``: what computes the head: auto, torch, native (C, on CPUs) or triton (on
        GPUs). Default: 'auto'.
        """
        self.options.set("head.kernels", name)

    def set_head_tile(self, rows: int | None) -> None:
        """Set ``head.tile``: class rows at a time; when not set, by the batch size. Default: None."""
        self.options.set("head.tile", rows)

    def set_dataset_dir(self, directory: str) -> None:
        """Set ``data.dataset_dir``: the training data: a folder (label.txt and images/, one folder of
        images per class, or base64 parts), a file or shards of .rec, .parquet, .tar, .csv, .jsonl or
        .lmdb, or an fsspec URL of one. Default: './train_data'.
        """
        self.options.set("data.dataset_dir", directory)

    def set_datasets(self, datasets: Sequence[dict[str, Any]]) -> None:
        """Set ``data.datasets``: several data sets with a head each, instead of dataset_dir: each has a
        name and a path, and may have a weight, class_num, loss_type, margin, scale and sample_ratio;
        add_dataset adds one. Default: ().
        """
        self.options.set("data.datasets", datasets)

    def set_train_image_num(self, num: int | None) -> None:
        """Set ``data.train_image_num``: images per epoch, for readers that cannot tell; when not set,
        counted. Default: None.
        """
        self.options.set("data.train_image_num", num)

    def set_val_targets(self, targets: str | None) -> None:
        """Set ``data.val_targets``: names of pair files (name.bin in the dataset folder), separated by
        commas; when not set, 'lfw' if lfw.bin is there. Default: None.
        """
        self.options.set("data.val_targets", targets)

    def set_num_workers(self, num: int) -> None:
        """Set ``data.num_workers``: threads or processes per rank that read images ahead; 0 reads between
        the steps. Default: 2.
        """
        self.options.set("data.num_workers", num)

    def set_loader(self, kind: str) -> None:
        """Set ``data.loader``: what reads images: threads, processes (for Python code of your own), or
        auto, which chooses. Default: 'auto'.
        """
        self.options.set("data.loader", kind)

    def set_order(self, order: str) -> None:
        """Set ``data.order``: order of an epoch: global (all shuffled), block (neighbours stay near:
        disks, remote stores), sequential, or rank_files (rank r reads part r of file_list.txt alone,
        shuffled). Default: 'global'.
        """
        self.options.set("data.order", order)

    def set_block_samples(self, num: int) -> None:
        """Set ``data.block_samples``: order block: neighbouring samples that are read together. Default:
        1024.
        """
        self.options.set("data.block_samples", num)

    def set_pool_samples(self, num: int) -> None:
        """Set ``data.pool_samples``: order block: samples that are shuffled among each other. Default:
        65536.
        """
        self.options.set("data.pool_samples", num)

    def set_reader_shards_itself(self, flag: bool) -> None:
        """Set ``data.reader_shards_itself``: call a generator reader as reader(rank, ranks): it yields
        this rank's samples only; one with the attribute shards_itself = True always is. Default: False.
        """
        self.options.set("data.reader_shards_itself", flag)

    def set_cache(self, where: str) -> None:
        """Set ``data.cache``: keep what the first epoch reads: none, memory or disk. Default: 'none'."""
        self.options.set("data.cache", where)

    def set_cache_bytes(self, num: int) -> None:
        """Set ``data.cache_bytes``: the most bytes that the cache of a rank takes. Default: 2147483648."""
        self.options.set("data.cache_bytes", num)

    def set_cache_decoded(self, flag: bool) -> None:
        """Set ``data.cache_decoded``: keep pixels of the network's size, not encoded images: no decoding
        again, about 8 times the bytes. Default: False.
        """
        self.options.set("data.cache_decoded", flag)

    def set_cache_dir(self, directory: str | None) -> None:
        """Set ``data.cache_dir``: local folder of the disk cache; when not set, the system's for temporary
        files. Default: None.
        """
        self.options.set("data.cache_dir", directory)

    def set_last_batch(self, policy: str) -> None:
        """Set ``data.last_batch``: the last batch of an epoch: pad (repeats the epoch's first samples),
        keep (smaller) or drop. Default: 'pad'.
        """
        self.options.set("data.last_batch", policy)

    def set_bad_images(self, policy: str) -> None:
        """Set ``data.bad_images``: a sample that cannot be used: stop the run, skip (left out), or replace
        (another, drawn by the seed); what is passed over is counted and listed in bad_samples.txt.
        Default: 'stop'.
        """
        self.options.set("data.bad_images", policy)

    def set_crop_padding(self, pixels: int) -> None:
        """Set ``data.crop_padding``: augmentation: pad by so many black pixels and cut out at random.
        Default: 0.
        """
        self.options.set("data.crop_padding", pixels)

    def set_colour_jitter(self, strengths: Sequence[float]) -> None:
        """Set ``data.colour_jitter``: augmentation: vary brightness, contrast and saturation by factors in
        [1 - x, 1 + x]. Default: (0.0, 0.0, 0.0).
        """
        self.options.set("data.colour_jitter", strengths)

    def set_low_resolution(self, share: float) -> None:
        """Set ``data.low_resolution``: augmentation: share of images shrunk to 25-100 % of their size and
        enlarged again. Default: 0.0.
        """
        self.options.set("data.low_resolution", share)

    def set_random_erasing(self, share: float) -> None:
        """Set ``data.random_erasing``: augmentation: share of images of which a rectangle, 2-20 % of the
        area, turns grey. Default: 0.0.
        """
        self.options.set("data.random_erasing", share)

    def set_flip(self, flip: bool) -> None:
        """Set ``data.flip``: mirror half of the training images, and add the mirrored image's embedding in
        evaluation. Default: True.
        """
        self.options.set("data.flip", flip)

    def set_image_column(self, name: str | None) -> None:
        """Set ``data.image_column``: column (CSV, JSON lines, Parquet) or suffix (tar) of the image; when
        not set, the usual names. Default: None.
        """
        self.options.set("data.image_column", name)

    def set_label_column(self, name: str | None) -> None:
        """Set ``data.label_column``: column (CSV, JSON lines, Parquet) or suffix (tar) of the label; when
        not set, the usual names. Default: None.
        """
        self.options.set("data.label_column", name)

    def set_label_map(self, path: str | None) -> None:
        """Set ``data.label_map``: file of class names and their ids, .json or lines of name<TAB>id; when
        not set, the ids are the ranks of the sorted names. Default: None.
        """
        self.options.set("data.label_map", path)

    def set_class_depth(self, depth: int | None) -> None:
        """Set ``data.class_depth``: depth of the folders that are classes; when not set, 1, and class
        folders that hold folders of images are refused. Default: None.
        """
        self.options.set("data.class_depth", depth)

    def set_lr(self, lr: float | None) -> None:
        """Set ``optim.lr``: learning rate, used as it is for any batch; when not set, 0.1 x global batch /
        1024. Default: None.
        """
        self.options.set("optim.lr", lr)

    def set_optimizer(self, optimizer: str) -> None:
        """Set ``optim.optimizer``: optimizer of the network: sgd, adam, adamw, rmsprop, adadelta, adagrad,
        adamax, nadam, radam, asgd, rprop, adafactor, or 'package.module:factory'; class rows:
        head.optimizer. Default: 'sgd'.
        """
        self.options.set("optim.optimizer", optimizer)

    def set_optimizer_arguments(self, arguments: dict[str, Any] | None) -> None:
        """Set ``optim.optimizer_arguments``: more of the optimizer's own settings by name, such as {eps:
        1.e-7}. Default: None.
        """
        self.options.set("optim.optimizer_arguments", arguments)

    def set_optimizer_implementation(self, name: str) -> None:
        """Set ``optim.implementation``: what computes the optimizer's step: auto, fused, foreach or
        for_loop. Default: 'auto'.
        """
        self.options.set("optim.implementation", name)

    def set_momentum(self, momentum: float) -> None:
        """Set ``optim.momentum``: momentum of SGD. Default: 0.9."""
        self.options.set("optim.momentum", momentum)

    def set_nesterov(self, nesterov: bool) -> None:
        """Set ``optim.nesterov``: Nesterov's momentum in SGD, of the network and of class rows. Default:
        False.
        """
        self.options.set("optim.nesterov", nesterov)

    def set_betas(self, betas: Sequence[float]) -> None:
        """Set ``optim.betas``: decay of the two moments of Adam and its relatives. Default: (0.9, 0.999)."""
        self.options.set("optim.betas", betas)

    def set_weight_decay(self, decay: float) -> None:
        """Set ``optim.weight_decay``: L2 decay of all parameters. Default: 0.0005."""
        self.options.set("optim.weight_decay", decay)

    def set_l1_decay(self, decay: float) -> None:
        """Set ``optim.l1_decay``: L1 decay of the network's parameters. Default: 0.0."""
        self.options.set("optim.l1_decay", decay)

    def set_decay_norm_and_bias(self, decay: bool) -> None:
        """Set ``optim.decay_norm_and_bias``: decay parameters of one dimension, too: biases, norms,
        PReLU's slopes. Default: True.
        """
        self.options.set("optim.decay_norm_and_bias", decay)

    def set_parameter_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Set ``optim.groups``: groups of parameters with settings of their own: each has a pattern, and
        may have lr_factor, weight_decay, l1_decay, frozen and settings of the optimizer; the first that
        matches counts; add_parameter_group adds one. Default: ().
        """
        self.options.set("optim.groups", groups)

    def set_freeze(self, patterns: Sequence[str]) -> None:
        """Set ``optim.freeze``: patterns of parameters that are not trained, such as [stem, stages.0].
        Default: ().
        """
        self.options.set("optim.freeze", patterns)

    def set_lr_schedule(self, schedule: str) -> None:
        """Set ``optim.schedule``: how the learning rate falls: cosine, polynomial, exponential, step or
        multi_step (step_boundaries), constant, or 'package.module:function'; when not set: step if
        step_boundaries or lr_decay_factor are set, constant if a generator reader does not tell its
        length. Default: 'cosine'.
        """
        self.options.set("optim.schedule", schedule)

    def set_decay_steps(self, num: int | None) -> None:
        """Set ``optim.decay_steps``: step at which a polynomial, cosine or exponential schedule ends;
        None: the last of the run. Default: None.
        """
        self.options.set("optim.decay_steps", num)

    def set_decay_power(self, power: float) -> None:
        """Set ``optim.decay_power``: power of the polynomial schedule. Default: 1.0."""
        self.options.set("optim.decay_power", power)

    def set_cosine_cycles(self, num: int) -> None:
        """Set ``optim.cosine_cycles``: cosine curves from the first step to the last, one after another
        (warm restarts). Default: 1.
        """
        self.options.set("optim.cosine_cycles", num)

    def set_end_lr_factor(self, factor: float) -> None:
        """Set ``optim.end_lr_factor``: where a polynomial, cosine or exponential schedule ends, as a part
        of the learning rate. Default: 0.0.
        """
        self.options.set("optim.end_lr_factor", factor)

    def set_warmup_epochs(self, num: int) -> None:
        """Set ``optim.warmup_epochs``: epochs over which the learning rate rises linearly from 0. Default:
        0.
        """
        self.options.set("optim.warmup_epochs", num)

    def set_warmup_steps(self, num: int | None) -> None:
        """Set ``optim.warmup_steps``: the same in steps, instead of warmup_epochs; when neither is set,
        10% of the run's steps, at most 1000; 100 where the length is unknown; 0 with a schedule
        'package.module:function'. Default: None.
        """
        self.options.set("optim.warmup_steps", num)

    def set_step_boundaries(self, boundaries: Sequence[int]) -> None:
        """Set ``optim.step_boundaries``: steps at which the learning rate is multiplied by
        lr_decay_factor. Default: (100000, 160000, 220000).
        """
        self.options.set("optim.step_boundaries", boundaries)

    def set_lr_decay_factor(self, factor: float) -> None:
        """Set ``optim.lr_decay_factor``: factor of the learning rate at each boundary. Default: 0.1."""
        self.options.set("optim.lr_decay_factor", factor)

    def set_clip_norm(self, norm: float | None) -> None:
        """Set ``optim.clip_norm``: clip gradients whose norm is larger; not set: 20, at most 0.4 / lr; 0:
        no clipping. Default: None.
        """
        self.options.set("optim.clip_norm", norm)

    def set_clip_scope(self, scope: str) -> None:
        """Set ``optim.clip_scope``: gradients that are clipped: backbone, or all (with the class rows: one
        more pass over them). Default: 'backbone'.
        """
        self.options.set("optim.clip_scope", scope)

    def set_precision(self, mode: str) -> None:
        """Set ``precision.mode``: what the backbone is trained in: float32, float16 (with loss scaling; on
        a CPU it is bfloat16) or bfloat16; weights, their updates and the loss stay float32. Default:
        'float32'.
        """
        self.options.set("precision.mode", mode)

    def set_init_loss_scaling(self, scale: float) -> None:
        """Set ``precision.init_loss_scaling``: of float16: what the loss is multiplied with at first.
        Default: 1.0.
        """
        self.options.set("precision.init_loss_scaling", scale)

    def set_incr_every_n_steps(self, steps: int) -> None:
        """Set ``precision.incr_every_n_steps``: so many finite steps in a row raise the loss scale.
        Default: 2000.
        """
        self.options.set("precision.incr_every_n_steps", steps)

    def set_decr_every_n_nan_or_inf(self, steps: int) -> None:
        """Set ``precision.decr_every_n_nan_or_inf``: so many steps in a row with a nan or inf lower the
        loss scale. Default: 2.
        """
        self.options.set("precision.decr_every_n_nan_or_inf", steps)

    def set_incr_ratio(self, ratio: float) -> None:
        """Set ``precision.incr_ratio``: what the loss scale is raised by, up to 2^24. Default: 2.0."""
        self.options.set("precision.incr_ratio", ratio)

    def set_decr_ratio(self, ratio: float) -> None:
        """Set ``precision.decr_ratio``: what the loss scale is lowered by, down to 1. Default: 0.5."""
        self.options.set("precision.decr_ratio", ratio)

    def set_dynamic_loss_scaling(self, flag: bool) -> None:
        """Set ``precision.use_dynamic_loss_scaling``: raise and lower the loss scale; without, it stays,
        and steps with a nan or inf are skipped. Default: True.
        """
        self.options.set("precision.use_dynamic_loss_scaling", flag)

    def set_loss_scaling(self, when: str) -> None:
        """Set ``precision.loss_scaling``: auto: in float16; always: in any mode, to see how a run takes
        skipped steps. Default: 'auto'.
        """
        self.options.set("precision.loss_scaling", when)

    def set_precision_white_list(self, names: Sequence[str]) -> None:
        """Set ``precision.white_list``: operators, and modules by name or class (with * and ?), that are
        forced to 16 bits. Default: ().
        """
        self.options.set("precision.white_list", names)

    def set_precision_black_list(self, names: Sequence[str]) -> None:
        """Set ``precision.black_list``: operators, and modules by name or class (with * and ?), that stay
        float32. Default: ().
        """
        self.options.set("precision.black_list", names)

    def set_evaluation_precision(self, mode: str) -> None:
        """Set ``precision.evaluation``: what test, predict and evaluations while training run in: float32,
        or training (the mode of training). Default: 'float32'.
        """
        self.options.set("precision.evaluation", mode)

    def set_train_batch_size(self, batch_size: int) -> None:
        """Set ``train.batch_size``: training images per rank and step. Default: 128."""
        self.options.set("train.batch_size", batch_size)

    def set_global_batch_size(self, batch_size: int | None) -> None:
        """Set ``train.global_batch_size``: training images per step over all ranks, instead of batch_size.
        Default: None.
        """
        self.options.set("train.global_batch_size", batch_size)

    def set_micro_batches(self, num: int) -> None:
        """Set ``train.micro_batches``: parts of a rank's batch that are computed one after another
        (gradient accumulation). Default: 1.
        """
        self.options.set("train.micro_batches", num)

    def set_test_batch_size(self, batch_size: int) -> None:
        """Set ``train.test_batch_size``: images per rank in test and predict. Default: 120."""
        self.options.set("train.test_batch_size", batch_size)

    def set_train_epochs(self, num: int) -> None:
        """Set ``train.epochs``: passes over the data. Default: 120."""
        self.options.set("train.epochs", num)

    def set_epoch_steps(self, num: int | None) -> None:
        """Set ``train.epoch_steps``: over several data sets: steps in an epoch of the run; when not set,
        as many as make the images of all of them. Default: None.
        """
        self.options.set("train.epoch_steps", num)

    def set_train_steps(self, num: int | None) -> None:
        """Set ``train.steps``: stop after this many steps, if before the last epoch. Default: None."""
        self.options.set("train.steps", num)

    def set_calc_acc(self, calc: bool) -> None:
        """Set ``train.calc_acc``: measure the accuracy of the batch at each logged step. Default: False."""
        self.options.set("train.calc_acc", calc)

    def set_log_period(self, period: int) -> None:
        """Set ``train.log_period``: steps between two log lines. Default: 200."""
        self.options.set("train.log_period", period)

    def set_with_test(self, with_test: bool) -> None:
        """Set ``train.with_test``: evaluate val_targets while training. Default: True."""
        self.options.set("train.with_test", with_test)

    def set_test_period(self, period: int) -> None:
        """Set ``train.test_period``: steps between evaluations, besides each epoch's end; 0: none.
        Default: 0.
        """
        self.options.set("train.test_period", period)

    def set_seed(self, seed: int) -> None:
        """Set ``train.seed``: the one seed of the run: weights, order, augmentation, dropout. Default: 0."""
        self.options.set("train.seed", seed)

    def set_deterministic(self, flag: bool) -> None:
        """Set ``train.deterministic``: refuse operations whose result may differ between runs. Default:
        False.
        """
        self.options.set("train.deterministic", flag)

    def set_stop_deadline(self, seconds: float) -> None:
        """Set ``train.stop_deadline``: seconds after SIGINT or SIGTERM in which the state must be saved;
        then the process ends. Default: 60.0.
        """
        self.options.set("train.stop_deadline", seconds)

    def set_checkpoint_stages(self, names: str) -> None:
        """Set ``memory.checkpoint_stages``: parts of the network whose inner results are computed again in
        the backward pass, not kept (activation checkpointing): none, all (its blocks), or patterns of
        module names such as 'stages.0,stages.1.*'. Default: 'none'.
        """
        self.options.set("memory.checkpoint_stages", names)

    def set_checkpoint_every(self, num: int) -> None:
        """Set ``memory.checkpoint_every``: of those parts, in the network's order, each nth alone.
        Default: 1.
        """
        self.options.set("memory.checkpoint_every", num)

    def set_model_save_dir(self, directory: str) -> None:
        """Set ``checkpoint.save_dir``: folder, or fsspec URL such as s3://bucket/run, for checkpoints,
        metrics and plots. Default: 'output'.
        """
        self.options.set("checkpoint.save_dir", directory)

    def set_checkpoint_dir(self, directory: str | None) -> None:
        """Set ``checkpoint.load_dir``: checkpoint to resume, test or predict with: a folder, a URL, or
        'last' or 'best' of save_dir; training with 'last' begins anew where there is none. Default:
        None.
        """
        self.options.set("checkpoint.load_dir", directory)

    def set_upload_dir(self, url: str | None) -> None:
        """Set ``checkpoint.upload_dir``: fsspec URL of a folder to which each checkpoint is sent, besides
        save_dir. Default: None.
        """
        self.options.set("checkpoint.upload_dir", url)

    def set_download_dir(self, url: str | None) -> None:
        """Set ``checkpoint.download_dir``: fsspec URL of a checkpoint that is fetched to load_dir, or to
        the cache, and loaded. Default: None.
        """
        self.options.set("checkpoint.download_dir", url)

    def set_local_save_dir(self, directory: str | None) -> None:
        """Set ``checkpoint.local_dir``: where checkpoints are on this machine when save_dir is a URL;
        None: in the cache folder. Default: None.
        """
        self.options.set("checkpoint.local_dir", directory)

    def set_hdfs_user(self, name: str | None) -> None:
        """Set ``checkpoint.hdfs_user``: user name for HDFS, if not that of the environment
        (HADOOP_USER_NAME) or the system. Default: None.
        """
        self.options.set("checkpoint.hdfs_user", name)

    def set_new_version(self, flag: bool) -> None:
        """Set ``checkpoint.new_version``: save to a new folder save_dir/version_<n>, next to those of
        earlier runs. Default: False.
        """
        self.options.set("checkpoint.new_version", flag)

    def set_save_every_n_epochs(self, num: int) -> None:
        """Set ``checkpoint.every_n_epochs``: epochs between two checkpoints; the last epoch has one
        anyway; 0: that alone. Default: 1.
        """
        self.options.set("checkpoint.every_n_epochs", num)

    def set_save_every_n_steps(self, num: int) -> None:
        """Set ``checkpoint.every_n_steps``: steps between two checkpoints, besides those of epochs; 0:
        none. Default: 0.
        """
        self.options.set("checkpoint.every_n_steps", num)

    def set_max_last_checkpoint_num(self, num: int) -> None:
        """Set ``checkpoint.keep_last``: number of newest checkpoints to keep; -1 keeps all. Default: 5."""
        self.options.set("checkpoint.keep_last", num)

    def set_save_top_k(self, num: int) -> None:
        """Set ``checkpoint.save_top_k``: number of best checkpoints to keep besides; -1 keeps all.
        Default: 1.
        """
        self.options.set("checkpoint.save_top_k", num)

    def set_monitor(self, metric: str | None) -> None:
        """Set ``checkpoint.monitor``: metric that makes a checkpoint the best: 'loss', or '<pair file>
        accuracy'; None: accuracy on the first pair file, else the loss. Default: None.
        """
        self.options.set("checkpoint.monitor", metric)

    def set_monitor_mode(self, mode: str) -> None:
        """Set ``checkpoint.monitor_mode``: whether that metric should be high or low: max, min, or auto
        (min for a loss). Default: 'auto'.
        """
        self.options.set("checkpoint.monitor_mode", mode)

    def set_async_save(self, flag: bool) -> None:
        """Set ``checkpoint.asynchronous``: write checkpoints in the background, from a copy in this
        machine's memory. Default: True.
        """
        self.options.set("checkpoint.asynchronous", flag)

    def set_save_error(self, policy: str) -> None:
        """Set ``checkpoint.on_error``: when a checkpoint cannot be written: stop, or continue without it.
        Default: 'stop'.
        """
        self.options.set("checkpoint.on_error", policy)

    def set_store_timeout(self, seconds: float) -> None:
        """Set ``checkpoint.store_timeout``: seconds for which a failing transfer to or from a store is
        tried again. Default: 120.0.
        """
        self.options.set("checkpoint.store_timeout", seconds)

    def set_backbone_parallel(self, way: str) -> None:
        """Set ``parallel.backbone``: replicated (each rank has the whole backbone) or sharded (each has a
        share of its parameters, gradients and optimizer state, and more is sent). Default:
        'replicated'.
        """
        self.options.set("parallel.backbone", way)

    def set_backbone_shard_size(self, ranks: int) -> None:
        """Set ``parallel.shard_size``: ranks that share one copy of a sharded backbone, such as those of a
        machine; 0: all ranks. Default: 0.
        """
        self.options.set("parallel.shard_size", ranks)

    def set_backbone_shard_units(self, patterns: str) -> None:
        """Set ``parallel.shard_units``: modules of a sharded backbone that are put together one at a time:
        auto, or names separated by commas in which * stands for one component, such as
        'stages.*.*,neck'. Default: 'auto'.
        """
        self.options.set("parallel.shard_units", patterns)

    def set_device(self, device: str) -> None:
        """Set ``runtime.device``: auto, cpu or cuda. Default: 'auto'."""
        self.options.set("runtime.device", device)

    def set_backend(self, backend: str) -> None:
        """Set ``runtime.backend``: auto (NCCL on CUDA, gloo elsewhere), gloo, nccl or mpi. Default:
        'auto'.
        """
        self.options.set("runtime.backend", backend)

    def set_init_method(self, url: str) -> None:
        """Set ``runtime.init_method``: where the ranks meet: env:// (a launcher's environment variables),
        tcp://host:port of rank 0, or file:///path on a file system that all of them see. Default:
        'env://'.
        """
        self.options.set("runtime.init_method", url)

    def set_rank(self, rank: int | None) -> None:
        """Set ``runtime.rank``: number of this rank, from 0; None: RANK of the environment. Default: None."""
        self.options.set("runtime.rank", rank)

    def set_world_size(self, ranks: int | None) -> None:
        """Set ``runtime.world_size``: number of ranks; None: WORLD_SIZE of the environment. Default: None."""
        self.options.set("runtime.world_size", ranks)

    def set_timeout(self, seconds: float) -> None:
        """Set ``runtime.timeout``: seconds that a rank waits for the others. Default: 1800.0."""
        self.options.set("runtime.timeout", seconds)

    def set_dtype(self, dtype: str) -> None:
        """Set ``runtime.dtype``: float32, or float64 for checks, of weights and computation. Default:
        'float32'.
        """
        self.options.set("runtime.dtype", dtype)

    def set_cpu_threads(self, num: int) -> None:
        """Set ``runtime.cpu_threads``: CPU threads per rank; 0 leaves it to torch (torchrun sets 1, plsc
        launch cores / ranks). Default: 0.
        """
        self.options.set("runtime.cpu_threads", num)

    def set_channels_last(self, mode: str) -> None:
        """Set ``speed.channels_last``: keep images channels last in memory: on, off, or auto (on in 16
        bits and on CPUs). Default: 'auto'.
        """
        self.options.set("speed.channels_last", mode)

    def set_compile(self, flag: bool) -> None:
        """Set ``speed.compile``: compile the backbone's training step by torch.compile: minutes at the
        first start, a cache keeps it. Default: False.
        """
        self.options.set("speed.compile", flag)

    def set_fold_batch_norm(self, flag: bool) -> None:
        """Set ``speed.fold_batch_norm``: evaluate and predict with batch norms folded into the
        convolutions before them. Default: False.
        """
        self.options.set("speed.fold_batch_norm", flag)

    def set_overlap_copies(self, flag: bool) -> None:
        """Set ``speed.overlap_copies``: on a GPU, copy a batch there while the step before still runs.
        Default: True.
        """
        self.options.set("speed.overlap_copies", flag)

    def set_late_losses(self, flag: bool) -> None:
        """Set ``speed.late_losses``: on a GPU, look at a step's loss one step later instead of waiting for
        it; without, a bad loss stops the run before the update that it belongs to, as on a CPU.
        Default: True.
        """
        self.options.set("speed.late_losses", flag)

    def set_bucket_mb(self, mebibytes: float) -> None:
        """Set ``speed.bucket_mb``: MiB of gradients that are summed over the ranks at once, while the
        backward pass continues. Default: 25.0.
        """
        self.options.set("speed.bucket_mb", mebibytes)
