"""Train a small residual network with the sharded ArcFace head on the glyphs.

    torchrun --standalone --nproc-per-node 2 demo/train_glyphs.py demo/output/glyphs demo/output/run

The script also runs in one process (`python demo/train_glyphs.py ...`) and on any number of ranks, with the
same global batch size; each rank holds a part of the class weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from plsc import Entry


def main() -> None:
    """Train, then evaluate the saved checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path, help="output folder of make_glyphs.py")
    parser.add_argument("run", type=Path, help="new folder for checkpoints, metrics and plots")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--precision", default="float32", help="or bfloat16")
    options = parser.parse_args()

    ins = Entry()
    ins.set_dataset_dir(str(options.data))
    ins.set_val_targets("glyphs_unseen")
    ins.set_flip(False)  # a mirrored glyph is a different glyph
    ins.set_num_workers(0)  # reading small files is faster than transferring them between processes

    ins.set_model_name("SmallResNet")
    ins.set_image_shape((1, 32, 32))
    ins.set_emb_size(128)
    ins.set_dropout(0.0)

    ins.set_global_batch_size(128)
    ins.set_train_epochs(options.epochs)
    ins.set_lr(0.1)

    ins.set_precision(options.precision)
    ins.set_seed(1)
    ins.set_calc_acc(True)
    ins.set_log_period(30)
    ins.set_test_batch_size(500)
    ins.set_model_save_dir(str(options.run))
    ins.set_max_last_checkpoint_num(1)
    result = ins.train()

    ins.set_checkpoint_dir(str(result.checkpoint))  # as a later script would do
    ins.test()


if __name__ == "__main__":
    main()
