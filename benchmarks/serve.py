"""Queries per second: galleries next to exact search and faiss, `plsc serve` next to a plain FastAPI server.

    plsc predict --checkpoint.load_dir demo/output/run --images demo/output/glyphs/images --output build/demo
    python benchmarks/serve.py search build/serve --embeddings build/demo     # a few minutes, 5 GB of disk
    python benchmarks/serve.py requests build/serve --model MODEL --images MODEL/thumbnails

search: a gallery of a million vectors of 512 values, in clusters: each vector is a centre plus Gaussian
noise, so two vectors of a cluster have a cosine of 0.8 on average. The centres are the embeddings of
`--embeddings` (a folder of `plsc predict`), rotated into 512 dimensions, or Gaussian vectors. The queries are
further vectors around random centres. The reference multiplies float32 matrices with torch, part by part.

requests: MODEL is a folder of `plsc export`, IMAGES a folder of JPEG files. All servers have the same graph,
onnxruntime threads, preprocessing, HTTP server, requests and responses (JSON), on loopback. The clients send
the next request when they have the response; one process, without an HTTP library.

--quick: small sizes, to test the script. Appends to NAME.jsonl and NAME.md in the folder.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import faiss
import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, Request
from measuring import HERE, Report, Sample, machine, speed, turns
from starlette.concurrency import run_in_threadpool

from plsc import open_embeddings
from plsc.gallery import open_gallery, write_gallery

COUNT, QUICK_COUNT, SIZE, QUERIES = 10**6, 20_000, 512, 1000
NOISE = 0.5  # expected norm of the noise; that of a centre is 1
ROWS = 16384  # vectors at a time
K = 10
THREADS = 1  # of a search
SERVERS = ("plsc", "pool", "loop")
"""plsc serve; a forward per request in FastAPI's thread pool; the same in its event loop."""
CLIENTS = (1, 8, 64)
SECONDS, QUICK_SECONDS = 5.0, 0.3
Search = Callable[[np.ndarray], np.ndarray]


def compare_searches(options: argparse.Namespace, report: Report) -> None:
    """Measure all ways of search in turn, with single queries and batches."""
    torch.set_num_threads(THREADS)
    faiss.omp_set_num_threads(THREADS)
    centres = read_centres(options.embeddings, SIZE)
    count = QUICK_COUNT if options.quick else COUNT
    vectors = write_vectors(options.folder / "vectors.npy", centres, count)
    queries = around(centres, QUERIES, seed=1)
    searches = {name: make(options.folder, vectors) for name, make in WAYS.items()}
    found = {
        name: np.concatenate([search(queries[i : i + 64]) for i in range(0, QUERIES, 64)])
        for name, search in searches.items()
    }
    truth = found[EXACT]
    for batch in (1, 64):
        report.print(f"\n### {count:,} vectors of {SIZE} values, queries in batches of {batch}\n")
        report.header("way", "recall@1", f"recall@{K}", "queries per second", f"speed / {EXACT}")
        samples: list[Sample] = []
        for turn, name in turns(list(searches), options.rounds):
            part = queries[turn * batch : turn * batch + batch]
            began = time.perf_counter()
            searches[name](part)
            seconds = time.perf_counter() - began
            samples.append({"kind": "time", "way": name, "round": turn, "seconds": seconds, "batch": batch})
            report.keep(**samples[-1])
        for name, numbers in found.items():
            shared = [len(set(a) & set(b)) / K for a, b in zip(numbers, truth, strict=True)]
            first = (numbers[:, 0] == truth[:, 0]).mean()
            rate = batch / statistics.median(one["seconds"] for one in samples if one["way"] == name)
            ratio = f"{speed(samples, name, EXACT):.2f}"
            report.row(name, f"{first:.2%}", f"{np.mean(shared):.2%}", f"{rate:,.1f}", ratio)


def read_centres(folder: Path | None, size: int) -> np.ndarray:
    """Return the centres of the clusters, float32 [n, size], of norm 1."""
    random = np.random.default_rng(0)
    if folder is None:
        centres = random.standard_normal((50_000, size))
    else:
        own = open_embeddings(folder)["embeddings"][:]
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


def exact(folder: Path, vectors: np.ndarray) -> Search:
    """Multiply all vectors, part by part, and keep the best of each part."""
    parts = [torch.from_numpy(vectors[first : first + ROWS]) for first in range(0, len(vectors), ROWS)]

    def search(queries: np.ndarray) -> np.ndarray:
        given = torch.from_numpy(queries)
        tops = [(given @ part.T).topk(min(K, len(part))) for part in parts]
        scores = torch.cat([top.values for top in tops], 1)
        numbers = torch.cat([top.indices + i * ROWS for i, top in enumerate(tops)], 1)
        return numbers.gather(1, scores.topk(K).indices).numpy()

    return search


def gallery(folder: Path, vectors: np.ndarray) -> Search:
    """Write and open a gallery."""
    place = folder / "gallery"
    shutil.rmtree(place, ignore_errors=True)
    write_gallery(place, vectors, model="")
    opened = open_gallery(place)
    return lambda queries: opened.search(queries, K)[1]


def faiss_8_bits(folder: Path, vectors: np.ndarray) -> Search:
    """Search with the 8-bit index of faiss, with a range per dimension, and nothing else."""
    index = faiss.IndexScalarQuantizer(
        vectors.shape[1], faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT
    )
    index.train(vectors[: 4 * ROWS])
    for first in range(0, len(vectors), ROWS):
        index.add(vectors[first : first + ROWS])
    return lambda queries: index.search(queries, K)[1]


EXACT = "torch, float32 products"
WAYS = {EXACT: exact, "gallery": gallery, "faiss QT_8bit alone": faiss_8_bits}


def run_baseline(model_folder: str, port: int, way: str, threads: int) -> None:
    """Serve one forward per request, as written in an afternoon."""
    from plsc.export import open_model

    model = open_model(model_folder, threads)
    app = FastAPI()

    def forward(data: bytes) -> list[float]:
        embedding: list[float] = model.embed(model.preprocess(data)[None])[0].tolist()
        return embedding

    @app.post("/embed")
    async def embed(request: Request) -> dict[str, list[float]]:
        data = await request.body()
        return {"embedding": await run_in_threadpool(forward, data) if way == "pool" else forward(data)}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    uvicorn.run(app, port=port, log_config=None, access_log=False)


@contextlib.contextmanager
def server(way: str, model: str) -> Iterator[int]:
    """Start a server and yield its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        script = [__file__, "requests", folder, "--model", model, "--baseline", way]
        if way == "plsc":
            script = ["-m", "plsc.cli", "serve", model, "--store", f"{folder}/entries.sqlite"]
        command = [sys.executable, *script, "--port", str(port), "--threads", str(os.cpu_count())]
        environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=environment, stdout=sys.stderr)
        try:
            wait_for(port, process)
            yield port
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server answers."""
    for _ in range(600):
        if process.poll() is not None:
            raise SystemExit("the server ended")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as probe:
            probe.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            if probe.recv(100).startswith(b"HTTP/1.1 200"):
                return
        time.sleep(0.1)
    raise SystemExit("the server does not answer")


def load(port: int, requests: list[bytes], clients: int, seconds: float) -> tuple[float, list[float]]:
    """Send requests from so many connections; return requests per second, and the seconds of each."""
    selector = selectors.DefaultSelector()
    sent: dict[socket.socket, float] = {}
    taken: list[float] = []
    number = 0

    def send(one: socket.socket) -> None:
        nonlocal number
        sent[one] = time.perf_counter()
        one.sendall(requests[number % len(requests)])
        number += 1

    for _ in range(clients):
        one: socket.socket = socket.create_connection(("127.0.0.1", port))
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(one, selectors.EVENT_READ, bytearray())
        send(one)
    begin = time.perf_counter()
    while selector.get_map():  # at the end, wait for the responses to all requests
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            one, received = key.fileobj, key.data
            received += one.recv(65536)
            if is_complete(received):
                taken.append(time.perf_counter() - sent[one])
                if not received.startswith(b"HTTP/1.1 200"):
                    raise SystemExit(f"the server answered {bytes(received[:300])!r}")
                received.clear()
                if time.perf_counter() < begin + seconds:
                    send(one)
                else:
                    selector.unregister(one)
                    one.close()
    return len(taken) / (time.perf_counter() - begin), taken


def is_complete(response: bytearray) -> bool:
    """Return whether the headers and the declared length have been received."""
    end = response.find(b"\r\n\r\n")
    if end < 0:
        return False
    head = bytes(response[:end]).lower()
    start = head.index(b"content-length: ") + 16
    return len(response) >= end + 4 + int(head[start:].split(b"\r", 1)[0])


def as_requests(folder: str, most: int = 512) -> list[bytes]:
    """Return a request per JPEG file."""
    bodies = [path.read_bytes() for path in sorted(Path(folder).rglob("*.jpg"))[:most]]
    if not bodies:
        raise SystemExit(f"{folder} has no .jpg files")
    head = b"POST /embed HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: image/jpeg\r\n"
    head += b"Content-Length: %d\r\n\r\n"
    return [head % len(body) + body for body in bodies]


def compare_servers(options: argparse.Namespace, report: Report) -> None:
    """Measure all servers in turn, and print medians over the rounds."""
    requests = as_requests(options.images)
    length = QUICK_SECONDS if options.quick else SECONDS
    with contextlib.ExitStack() as stack:
        servers = {way: stack.enter_context(server(way, options.model)) for way in SERVERS}
        for port in servers.values():
            load(port, requests, max(CLIENTS), 1.0)  # warm-up
        for clients in CLIENTS:
            samples: list[Sample] = []
            for turn, way in turns(SERVERS, options.rounds):
                rate, taken = load(servers[way], requests, clients, length)
                sample = {"kind": "time", "way": way, "round": turn, "seconds": 1 / rate, "clients": clients}
                samples.append({**sample, "taken": taken})
                report.keep(**sample)
            report.print(f"\n### {clients} clients\n")
            report.header("server", "requests per second", "p50 ms", "p99 ms", "speed of plsc / this one")
            for way in SERVERS:
                mine = [one for one in samples if one["way"] == way]
                rate = 1 / statistics.median(one["seconds"] for one in mine)
                times = sorted(1e3 * one for sample in mine for one in sample["taken"])
                p50, p99 = (times[int(share * (len(times) - 1))] for share in (0.5, 0.99))
                ratio = f"{speed(samples, 'plsc', way):.2f}"
                report.row(way, f"{rate:.0f}", f"{p50:.2f}", f"{p99:.2f}", ratio)


def main() -> None:
    """Run the chosen comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("search", "requests"))
    parser.add_argument("folder", type=Path, help="output folder")
    parser.add_argument("--embeddings", type=Path, help="search: of the centres; default: random ones")
    parser.add_argument("--model", help="requests: folder of plsc export")
    parser.add_argument("--images", help="requests: folder of JPEG files")
    parser.add_argument("--rounds", type=int, help="default: 20 of search, 3 of requests")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--baseline", choices=SERVERS[1:], help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.baseline:
        run_baseline(options.model, options.port, options.baseline, options.threads)
        return
    options.rounds = options.rounds or (20 if options.what == "search" else 3)
    report = Report(options.folder, options.what)
    report.keep(**machine(THREADS, "cpu"))
    (compare_searches if options.what == "search" else compare_servers)(options, report)


if __name__ == "__main__":
    main()
