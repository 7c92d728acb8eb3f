"""A rank of test_embed.py: what it embeds, or the error, goes to FOLDER/RANK/CASE.npy or .txt."""

import sys
from pathlib import Path

import numpy as np
import torch

from plsc.data.pairs import read_pairs
from plsc.errors import PlscError
from plsc.evaluate.embed import embed_images
from plsc.parallel.world import World


class Network(torch.nn.Module):
    """Returns the pixels, so that each image has a different embedding."""

    def forward(self, input, label, is_train):
        if case == "bug" and world.rank == 1:
            raise RuntimeError("out of memory")
        return input.flatten(1)[:, ::5]


folder = Path(sys.argv[1])
world = World.from_environment(device="cpu", timeout_seconds=60)
output = folder / str(world.rank)
output.mkdir()
for case in ("good", "few", "bad", "bug"):
    images = read_pairs(folder / "pairs.bin").images
    images = images[:2] if case == "few" else [*images[:-1], b"no image"] if case == "bad" else images
    how = {"batch_size": 2, "device": "cpu", "world": world, "name": "pairs.bin"}
    try:
        np.save(output / f"{case}.npy", embed_images(Network(), images, (3, 16, 16), **how))
    except (PlscError, RuntimeError) as error:
        (output / f"{case}.txt").write_text(f"{type(error).__name__}: {error}")
world.close()
