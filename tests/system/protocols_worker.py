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

from tests.system.small_entry import entry

CASES = {
    "pairs": {"pairs": "pairs.txt"},
    "bin": {"pairs": "lfw.bin"},
    "gallery": {"images": "", "gallery": "gallery", "distractors": "distractors"},
    "templates": {"images": "", "templates": "templates"},
    "pairs_groups": {"pairs": "pairs.txt", "groups": "groups.tsv"},
    "identify_groups": {"groups": "groups.tsv"},
    "retrieval_groups": {"groups": "groups.tsv"},
}
PROTOCOLS = {"bin": "pairs", "gallery": "identify"}  # of cases with another name
PROTOCOLS |= {case: case.removesuffix("_groups") for case in CASES if case.endswith("_groups")}


def places(dataset: str, case: str) -> dict[str, str]:
    return {name: str(Path(dataset) / place) for name, place in CASES[case].items()}


def main() -> None:
    checkpoint, dataset, output = sys.argv[1:]
    results = {}
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        Figure.savefig = lambda _figure, path, **_: Path(path).touch()
    ins = entry(dataset, output)
    ins.set_checkpoint_dir(checkpoint)
    ins.set_test_batch_size(3)
    for case in CASES:
        found = ins.test(PROTOCOLS.get(case, case), **places(dataset, case), output=f"{output}/{case}")
        results[case] = {name: one.as_dict() for name, one in found.items()}
    rank = os.environ.get("RANK", "0")
    (Path(output) / f"results-{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
