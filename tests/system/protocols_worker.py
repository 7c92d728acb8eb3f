"""Run protocols on a checkpoint: protocols_worker.py CHECKPOINT DATASET OUTPUT.

Each rank writes what test() returns to OUTPUT/results-RANK.json; the reports are in OUTPUT/PROTOCOL. Several
ranks leave their plots empty, which take longer than all else.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from matplotlib.figure import Figure

from plsc.names import PROTOCOLS
from tests.system.small_entry import entry

_PLACES = {
    "images": "", "pairs": "pairs.txt", "gallery": "gallery", "distractors": "distractors",
    "templates": "templates", "groups": "groups.tsv",
}  # fmt: skip
CASES = {  # each protocol with all of its arguments, and some without
    **{name: (name, {one: _PLACES[one] for one in takes}) for name, takes in PROTOCOLS.items()},
    "plain": ("pairs", {"pairs": "pairs.txt"}),
    "bin": ("pairs", {"pairs": "lfw.bin"}),
    "split": ("identify", {"groups": "groups.tsv"}),
}


def arguments_of(dataset: str, case: str) -> dict[str, str]:
    """The arguments of `Entry.test`, but for the output."""
    protocol, places = CASES[case]
    return {"protocol": protocol, **{name: str(Path(dataset) / place) for name, place in places.items()}}


def main() -> None:
    checkpoint, dataset, output = sys.argv[1:]
    results = {}
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        Figure.savefig = lambda _figure, path, **_: Path(path).touch()
    ins = entry(dataset, output)
    ins.set_checkpoint_dir(checkpoint)
    ins.set_test_batch_size(3)
    for case in CASES:
        found = ins.test(**arguments_of(dataset, case), output=f"{output}/{case}")
        results[case] = {name: one.as_dict() for name, one in found.items()}
    rank = os.environ.get("RANK", "0")
    (Path(output) / f"results-{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
