"""A rank of test_templates.py: evaluate_rank.py FOLDER

FOLDER has data.npz and meta files; the results go to FOLDER/RANKS-RANK.npz.
"""

import sys
from pathlib import Path

import numpy as np

from plsc.evaluate import all_pairs, identification, templates
from plsc.evaluate.groups import Groups
from plsc.evaluate.identification import identify
from plsc.evaluate.templates import evaluate_templates, read_protocol
from plsc.parallel.world import World

identification._CHUNK = templates._CHUNK = 7
identification._CELLS = all_pairs.TILE = 20
folder = Path(sys.argv[1])
world = World.from_environment(device="cpu", timeout_seconds=60)
data = np.load(folder / "data.npz")
gallery, labels = data["gallery"], data["gallery_labels"]
found = identify(gallery, labels, data["probes"], data["probe_labels"], world)
pooled = evaluate_templates(data["images"], read_protocol(folder), world)
searched = identification.retrieval(gallery, labels, world)
compared = all_pairs.all_pairs(gallery, labels, world)
rates = all_pairs.all_pair_rates(gallery, labels, Groups(("a", "b"), labels % 2), compared, world)
results = (found, pooled, searched, compared, rates)
np.savez(
    folder / f"{world.size}-{world.rank}.npz",
    ranks=found.ranks,
    mate_scores=found.mate_scores,
    top_scores=found.top_scores,
    retrieval=searched.values,
    same=compared.same,
    different=compared.different,
    values=repr([result.as_dict() for result in results]),
)
world.close()
