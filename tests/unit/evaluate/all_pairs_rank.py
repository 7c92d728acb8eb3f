"""A rank of test_all_pairs.py: python -m torch.distributed.run ... all_pairs_rank.py FOLDER

Reads embeddings.npy and labels.npy; the histograms go to FOLDER/RANK.npy.
"""

import os
import sys
from pathlib import Path

import numpy as np

from plsc.evaluate.all_pairs import all_pairs
from plsc.parallel.world import World

folder = Path(sys.argv[1])
world = World.from_environment(device="cpu", timeout_seconds=60)
embeddings = np.load(folder / "embeddings.npy", mmap_mode="r")
result = all_pairs(embeddings, np.load(folder / "labels.npy"), world)
np.save(folder / f"{world.rank}.npy", [result.same, result.different])
world.close()
# As in embed_rank.py: a process that has used gloo is sometimes aborted while it exits.
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
