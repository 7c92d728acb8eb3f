"""The benchmarks compare what they say they compare: the same loss, the same update, the same bytes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.benchmark_forks import run_here, run_in_forks
from tests.distributed.launch import run_ranks

REPO = Path(__file__).parents[2]
BENCHMARKS = REPO / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import accuracy_peer  # noqa: E402
import checkpoint  # noqa: E402
import head  # noqa: E402
import kill  # noqa: E402
import many_classes  # noqa: E402
import measuring  # noqa: E402
import run as table  # noqa: E402
import train  # noqa: E402
from ways import BASELINE, BY_NAME, WAYS  # noqa: E402

pytestmark = pytest.mark.slow


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


def test_a_quick_training_benchmark_has_a_row_for_each_way_from_files(tmp_path, monkeypatch):
    run_in_forks(monkeypatch, train, tmp_path, "--quick", "--files", "--workers", "0")
    samples = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    timed = [(one["way"], one["round"], one["files"]) for one in samples if one["kind"] == "time"]
    ways = {way for way, _, _ in timed}
    assert {"plain PyTorch, fp32", "plsc, fp32", "plsc, bf16"} < ways
    assert sorted(timed) == sorted((way, turn, True) for way in ways for turn in (0, 1))


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
