"""`plsc launch` whose ranks are forks, which start without seconds of imports: forking.py ARGUMENT ..."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401 - which comes with the first optimizer
from torch.distributed.launcher import api

import plsc.entry  # noqa: F401
from plsc.cli import main

_launch = api.elastic_launch


def _rank(script: str, *arguments: str) -> None:
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def _forking(config: api.LaunchConfig, _python: str) -> Callable[..., Any]:
    config.start_method = "fork"
    return lambda *command: _launch(config, _rank)(*command[command.index("-u") + 1 :])


if __name__ == "__main__":
    api.elastic_launch = _forking
    sys.exit(main(["launch", *sys.argv[1:]]))
