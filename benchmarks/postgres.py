"""Compare a gallery in PostgreSQL with exact galleries: recall, queries per second, bytes and build time.

    export PGOPTIONS="-c maintenance_work_mem=3GB -c max_parallel_maintenance_workers=0"    # of one core
    python benchmarks/postgres.py build/postgres postgresql://user:password@host/database --embeddings DATA

Vectors, queries and the reference are those of benchmarks/search.py. The table of the fingerprint "benchmark"
is replaced. Writes postgres.json to the folder.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import psycopg
import torch
from search import BATCHES, WAYS, K, Search, around, read_centres, speed, write_vectors

from plsc.gallery.postgres import PostgresStore
from plsc.gallery.store import New

EXACT = ("torch, float32 products", "gallery")


def main() -> None:
    """Measure the exact galleries, and then PostgreSQL."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="output folder")
    parser.add_argument("url", help="an empty database with pgvector")
    parser.add_argument("--embeddings", type=Path, help="as of benchmarks/search.py")
    parser.add_argument("--count", type=int, default=10**6)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--queries", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    centres = read_centres(options.embeddings, options.size)
    vectors = write_vectors(options.folder / "vectors.npy", centres, options.count)
    queries = around(centres, options.queries, seed=1)
    store = PostgresStore(options.url, "benchmark", options.size)
    rows: list[dict[str, Any]] = []
    truth = None
    for name in (*EXACT, "PostgreSQL"):
        began = time.perf_counter()
        search, facts = (
            WAYS[name](options.folder, vectors) if name in EXACT else fill(store, options.url, vectors)
        )
        row = {"way": name, "prepare s": time.perf_counter() - began, **facts}
        found = np.concatenate([search(queries[i : i + 64]) for i in range(0, len(queries), 64)])
        truth = found if truth is None else truth
        row["recall@1"] = float((found[:, 0] == truth[:, 0]).mean())
        row["recall@10"] = np.mean([len({*a} & {*b}) / K for a, b in zip(found, truth, strict=True)])
        for batch in BATCHES:
            row[f"queries/s, batch {batch}"] = speed(search, queries, batch)
        print(json.dumps(row), flush=True)
        rows.append(row)
    about = {"centres": len(centres), "count": options.count, "size": options.size, "queries": len(queries)}
    (options.folder / "postgres.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


def fill(store: PostgresStore, url: str, vectors: np.ndarray) -> tuple[Search, dict[str, Any]]:
    """Copy the vectors to the table, and build the index."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("TRUNCATE plsc_benchmark RESTART IDENTITY")
        connection.execute("DROP INDEX IF EXISTS plsc_benchmark_hnsw")
        began = time.perf_counter()
        store.write([New(str(number), vector, b"") for number, vector in enumerate(vectors)], builds=True)
        written = time.perf_counter() - began
        connection.execute("VACUUM plsc_benchmark")
        sizes = "SELECT pg_table_size('plsc_benchmark'), pg_relation_size('plsc_benchmark_hnsw')"
        table, index = connection.execute(sizes).fetchall()[0]
    facts = {
        "write s": written,
        "bytes per vector": round((table + index) / len(vectors)),
        "of these in the index": round(index / len(vectors)),
        "recall as plsc index prints it": store.measure_recall(),
    }
    return lambda queries: np.array(
        [[int(one.name) for one in row] for row in store.search(queries, K)]
    ), facts


if __name__ == "__main__":
    main()
