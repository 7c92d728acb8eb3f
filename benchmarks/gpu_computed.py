"""Compute, without a GPU, what a step does on one: launches, waits and bytes, and the bound of its time.

    python benchmarks/gpu_computed.py            # prints the tables of docs/benchmarks/computed.md
    python benchmarks/gpu_computed.py --quick    # small sizes, to test the script

Nothing here is measured. tests/pretend_gpu.py runs a step of each way on tensors without values, and counts.
The bound is the time that a GPU of the data sheet needs at least for the counted bytes or the counted
operations, whichever takes longer. Other implementations: those that benchmarks/rivals.py installs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from gpu import BASELINE, CHUNKED, CUT, LIGER, LOSSES, PUBLISHED, REWRITTEN  # noqa: E402
from ways import BY_NAME  # noqa: E402

from tests.pretend_gpu import Case, Report, run_cases, unavailable  # noqa: E402

# Bytes per second, and operations per second by the dtype of the inputs (dense), from the data sheets.
CHIPS = {
    "A100": (2.039e12, {"float32": 19.5e12, "float16": 312e12, "bfloat16": 312e12}),
    "H100": (3.35e12, {"float32": 67e12, "float16": 989e12, "bfloat16": 989e12}),
    "4090": (1.008e12, {"float32": 82.6e12, "float16": 165.2e12, "bfloat16": 165.2e12}),
}
# Products of [B, C] in Triton kernels: the logits; the logits again and two gradients.
PRODUCTS = {"_cce_lse_forward_kernel": 1, "_cce_backward_kernel": 3}
OURS = ("plsc, bf16", "plsc, fp32", "plsc, bf16, 0.1", *LOSSES)
HEADS: tuple[str, ...] = (*OURS, BASELINE, "plain PyTorch, bf16 autocast")
HEADS += (*PUBLISHED, REWRITTEN, CUT[1], CHUNKED, LIGER)
STEPS: tuple[str, ...] = ("plsc, fp32", "plsc, bf16", "plsc, fp16", BASELINE, "plain PyTorch, bf16 autocast")


def flops(case: Case, report: Report) -> dict[str, float]:
    """Return the operations of a step by the dtype of their inputs."""
    found: dict[str, float] = dict(report.flops)
    product = 2 * case.batch * case.classes * case.dimension
    for kernel, count in PRODUCTS.items():
        found["bfloat16"] = found.get("bfloat16", 0) + count * report.launches[kernel] * product
    return found


def bound(case: Case, report: Report, chip: str) -> float:
    """Return the least seconds of a step on a chip."""
    bandwidth, rates = CHIPS[chip]
    products = sum(count / rates[dtype] for dtype, count in flops(case, report).items())
    return max(products, sum(report.bytes.values()) / bandwidth)


def print_table(cases: list[Case], folder: Path) -> None:
    """Print a row for each case, of one size."""
    first = cases[0]
    what = f"A step of {first.network}" if first.network else "A step of the head"
    print(f"\n## {what}: C = {first.classes:,}, B = {first.batch:,}, D = {first.dimension:,}\n")
    print(f"| | launches | waits | GB | TFLOP | {' | '.join(f'bound, ms: {chip}' for chip in CHIPS)} |")
    print(f"|---|---|---|---|---|{'---|' * len(CHIPS)}")
    able = [case for case in cases if case.network or BY_NAME[case.way].missing("cuda") is None]
    reports = run_cases(able, folder) if able else {}
    for case in cases:
        report = reports.get(case.name)
        if report is None or report.error:
            why = report.error.strip().splitlines()[-1][:80] if report else BY_NAME[case.way].missing("cuda")
            print(f"| {case.way} | {why} |{' |' * (3 + len(CHIPS))}")
            continue
        waits = report.waits.total() + report.blocking.total()
        total = sum(flops(case, report).values()) / 1e12
        bounds = " | ".join(f"{1000 * bound(case, report, chip):.3g}" for chip in CHIPS)
        row = f"| {case.way} | {report.launches.total():,} | {waits} | {report.gigabytes:,.1f} | {total:.2f}"
        print(f"{row} | {bounds} |", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--ways", type=lambda text: text.split("|"), help="only these ways of the head")
    given = parser.parse_args()
    if reason := unavailable():
        sys.exit(reason)
    head = Case("", batch=1024, classes=10**6)
    large = replace(head, batch=16_384, classes=248_320, dimension=2048)
    step = Case("", network="ResNet50", batch=512)
    heads, steps = HEADS, STEPS
    if given.quick:
        head, large = replace(head, batch=128, classes=5000), replace(head, batch=256, classes=3000)
        step = replace(step, network="SmallResNet", batch=16, classes=1000)
        heads, steps = ("plsc, bf16", BASELINE, REWRITTEN, *CUT[1:]), STEPS[:2]
    if given.ways:
        heads, steps = tuple(given.ways), ()
    others = [way for way in heads if way in ("plsc, bf16", LOSSES[0], CUT[1], LIGER)]
    with tempfile.TemporaryDirectory() as folder:
        for base, ways in ((head, heads), (large, others), (step, steps)):
            if ways:
                print_table([replace(base, name=way, way=way) for way in ways], Path(folder))


if __name__ == "__main__":
    main()
