"""Train on all ranks, reorder the classes on rank 0, and resume. Arguments: CLASS_FOLDERS OUT."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist

from plsc.checkpoint.classes import change_classes
from tests.distributed.job import small_entry


def train(dataset, save_dir, checkpoint, epochs):
    ins = small_entry(dataset, save_dir)
    ins.set_emb_size(8)
    ins.set_train_batch_size(10)
    ins.set_train_epochs(epochs)
    if checkpoint:
        ins.set_checkpoint_dir(checkpoint)
    return ins.train()


def main():
    dataset, out = map(Path, sys.argv[1:])
    dist.init_process_group("gloo")
    first = train(dataset, out / "first", None, 2)
    changed = out / "changed"
    if dist.get_rank() == 0:
        change_classes(first.checkpoint, changed, reorder=np.loadtxt(out / "order.txt", dtype=int))
    dist.barrier()
    train(dataset, out / "undisturbed", first.checkpoint, 3)
    train(dataset, out / "second", changed, 3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
