"""benchmarks/gpu.sh without a GPU: every slice at toy size, and what becomes of one that fails."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tests.benchmark_forks import run_in_forks
from tests.distributed.launch import run_ranks

REPO = Path(__file__).parents[2]
sys.path.insert(0, str(REPO / "benchmarks"))

import gpu  # noqa: E402
import train  # noqa: E402
from ways import BY_NAME  # noqa: E402


def run(out: Path, *arguments: str, python: str | Path = sys.executable):
    return subprocess.run(
        ["bash", "benchmarks/gpu.sh", *arguments],
        cwd=REPO,
        env={**os.environ, "PYTHON": str(python), "OUT": str(out), "OMP_NUM_THREADS": "1"}
        | {"RIVALS": str(out / "rivals"), "PIP_NO_INDEX": "1"},
        text=True,
        capture_output=True,
    )


def samples_of(out: Path, number: int) -> list[dict]:
    return [json.loads(line) for line in (out / f"slice-{number}.jsonl").read_text().splitlines()]


@pytest.mark.slow
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
    samples = samples_of(tmp_path, number)
    assert {sample["kind"] for sample in samples} == {"machine", "end"} | kinds
    assert samples[0]["torch"] in (tmp_path / f"slice-{number}.md").read_text()
    # Only what is not installed here, or is for a GPU, is a row without figures.
    outcomes = {sample["outcome"] for sample in samples if sample["kind"] == "failed"}
    assert outcomes <= {"not installed", "needs a GPU"}


def test_what_there_is_no_time_left_for_is_a_row(tmp_path):
    assert run(tmp_path, "1", "--device", "cpu", "--seconds", "0").returncode == 0
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
    done = run(tmp_path, "1", "--device", "cpu", "--seconds", "0")
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
    done = run(tmp_path / "out", python=python)
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
