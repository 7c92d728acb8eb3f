"""Time and memory of all pairs of embeddings, compared with their bare float32 products, in turn.

python benchmarks/all_pairs.py                  100,000 embeddings, 3 rounds: 12 minutes on two cores
python benchmarks/all_pairs.py --count 20000    a quick run

Ways:
- products: torch.mm over the same tiles of normalised embeddings in memory, nothing else.
- plsc: `all_pairs` of a memory-mapped file, from the embeddings to the result.
- plsc in torch: the same without the C library (with --torch).
- full matrix: x @ x.T and torch.sort in plain PyTorch, for up to --most embeddings.

Each result is a line of JSON. Memory is measured in one process per way: the peak minus that after imports.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from measuring import print_json, status

from plsc.evaluate import all_pairs as module
from plsc.evaluate.all_pairs import TILE, all_pairs

FAR = 1e-6


def main() -> int:
    """Run the ways in turn; print the times, the ratios of each round and the memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000, help="embeddings")
    parser.add_argument("--size", type=int, default=512, help="embedding size")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--torch", action="store_true", help="also without the C library")
    parser.add_argument("--most", type=int, default=20_000, help="embeddings for the full matrix")
    parser.add_argument("--memory", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.memory:
        measure_memory(given.memory[0], Path(given.memory[1]), torch.device(given.device))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_embeddings(folder, given.count, given.size)
        ways = ["products", "plsc"] + ["plsc in torch"] * given.torch
        ways += ["full matrix"] * (given.count <= given.most)
        seconds = take_turns(ways, folder, given.rounds, torch.device(given.device))
        options = [f"--threads={given.threads}", f"--device={given.device}"]
        for way in ways:
            subprocess.run([sys.executable, __file__, *options, "--memory", way, name], check=True)
    for way in ways[1:]:
        ratios = [one / products for one, products in zip(seconds[way], seconds["products"], strict=True)]
        print(
            f"{way}: {statistics.median(seconds[way]):.1f} s, {statistics.median(ratios):.2f} x the products "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )
    return 0


def make_embeddings(folder: Path, count: int, size: int) -> None:
    """Write embeddings.npy, float32 [count, size], and labels.npy with about 20 embeddings per class."""
    rng = np.random.default_rng(0)
    centers = rng.standard_normal((max(2, count // 20), size), dtype=np.float32)
    labels = rng.integers(0, len(centers), count)
    np.save(folder / "labels.npy", labels)
    shape = (count, size)
    embeddings = np.lib.format.open_memmap(folder / "embeddings.npy", "w+", np.float32, shape)
    for start in range(0, count, TILE):
        chosen = labels[start : start + TILE]
        noise = rng.standard_normal((len(chosen), size), dtype=np.float32)
        embeddings[start : start + TILE] = centers[chosen] + 1.5 * noise


def take_turns(ways: list[str], folder: Path, rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of each way per round; the order changes from round to round."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds):
        first = turn % len(ways)
        for way in ways[first:] + ways[:first]:
            run = prepare(way, folder, device)
            began = time.perf_counter()
            found = run()
            seconds[way].append(time.perf_counter() - began)
            print_json("time", way=way, round=turn, seconds=seconds[way][-1], tar=found)
    return seconds


def measure_memory(way: str, folder: Path, device: torch.device) -> None:
    """Print the peak memory of a way; mapped: the bytes of the memory-mapped embeddings in it."""
    torch.mm(torch.ones(64, 64), torch.ones(64, 64))  # the buffers of the products
    before = status("VmRSS")
    prepare(way, folder, device)()
    mapped = (folder / "embeddings.npy").stat().st_size
    facts = {"peak": status("VmHWM") - before, "mapped": mapped}
    if device.type == "cuda":
        facts["gpu_peak"] = torch.cuda.max_memory_allocated(device)
    print_json("memory", way=way, **facts)


def prepare(way: str, folder: Path, device: torch.device) -> Callable[[], float | None]:
    """Return a function that runs a way and returns its TAR at FAR 1e-6."""
    embeddings = np.load(folder / "embeddings.npy", mmap_mode="r")
    labels = np.load(folder / "labels.npy")
    if way == "products":
        unit = torch.nn.functional.normalize(torch.from_numpy(np.array(embeddings))).to(device)
        return lambda: multiply_tiles(unit)
    if way == "full matrix":
        return lambda: full_matrix(torch.from_numpy(np.array(embeddings)), torch.from_numpy(labels))

    def run() -> float:
        is_native = way == "plsc"
        with nullcontext() if is_native else mock.patch.object(module, "function", return_value=None):
            return all_pairs(embeddings, labels, device=device).tar_at_far[FAR]

    return run


def multiply_tiles(unit: torch.Tensor) -> None:
    """Multiply the tiles of the upper triangle."""
    buffer = torch.empty(min(TILE, len(unit)) ** 2, device=unit.device)
    blocks = unit.split(TILE)
    for index, rows in enumerate(blocks):
        for columns in blocks[index:]:
            out = buffer[: len(rows) * len(columns)].view(len(rows), len(columns))
            torch.mm(rows, columns.T, out=out)
    if unit.is_cuda:
        torch.cuda.synchronize(unit.device)


def full_matrix(embeddings: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the TAR at FAR from the sorted scores of all different pairs."""
    unit = torch.nn.functional.normalize(embeddings)
    scores = unit @ unit.T
    is_upper = torch.ones_like(scores, dtype=torch.bool).triu_(1)
    is_same = labels[:, None] == labels[None]
    positives, negatives = scores[is_upper & is_same], scores[is_upper & ~is_same]
    accepted = int(FAR * len(negatives))  # ties are ignored
    threshold = negatives.sort(descending=True).values[accepted]
    return float((positives > threshold).float().mean())


if __name__ == "__main__":
    sys.exit(main())
