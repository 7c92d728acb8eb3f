"""Watch a run by callbacks: a metric from the output of a layer, and weights and gradients, every 25 batches.

    python demo/watch_training.py demo/output/glyphs demo/output/watch_training

Runs in one process, or under torchrun: every rank calls the callbacks, rank 0 prints.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from plsc import Entry
from plsc.train.callbacks import Context

LAYER = "stages.3"


def log_active_share(context: Context) -> None:
    """Log the share of positive activations in a layer's output [batch, channels, height, width]."""
    share = float((context.layer_output(LAYER) > 0).float().mean())
    context.log(f"active share of {LAYER}", share)
    if context.is_main:
        print(f"step {context.step}: {share:.1%} of the outputs of {LAYER} are positive")


def print_weights_and_gradients(context: Context) -> None:
    """Print the norm of each parameter and of its gradient."""
    if not context.is_main:
        return
    print(f"step {context.step}: norm of the weights, norm of the gradient")
    for name, _ in context.network.named_parameters():
        gradient = context.gradient(name)
        if gradient is not None:
            print(f"  {name:40} {float(context.weight(name).norm()):10.4f} {float(gradient.norm()):10.6f}")


def main() -> None:
    """Train with the two callbacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path, help="output folder of make_glyphs.py")
    parser.add_argument("run", type=Path, help="new folder for checkpoints, metrics and plots")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=25, help="batches between two calls of a callback")
    options = parser.parse_args()

    ins = Entry()
    ins.add_callback(log_active_share, "after_forward", every=options.every, layers=[LAYER])
    ins.add_callback(print_weights_and_gradients, "after_backward", every=options.every)
    ins.set_dataset_dir(str(options.data))
    ins.set_model_name("SmallResNet")
    ins.set_image_shape((1, 32, 32))
    ins.set_emb_size(64)
    ins.set_loss_type("dist_arcface")
    ins.set_lr(0.1)
    ins.set_global_batch_size(128)
    ins.set_train_steps(options.steps)
    ins.set_log_period(25)
    ins.set_with_test(False)
    ins.set_model_save_dir(str(options.run))
    ins.train()


if __name__ == "__main__":
    main()
