"""Images per second of an exported graph in onnxruntime and OpenVINO, and how far their embeddings differ.

    pip install openvino
    python benchmarks/runtimes.py MODEL [--batches 1 16 64] [--rounds 15] [--threads 1]

MODEL is a folder of plsc export in float32. The runtimes take turns, in another order in each round; each
turn embeds the same images, at least 64. Speeds are medians; ratios are medians over the rounds of the time
of onnxruntime divided by that of the other. OpenVINO runs as it does by default and with
INFERENCE_PRECISION_HINT=f32. Prints a table, and the raw seconds as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino

from plsc.export import open_model

Embed = Callable[[np.ndarray], np.ndarray]
_FEWEST = 64  # images per turn


def main() -> None:
    """Measure all batch sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    model = open_model(options.model, options.threads)
    ways: dict[str, Embed] = {"onnxruntime": model.embed}
    for name, hints in (("OpenVINO, f32", {"INFERENCE_PRECISION_HINT": "f32"}), ("OpenVINO, default", {})):
        ways[name] = open_in_openvino(model.folder / model.about["graph"]["file"], options.threads, hints)
    print("| batch | runtime | images/s | x onnxruntime | largest difference | lowest cosine |")
    print("|---:|---|---:|---:|---:|---:|")
    for batch in options.batches:
        noise = np.random.default_rng(0).integers(0, 256, (batch, *model.image_shape))
        measure(ways, ((noise - 127.5) / 128).astype(np.float32), options.rounds)


def open_in_openvino(path: Path, threads: int, hints: dict[str, Any]) -> Embed:
    """Return a function that runs a graph in OpenVINO on the CPU."""
    core = openvino.Core()
    given = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", **hints}
    compiled = core.compile_model(core.read_model(path), "CPU", given)
    print(f"OpenVINO {openvino.get_version()}: {compiled.get_property('INFERENCE_PRECISION_HINT')}")
    return lambda images: compiled(images)[0]


def measure(ways: dict[str, Embed], images: np.ndarray, rounds: int) -> None:
    """Print a row per runtime for one batch of images."""
    truth = next(iter(ways.values()))(images)
    found = {name: embed(images).copy() for name, embed in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    calls, order = -(-_FEWEST // len(images)), list(ways)
    for turn in range(rounds):
        first = turn % len(order)
        for name in order[first:] + order[:first]:
            began = time.perf_counter()
            for _ in range(calls):
                ways[name](images)
            seconds[name].append(time.perf_counter() - began)
    reference = seconds[order[0]]
    for name, taken in seconds.items():
        speed = calls * len(images) / statistics.median(taken)
        ratio = statistics.median(one / other for one, other in zip(reference, taken, strict=True))
        apart, cosine = np.abs(found[name] - truth).max(), (found[name] * truth).sum(axis=1).min()
        print(f"| {len(images)} | {name} | {speed:.1f} | {ratio:.2f} | {apart:.1e} | {cosine:.6f} |")
    print(json.dumps({"batch": len(images), "seconds": seconds}))


if __name__ == "__main__":
    main()
