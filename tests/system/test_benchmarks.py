"""The benchmarks compare what they say they compare: the same loss, the same update, the same bytes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.distributed.launch import ROOT, run_ranks

REPO = Path(__file__).parents[2]
BENCHMARKS = REPO / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import accuracy_peer  # noqa: E402
import checkpoint  # noqa: E402
import gpu  # noqa: E402
import head  # noqa: E402
import kill  # noqa: E402
import many_classes  # noqa: E402
import measuring  # noqa: E402
import run as table  # noqa: E402
import train  # noqa: E402
from ways import BASELINE, BY_NAME, WAYS  # noqa: E402

pytestmark = pytest.mark.slow


def run_here(monkeypatch: Any, script: Any, *arguments: object) -> None:
    """Run a benchmark, a module, in this process; the processes that it starts are its own."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", [script.__file__, *map(str, arguments)])
    script.main()


def run_in_forks(monkeypatch: Any, script: Any, *arguments: object) -> None:
    """Run a benchmark in this process, and its processes as forks of the server of ranks."""
    is_running = threading.Lock()

    def run_child(command: list[str], timeout: float | None, **env: str) -> tuple[list[dict], str | None]:
        ranks = 0
        if command[:2] == ["-m", "torch.distributed.run"]:
            ranks, command = int(command[3].partition("=")[2]), command[4:]
        with is_running:
            done = run_ranks(command[0], ranks, *command[1:], check=False, env=env, cwd=ROOT)
        samples = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return samples, f"failed: {done.stderr[-2000:]}" if done.returncode else None

    def run(command: list[str], **_: Any) -> None:
        with is_running:
            run_ranks(command[1], 0, *command[2:], cwd=ROOT)

    folder = Path(script.__file__).parent
    for module in list(sys.modules.values()):
        if Path(getattr(module, "__file__", None) or "/").parent == folder and hasattr(module, "run_child"):
            monkeypatch.setattr(module, "run_child", run_child)
    monkeypatch.setattr(subprocess, "run", run)
    run_here(monkeypatch, script, *arguments)


def read(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "head.jsonl").read_text().splitlines()
    return [sample for sample in map(json.loads, lines) if sample["kind"] == kind]


def test_a_quick_run_has_a_row_for_each_way_and_ours_learns_as_plain_pytorch_does(tmp_path, monkeypatch):
    missing = next(way.name for way in WAYS if way.needs_gpu)
    ours = ("plsc, fp32", "plsc, fp32, kept", "plsc, bf16")
    small = "--quick", "--device", "cpu", "--threads", 1
    run_in_forks(monkeypatch, head, *small, "--ways", "|".join([BASELINE, missing, *ours]), tmp_path)
    table = (tmp_path / "head.md").read_text()
    rows = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if " | " in line]
    assert rows == ["way", *(name for name in BY_NAME if name in (BASELINE, missing, *ours))]
    assert [sample["way"] for sample in read(tmp_path, "failed")] == [missing]

    memory = {sample["way"]: sample for sample in read(tmp_path, "memory")}
    for name, tolerance in zip(ours, (1e-5, 1e-3, 1e-3), strict=True):
        assert memory[name]["losses"] == pytest.approx(memory[BASELINE]["losses"], rel=tolerance)
        assert memory[name]["needed"] == memory[BASELINE]["needed"] == 2 * 2000 * 512 * 4
    assert {(s["way"], s["round"]) for s in read(tmp_path, "time")} == {
        (name, turn) for name in (BASELINE, *ours) for turn in range(3)
    }


def test_every_way_to_keep_a_checkpoint_loads_what_it_saved_on_fewer_and_more_ranks(tmp_path, monkeypatch):
    # Each load looks at every row.
    run_in_forks(monkeypatch, checkpoint, str(tmp_path), "--quick", "--rounds", "1")
    samples = measuring.read_lines(tmp_path / "checkpoint.jsonl")[1:]
    assert [sample["act"] for sample in samples] == ["save"] * 3 + ["load"] * 6
    assert {sample["ranks"] for sample in samples if sample["act"] == "load"} == {1, 2, 3}


def test_the_accuracy_benchmark_trains_and_judges_each_way_and_repeats_nothing(tmp_path, monkeypatch):
    data = REPO.parent / "shared/data/omniglot_small2.zip"
    if not data.exists():
        pytest.skip(f"{data} is not there")
    command = [
        str(tmp_path), "--omniglot", str(data), "--no-peer",
        "--network", "SmallResNet", "--epochs", "1", "--seeds", "1", "--rates", "0.02",
        "--variant", "no clip: optim.clip_norm=0",
    ]  # fmt: skip
    for is_repeated in (False, True):
        run_in_forks(monkeypatch, accuracy_peer, *command)
        rows = (tmp_path / "results.md").read_text().splitlines()
        names = [tuple(cell.strip() for cell in row.split("|")[1:3]) for row in rows[2:]]
        assert names == [
            ("raw pixels", ""), ("plsc", "0.02"), ("plsc", "default"), ("no clip", "0.02"),
        ]  # fmt: skip
        logs = sorted(tmp_path.glob("*.log"))
        assert len(logs) == (0 if is_repeated else 3)
        for log in logs:
            log.unlink()  # a second time nothing is trained, and nothing logged


def test_the_capacity_benchmark_has_a_row_for_each_gallery_and_level(tmp_path):
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(150), 2)
    embeddings = rng.normal(size=(150, 8))[labels] + 0.2 * rng.normal(size=(300, 8))
    np.savez(tmp_path / "drawn.npz", embeddings=embeddings, labels=labels)
    done = run_ranks(BENCHMARKS / "gallery.py", 0, "capacity", str(tmp_path), "--quick", cwd=REPO)
    rows = [line.strip("|").split("|") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [(int(row[0]), float(row[1])) for row in rows if len(row) == 4 and row[0].strip().isdigit()] == [
        (n, level) for n in (30, 60) for level in (0.01, 0.05, 0.2, 0.4)
    ]


def test_the_table_of_all_benchmarks_has_a_row_with_figures_for_each(tmp_path, monkeypatch, capsys):
    here = {Path(script.__file__).name: script for script in (head, train, many_classes, kill)}

    def start(command, **_):
        name, arguments = Path(command[1]).name, command[2:]
        if name in here:
            run_in_forks(monkeypatch, here[name], *arguments)
        else:
            run_ranks(command[1], 0, *arguments, cwd=REPO)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setenv("PLSC_CACHE_DIR", "")  # one of them sets it
    monkeypatch.setattr(table, "subprocess", SimpleNamespace(run=start))
    with pytest.raises(SystemExit) as ended:
        run_here(monkeypatch, table, "--quick", tmp_path)
    assert not ended.value.code
    rows = capsys.readouterr().out.partition("| compared with |")[2].splitlines()[2:]
    cells = [row.split("|")[3] for row in rows]
    assert len(cells) == len(table.PARTS)
    assert not [cell for cell in cells if not re.search(r"\d", cell)]


# benchmarks/gpu.sh without a GPU: every slice at toy size, and what becomes of one that fails.


def run_script(out: Path, *arguments: str, python: str | Path = sys.executable):
    return subprocess.run(
        ["bash", "benchmarks/gpu.sh", *arguments],
        cwd=REPO,
        env={**os.environ, "PYTHON": str(python), "OUT": str(out), "OMP_NUM_THREADS": "1"}
        | {"RIVALS": str(out / "rivals"), "PIP_NO_INDEX": "1"},
        text=True,
        capture_output=True,
    )


@pytest.mark.timeout(900)  # slice 1 starts a dozen processes that import torch
@pytest.mark.parametrize(
    ("number", "kinds"),
    [
        (1, {"memory", "failed"}),
        (2, {"step", "goal"}),
        (3, {"test"}),
        (4, {"step"}),
        (5, {"memory"}),
        (6, {"files", "goal"}),
    ],
)
def test_a_slice_measures_what_it_is_for_at_toy_size(number, kinds, tmp_path, monkeypatch):
    arguments = str(number), str(tmp_path), "--device", "cpu"
    if number == 3:  # pytest
        run_ranks(REPO / "benchmarks/gpu.py", 0, *arguments, cwd=REPO, timeout=800)
    else:
        run_in_forks(monkeypatch, gpu, *arguments)
    samples = measuring.read_lines(tmp_path / f"slice-{number}.jsonl")
    assert {sample["kind"] for sample in samples} == {"machine", "end"} | kinds
    assert samples[0]["torch"] in (tmp_path / f"slice-{number}.md").read_text()
    # Only what is not installed here, or is for a GPU, is a row without figures.
    outcomes = {sample["outcome"] for sample in samples if sample["kind"] == "failed"}
    assert outcomes <= {"not installed", "needs a GPU"}


def test_what_there_is_no_time_left_for_is_a_row(tmp_path):
    assert run_script(tmp_path, "1", "--device", "cpu", "--seconds", "0").returncode == 0
    assert "| plain PyTorch, fp32 | arcface | no time left |" in (tmp_path / "slice-1.md").read_text()


def test_without_a_network_what_is_missing_comes_from_a_folder_or_is_named(tmp_path):
    folder = tmp_path / "rivals"
    folder.mkdir()
    with zipfile.ZipFile(folder / "liger_kernel-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("liger_kernel/__init__.py", "")
        for name, text in {
            "METADATA": "Metadata-Version: 2.1\nName: liger-kernel\nVersion: 1\n",
            "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "RECORD": "",
        }.items():
            wheel.writestr(f"liger_kernel-1.dist-info/{name}", text)
    (folder / "partial_fc_v2.py").write_text("")
    done = run_script(tmp_path, "1", "--device", "cpu", "--seconds", "0")
    assert done.returncode == 0
    site = {path.name for path in (folder / "site").iterdir()}
    assert "partial_fc_v2.py" in site
    for package, is_given in (("liger-kernel", True), ("cut-cross-entropy", False)):
        name = package.replace("-", "_")
        if importlib.util.find_spec(name) is None:
            assert (name in site) == is_given
            assert (f"{package} is missing" in done.stdout) != is_given


def test_a_slice_that_fails_stops_no_other_and_is_named_at_the_end(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n[ "$2" != 2 ]\n')
    python.chmod(0o755)
    done = run_script(tmp_path / "out", python=python)
    begun = [line for line in done.stdout.splitlines() if line.startswith("benchmarks/gpu.py")]
    assert begun == [f"benchmarks/gpu.py {number} {tmp_path / 'out'}" for number in range(1, 7)]
    assert done.returncode == 1
    assert "failed slices: 2\n" in done.stderr


def test_at_full_size_a_slice_asks_for_ways_that_exist_and_for_fewer_classes_where_many_do_not_fit(
    tmp_path, monkeypatch
):
    asked: list[tuple[str, int]] = []

    def measure_apart(options, way, classes, batch, report, timeout):
        asked.append((way.name, classes))
        kind, figures = (
            "memory",
            {"seconds": [1.0], "median": 1.0, "peak": 1, "over": 1, "note": ""},
        )
        if classes > 6e7:
            kind, figures = "failed", {"outcome": "out of memory"}
        report.keep(kind=kind, way=way.name, C=classes, B=batch, **figures)
        return "out of memory" if kind == "failed" else figures

    def run_child(arguments, timeout):
        name, classes = arguments[2], int(arguments[4])
        asked.append((name, classes))
        figures = {"seconds": [1.0], "busy": 90, "peak": 1}
        sizes = map(int, arguments[5].split(","))
        return [{"kind": "step", "way": name, "C": classes, "B": b, **figures} for b in sizes], None

    monkeypatch.setattr(gpu, "measure_apart", measure_apart)
    monkeypatch.setattr(gpu, "run_child", run_child)
    monkeypatch.setattr(gpu.torch.cuda, "mem_get_info", lambda: (0, 80 * 10**9))
    monkeypatch.setattr(gpu, "free_memory", lambda: 10**11)
    known = BY_NAME.keys() | train.BY_NAME.keys()
    for number in (1, 2, 5):
        report = gpu.Report(tmp_path, f"slice-{number}")
        here = gpu.Slice(tmp_path, report, "cuda", time.monotonic() + 500, toy=False)
        assert gpu.SLICES[str(number)](here) == []
        assert {name for name, _ in asked} <= known
        goals = {sample["name"] for sample in report.samples if sample["kind"] == "goal"}
        assert goals == {1: {"cut", "partial"}, 2: {"half", "head"}, 5: {"classes"}}[number]
    light = [classes for name, classes in asked if name == gpu.LIGHT[0]]
    assert light == [71_000_000, 63_900_000, 57_510_000]
