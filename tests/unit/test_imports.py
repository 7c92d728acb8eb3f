"""Imports go one way through the rooms."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# From the ground up: a room may import from rooms above it in this list, and from itself.
ROOMS = [
    {"version", "redaction", "keys", "spans"},
    {"errors"},
    {"named", "option", "patterns", "verbs"},
    {"options"},
    {"config"},
    {"flags", "config_file"},
    {"parallel", "storage"},
    {"data", "models", "heads", "optim"},
    {"checkpoint", "evaluate"},
    {"train", "utils", "plan", "data_cli"},
    {"setters", "checkpoint_cli", "profiling"},
    {"entry"},
    {"cli"},
]
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("plsc."):
            yield node.module.split(".")[1], node.lineno
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("plsc."):
                    yield alias.name.split(".")[1], node.lineno


def test_no_room_imports_from_a_room_above_it():
    offenders = []
    for path in sorted((ROOT / "plsc").rglob("*.py")):
        room = path.relative_to(ROOT / "plsc").parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        for target, line in imports_of(path):
            if target != room and LEVEL[target] >= LEVEL[room]:
                offenders.append(f"{path.relative_to(ROOT)}:{line} imports plsc.{target}")
    assert not offenders, "\n".join(offenders)


def test_importing_plsc_does_nothing_and_is_light():
    code = (
        "import sys, plsc; assert plsc.__version__; "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_importing_the_facade_makes_no_process_group_and_touches_no_generator():
    code = (
        "import random, numpy, torch; torch.manual_seed(1); a = torch.get_rng_state(); "
        "import plsc.entry, plsc.cli, torch.distributed as d; assert not d.is_initialized(); "
        "assert torch.equal(a, torch.get_rng_state())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
