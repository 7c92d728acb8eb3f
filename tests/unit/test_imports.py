"""Imports go one way through the rooms, and the architecture page names what is there."""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# From the ground up: a room may import from rooms above it in this list, and from itself.
ROOMS = [
    {"seeds", "spans"},
    {"errors"},
    {"config", "terminal"},
    {"parallel", "storage"},
    {"data", "models", "heads", "optim"},
    {"checkpoint", "evaluate"},
    {"train", "utils", "plan"},
    {"profiling"},
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


def test_the_head_can_be_taken_out_with_errors_and_collectives_alone():
    allowed = {"plsc.errors", "plsc.parallel.collectives", "plsc.seeds", "plsc.spans"}
    for path in (ROOT / "plsc/heads").rglob("*.py"):
        nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
        found = {n.module for n in nodes if n.module and n.module.startswith("plsc.")}
        assert not {m for m in found if not m.startswith("plsc.heads")} - allowed, path


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


def test_the_walks_of_the_architecture_page_name_at_most_eight_files_and_what_is_in_them():
    page = (ROOT / "docs/architecture.md").read_text()
    section = page.split("## Three walks through the code")[1].split("\n## ")[0]
    for walk in section.split("\n**")[1:]:
        steps = re.findall(r"^\d\. `(plsc/\S+)` (.+?):", walk, re.MULTILINE)
        assert 6 <= len(steps) <= 8, walk
        for path, names in steps:
            source = (ROOT / path).read_text()
            for name in re.findall(r"`(\w+)`", names):
                assert re.search(rf"^ *(def|class) {name}\b|^    {name}:", source, re.MULTILINE), name
