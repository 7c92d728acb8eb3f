"""The options of the speed of a step; the reasons for the defaults are measured in docs/speed.md."""

from __future__ import annotations

from dataclasses import dataclass

from plsc.option import declare, more_than, of_run, one_of


@dataclass(frozen=True)
class SpeedOptions:
    """Speed of a step; none of it changes what is computed, but for rounding."""

    channels_last: str = of_run(
        "auto",
        "keep images channels last in memory: on, off, or auto (on in 16 bits and on CPUs)",
        "set_channels_last(mode)",
        one_of("auto", "on", "off"),
    )
    compile: bool = of_run(
        False,
        "compile the backbone's training step by torch.compile: minutes at the first start, a cache keeps it",
        "set_compile(flag)",
    )
    fold_batch_norm: bool = declare(
        False,
        "evaluate and predict with batch norms folded into the convolutions before them",
        "set_fold_batch_norm(flag)",
    )
    overlap_copies: bool = declare(
        True, "on a GPU, copy a batch there while the step before still runs", "set_overlap_copies(flag)"
    )  # fmt: skip
    late_losses: bool = of_run(
        True,
        "on a GPU, look at a step's loss one step later instead of waiting for it; without, a bad loss stops "
        "the run before the update that it belongs to, as on a CPU",
        "set_late_losses(flag)",
    )
    bucket_mb: float = of_run(
        25.0,
        "MiB of gradients that are summed over the ranks at once, while backward goes on",
        "set_bucket_mb(mebibytes)",
        more_than(0),
    )
