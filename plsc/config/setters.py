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
        """Set ``model.name``: network: ResNet18, ResNet34, ResNet50, ResNet101, ResNet152, IResNet18,
        IResNet34, IResNet50, IResNet100, IResNet200, SmallResNet, 'torchvision/NAME', 'timm/NAME', or
        'package.module:Class' for a BaseModel subclass of your own. Default: 'ResNet50'.
        """
        self.options.set("model.name", name)

    def set_emb_size(self, size: int) -> None:
        """Set ``model.emb_size``: size of the embedding vector. Default: 512."""
        self.options.set("model.emb_size", size)

    def set_image_shape(self, shape: Sequence[int]) -> None:
        """Set ``model.image_shape``: channels, height and width of the input images; on the command line
        [3,112,112]. Default: (3, 112, 112).
        """
        self.options.set("model.image_shape", shape)

    def set_dropout(self, ratio: float) -> None:
        """Set ``model.dropout``: dropout probability before the embedding layer. Default: 0.4."""
        self.options.set("model.dropout", ratio)

    def set_neck(self, parts: str) -> None:
        """Set ``model.neck``: layers between features and embedding, joined by '-': norm (batch norm),
        dropout, linear; such as 'dropout-linear'. Default: 'norm-dropout-linear-norm'.
        """
        self.options.set("model.neck", parts)

    def set_sync_batch_norm(self, sync: bool) -> None:
        """Set ``model.sync_batch_norm``: compute batch-norm statistics over the global batch. Default:
        False.
        """
        self.options.set("model.sync_batch_norm", sync)

    def set_pretrained(self, path: str | None) -> None:
        """Set ``model.pretrained``: initial weights: a checkpoint, a .safetensors file, or a state dict
        saved by torch.save; tensors are loaded where name and shape match; optimizer and step count
        start from scratch. Default: None.
        """
        self.options.set("model.pretrained", path)

    def set_initializations(self, rules: Sequence[dict[str, Any]]) -> None:
        """Set ``model.initialization``: initialisation rules: a list of mappings with pattern, rule
        (xavier_uniform, xavier_normal, kaiming_uniform, kaiming_normal, orthogonal, normal,
        trunc_normal, uniform, constant) and the rule's arguments; the first matching pattern is used;
        set_initialization adds one. Default: ().
        """
        self.options.set("model.initialization", rules)

    def set_loss_type(self, loss_type: str) -> None:
        """Set ``head.loss_type``: loss: softmax, normface, arcface, cosface, sphereface, combined,
        adaface, magface, curricularface; with the prefix dist_, class weights are sharded over the
        ranks, without it every rank holds all of them. Default: 'dist_arcface'.
        """
        self.options.set("head.loss_type", loss_type)

    def set_class_num(self, num: int | None) -> None:
        """Set ``head.class_num``: number of classes; when not set, the largest label + 1. Default: None."""
        self.options.set("head.class_num", num)

    def set_margin(self, margin: float) -> None:
        """Set ``head.margin``: margin of the loss: an angle in radians; a cosine for cosface; a factor of
        the angle for sphereface; when not set, 0.5 for arcface and the paper's value for other losses.
        Default: 0.5.
        """
        self.options.set("head.margin", margin)

    def set_margin_warmup_steps(self, num: int) -> None:
        """Set ``head.margin_warmup_steps``: steps over which the margin increases linearly to its full
        value; 0: full margin from the start. Default: 0.
        """
        self.options.set("head.margin_warmup_steps", num)

    def set_scale(self, scale: float | str) -> None:
        """Set ``head.scale``: factor of the cosines; auto: sqrt(2) ln(C - 1) for C classes (AdaCos), 64
        for 10,000 classes and more. Default: 'auto'.
        """
        self.options.set("head.scale", scale)

    def set_combined_margins(self, margins: Sequence[float]) -> None:
        """Set ``head.combined_margins``: combined: m1, m2 and m3 in cos(m1 angle + m2) - m3. Default:
        (1.0, 0.3, 0.2).
        """
        self.options.set("head.combined_margins", margins)

    def set_easy_margin(self, easy: bool) -> None:
        """Set ``head.easy_margin``: arcface and magface: apply the margin only to angles below 90 degrees;
        when not set, off for arcface, on for magface. Default: False.
        """
        self.options.set("head.easy_margin", easy)

    def set_straight_through(self, flag: bool) -> None:
        """Set ``head.straight_through``: arcface: treat the margin as a constant in the backward pass, as
        some implementations do. Default: False.
        """
        self.options.set("head.straight_through", flag)

    def set_margin_momentum(self, momentum: float) -> None:
        """Set ``head.margin_momentum``: adaface and curricularface: momentum of the running statistics.
        Default: 0.99.
        """
        self.options.set("head.margin_momentum", momentum)

    def set_adaface_h(self, h: float) -> None:
        """Set ``head.adaface_h``: adaface: how strongly the embedding's norm changes the margin (h in the
        paper). Default: 0.333.
        """
        self.options.set("head.adaface_h", h)

    def set_magface_norms(self, norms: Sequence[float]) -> None:
        """Set ``head.magface_norms``: magface: lowest and highest embedding norm. Default: (10.0, 110.0)."""
        self.options.set("head.magface_norms", norms)

    def set_magface_margins(self, margins: Sequence[float]) -> None:
        """Set ``head.magface_margins``: magface: margins at the lowest and the highest norm. Default:
        (0.45, 0.8).
        """
        self.options.set("head.magface_margins", margins)

    def set_magface_lambda(self, weight: float) -> None:
        """Set ``head.magface_lambda``: magface: weight of the norm regulariser. Default: 35.0."""
        self.options.set("head.magface_lambda", weight)

    def set_initial_norm(self, norm: float | None) -> None:
        """Set ``head.initial_norm``: expected initial norm of each class weight vector; when not set,
        elements have standard deviation 0.01. Default: None.
        """
        self.options.set("head.initial_norm", norm)

    def set_sub_centers(self, num: int) -> None:
        """Set ``head.sub_centers``: class weight vectors per class (sub-centre ArcFace); the one closest
        to the embedding is used. Default: 1.
        """
        self.options.set("head.sub_centers", num)

    def set_sample_ratio(self, ratio: float) -> None:
        """Set ``head.sample_ratio``: share of each rank's classes that take part in a step (PartialFC);
        the classes of the batch always do. Default: 1.0.
        """
        self.options.set("head.sample_ratio", ratio)

    def set_hard_share(self, share: float) -> None:
        """Set ``head.hard_share``: share of the sampled classes that are the closest to the batch (hard
        negatives), not random ones. Default: 0.0.
        """
        self.options.set("head.hard_share", share)

    def set_head_optimizer(self, name: str) -> None:
        """Set ``head.optimizer``: optimizer of sharded class weights: sgd (with optim.momentum), adamw, or
        adagrad (one state value per class weight vector). Default: 'sgd'.
        """
        self.options.set("head.optimizer", name)

    def set_head_lr_factor(self, factor: float) -> None:
        """Set ``head.lr_factor``: factor: learning rate of the class weights = this factor x learning rate
        of the backbone. Default: 1.0.
        """
        self.options.set("head.lr_factor", factor)

    def set_head_weight_decay(self, decay: float | None) -> None:
        """Set ``head.weight_decay``: weight decay (L2) of the class weights; when not set,
        optim.weight_decay. Default: None.
        """
        self.options.set("head.weight_decay", decay)

    def set_row_dtype(self, dtype: str) -> None:
        """Set ``head.row_dtype``: data type of sharded class weights: float32, or bfloat16 with stochastic
        rounding. Default: 'float32'.
        """
        self.options.set("head.row_dtype", dtype)

    def set_row_state_dtype(self, dtype: str) -> None:
        """Set ``head.state_dtype``: data type of the optimizer state of sharded class weights: float32,
        bfloat16, or int8 (only for the momentum of sgd). Default: 'float32'.
        """
        self.options.set("head.state_dtype", dtype)

    def set_head_offload(self, offload: bool) -> None:
        """Set ``head.offload``: keep class weights and their optimizer state in CPU memory; only those of
        the current step are copied to the GPU. Default: False.
        """
        self.options.set("head.offload", offload)

    def set_head_products(self, dtype: str) -> None:
        """Set ``head.products``: data type of the inputs of the head's matrix products: float32, bfloat16,
        or auto (bfloat16 if precision.mode has 16 bits, else float32). Default: 'auto'.
        """
        self.options.set("head.products", dtype)

    def set_head_keep_mb(self, mebibytes: float) -> None:
        """Set ``head.keep_mb``: memory per rank, in MiB, to keep the logits' exponentials in 16 bits for
        the second pass; if they do not fit, they are recomputed. Default: 0.0.
        """
        self.options.set("head.keep_mb", mebibytes)

    def set_head_kernels(self, name: str) -> None:
        """Set ``head.kernels``: implementation of the head: auto, torch, native (C, for CPUs) or triton
        (for GPUs). Default: 'auto'.
        """
        self.options.set("head.kernels", name)

    def set_head_tile(self, rows: int | None) -> None:
        """Set ``head.tile``: class weight vectors computed at a time; when not set, chosen by the batch
        size. Default: None.
        """
        self.options.set("head.tile", rows)

    def set_dataset_dir(self, directory: str) -> None:
        """Set ``data.dataset_dir``: training data: a folder (label.txt and images/, one folder of images
        per class, or base64 files), a .rec, .parquet, .tar, .csv, .jsonl or .lmdb file or shards of
        one, or an fsspec URL of any of these. Default: './train_data'.
        """
        self.options.set("data.dataset_dir", directory)

    def set_datasets(self, datasets: Sequence[dict[str, Any]]) -> None:
        """Set ``data.datasets``: several data sets with one head each, instead of dataset_dir: a list of
        mappings with name, path and optionally weight, class_num, loss_type, margin, scale and
        sample_ratio; add_dataset adds one. Default: ().
        """
        self.options.set("data.datasets", datasets)

    def set_train_image_num(self, num: int | None) -> None:
        """Set ``data.train_image_num``: images per epoch of a generator reader, whose length is unknown
        otherwise; datasets are counted. Default: None.
        """
        self.options.set("data.train_image_num", num)

    def set_val_targets(self, targets: str | None) -> None:
        """Set ``data.val_targets``: pair files for verification: names without .bin, separated by commas,
        in the dataset folder; when not set, 'lfw' if lfw.bin exists. Default: None.
        """
        self.options.set("data.val_targets", targets)

    def set_num_workers(self, num: int) -> None:
        """Set ``data.num_workers``: threads or processes per rank that load images in the background; 0:
        load between steps. Default: 2.
        """
        self.options.set("data.num_workers", num)

    def set_loader(self, kind: str) -> None:
        """Set ``data.loader``: how images are loaded: threads, processes (for Python code of your own), or
        auto (chooses one of them). Default: 'auto'.
        """
        self.options.set("data.loader", kind)

    def set_order(self, order: str) -> None:
        """Set ``data.order``: order of the samples in an epoch: global (all samples shuffled), block
        (blocks of neighbouring samples shuffled: faster on hard disks and remote stores), sequential,
        or rank_files (rank r reads only file r of file_list.txt, shuffled). Default: 'global'.
        """
        self.options.set("data.order", order)

    def set_block_samples(self, num: int) -> None:
        """Set ``data.block_samples``: neighbouring samples per block with order 'block'. Default: 1024."""
        self.options.set("data.block_samples", num)

    def set_pool_samples(self, num: int) -> None:
        """Set ``data.pool_samples``: samples that are shuffled together with order 'block'. Default:
        65536.
        """
        self.options.set("data.pool_samples", num)

    def set_reader_shards_itself(self, flag: bool) -> None:
        """Set ``data.reader_shards_itself``: call a generator reader as reader(rank, ranks): it yields
        only the samples of this rank; a reader with the attribute shards_itself = True is always called
        like this. Default: False.
        """
        self.options.set("data.reader_shards_itself", flag)

    def set_cache(self, where: str) -> None:
        """Set ``data.cache``: where samples are kept after the first epoch has read them: none, memory or
        disk. Default: 'none'.
        """
        self.options.set("data.cache", where)

    def set_cache_bytes(self, num: int) -> None:
        """Set ``data.cache_bytes``: maximum size of the cache per rank, in bytes. Default: 2147483648."""
        self.options.set("data.cache_bytes", num)

    def set_cache_decoded(self, flag: bool) -> None:
        """Set ``data.cache_decoded``: cache decoded images at the network's input size, not encoded files:
        no repeated decoding, about 8 times the bytes. Default: False.
        """
        self.options.set("data.cache_decoded", flag)

    def set_cache_dir(self, directory: str | None) -> None:
        """Set ``data.cache_dir``: local folder of the disk cache; when not set, the system's temporary
        folder. Default: None.
        """
        self.options.set("data.cache_dir", directory)

    def set_last_batch(self, policy: str) -> None:
        """Set ``data.last_batch``: incomplete last batch of an epoch: pad (fill with the first samples of
        the epoch), keep (smaller batch) or drop. Default: 'pad'.
        """
        self.options.set("data.last_batch", policy)

    def set_bad_images(self, policy: str) -> None:
        """Set ``data.bad_images``: what to do with an unusable sample: stop the run, skip the sample, or
        replace it by a random one; skipped and replaced samples are counted and listed in
        bad_samples.txt. Default: 'stop'.
        """
        self.options.set("data.bad_images", policy)

    def set_crop_padding(self, pixels: int) -> None:
        """Set ``data.crop_padding``: augmentation: pad each side by this many black pixels, then crop at a
        random position; 0: off. Default: 0.
        """
        self.options.set("data.crop_padding", pixels)

    def set_colour_jitter(self, strengths: Sequence[float]) -> None:
        """Set ``data.colour_jitter``: augmentation: multiply brightness, contrast and saturation by random
        factors in [1 - x, 1 + x]. Default: (0.0, 0.0, 0.0).
        """
        self.options.set("data.colour_jitter", strengths)

    def set_low_resolution(self, share: float) -> None:
        """Set ``data.low_resolution``: augmentation: share of images that are downscaled to 25-100 % of
        their size and upscaled again. Default: 0.0.
        """
        self.options.set("data.low_resolution", share)

    def set_random_erasing(self, share: float) -> None:
        """Set ``data.random_erasing``: augmentation: share of images in which a random rectangle (2-20 %
        of the area) becomes grey. Default: 0.0.
        """
        self.options.set("data.random_erasing", share)

    def set_flip(self, flip: bool) -> None:
        """Set ``data.flip``: mirror each training image with probability 0.5; in evaluation, add the
        mirrored image's embedding. Default: True.
        """
        self.options.set("data.flip", flip)

    def set_image_column(self, name: str | None) -> None:
        """Set ``data.image_column``: column (CSV, JSON lines, Parquet) or file suffix (tar) of the images;
        when not set, common names are tried. Default: None.
        """
        self.options.set("data.image_column", name)

    def set_label_column(self, name: str | None) -> None:
        """Set ``data.label_column``: column (CSV, JSON lines, Parquet) or file suffix (tar) of the labels;
        when not set, common names are tried. Default: None.
        """
        self.options.set("data.label_column", name)

    def set_label_map(self, path: str | None) -> None:
        """Set ``data.label_map``: file of class names and ids: .json, or lines with name, tab and id; when
        not set, an id is the position in the sorted list of names. Default: None.
        """
        self.options.set("data.label_map", path)

    def set_class_depth(self, depth: int | None) -> None:
        """Set ``data.class_depth``: depth of the class folders below the dataset folder; when not set, 1,
        and class folders that contain folders of images are an error. Default: None.
        """
        self.options.set("data.class_depth", depth)

    def set_lr(self, lr: float | None) -> None:
        """Set ``optim.lr``: learning rate, not scaled by the batch size; when not set, 0.1 x global batch
        / 1024. Default: None.
        """
        self.options.set("optim.lr", lr)

    def set_optimizer(self, optimizer: str) -> None:
        """Set ``optim.optimizer``: optimizer of the network: sgd, adam, adamw, rmsprop, adadelta, adagrad,
        adamax, nadam, radam, asgd, rprop, adafactor, or 'package.module:factory'; class weights: see
        head.optimizer. Default: 'sgd'.
        """
        self.options.set("optim.optimizer", optimizer)

    def set_optimizer_arguments(self, arguments: dict[str, Any] | None) -> None:
        """Set ``optim.optimizer_arguments``: further arguments of the optimizer by name, such as {eps:
        1.e-7}. Default: None.
        """
        self.options.set("optim.optimizer_arguments", arguments)

    def set_optimizer_implementation(self, name: str) -> None:
        """Set ``optim.implementation``: implementation of the optimizer step: auto, fused, foreach or
        for_loop. Default: 'auto'.
        """
        self.options.set("optim.implementation", name)

    def set_momentum(self, momentum: float) -> None:
        """Set ``optim.momentum``: momentum of SGD. Default: 0.9."""
        self.options.set("optim.momentum", momentum)

    def set_nesterov(self, nesterov: bool) -> None:
        """Set ``optim.nesterov``: use Nesterov momentum in SGD, for the network and the class weights.
        Default: False.
        """
        self.options.set("optim.nesterov", nesterov)

    def set_betas(self, betas: Sequence[float]) -> None:
        """Set ``optim.betas``: decay rates of the first and second moments of Adam and its variants.
        Default: (0.9, 0.999).
        """
        self.options.set("optim.betas", betas)

    def set_weight_decay(self, decay: float) -> None:
        """Set ``optim.weight_decay``: weight decay (L2) of all parameters. Default: 0.0005."""
        self.options.set("optim.weight_decay", decay)

    def set_l1_decay(self, decay: float) -> None:
        """Set ``optim.l1_decay``: L1 decay of the network's parameters. Default: 0.0."""
        self.options.set("optim.l1_decay", decay)

    def set_decay_norm_and_bias(self, decay: bool) -> None:
        """Set ``optim.decay_norm_and_bias``: apply weight decay to one-dimensional parameters too: biases,
        norm weights, PReLU slopes. Default: True.
        """
        self.options.set("optim.decay_norm_and_bias", decay)

    def set_parameter_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Set ``optim.groups``: parameter groups: a list of mappings with pattern and optionally
        lr_factor, weight_decay, l1_decay, frozen and arguments of the optimizer; the first matching
        pattern is used; add_parameter_group adds one. Default: ().
        """
        self.options.set("optim.groups", groups)

    def set_freeze(self, patterns: Sequence[str]) -> None:
        """Set ``optim.freeze``: patterns of parameters that are not trained, such as [stem, stages.0].
        Default: ().
        """
        self.options.set("optim.freeze", patterns)

    def set_lr_schedule(self, schedule: str) -> None:
        """Set ``optim.schedule``: learning rate schedule: cosine, polynomial, exponential, step or
        multi_step (step_boundaries), constant, or 'package.module:function'; when not set: step if
        step_boundaries or lr_decay_factor is set, constant if the length of a generator reader is
        unknown, else cosine. Default: 'cosine'.
        """
        self.options.set("optim.schedule", schedule)

    def set_decay_steps(self, num: int | None) -> None:
        """Set ``optim.decay_steps``: step at which a polynomial, cosine or exponential schedule ends; when
        not set, the last step of the run. Default: None.
        """
        self.options.set("optim.decay_steps", num)

    def set_decay_power(self, power: float) -> None:
        """Set ``optim.decay_power``: power of the polynomial schedule. Default: 1.0."""
        self.options.set("optim.decay_power", power)

    def set_cosine_cycles(self, num: int) -> None:
        """Set ``optim.cosine_cycles``: number of cosine cycles over the run (warm restarts). Default: 1."""
        self.options.set("optim.cosine_cycles", num)

    def set_end_lr_factor(self, factor: float) -> None:
        """Set ``optim.end_lr_factor``: final learning rate of a polynomial, cosine or exponential
        schedule, as a fraction of the full learning rate. Default: 0.0.
        """
        self.options.set("optim.end_lr_factor", factor)

    def set_warmup_epochs(self, num: int) -> None:
        """Set ``optim.warmup_epochs``: epochs over which the learning rate increases linearly from 0.
        Default: 0.
        """
        self.options.set("optim.warmup_epochs", num)

    def set_warmup_steps(self, num: int | None) -> None:
        """Set ``optim.warmup_steps``: steps over which the learning rate increases linearly from 0,
        instead of warmup_epochs; when neither is set, 10% of the run's steps, at most 1000; 100 if the
        length is unknown; 0 with a schedule 'package.module:function'. Default: None.
        """
        self.options.set("optim.warmup_steps", num)

    def set_step_boundaries(self, boundaries: Sequence[int]) -> None:
        """Set ``optim.step_boundaries``: steps at which the learning rate is multiplied by
        lr_decay_factor. Default: (100000, 160000, 220000).
        """
        self.options.set("optim.step_boundaries", boundaries)

    def set_lr_decay_factor(self, factor: float) -> None:
        """Set ``optim.lr_decay_factor``: factor of the learning rate at each step boundary. Default: 0.1."""
        self.options.set("optim.lr_decay_factor", factor)

    def set_clip_norm(self, norm: float | None) -> None:
        """Set ``optim.clip_norm``: maximum norm of the gradients (gradient clipping); when not set, the
        smaller of 20 and 0.4 / lr; 0: no clipping. Default: None.
        """
        self.options.set("optim.clip_norm", norm)

    def set_clip_scope(self, scope: str) -> None:
        """Set ``optim.clip_scope``: which gradients are clipped: backbone, or all (with those of the class
        weights, which takes another pass over them). Default: 'backbone'.
        """
        self.options.set("optim.clip_scope", scope)

    def set_ema_decay(self, decay: float) -> None:
        """Set ``optim.ema_decay``: decay per step, such as 0.999, of an exponential moving average of the
        network's weights, which is saved, and used in evaluation, test and predict; 0: off. Default:
        0.0.
        """
        self.options.set("optim.ema_decay", decay)

    def set_precision(self, mode: str) -> None:
        """Set ``precision.mode``: data type in which the backbone computes: float32, float16 (with loss
        scaling; on CPUs, bfloat16 is used) or bfloat16; weights, their updates and the loss are always
        float32. Default: 'float32'.
        """
        self.options.set("precision.mode", mode)

    def set_init_loss_scaling(self, scale: float) -> None:
        """Set ``precision.init_loss_scaling``: float16: initial loss scale. Default: 1.0."""
        self.options.set("precision.init_loss_scaling", scale)

    def set_incr_every_n_steps(self, steps: int) -> None:
        """Set ``precision.incr_every_n_steps``: consecutive finite steps after which the loss scale
        increases. Default: 2000.
        """
        self.options.set("precision.incr_every_n_steps", steps)

    def set_decr_every_n_nan_or_inf(self, steps: int) -> None:
        """Set ``precision.decr_every_n_nan_or_inf``: consecutive steps with a nan or inf after which the
        loss scale decreases. Default: 2.
        """
        self.options.set("precision.decr_every_n_nan_or_inf", steps)

    def set_incr_ratio(self, ratio: float) -> None:
        """Set ``precision.incr_ratio``: factor by which the loss scale increases, up to 2^24. Default:
        2.0.
        """
        self.options.set("precision.incr_ratio", ratio)

    def set_decr_ratio(self, ratio: float) -> None:
        """Set ``precision.decr_ratio``: factor by which the loss scale decreases, down to 1. Default: 0.5."""
        self.options.set("precision.decr_ratio", ratio)

    def set_dynamic_loss_scaling(self, flag: bool) -> None:
        """Set ``precision.use_dynamic_loss_scaling``: increase and decrease the loss scale; if False, it
        is constant, and steps with a nan or inf are skipped. Default: True.
        """
        self.options.set("precision.use_dynamic_loss_scaling", flag)

    def set_loss_scaling(self, when: str) -> None:
        """Set ``precision.loss_scaling``: when the loss is scaled: auto (only in float16), or always (in
        any mode, to test skipped steps). Default: 'auto'.
        """
        self.options.set("precision.loss_scaling", when)

    def set_precision_white_list(self, names: Sequence[str]) -> None:
        """Set ``precision.white_list``: operators, and modules by name or class (with * and ?), that
        always compute in 16 bits. Default: ().
        """
        self.options.set("precision.white_list", names)

    def set_precision_black_list(self, names: Sequence[str]) -> None:
        """Set ``precision.black_list``: operators, and modules by name or class (with * and ?), that
        always compute in float32. Default: ().
        """
        self.options.set("precision.black_list", names)

    def set_evaluation_precision(self, mode: str) -> None:
        """Set ``precision.evaluation``: data type of test, predict and evaluation during training:
        float32, or training (that of training). Default: 'float32'.
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
        """Set ``train.micro_batches``: micro-batches into which a rank's batch is split (gradient
        accumulation). Default: 1.
        """
        self.options.set("train.micro_batches", num)

    def set_test_batch_size(self, batch_size: int) -> None:
        """Set ``train.test_batch_size``: images per rank and step in test, predict and evaluation.
        Default: 120.
        """
        self.options.set("train.test_batch_size", batch_size)

    def set_train_epochs(self, num: int) -> None:
        """Set ``train.epochs``: number of epochs. Default: 120."""
        self.options.set("train.epochs", num)

    def set_epoch_steps(self, num: int | None) -> None:
        """Set ``train.epoch_steps``: with several data sets: steps per epoch; when not set, the images of
        all data sets / global batch size. Default: None.
        """
        self.options.set("train.epoch_steps", num)

    def set_train_steps(self, num: int | None) -> None:
        """Set ``train.steps``: maximum number of steps; training stops after them even within an epoch.
        Default: None.
        """
        self.options.set("train.steps", num)

    def set_calc_acc(self, calc: bool) -> None:
        """Set ``train.calc_acc``: measure the training accuracy at each logged step. Default: False."""
        self.options.set("train.calc_acc", calc)

    def set_log_period(self, period: int) -> None:
        """Set ``train.log_period``: steps between two log lines. Default: 200."""
        self.options.set("train.log_period", period)

    def set_with_test(self, with_test: bool) -> None:
        """Set ``train.with_test``: evaluate val_targets during training. Default: True."""
        self.options.set("train.with_test", with_test)

    def set_test_period(self, period: int) -> None:
        """Set ``train.test_period``: steps between evaluations, in addition to the end of each epoch; 0:
        only at the end of epochs. Default: 0.
        """
        self.options.set("train.test_period", period)

    def set_seed(self, seed: int) -> None:
        """Set ``train.seed``: random seed of the run: weights, order, augmentation, dropout. Default: 0."""
        self.options.set("train.seed", seed)

    def set_deterministic(self, flag: bool) -> None:
        """Set ``train.deterministic``: use deterministic algorithms only: an operation that has none is an
        error. Default: False.
        """
        self.options.set("train.deterministic", flag)

    def set_stop_deadline(self, seconds: float) -> None:
        """Set ``train.stop_deadline``: seconds in which the state must be saved after SIGINT or SIGTERM;
        then the process ends. Default: 60.0.
        """
        self.options.set("train.stop_deadline", seconds)

    def set_checkpoint_stages(self, names: str) -> None:
        """Set ``memory.checkpoint_stages``: activation checkpointing: parts of the network whose
        activations are recomputed in the backward pass: none, all (every block), or patterns of module
        names such as 'stages.0,stages.1.*'. Default: 'none'.
        """
        self.options.set("memory.checkpoint_stages", names)

    def set_checkpoint_every(self, num: int) -> None:
        """Set ``memory.checkpoint_every``: activation checkpointing: use only every n-th of these parts,
        in the network's order. Default: 1.
        """
        self.options.set("memory.checkpoint_every", num)

    def set_model_save_dir(self, directory: str) -> None:
        """Set ``checkpoint.save_dir``: folder or fsspec URL, such as s3://bucket/run, for checkpoints,
        metrics and plots. Default: 'output'.
        """
        self.options.set("checkpoint.save_dir", directory)

    def set_checkpoint_dir(self, directory: str | None) -> None:
        """Set ``checkpoint.load_dir``: checkpoint to resume, test or predict with: a folder, a URL, or
        'last' or 'best' in save_dir; with 'last', training starts from scratch if there is no
        checkpoint. Default: None.
        """
        self.options.set("checkpoint.load_dir", directory)

    def set_upload_dir(self, url: str | None) -> None:
        """Set ``checkpoint.upload_dir``: fsspec URL of a folder to which each checkpoint is uploaded, in
        addition to save_dir. Default: None.
        """
        self.options.set("checkpoint.upload_dir", url)

    def set_download_dir(self, url: str | None) -> None:
        """Set ``checkpoint.download_dir``: fsspec URL of a checkpoint that is downloaded to load_dir, or
        to the cache, and loaded. Default: None.
        """
        self.options.set("checkpoint.download_dir", url)

    def set_local_save_dir(self, directory: str | None) -> None:
        """Set ``checkpoint.local_dir``: local folder of the checkpoints when save_dir is a URL; when not
        set, in the cache folder. Default: None.
        """
        self.options.set("checkpoint.local_dir", directory)

    def set_hdfs_user(self, name: str | None) -> None:
        """Set ``checkpoint.hdfs_user``: HDFS user name; when not set, HADOOP_USER_NAME or the system's
        user name. Default: None.
        """
        self.options.set("checkpoint.hdfs_user", name)

    def set_new_version(self, flag: bool) -> None:
        """Set ``checkpoint.new_version``: save to a new folder version_N in save_dir, next to those of
        earlier runs. Default: False.
        """
        self.options.set("checkpoint.new_version", flag)

    def set_save_every_n_epochs(self, num: int) -> None:
        """Set ``checkpoint.every_n_epochs``: epochs between checkpoints; the last epoch is always saved;
        0: only the last epoch. Default: 1.
        """
        self.options.set("checkpoint.every_n_epochs", num)

    def set_save_every_n_steps(self, num: int) -> None:
        """Set ``checkpoint.every_n_steps``: steps between checkpoints, in addition to those of epochs; 0:
        none. Default: 0.
        """
        self.options.set("checkpoint.every_n_steps", num)

    def set_max_last_checkpoint_num(self, num: int) -> None:
        """Set ``checkpoint.keep_last``: number of newest checkpoints to keep; -1: all. Default: 5."""
        self.options.set("checkpoint.keep_last", num)

    def set_save_top_k(self, num: int) -> None:
        """Set ``checkpoint.save_top_k``: number of best checkpoints to keep in addition; -1: all. Default:
        1.
        """
        self.options.set("checkpoint.save_top_k", num)

    def set_monitor(self, metric: str | None) -> None:
        """Set ``checkpoint.monitor``: metric that decides which checkpoint is best: 'loss', or 'lfw
        accuracy' for the pair file lfw; when not set, accuracy on the first pair file, else the loss.
        Default: None.
        """
        self.options.set("checkpoint.monitor", metric)

    def set_monitor_mode(self, mode: str) -> None:
        """Set ``checkpoint.monitor_mode``: whether a higher (max) or lower (min) value of that metric is
        better; auto: min for a loss. Default: 'auto'.
        """
        self.options.set("checkpoint.monitor_mode", mode)

    def set_async_save(self, flag: bool) -> None:
        """Set ``checkpoint.asynchronous``: write checkpoints in the background, from a copy in CPU memory.
        Default: True.
        """
        self.options.set("checkpoint.asynchronous", flag)

    def set_save_error(self, policy: str) -> None:
        """Set ``checkpoint.on_error``: what to do if a checkpoint cannot be written: stop the run, or
        continue without it. Default: 'stop'.
        """
        self.options.set("checkpoint.on_error", policy)

    def set_store_timeout(self, seconds: float) -> None:
        """Set ``checkpoint.store_timeout``: seconds for which a failing transfer to or from a store is
        retried. Default: 120.0.
        """
        self.options.set("checkpoint.store_timeout", seconds)

    def set_backbone_parallel(self, way: str) -> None:
        """Set ``parallel.backbone``: how ranks share the backbone: replicated (each rank holds all of it)
        or sharded (parameters, gradients and optimizer state are split over the ranks: less memory,
        more communication). Default: 'replicated'.
        """
        self.options.set("parallel.backbone", way)

    def set_backbone_shard_size(self, ranks: int) -> None:
        """Set ``parallel.shard_size``: number of ranks that share one copy of a sharded backbone, such as
        those of one machine; 0: all ranks. Default: 0.
        """
        self.options.set("parallel.shard_size", ranks)

    def set_backbone_shard_units(self, patterns: str) -> None:
        """Set ``parallel.shard_units``: modules of a sharded backbone whose parameters are gathered
        together (FSDP units): auto, or names separated by commas in which * stands for one component,
        such as 'stages.*.*,neck'. Default: 'auto'.
        """
        self.options.set("parallel.shard_units", patterns)

    def set_device(self, device: str) -> None:
        """Set ``runtime.device``: device: auto, cpu or cuda. Default: 'auto'."""
        self.options.set("runtime.device", device)

    def set_backend(self, backend: str) -> None:
        """Set ``runtime.backend``: communication backend: auto (NCCL on CUDA, gloo elsewhere), gloo, nccl
        or mpi. Default: 'auto'.
        """
        self.options.set("runtime.backend", backend)

    def set_init_method(self, url: str) -> None:
        """Set ``runtime.init_method``: where the ranks meet: env:// (environment variables of the
        launcher), tcp://host:port of rank 0, or file:///path on a shared file system. Default:
        'env://'.
        """
        self.options.set("runtime.init_method", url)

    def set_rank(self, rank: int | None) -> None:
        """Set ``runtime.rank``: rank of this process, from 0; None: RANK of the environment. Default:
        None.
        """
        self.options.set("runtime.rank", rank)

    def set_world_size(self, ranks: int | None) -> None:
        """Set ``runtime.world_size``: number of ranks; None: WORLD_SIZE of the environment. Default: None."""
        self.options.set("runtime.world_size", ranks)

    def set_timeout(self, seconds: float) -> None:
        """Set ``runtime.timeout``: seconds that a rank waits for the other ranks before it fails. Default:
        1800.0.
        """
        self.options.set("runtime.timeout", seconds)

    def set_dtype(self, dtype: str) -> None:
        """Set ``runtime.dtype``: data type of weights and computation: float32, or float64 for numerical
        checks. Default: 'float32'.
        """
        self.options.set("runtime.dtype", dtype)

    def set_cpu_threads(self, num: int) -> None:
        """Set ``runtime.cpu_threads``: CPU threads per rank; 0: the default of PyTorch (torchrun sets 1,
        plsc launch cores / ranks). Default: 0.
        """
        self.options.set("runtime.cpu_threads", num)

    def set_channels_last(self, mode: str) -> None:
        """Set ``speed.channels_last``: channels-last memory format of images: on, off, or auto (on in 16
        bits and on CPUs). Default: 'auto'.
        """
        self.options.set("speed.channels_last", mode)

    def set_compile(self, flag: bool) -> None:
        """Set ``speed.compile``: compile the backbone's training step with torch.compile: the first start
        takes minutes, later ones use a cache. Default: False.
        """
        self.options.set("speed.compile", flag)

    def set_fold_batch_norm(self, flag: bool) -> None:
        """Set ``speed.fold_batch_norm``: in test, predict and evaluation, fold batch norms into the
        convolutions before them. Default: False.
        """
        self.options.set("speed.fold_batch_norm", flag)

    def set_overlap_copies(self, flag: bool) -> None:
        """Set ``speed.overlap_copies``: on a GPU, copy the next batch while the current step runs.
        Default: True.
        """
        self.options.set("speed.overlap_copies", flag)

    def set_late_losses(self, flag: bool) -> None:
        """Set ``speed.late_losses``: on a GPU, read each loss one step later instead of waiting for it; if
        False, a bad loss stops the run before the update that it belongs to, as on a CPU. Default:
        True.
        """
        self.options.set("speed.late_losses", flag)

    def set_bucket_mb(self, mebibytes: float) -> None:
        """Set ``speed.bucket_mb``: MiB of gradients that are summed over the ranks at once, while the
        backward pass continues (DDP buckets). Default: 25.0.
        """
        self.options.set("speed.bucket_mb", mebibytes)
