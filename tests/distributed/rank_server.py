"""Start ranks as forks of a process that has imported torch and plsc: rank_server.py DESCRIPTOR

Ranks are separate processes, as with torchrun, but start without seconds of imports. DESCRIPTOR is a socket.
A request is a JSON object with three file descriptors: standard output and standard error of the script, and
one that is kept open. The answers are the process group of the ranks and, at the end, the exit code.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

_SECONDS_TO_END = 30  # as torchrun: from SIGTERM to SIGKILL
_SECONDS_TO_REPORT = 50


def serve(requests: socket.socket) -> dict[str, Any]:
    """Answer requests until the other side closes; returns only in the ranks, with their request."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 2**20, 3)
        if not message:
            sys.exit()
        assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork would lose threads"
        launcher = os.fork()
        if launcher == 0:
            requests.close()
            os.setsid()
            os.dup2(descriptors[0], 1)
            os.dup2(descriptors[1], 2)  # the third is kept open until the last process ends
            request = json.loads(message)
            return launch(request) if request["ranks"] else request
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(str(launcher).encode())
        _, status = os.waitpid(launcher, 0)
        requests.send(str(os.waitstatus_to_exitcode(status)).encode())


def launch(request: dict[str, Any]) -> dict[str, Any]:
    """Start the ranks and wait for them, as torchrun does; returns only in the ranks."""
    reader, writer = os.pipe()
    ranks: dict[int, int] = {}
    for rank in range(request["ranks"]):
        pid = os.fork()
        if pid == 0:
            os.close(writer)
            variables = {
                "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1",
                "WORLD_SIZE": request["ranks"], "LOCAL_WORLD_SIZE": request["ranks"],
                "MASTER_PORT": int(os.read(reader, 8)), "TORCHELASTIC_USE_AGENT_STORE": True,
                "TORCHELASTIC_RUN_ID": "tests",
            }  # fmt: skip
            request["environment"] |= {name: str(value) for name, value in variables.items()}
            return request
        ranks[pid] = rank
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writer, b"%08d" % store.port * len(ranks))

    def end(with_signal: int) -> None:
        for pid in ranks:
            os.kill(pid, with_signal)

    signal.signal(signal.SIGALRM, lambda *_: end(signal.SIGKILL))
    code = 0
    while ranks:
        pid, status = os.wait()
        rank = ranks.pop(pid)
        if status and not code:
            code = 1
            ended = os.waitstatus_to_exitcode(status)
            how = signal.Signals(-ended).name if ended < 0 else f"exit code {ended}"
            print(f"rank {rank} ended with {how}", file=sys.stderr)
            end(signal.SIGTERM)
            signal.alarm(_SECONDS_TO_END)
    os._exit(code)


def report_hang() -> None:
    """Print the rank and the stack of each thread: what a test shows that waits for it in vain."""
    rank = os.environ.get("RANK", "0")
    print(f"rank {rank} still runs after {_SECONDS_TO_REPORT} s:", file=sys.stderr, flush=True)
    faulthandler.dump_traceback()


_PICKLING = ("head_alone_worker.py", "checkpoint.py")  # with Lightning and torch.distributed.checkpoint


def run(script: str, arguments: list[str], environment: dict[str, str], folder: str) -> int:
    """Run a script like the interpreter; return the exit code."""
    import torch.distributed

    os.environ.clear()
    os.environ.update(environment)
    watch = threading.Timer(_SECONDS_TO_REPORT, report_hang)
    watch.daemon = True
    watch.start()
    if Path(script).name not in _PICKLING:
        torch.distributed.distributed_c10d._unpickler = None  # no rank unpickles what another one sends
    if "DRAW_LOSSES" not in environment:
        from tests.undrawn import draw_nothing

        draw_nothing()
    os.chdir(folder)
    sys.argv = [script, *arguments]
    sys.path[:0] = [str(Path(script).parent), *environment["PYTHONPATH"].split(os.pathsep)]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # no background thread of pyarrow
    from PIL import Image

    # What each rank would import, for seconds: torch._dynamo comes with the first optimizer.
    for module in ("pytest", "torch._dynamo", "plsc.train.run", "plsc.entry", "tests.undrawn"):
        importlib.import_module(module)
    Image.init()  # imports what reads each format
    gc.freeze()  # a collection would copy the pages of all these modules in each rank
    code = run(**{name: value for name, value in serve(requests).items() if name != "ranks"})
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # With torch 2.15, a process that has used gloo sometimes aborts while the interpreter exits.
    os._exit(code)


if __name__ == "__main__":
    main()
