"""Time and memory of `plsc gallery upgrade` for synthetic entries, beside NumPy with everything in memory.

    python benchmarks/upgrade_scale.py build/upgrade_scale --entries 1000000

Old and new embeddings differ by a rotation and noise; the pairs are 100,000 classes, read into memory as
from a checkpoint. NumPy maps with the matrix that was found: np.load, a product, norms, np.save. Each way
runs in a process of its own, in turns. Memory is the highest anonymous resident memory: pages of mapped
files are not counted. Bound, set before measuring: a million entries of 512 values in a minute on two
cores, with at most 1 GiB.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from plsc.gallery import open_gallery, write_gallery
from plsc.gallery.embedder import Embedder
from plsc.gallery.upgrade import fit_upgrade, upgrade_gallery

SIZE, CLASSES, PART, NOISE = 512, 100_000, 2**15, 0.5


def vectors(count: int, seed: int) -> np.ndarray:
    """Return random unit vectors, float32 [count, SIZE]."""
    found = np.random.default_rng(seed).standard_normal((count, SIZE), np.float32)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def write_classes(folder: Path) -> None:
    """Write the class weights of both runs."""
    old = vectors(CLASSES, 1)
    turned = np.linalg.qr(np.random.default_rng(0).standard_normal((SIZE, SIZE)))[0].astype(np.float32)
    np.save(folder / "old.npy", old)
    np.save(folder / "new.npy", old @ turned + NOISE * vectors(CLASSES, 2))


def runs(folder: Path) -> tuple[Embedder, Embedder]:
    """Return an old and a new run, which have class weights and no network."""

    def run(name: str) -> Embedder:
        def classes() -> tuple[np.ndarray, None]:
            return np.load(folder / f"{name}.npy"), None

        return Embedder(name, name[0] * 64, lambda: SIZE, lambda data: data, np.stack, classes)

    return run("old"), run("new")


def run_plsc(folder: Path) -> None:
    """Map the gallery in the folder."""
    upgrade_gallery(str(folder / "gallery"), str(folder / "mapped"), runs(folder))


def run_numpy(folder: Path) -> None:
    """Map the same vectors in memory."""
    mapped = np.load(folder / "vectors.npy") @ np.load(folder / "matrix.npy")
    mapped /= np.linalg.norm(mapped, axis=1, keepdims=True)
    np.save(folder / "mapped.npy", mapped)


WAYS = {"plsc": run_plsc, "numpy": run_numpy}


def measure(way: str, folder: Path) -> None:
    """Print seconds and highest anonymous memory of a way."""
    peak, is_done = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_done.wait(0.02):
            lines = Path("/proc/self/status").read_text().splitlines()
            peak = max(peak, next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")))

    thread = threading.Thread(target=watch)
    thread.start()
    begin = time.perf_counter()
    try:
        WAYS[way](folder)
    finally:
        is_done.set()
        thread.join()
    print(json.dumps({"way": way, "seconds": time.perf_counter() - begin, "bytes": peak * 1024}))


def main() -> None:
    """Write the gallery, and print the ways side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder: Path = options.folder
    if options.way:
        measure(options.way, folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_classes(folder)
    shutil.rmtree(folder / "gallery", ignore_errors=True)
    lows = range(0, options.entries, PART)
    entries = np.concatenate([vectors(min(PART, options.entries - low), low) for low in lows])
    write_gallery(folder / "gallery", entries, [str(n) for n in range(len(entries))], model="a" * 64)
    np.save(folder / "vectors.npy", entries)
    found = fit_upgrade(*runs(folder))
    np.save(folder / "matrix.npy", found.matrix)
    del entries
    for way in list(WAYS) * options.rounds:
        if way == "plsc":
            shutil.rmtree(folder / "mapped", ignore_errors=True)
        command = [sys.executable, __file__, str(folder), "--way", way]
        subprocess.run(command, check=True)
    mapped, other = open_gallery(folder / "mapped"), np.load(folder / "mapped.npy", mmap_mode="r")
    some = [one.vector for one in mapped.read(0, PART)]
    print(f"largest difference of the first {len(some):,}: {np.abs(some - other[: len(some)]).max():.1e}")


if __name__ == "__main__":
    main()
