"""Compare galleries with exact search and with faiss alone: recall, queries per second, bytes per vector.

    plsc predict --checkpoint.load_dir demo/output/run --images demo/output/glyphs/images --output build/demo
    python benchmarks/search.py build/search --embeddings build/demo     # a few minutes, 5 GB of disk

The gallery has a million vectors of 512 values, in clusters: each vector is a centre plus Gaussian noise, so
two vectors of a cluster have a cosine of 0.8 on average. The centres are the embeddings of `--embeddings` (a
folder of ``plsc predict``, or a file of capacity.py), rotated into 512 dimensions, or Gaussian vectors.
The queries are further vectors around random centres. The reference multiplies float32 matrices with torch,
part by part. Writes results.json and results.md to the folder.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

from plsc import open_embeddings
from plsc.gallery import open_gallery, write_gallery

NOISE = 0.5  # expected norm of the noise; that of a centre is 1
ROWS = 16384  # vectors at a time
K = 10
BATCHES = (1, 64)
Search = Callable[[np.ndarray], np.ndarray]


def main() -> None:
    """Measure all ways of search in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="output folder")
    parser.add_argument("--embeddings", type=Path, help="of the centres; default: random ones")
    parser.add_argument("--count", type=int, default=10**6)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    faiss.omp_set_num_threads(options.threads)
    options.folder.mkdir(parents=True, exist_ok=True)
    centres = read_centres(options.embeddings, options.size)
    vectors = write_vectors(options.folder / "vectors.npy", centres, options.count)
    queries = around(centres, options.queries, seed=1)
    truth, rows = None, []
    for name, make in WAYS.items():
        began = time.perf_counter()
        search, bytes_of = make(options.folder, vectors)
        row: dict[str, Any] = {"way": name, "prepare s": time.perf_counter() - began, **bytes_of}
        found = np.concatenate([search(queries[i : i + 64]) for i in range(0, len(queries), 64)])
        truth = found if truth is None else truth
        row["recall@1"] = float((found[:, 0] == truth[:, 0]).mean())
        row["recall@10"] = float(
            np.mean([len(set(a) & set(b)) / K for a, b in zip(found, truth, strict=True)])
        )
        for batch in BATCHES:
            row[f"queries/s, batch {batch}"] = speed(search, queries, batch)
        print(json.dumps(row), flush=True)
        rows.append(row)
    about = {
        "centres": f"{len(centres)} {'embeddings' if options.embeddings else 'random'}",
        "peak RSS GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        **{name: value for name, value in vars(options).items() if not isinstance(value, Path)},
    }
    (options.folder / "results.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1))
    (options.folder / "results.md").write_text(table(rows))
    print(about, table(rows), sep="\n")


def read_centres(folder: Path | None, size: int) -> np.ndarray:
    """Return the centres of the clusters, float32 [n, size], of norm 1."""
    random = np.random.default_rng(0)
    if folder is None:
        centres = random.standard_normal((50_000, size))
    else:
        own = (np.load(folder) if folder.suffix == ".npz" else open_embeddings(folder))["embeddings"][:]
        basis, _ = np.linalg.qr(random.standard_normal((size, own.shape[1])))
        centres = own @ basis.T
    return unit(centres)


def around(centres: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return vectors around random centres, float32 [count, D]."""
    random = np.random.default_rng(seed)
    noise = random.standard_normal((count, centres.shape[1]), np.float32) * NOISE / centres.shape[1] ** 0.5
    return unit(centres[random.integers(len(centres), size=count)] + noise)


def unit(vectors: np.ndarray) -> np.ndarray:
    """Return vectors of norm 1, float32."""
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def write_vectors(path: Path, centres: np.ndarray, count: int) -> np.ndarray:
    """Write the vectors to a file, and return them memory-mapped, float32 [count, D]."""
    file = np.lib.format.open_memmap(path, "w+", np.float32, (count, centres.shape[1]))
    for first in range(0, count, ROWS):
        part = file[first : first + ROWS]
        part[:] = around(centres, len(part), seed=2 + first)
    return file


def exact(folder: Path, vectors: np.ndarray) -> tuple[Search, dict[str, Any]]:
    """Multiply all vectors, part by part, and keep the best of each part."""
    parts = [torch.from_numpy(vectors[first : first + ROWS]) for first in range(0, len(vectors), ROWS)]

    def search(queries: np.ndarray) -> np.ndarray:
        given = torch.from_numpy(queries)
        tops = [(given @ part.T).topk(min(K, len(part))) for part in parts]
        scores = torch.cat([top.values for top in tops], 1)
        numbers = torch.cat([top.indices + i * ROWS for i, top in enumerate(tops)], 1)
        return numbers.gather(1, scores.topk(K).indices).numpy()

    return search, {"bytes per vector": 4 * vectors.shape[1], "in memory": 4 * vectors.shape[1]}


def gallery(folder: Path, vectors: np.ndarray) -> tuple[Search, dict[str, Any]]:
    """Write and open a gallery."""
    place = folder / "gallery"
    if not place.exists():
        write_gallery(place, vectors, model="")
    began = time.perf_counter()
    opened = open_gallery(place)
    sizes = {
        "bytes per vector": round(opened.about["file"]["bytes"] / len(opened)),
        "in memory": 4 * vectors.shape[1],
        "open s": time.perf_counter() - began,
    }
    return lambda queries: opened.search(queries, K)[1], sizes


def faiss_8_bits(folder: Path, vectors: np.ndarray) -> tuple[Search, dict[str, Any]]:
    """Search with the 8-bit index of faiss, with a range per dimension, and nothing else."""
    index = faiss.IndexScalarQuantizer(
        vectors.shape[1], faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT
    )
    index.train(vectors[: 4 * ROWS])
    for first in range(0, len(vectors), ROWS):
        index.add(vectors[first : first + ROWS])
    return lambda queries: index.search(queries, K)[1], {
        "bytes per vector": vectors.shape[1],
        "in memory": vectors.shape[1],
    }


WAYS = {
    "torch, float32 products": exact,
    "gallery": gallery,
    "faiss QT_8bit alone": faiss_8_bits,
}


def speed(search: Search, queries: np.ndarray, batch: int) -> float:
    """Return queries per second: the median of at least five batches, for two seconds or more."""
    times: list[float] = []
    for first in batches(len(queries), batch):
        began = time.perf_counter()
        search(queries[first : first + batch])
        times.append(time.perf_counter() - began)
        if len(times) >= 5 and sum(times) > 2:
            break
    return batch / statistics.median(times)


def batches(count: int, batch: int) -> Iterator[int]:
    """Yield the numbers of the first query of full batches, without end."""
    while True:
        yield from range(0, max(1, count - batch + 1), batch)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown table."""
    columns = ["way", "recall@1", "recall@10", *(f"queries/s, batch {one}" for one in BATCHES)]
    columns += ["bytes per vector", "in memory"]
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        recalls = [f"{row[name]:.2%}" for name in columns[1:3]]
        speeds = [f"{row[name]:,.1f}" for name in columns[3:5]]
        lines.append([row["way"], *recalls, *speeds, *(f"{row[name]:,}" for name in columns[5:])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    main()
