"""A rank of test_all_pairs.py: python -m torch.distributed.run ... all_pairs_rank.py FOLDER

Reads embeddings.npy and labels.npy; the histograms go to FOLDER/RANK.npy, rates per group to
RANK.json.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

from plsc.evaluate.all_pairs import all_pair_rates, all_pairs
from plsc.evaluate.groups import Groups
from plsc.parallel.world import World

folder = Path(sys.argv[1])
world = World.from_environment(device="cpu", timeout_seconds=60)
embeddings = np.load(folder / "embeddings.npy", mmap_mode="r")
labels = np.load(folder / "labels.npy")
result = all_pairs(embeddings, labels, world)
rates = all_pair_rates(embeddings, labels, Groups(("a", "b"), labels % 2), result, world)
(folder / f"{world.rank}.json").write_text(json.dumps(rates.as_dict()))
np.save(folder / f"{world.rank}.npy", [result.same, result.different])
world.close()
# As in embed_rank.py: a process that has used gloo is sometimes aborted while it exits.
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
