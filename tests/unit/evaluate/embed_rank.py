"""A rank of test_embed.py: python -m torch.distributed.run ... embed_rank.py FOLDER CASE [CASE ...]

What it embeds, or the error, goes to FOLDER/CASE/RANK.npy or .txt.
"""

import os
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

    def __init__(self, fails):
        super().__init__()
        self.fails = fails

    def forward(self, input, label, is_train):
        if self.fails:
            raise RuntimeError("out of memory")
        return input.flatten(1)[:, ::5]


folder, cases = Path(sys.argv[1]), sys.argv[2:]
world = World.from_environment(device="cpu", timeout_seconds=60)
for case in cases:
    images = read_pairs(folder / "pairs.bin").images
    if case == "few":
        images = images[:2]
    if case == "bad":
        images[-1] = b"no image"
    network = Network(case == "bug" and world.rank == 1)
    output = folder / case / f"{world.rank}.npy"
    output.parent.mkdir(exist_ok=True)
    try:
        embeddings = embed_images(
            network, images, (3, 16, 16), batch_size=2, device="cpu", world=world, name="pairs.bin"
        )
        np.save(output, embeddings)
    except (PlscError, RuntimeError) as error:
        output.with_suffix(".txt").write_text(f"{type(error).__name__}: {error}")
world.close()
# The test is over. With torch 2.15, a process that has used gloo is sometimes aborted while it exits
# ("terminate called without an active exception"), on loaded machines.
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
