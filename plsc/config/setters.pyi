"""The types of the setters, written by tools/generate.py from the table in plsc/config."""

from collections.abc import Sequence
from typing import Any

from plsc.config import Options

class Setters:
    """Setters that check a value and put it into `options`; OptionError says what was expected."""

    options: Options

    def set_model_name(self, model_name: str) -> None:
        """Set ``model.name``: network: ResNet18, ResNet34, ResNet50, ResNet101, ResNet152, IResNet18,
        IResNet34, IResNet50, IResNet100, IResNet200, SmallResNet, 'torchvision/NAME', 'timm/NAME', or
        'package.module:Class' (a subclass of BaseModel). Default: 'ResNet50'.
        """

    def set_emb_size(self, size: int) -> None:
        """Set ``model.emb_size``: size of the embedding. Default: 512."""

    def set_image_shape(self, shape: Sequence[int]) -> None:
        """Set ``model.image_shape``: channels, height and width of the input; on the command line
        3,112,112. Default: (3, 112, 112).
        """

    def set_dropout(self, ratio: float) -> None:
        """Set ``model.dropout``: dropout probability before the embedding layer. Default: 0.4."""

    def set_neck(self, parts: str) -> None:
        """Set ``model.neck``: layers between features and embedding, joined by '-': norm (batch norm),
        dropout, linear. Default: 'norm-dropout-linear-norm'.
        """

    def set_sync_batch_norm(self, sync: bool) -> None:
        """Set ``model.sync_batch_norm``: use batch-norm statistics of the global batch. Default: False."""

    def set_pretrained(self, path: str | None) -> None:
        """Set ``model.pretrained``: initial weights: a checkpoint, a .safetensors file, or a state dict of
        torch.save. Default: None.
        """

    def set_loss_type(self, loss_type: str, **arguments: Any) -> None:
        """Set ``head.loss_type``: loss: softmax, arcface, cosface, sphereface, combined, adaface, magface,
        curricularface; with the prefix dist_, class weights are sharded, else replicated. Default:
        'dist_arcface'.
        """

    def set_margin(self, margin: float | None) -> None:
        """Set ``head.margin``: margin: an angle in radians; cosface: a cosine; sphereface: a factor of the
        angle; None: the paper's value, 0.5 for arcface. Default: None.
        """

    def set_class_margins(self, **arguments: Any) -> None:
        """Set ``head.class_margins``: margins per class instead of head.margin, of any loss with that
        argument: {a: 0.5, b: 0.05} for a n^(-1/4) + b, n images of the class (LDAM); or {file: m.npy},
        one margin per class. Default: None.
        """

    def set_class_num(self, num: int | None) -> None:
        """Set ``head.class_num``: number of classes; None: largest label + 1. Default: None."""

    def set_margin_warmup_steps(self, num: int) -> None:
        """Set ``head.margin_warmup_steps``: steps of linear increase of the margin; only if the loss has a
        margin. Default: 0.
        """

    def set_scale(self, scale: float | str) -> None:
        """Set ``head.scale``: factor of the cosines; auto: sqrt(2) ln(C - 1) for C classes (AdaCos), 64
        from 10,000 classes on. Default: 'auto'.
        """

    def set_sub_centers(self, num: int) -> None:
        """Set ``head.sub_centers``: weight vectors per class (sub-centre ArcFace). Default: 1."""

    def set_sample_ratio(self, sample_ratio: float | dict[str, Any]) -> None:
        """Set ``head.sample_ratio``: share of each rank's classes per step, including those of the batch
        (PartialFC); or shares by their first step, such as {0: 1.0, 2000: 0.1}; only if class weights
        are sharded (a loss dist_...). Default: 1.0.
        """

    def set_hard_share(self, share: float) -> None:
        """Set ``head.hard_share``: largest share of the sampled classes that are hard negatives (known to
        be near those of the batch); only if class weights are sharded (a loss dist_...) and
        head.sample_ratio is below 1. Default: 0.0.
        """

    def set_head_optimizer(self, name: str) -> None:
        """Set ``head.optimizer``: optimizer of class weights: sgd (with optim.momentum), adamw, or adagrad
        (row-wise); only if class weights are sharded (a loss dist_...). Default: 'sgd'.
        """

    def set_head_lr_factor(self, factor: float) -> None:
        """Set ``head.lr_factor``: learning rate of class weights, relative to the backbone's. Default:
        1.0.
        """

    def set_head_weight_decay(self, decay: float | None) -> None:
        """Set ``head.weight_decay``: weight decay (L2) of class weights; None: optim.weight_decay.
        Default: None.
        """

    def set_row_dtype(self, dtype: str) -> None:
        """Set ``head.row_dtype``: dtype of class weights: float32; with stochastic rounding bfloat16, or
        int8 with a scale per class; only if class weights are sharded (a loss dist_...). Default:
        'float32'.
        """

    def set_row_state_dtype(self, dtype: str) -> None:
        """Set ``head.state_dtype``: dtype of the optimizer state of class weights: float32 or bfloat16;
        only if class weights are sharded (a loss dist_...). Default: 'float32'.
        """

    def set_head_offload(self, offload: bool) -> None:
        """Set ``head.offload``: keep class weights and their optimizer state in CPU memory; only if class
        weights are sharded (a loss dist_...). Default: False.
        """

    def set_weights_file(self, folder: str | None) -> None:
        """Set ``head.weights_file``: folder on a local disk: keep class weights and their optimizer state
        in a file per rank, of which a step reads and writes only what it uses; only if class weights
        are sharded (a loss dist_...) and head.sample_ratio is always below 1 and head.row_dtype is int8
        and head.hard_share is 0 and head.sub_centers is 1 and checkpoints are not uploaded: they lack
        the class weights (plsc checkpoint copy adds them). Default: None.
        """

    def set_head_execution(self, **arguments: Any) -> None:
        """Set ``head.execution``: how the head computes: products (of float32 or bfloat16; auto: by
        precision.mode); keep_mb (MiB per rank to cache softmax terms); kernels (torch, native (C) or
        triton); only if class weights are sharded (a loss dist_...). Default: None.
        """

    def set_dataset_dir(self, directory: str, **arguments: Any) -> None:
        """Set ``data.dataset_dir``: training data: a path or fsspec URL (formats: docs/data.md). Default:
        './train_data'.
        """

    def set_train_image_num(self, num: int | None) -> None:
        """Set ``data.train_image_num``: images per epoch of a reader, if known. Default: None."""

    def set_val_targets(self, targets: str | None) -> None:
        """Set ``data.val_targets``: pair files in the dataset folder, without .bin, or text lists such as
        pairs.txt, separated by commas; None: 'lfw' if lfw.bin exists. Default: None.
        """

    def set_val_dir(self, directory: str | None) -> None:
        """Set ``data.val_dir``: dataset of held-out images of the same classes, to measure top-1 and top-5
        accuracy. Default: None.
        """

    def set_num_workers(self, num: int) -> None:
        """Set ``data.num_workers``: threads per rank (processes for a Dataset or transform of yours) that
        load images; 0: load between steps. Default: 2.
        """

    def set_order(self, order: str | dict[str, Any], **arguments: Any) -> None:
        """Set ``data.order``: order of the samples: global (all shuffled), block (blocks of neighbours
        shuffled), sequential, balanced (small classes more often), or classes (images_per_class images
        of each class in a batch); or a mapping with name and arguments: balance (balanced: share of a
        class of n images in an epoch, in proportion to n^balance; 0: equal; 1: as in the data);
        images_per_class (classes: images of each class in a global batch); block_samples (block:
        neighbouring samples per block); pool_samples (block: samples that are shuffled together).
        Default: 'global'.
        """

    def set_cache(self, where: str) -> None:
        """Set ``data.cache``: where samples are kept after the first epoch, and how many bytes per rank:
        none, memory:4G, or a folder, such as /scratch:40G. Default: 'none'.
        """

    def set_last_batch(self, policy: str) -> None:
        """Set ``data.last_batch``: incomplete last batch of an epoch: pad (with the epoch's first
        samples), keep or drop. Default: 'pad'.
        """

    def set_bad_images(self, policy: str) -> None:
        """Set ``data.bad_images``: what to do with an unusable sample: stop, or skip it. Default: 'stop'."""

    def set_flip(self, flip: bool) -> None:
        """Set ``data.flip``: flip training images with probability 0.5; in evaluation, add the flipped
        image's embedding. Default: True.
        """

    def set_landmarks(self, path: str | None) -> None:
        """Set ``data.landmarks``: file in the dataset folder with five landmarks per image, to align faces
        (docs/evaluate.md#align-faces). Default: None.
        """

    def set_lr(self, lr: float | None) -> None:
        """Set ``optim.lr``: learning rate, used as it is; None: 0.1 x global batch / 1024; only if the
        optimizer has a name, or the class weights are sharded. Default: None.
        """

    def set_optimizer(self, optimizer: str) -> None:
        """Set ``optim.optimizer``: optimizer of the network: sgd, adam, adamw, rmsprop, adadelta, adagrad,
        sparse_adam, adamax, nadam, radam, asgd, rprop, adafactor, or 'package.module:factory'. Default:
        'sgd'.
        """

    def set_optimizer_arguments(self, arguments: dict[str, Any] | None) -> None:
        """Set ``optim.optimizer_arguments``: other arguments of the optimizer, such as {betas: [0.9,
        0.99]}; nesterov of sgd also applies to class weights. Default: None.
        """

    def set_momentum(self, momentum: float) -> None:
        """Set ``optim.momentum``: momentum of SGD; only if the optimizer of network or class weights is
        sgd. Default: 0.9.
        """

    def set_weight_decay(self, decay: float) -> None:
        """Set ``optim.weight_decay``: weight decay (L2) of all parameters; only if the optimizer has a
        name, or the class weights are sharded. Default: 0.0005.
        """

    def set_parameter_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Set ``optim.groups``: parameter groups: a list of mappings with pattern, lr_factor,
        weight_decay, frozen and optimizer arguments; add_parameter_group adds one. Default: ().
        """

    def set_freeze(self, patterns: Sequence[str]) -> None:
        """Set ``optim.freeze``: patterns of parameters to freeze, such as [stem, stages.0]. Default: ()."""

    def set_lr_schedule(self, schedule: str | dict[str, Any], **arguments: Any) -> None:
        """Set ``optim.schedule``: learning rate schedule: cosine, polynomial, step, constant, or
        'package.module:function'; or a mapping with name and arguments: steps (last step of the fall;
        None: that of the run); end_factor (final learning rate, relative to lr); power (power of the
        polynomial); boundaries (steps at which step changes the learning rate); factor (factor of step
        at each of the boundaries). Default: 'cosine'.
        """

    def set_warmup_steps(self, num: int | str | None) -> None:
        """Set ``optim.warmup_steps``: steps of linear warm-up, such as 500, or epochs, such as 2ep; None:
        10% of the run, at most 1000; 100 if the length is unknown; 0 with a custom schedule. Default:
        None.
        """

    def set_clip_norm(self, norm: float | None) -> None:
        """Set ``optim.clip_norm``: maximum norm of the gradients; None: the smaller of 20 and 0.4 / lr; 0:
        no clipping. Default: None.
        """

    def set_ema_decay(self, decay: float) -> None:
        """Set ``optim.ema_decay``: decay per step, such as 0.999, of a moving average of the network's
        weights for evaluation; 0: off. Default: 0.0.
        """

    def set_precision(self, mode: str) -> None:
        """Set ``precision.mode``: dtype of the backbone's computation: float32, bfloat16 or float16 (with
        loss scaling; on CPUs bfloat16). Default: 'float32'.
        """

    def set_loss_scaling(self, **arguments: Any) -> None:
        """Set ``precision.scaling_arguments``: how the loss is scaled: init_loss_scaling (initial loss
        scale); incr_every_n_steps (consecutive finite steps before the scale increases);
        decr_every_n_nan_or_inf (consecutive steps with nan or inf before the scale decreases);
        incr_ratio (factor by which the scale increases, up to 2^24); decr_ratio (factor by which the
        scale decreases, down to 1); use_dynamic_loss_scaling (adapt the scale; False: constant); only
        if precision.mode is float16. Default: None.
        """

    def set_precision_lists(self, **arguments: Any) -> None:
        """Set ``precision.lists``: operators, see docs/performance.md: custom_white_list (those in 16
        bits); custom_black_list (those in float32); only if precision.mode is float16 or bfloat16.
        Default: None.
        """

    def set_train_batch_size(self, batch_size: int) -> None:
        """Set ``train.batch_size``: training images per rank and step. Default: 128."""

    def set_global_batch_size(self, batch_size: int | None) -> None:
        """Set ``train.global_batch_size``: training images per step over all ranks, instead of batch_size.
        Default: None.
        """

    def set_micro_batches(self, num: int) -> None:
        """Set ``train.micro_batches``: micro-batches per batch of a rank (gradient accumulation). Default:
        1.
        """

    def set_test_batch_size(self, batch_size: int) -> None:
        """Set ``train.test_batch_size``: images per rank and step in test, predict and evaluation.
        Default: 120.
        """

    def set_train_epochs(self, num: int) -> None:
        """Set ``train.epochs``: number of epochs. Default: 120."""

    def set_train_steps(self, num: int | None) -> None:
        """Set ``train.steps``: number of steps, instead of epochs. Default: None."""

    def set_calc_acc(self, calc: bool) -> None:
        """Set ``train.calc_acc``: log the training accuracy, top-1 and top-5. Default: False."""

    def set_log_period(self, period: int) -> None:
        """Set ``train.log_period``: steps between log lines. Default: 200."""

    def set_loggers(self, loggers: str | Sequence[str]) -> None:
        """Set ``train.loggers``: where metrics are written: jsonl, tensorboard; separated by commas, or a
        list. Default: 'jsonl'.
        """

    def set_callbacks(self, callbacks: str | Sequence[str]) -> None:
        """Set ``train.callbacks``: callbacks: gradient_norm (log the norm of the network's gradient),
        check_shape (print the shapes of parameters and outputs of each layer), check_content (also
        values and statistics), profile (trace steps 6 to 15 with torch.profiler); separated by commas,
        or a list. Default: ().
        """

    def set_with_test(self, with_test: bool) -> None:
        """Set ``train.with_test``: evaluate val_targets and val_dir during training. Default: True."""

    def set_test_period(self, period: int) -> None:
        """Set ``train.test_period``: steps between additional evaluations; 0: none; only if
        train.with_test is True. Default: 0.
        """

    def set_seed(self, seed: int) -> None:
        """Set ``train.seed``: random seed of weights, order, flips and dropout. Default: 0."""

    def set_deterministic(self, flag: bool) -> None:
        """Set ``train.deterministic``: use deterministic algorithms only. Default: False."""

    def set_limit_train_batches(self, limit: int | float) -> None:
        """Set ``train.limit_train_batches``: batches per epoch: an integer is their number, a fraction
        their share; 1.0: all. Default: 1.0.
        """

    def set_limit_val_batches(self, limit: int | float) -> None:
        """Set ``train.limit_val_batches``: as limit_train_batches, for each evaluation during training.
        Default: 1.0.
        """

    def set_limit_test_batches(self, limit: int | float) -> None:
        """Set ``train.limit_test_batches``: as limit_train_batches, for test. Default: 1.0."""

    def set_fast_dev_run(self, flag: bool | int) -> None:
        """Set ``train.fast_dev_run``: run one batch (True) or this many of training, of each evaluation or
        of test, and save nothing. Default: False.
        """

    def set_recompute(self, blocks: str) -> None:
        """Set ``memory.recompute``: recomputation (activation checkpointing): none, or all (every block).
        Default: 'none'.
        """

    def set_model_save_dir(self, directory: str) -> None:
        """Set ``checkpoint.save_dir``: folder or fsspec URL, such as s3://bucket/run, of checkpoints,
        metrics and plots. Default: 'output'.
        """

    def set_checkpoint_dir(self, directory: str | None) -> None:
        """Set ``checkpoint.load_dir``: checkpoint to resume, test or predict with: a folder, a URL, or
        'last' or 'best' in save_dir; 'last' trains from scratch if there is none. Default: None.
        """

    def set_upload_dir(self, url: str | None) -> None:
        """Set ``checkpoint.upload_dir``: fsspec URL to which each checkpoint is uploaded, too. Default:
        None.
        """

    def set_download_dir(self, url: str | None) -> None:
        """Set ``checkpoint.download_dir``: fsspec URL of a checkpoint to load, or of a run (newest
        checkpoint); downloaded to load_dir, or to the cache folder. Default: None.
        """

    def set_hdfs_user(self, name: str | None) -> None:
        """Set ``checkpoint.hdfs_user``: HDFS user name; None: HADOOP_USER_NAME or the system's user name.
        Default: None.
        """

    def set_new_version(self, flag: bool) -> None:
        """Set ``checkpoint.new_version``: save to a new folder version_N in save_dir. Default: False."""

    def set_save_every_n_epochs(self, num: int) -> None:
        """Set ``checkpoint.every_n_epochs``: epochs between checkpoints; the last epoch is always saved;
        0: no others. Default: 1.
        """

    def set_save_every_n_steps(self, num: int) -> None:
        """Set ``checkpoint.every_n_steps``: steps between additional checkpoints; 0: none. Default: 0."""

    def set_max_last_checkpoint_num(self, num: int) -> None:
        """Set ``checkpoint.keep_last``: newest checkpoints to keep; -1: all. Default: 5."""

    def set_save_top_k(self, num: int) -> None:
        """Set ``checkpoint.save_top_k``: best checkpoints to keep in addition; -1: all. Default: 1."""

    def set_monitor(self, metric: str | None) -> None:
        """Set ``checkpoint.monitor``: metric of the best checkpoint: 'loss', 'lfw accuracy', 'val top1',
        ...; None: accuracy of the first pair file, else top-1 on val_dir, else loss. Default: None.
        """

    def set_device(self, device: str) -> None:
        """Set ``runtime.device``: device: auto, cpu or cuda. Default: 'auto'."""

    def set_backend(self, backend: str) -> None:
        """Set ``runtime.backend``: communication backend: auto (nccl on CUDA, else gloo), gloo, nccl or
        mpi. Default: 'auto'.
        """

    def set_init_method(self, url: str) -> None:
        """Set ``runtime.init_method``: rendezvous: env:// (environment variables), tcp://host:port of rank
        0, or file:///path. Default: 'env://'.
        """

    def set_rank(self, rank: int | None) -> None:
        """Set ``runtime.rank``: rank of this process; None: RANK of the environment. Default: None."""

    def set_world_size(self, ranks: int | None) -> None:
        """Set ``runtime.world_size``: number of ranks; None: WORLD_SIZE of the environment. Default: None."""

    def set_timeout(self, seconds: float) -> None:
        """Set ``runtime.timeout``: seconds that a rank waits for other ranks. Default: 1800.0."""

    def set_cpu_threads(self, num: int) -> None:
        """Set ``runtime.cpu_threads``: CPU threads per rank; 0: PyTorch's default (torchrun: 1, plsc
        launch: cores / ranks). Default: 0.
        """

    def set_compile(self, flag: bool) -> None:
        """Set ``speed.compile``: compile the backbone with torch.compile. Default: False."""
