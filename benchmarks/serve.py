"""Requests per second and latency of ``plsc serve``, and of a FastAPI server with one forward per request.

    python benchmarks/serve.py MODEL IMAGES [--clients 1 8 64] [--seconds 5] [--rounds 3]

MODEL is a folder of plsc export, IMAGES a folder of JPEG files. Both servers have the same graph, onnxruntime
threads, preprocessing, HTTP server, requests and responses (JSON); they are measured in turn, on loopback.
The clients send the next request when they have the response; one process, without an HTTP library.
--soak SECONDS measures the memory of plsc serve at full load instead.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request
from starlette.concurrency import run_in_threadpool

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("plsc", "pool", "loop")
"""plsc serve; a forward per request in FastAPI's thread pool; the same in its event loop."""


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
def server(way: str, model: str, threads: int) -> Iterator[tuple[int, int]]:
    """Start a server and yield its port and process id."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        script = [__file__, model, "-", "--baseline", way]
        if way == "plsc":
            script = ["-m", "plsc.cli", "serve", model, "--store", f"{folder}/entries.sqlite"]
        command = [sys.executable, *script, "--port", str(port), "--threads", str(threads)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=environment, stdout=sys.stderr)
        try:
            wait_for(port, process)
            yield port, process.pid
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


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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


def compare(options: argparse.Namespace) -> None:
    """Measure all ways in turn, and print medians over the rounds."""
    requests = as_requests(options.images)
    found: dict[tuple[str, int], list[tuple[float, float, list[float]]]] = {}
    with contextlib.ExitStack() as stack:
        servers = {way: stack.enter_context(server(way, options.model, options.threads)) for way in WAYS}
        for port, _ in servers.values():
            load(port, requests, max(options.clients), 1.0)  # warm-up
        for _ in range(options.rounds):
            for clients in options.clients:
                for way, (port, pid) in servers.items():
                    before = cpu_seconds(pid)
                    rate, taken = load(port, requests, clients, options.seconds)
                    used = 1e3 * (cpu_seconds(pid) - before) / len(taken)
                    found.setdefault((way, clients), []).append((rate, used, taken))
    print(
        f"{'clients':>8} {'server':8} {'requests/s':>11} {'p50 ms':>8} {'p99 ms':>8} {'CPU ms/request':>15}"
    )
    for clients in options.clients:
        rates = {}
        for way in WAYS:
            rounds = found[way, clients]
            rates[way] = statistics.median(rate for rate, _, _ in rounds)
            used = statistics.median(used for _, used, _ in rounds)
            times = sorted(1e3 * one for _, _, taken in rounds for one in taken)
            p50, p99 = (times[int(share * (len(times) - 1))] for share in (0.5, 0.99))
            print(f"{clients:8} {way:8} {rates[way]:11.0f} {p50:8.2f} {p99:8.2f} {used:15.3f}")
        best = max(rates["pool"], rates["loop"])
        facts = {"clients": clients, **{way: round(rate, 1) for way, rate in rates.items()}}
        print(json.dumps({**facts, "ratio": round(rates["plsc"] / best, 3)}), flush=True)


def soak(options: argparse.Namespace) -> None:
    """Print the memory of plsc serve over the time, at full load; fail if it grows by over 5 %."""
    requests = as_requests(options.images)
    with server("plsc", options.model, options.threads) as (port, pid):
        held = []
        for part in range(11):
            rate, _ = load(port, requests, max(options.clients), options.soak / 11)
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            held.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
            print(f"part {part}: {rate:.0f} requests/s, {held[-1]:.1f} MiB", flush=True)
    print(json.dumps({"first": round(held[1], 1), "last": round(held[-1], 1)}))
    if held[-1] > 1.05 * held[1]:
        raise SystemExit("the memory grows")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("images")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of onnxruntime, in all servers")
    parser.add_argument("--soak", type=float, default=0.0)
    parser.add_argument("--baseline", choices=WAYS[1:], help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.baseline:
        run_baseline(options.model, options.port, options.baseline, options.threads)
    elif options.soak:
        soak(options)
    else:
        compare(options)


if __name__ == "__main__":
    main()
