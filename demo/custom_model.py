"""Train a custom network on the glyphs: subclass BaseModel and pass an instance to set_model.

    python demo/custom_model.py demo/output/glyphs demo/output/custom_model

Runs in one process, or under torchrun.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torch import Tensor, nn

from plsc import Entry
from plsc.models.base_model import BaseModel


class PlainNet(BaseModel):
    """Three convolutions and a linear layer: maps images [b, 1, 32, 32] to embeddings [b, 64].

    The batch norms are important: without them ArcFace tends to collapse all embeddings to one point.
    """

    def __init__(self, emb_size: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((1, 16), (16, 32), (32, 64)):
            layers.append(nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False))
            layers.append(nn.BatchNorm2d(outputs))
            layers.append(nn.ReLU())
        self.features = nn.Sequential(*layers)
        self.embedding = nn.Sequential(
            nn.Flatten(), nn.Linear(64 * 4 * 4, emb_size), nn.BatchNorm1d(emb_size)
        )

    def build_network(self, input: Tensor, label: Tensor | None, is_train: bool = True) -> Tensor:
        """Return the embeddings; called in each step, with label None in prediction."""
        return self.embedding(self.features(input))


def main() -> None:
    """Train the network, then verify the pairs with the saved checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path, help="output folder of make_glyphs.py")
    parser.add_argument("run", type=Path, help="new folder for checkpoints, metrics and plots")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    ins = Entry()
    ins.set_seed(1)  # before creating the network, because it seeds the initial weights
    ins.set_model(PlainNet(emb_size=64))
    ins.set_emb_size(64)
    ins.set_image_shape((1, 32, 32))
    ins.set_dataset_dir(str(options.data))
    ins.set_val_targets("glyphs_unseen")
    ins.set_flip(False)
    ins.set_num_workers(0)
    ins.set_loss_type("dist_arcface")
    ins.set_lr(0.1)
    ins.set_global_batch_size(128)
    ins.set_train_steps(options.steps)
    ins.set_log_period(5)
    ins.set_model_save_dir(str(options.run))
    result = ins.train()

    ins.set_checkpoint_dir(str(result.checkpoint))
    ins.test()


if __name__ == "__main__":
    main()
