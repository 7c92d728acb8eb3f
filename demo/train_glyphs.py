"""Train a small residual network with the distributed ArcFace head on the glyphs.

    torchrun --standalone --nproc-per-node 2 demo/train_glyphs.py demo/output/glyphs demo/output/run

The same script runs on one process (`python demo/train_glyphs.py ...`) and on any number of ranks: the
global batch stays the same, and every rank holds its share of the class weights.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from plsc import Entry

GLOBAL_BATCH = 128
RATE = 0.1  # learning rate of that batch


def main() -> None:
    """Set the options, train, and show that the weights that were saved work."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("data", type=Path, help="folder that make_glyphs.py made")
    parser.add_argument("run", type=Path, help="new folder for checkpoints, metrics and plots")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--precision", default="float32", help="or bfloat16")
    options = parser.parse_args()

    with (options.data / "label.txt").open() as file:
        images = sum(1 for _ in file)
    steps = options.epochs * math.ceil(images / GLOBAL_BATCH)

    ins = Entry()
    ins.set_dataset_dir(str(options.data))
    ins.set_val_targets("glyphs_unseen")
    ins.set_flip(False)  # a mirrored glyph is another glyph
    ins.set_num_workers(0)  # small files: reading them costs less than handing them over

    ins.set_model_name("SmallResNet")
    ins.set_image_shape((1, 32, 32))
    ins.set_emb_size(128)
    ins.set_dropout(0.0)

    ins.set_loss_type("dist_arcface")
    ins.set_margin(0.3)  # milder than the 0.5 and 64 of long trainings: it learns faster at first
    ins.set_scale(32.0)

    ins.set_global_batch_size(GLOBAL_BATCH)
    ins.set_train_epochs(options.epochs)
    ins.set_lr(RATE)
    ins.set_warmup_epochs(1)  # at the full rate from the start, it learns much more slowly
    ins.set_step_boundaries((steps // 2, steps * 3 // 4, steps * 9 // 10))
    ins.set_lr_decay_factor(0.3)

    ins.set_precision(options.precision)
    ins.set_seed(1)
    ins.set_calc_acc(True)
    ins.set_log_period(max(1, steps // 40))
    ins.set_test_batch_size(500)
    ins.set_model_save_dir(str(options.run))
    ins.set_max_last_checkpoint_num(1)
    result = ins.train()

    ins.set_checkpoint_dir(str(result.checkpoint))  # what a later script would do with the weights
    ins.test()


if __name__ == "__main__":
    main()
