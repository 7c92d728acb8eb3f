"""Time of a step of the head in this checkout, compared with another checkout of plsc.

    git worktree add build/before v0.9
    (cd build/before && python setup.py -q build_ext --inplace)
    python benchmarks/versions.py build/before --ways 'plsc, fp32|plsc, bf16, 0.1'

Each checkout runs in its own process. They take turns, one step each, so that the load of the machine is the
same for both. Of two processes with the same code, one is up to 5 % faster, depending on where its memory
lies, and on which has started first; so there are several pairs of processes, and each checkout starts first
in half of them. Prints for each way the mean of the pairs, the least and the most; that of a pair is the
median of its rounds. Below 1, this checkout is faster.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import warnings
from itertools import cycle
from pathlib import Path

SCRIPT = Path(__file__).resolve()
ROOT = SCRIPT.parents[1]


class Checkout:
    """A process with the plsc and the benchmarks of a checkout."""

    def __init__(self, root: Path, options: argparse.Namespace, way: str) -> None:
        words = [way, str(options.classes), str(options.batch), str(options.dimension), str(options.threads)]
        self._process = subprocess.Popen(
            [sys.executable, SCRIPT, root, "--run", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def step(self) -> float:
        """Run a step; return its seconds."""
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._read())

    def _read(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            sys.exit("a measuring process failed, see above")
        return line.rstrip()

    def end(self) -> None:
        """End the process."""
        self._process.communicate()


def run(root: Path, way: str, classes: int, batch: int, dimension: int, threads: int) -> None:
    """Print a line when all is ready; for each line read, run a step and print its seconds."""
    sys.path[:1] = [str(root), str(root / "benchmarks")]
    import measuring
    import torch

    warnings.filterwarnings("error", "the head runs in plain PyTorch")  # its C parts are not built
    torch.set_num_threads(threads)
    cpu = torch.device("cpu")
    built = measuring._build(way, measuring.Store(classes, dimension, cpu))
    batches = cycle(list(measuring._batches(classes, batch, dimension, cpu)))
    for _ in range(2):
        measuring._timed(built, *next(batches))
    print(built.note(), flush=True)
    for _ in sys.stdin:
        print(measuring._timed(built, *next(batches))[0], flush=True)


def compare(options: argparse.Namespace, way: str) -> None:
    """Print the line of one way."""
    pairs, taken = [], []
    for pair in range(options.pairs):
        roots = [ROOT, options.other][:: 1 if pair % 2 else -1]
        running = {root: Checkout(root, options, way) for root in roots}
        rounds = []
        for turn in range(options.rounds):
            seconds = {root: running[root].step() for root in roots[:: 1 if turn % 2 else -1]}
            taken.append(seconds[ROOT])
            rounds.append(seconds[ROOT] / seconds[options.other])
        for checkout in running.values():
            checkout.end()
        pairs.append(statistics.median(rounds))
    print(
        f"| {way} | {1000 * statistics.median(taken):.3g} | {statistics.fmean(pairs):.3f} "
        f"({min(pairs):.3f} to {max(pairs):.3f}) |",
        flush=True,
    )


def main() -> None:
    """Compare the chosen ways."""
    if "--run" in sys.argv:
        root, _, way, *numbers = sys.argv[1:]
        run(Path(root).resolve(), way, *map(int, numbers))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="the root of the other checkout, with its C parts built")
    parser.add_argument("--ways", default="plsc, fp32|plsc, bf16|plsc, bf16, 0.1", help="as in head.py")
    parser.add_argument("--classes", type=lambda text: int(float(text)), default=10**5)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--dimension", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=8, help="pairs of processes, an even number")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of a pair")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    print("| way | ms per step | this / the other |\n|---|---|---|")
    for way in options.ways.split("|"):
        compare(options, way)


if __name__ == "__main__":
    main()
