"""One rank of test_embed: python -m torch.distributed.run ... embed_rank.py FOLDER CASE."""

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
    """Keeps the pixels, so that each image has an embedding of its own."""

    def forward(self, input, label, is_train):
        if CASE == "bug" and world.rank == 1:
            raise RuntimeError("out of memory")
        return input.flatten(1)[:, ::5]


folder, CASE = Path(sys.argv[1]), sys.argv[2]
world = World.from_environment(device="cpu", timeout_seconds=60)
images = read_pairs(folder / "pairs.bin").images
if CASE == "few":
    images = images[:2]
if CASE == "bad":
    images[-1] = b"no image"
try:
    embeddings = embed_images(
        Network(), images, (3, 16, 16), batch_size=2, device="cpu", world=world, name="pairs.bin"
    )
    np.save(folder / f"{world.rank}.npy", embeddings)
except (PlscError, RuntimeError) as error:
    (folder / f"{world.rank}.txt").write_text(f"{type(error).__name__}: {error}")
world.close()
# What is tested is over. With torch 2.15, a process that has used gloo is now and then aborted while it ends
# ("terminate called without an active exception"), on loaded machines.
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
