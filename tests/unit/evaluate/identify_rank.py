"""A rank of test_identification.py and test_templates.py: identify_rank.py FOLDER

FOLDER has data.npz and meta files; the results go to FOLDER/RANKS-RANK.npz.
"""

import os
import sys
from pathlib import Path

import numpy as np

from plsc.evaluate import identification, retrieval, templates
from plsc.evaluate.identification import identify
from plsc.evaluate.template_files import read_protocol
from plsc.evaluate.templates import evaluate_templates
from plsc.parallel.world import World

identification._CHUNK = templates._CHUNK = 7
retrieval._CELLS = 20
folder = Path(sys.argv[1])
world = World.from_environment(device="cpu", timeout_seconds=60)
data = np.load(folder / "data.npz")
found = identify(*(data[name] for name in ("gallery", "gallery_labels", "probes", "probe_labels")), world)
pooled = evaluate_templates(data["images"], read_protocol(folder), world)
searched = retrieval.retrieval(data["gallery"], data["gallery_labels"], world)
np.savez(
    folder / f"{world.size}-{world.rank}.npz",
    ranks=found.ranks,
    mate_scores=found.mate_scores,
    top_scores=found.top_scores,
    retrieval=searched.values,
    values=repr((found.as_dict(), pooled.as_dict(), searched.as_dict())),
)
world.close()
# As in embed_rank.py.
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
