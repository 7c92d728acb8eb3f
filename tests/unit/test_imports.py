"""Packages import from lower levels only; the pages about the code name what exists."""

import ast
import functools
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# A package may import from packages before it in this list, and from itself.
LEVELS = [
    {"seeds", "version"},
    {"errors"},
    {"machine", "names", "inputs", "values"},
    {"config", "parallel", "storage"},
    {"data", "models", "heads", "optim"},
    {"checkpoint", "evaluate"},
    {"export", "utils", "plan"},
    {"train"},
    {"predict"},
    {"gallery", "original"},
    {"clean", "entry", "serve"},
    {"cli"},
]
LEVEL = {package: level for level, packages in enumerate(LEVELS) for package in packages}


@functools.cache
def import_nodes(path):
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]


def imports_of(path):
    for node in import_nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("plsc."):
            yield node.module.split(".")[1], node.lineno
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("plsc."):
                    yield alias.name.split(".")[1], node.lineno


def test_packages_import_from_lower_levels_only():
    offenders = []
    for path in sorted((ROOT / "plsc").rglob("*.py")):
        package = path.relative_to(ROOT / "plsc").parts[0].removesuffix(".py")
        if package == "__init__":
            continue
        for target, line in imports_of(path):
            if target != package and LEVEL[target] >= LEVEL[package]:
                offenders.append(f"{path.relative_to(ROOT)}:{line} imports plsc.{target}")
    assert not offenders, "\n".join(offenders)


# They take plain arguments, so that each can be read, tested and used alone: only builders read options.
PARTS = ("heads", "models", "optim.py", "parallel", "data", "checkpoint", "storage")


def test_parts_do_not_know_the_options():
    paths = [path for part in PARTS for path in [ROOT / "plsc" / part, *(ROOT / "plsc" / part).rglob("*.py")]]
    for path in filter(Path.is_file, paths):
        assert "config" not in {target for target, _ in imports_of(path)}, path


def test_no_two_files_import_each_other():
    """Nor in a larger circle; imports within functions and for type checkers count."""
    files = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in (ROOT / "plsc").rglob("*.py")}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    graph = {}
    for name, path in files.items():
        nodes = [node for node in import_nodes(path) if isinstance(node, ast.ImportFrom)]
        pairs = {(node.module, f"{node.module}.{one.name}") for node in nodes for one in node.names}
        targets = {inner if inner in files else module for module, inner in pairs}
        graph[name] = targets & files.keys() - {"plsc", name}
    del graph["plsc"]
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_the_head_imports_only_errors_seeds_and_the_ranks():
    allowed = {"plsc.errors", "plsc.parallel.world", "plsc.seeds"}
    for path in (ROOT / "plsc/heads").rglob("*.py"):
        found = {node.module for node in import_nodes(path) if isinstance(node, ast.ImportFrom)}
        ours = {name for name in found if name.startswith("plsc.") and not name.startswith("plsc.heads")}
        assert not ours - allowed, path


def test_importing_plsc_needs_no_torch_and_importing_entry_changes_nothing():
    code = (
        "import sys, plsc; assert plsc.__version__; "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules; "
        "import torch; torch.manual_seed(1); a = torch.get_rng_state(); "
        "import plsc.entry, plsc.cli, torch.distributed as d; assert not d.is_initialized(); "
        "assert torch.equal(a, torch.get_rng_state())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def walks():
    """Yield each numbered list of files in the pages about the code."""
    architecture = (ROOT / "docs/architecture.md").read_text()
    yield from architecture.split("## Walks through the code")[1].split("\n## ")[0].split("\n**")[1:]
    step = (ROOT / "docs/life_of_a_step.md").read_text()
    yield step.split("## Read the files in this order")[1].split("\n## ")[0]


def test_the_walks_through_the_code_name_files_and_functions_that_exist():
    for walk in walks():
        steps = re.findall(r"^\d\. `(plsc/\S+)` (.+?):", walk, re.MULTILINE)
        assert 4 <= len(steps) <= 8, walk
        for path, names in steps:
            source = (ROOT / path).read_text()
            for name in re.findall(r"`(\w+)`", names):
                assert re.search(rf"^ *(def|class) {name}\b|^    {name}:", source, re.MULTILINE), name


def test_the_life_of_a_checkpoint_names_what_is_in_its_files():
    page = (ROOT / "docs/checkpoints.md").read_text()
    found = re.findall(r"`(\w+)(?:\.(\w+))?`\s+\(`(plsc/\S+)`\)", page)
    assert len(found) > 10
    for name, method, path in found:
        source = (ROOT / path).read_text()
        assert re.search(rf"^(def|class) {name}\b", source, re.MULTILINE), name
        assert not method or f"    def {method}(" in source, method


def test_the_architecture_page_lists_every_package_with_its_level():
    page = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.+?) \|.*?\| (`\w+\.py`)? ?\|$", page, re.MULTILINE)
    listed = {}
    for level, packages, start in rows:
        for path in re.findall(r"`plsc/(\S+?)`", packages):
            assert (ROOT / "plsc" / path / start.strip("`")).exists(), path
            listed.setdefault(path.split("/")[0].removesuffix(".py"), int(level))
    assert listed == LEVEL
