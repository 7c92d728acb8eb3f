"""Evaluate the network of a checkpoint on pair files and on a held-out set."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from plsc.checkpoint.load import read_class_names
from plsc.config import Config, Options
from plsc.errors import DataError
from plsc.evaluate.verification import VerificationResult
from plsc.parallel.world import World
from plsc.run.build_heads import load_head
from plsc.run.targets import HeldOutSet, Target, evaluate_targets, load_targets, open_held_out
from plsc.run.user_parts import UserParts
from plsc.state.network import open_trained

logger = logging.getLogger(__name__)


def run_test(options: Options, world: World, user: UserParts) -> dict[str, Any]:
    """Return the results of the checkpoint's network on every pair file and on `data.val_dir`, by name."""
    network, config, checkpoint = open_trained(options, world, user.model)
    limit = int(config.train.fast_dev_run) or config.train.limit_test_batches
    targets: list[Target | HeldOutSet] = []
    targets += load_targets(config, user.test_reader, limit, world.size)
    head = None
    if config.data.val_dir is not None:
        head = load_head(*checkpoint, world)
        names, class_names = [target.name for target in targets], read_class_names(*checkpoint)
        targets += open_held_out(config, head.class_num, class_names, names, limit, world)
    check_any(targets, config)
    results = evaluate_targets(network, targets, config, world, head)
    log_results(world, results)
    return results


def check_any(targets: Sequence[Target | HeldOutSet], config: Config) -> None:
    """Raise DataError if there is nothing to test on."""
    if not targets:
        raise DataError(
            f"{config.data.dataset_dir} has no pair file to test on; put one there and name it with "
            "data.val_targets, or a labelled dataset as data.val_dir"
        )


def log_results(world: World, results: Mapping[str, Any]) -> None:
    """Log a line per result; for pairs, with the TAR at each FAR that is resolved."""
    for name, result in results.items():
        tars = ""
        if isinstance(result, VerificationResult):
            resolved = result.resolved_fars()
            tars = "".join(f", TAR {result.tar_at_far[far]:.4f} at FAR {far:g}" for far in resolved)
        world.log(f"{name}: {result.summary()}{tars}")
