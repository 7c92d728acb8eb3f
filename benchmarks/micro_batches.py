"""Peak memory of a training step of ResNet50 by the number of micro-batches.

    python benchmarks/micro_batches.py        # batch 64; 1, 2, 4 and 8 micro-batches; a few minutes

One process per setting, one rank on the CPU: three steps of `Entry().train()` on random images. The peak is
that of the resident memory, including torch.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

GIB = 2**30


def train(parts: int, batch: int) -> None:
    """Train three steps and print the peak resident memory of this process."""
    import numpy as np

    from plsc import Entry

    sys.stdout = sys.stderr  # log lines of the run

    def reader() -> Iterator[tuple[np.ndarray, int]]:
        random = np.random.default_rng(0)
        for index in range(3 * batch):
            yield random.normal(size=(3, 112, 112)).astype(np.float32), index % 100

    with tempfile.TemporaryDirectory() as folder:
        ins = Entry()
        ins.train_reader = reader
        ins.set_class_num(100)
        ins.set_train_image_num(3 * batch)
        ins.set_train_batch_size(batch)
        ins.set_micro_batches(parts)
        ins.set_train_epochs(1)
        ins.set_with_test(False)
        ins.set_model_save_dir(folder)
        ins.train()
    status = Path("/proc/self/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"parts": parts, "peak": int(peak.split()[1]) * 1024}), file=sys.__stdout__)


def main() -> None:
    """Measure all settings and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--parts", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        train(options.one, options.batch)
        return
    print(f"ResNet50, 112 x 112, batch {options.batch}\n")
    print("| micro-batches | images per micro-batch | peak GiB | / one micro-batch |\n|---|---|---|---|")
    whole = None
    for parts in options.parts:
        this = [sys.executable, __file__, "--batch", str(options.batch), "--one", str(parts)]
        done = subprocess.run(this, check=True, capture_output=True, text=True)
        peak = json.loads(done.stdout)["peak"]
        whole = whole or peak
        print(
            f"| {parts} | {options.batch // parts} | {peak / GIB:.2f} | {peak / whole:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
