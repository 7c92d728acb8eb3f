"""Trains on some ranks; each writes what its logger got, and torch's norms of the gradients."""

import json
import sys
from pathlib import Path

import torch

from plsc import Callback
from tests.system.small_entry import entry


class Remember:
    def __init__(self):
        self.entries = []

    def write(self, entry):
        self.entries.append(entry)

    def close(self):
        pass


class Norms(Callback):
    """torch's norm of the whole gradients, and the logged one."""

    def __init__(self):
        self.expected, self.logged_norms = [], []

    def after_backward(self, context):
        gradients = [p.grad for p in context.network.parameters() if p.grad is not None]
        self.expected.append(float(torch.nn.utils.get_total_norm(gradients)))

    def logged(self, context):
        self.logged_norms.append(context.metrics["gradient_norm"])


def main():
    dataset, folder = map(Path, sys.argv[1:])
    ins = entry(dataset, folder / "run", set_train_epochs=2, set_train_batch_size=4, set_log_period=2)
    ins.set_callbacks(("gradient_norm", "images"))
    logger, norms = Remember(), Norms()
    ins.add_callback(norms)
    ins.set_loggers("jsonl", logger)
    ins.train()
    report = [logger.entries, norms.expected, norms.logged_norms]
    (folder / f"{ins._world.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
