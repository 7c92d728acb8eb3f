"""Run the benchmarks of the data tools in turn: partition, formats, loader, and a training step.

    python benchmarks/data.py build/data             # about 20 minutes on two cores, 8 GB of disk
    python benchmarks/data.py --quick build/data     # to test the scripts

Each is a separate script, which describes its comparison and has more options.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Run all of them; stop at the first failure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    quick = ["--quick"] if options.quick else []
    few = ["--images", "512", "--rounds", "2"] if options.quick else []
    small = ["--model", "SmallResNet", "--rounds", "2"] if options.quick else []
    runs = [
        ["partition.py", str(options.output / "partition"), *quick],
        ["formats.py", str(options.output / "formats"), *quick],
        ["loader.py", "--json", str(options.output / "loader.json"), *few],
        ["loader.py", "--train", "--json", str(options.output / "train.json"), *small],
    ]
    for script, *arguments in runs:
        print(f"\n## python benchmarks/{script} {' '.join(arguments)}\n", flush=True)
        subprocess.run([sys.executable, str(HERE / script), *arguments], check=True)


if __name__ == "__main__":
    main()
