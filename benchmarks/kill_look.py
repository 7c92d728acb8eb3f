"""What benchmarks/kill.py does beside killing: it follows a journal, and looks at what a kill left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kill_job import Job, Plan

from plsc.checkpoint import list_checkpoints
from plsc.checkpoint.remote import clean, verify
from plsc.checkpoint.retention import checkpoints_in
from plsc.storage.store import Store

KNOWN = frozenset({"metrics.jsonl", "loss.png", "best.json", "bad_samples.txt"})
LONGEST_RUN = 300.0  # seconds
LONGEST_END = 60.0  # seconds for the launcher to notice that a rank is dead

Line = dict[str, Any]


@dataclass(frozen=True)
class Death:
    """How a run ended. killed: the ranks that were killed, the others ended by themselves."""

    is_complete: bool
    was_killed: bool
    killed: tuple[int, ...]


@dataclass(frozen=True)
class Typical:
    """Of the undisturbed run: seconds of a phase, points of a phase on a rank."""

    seconds: dict[str, float]
    points: dict[tuple[str, int], int]


def read_journal(path: Path) -> list[Line]:
    """Return the lines of a journal; one that was cut short is none."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            lines.append(json.loads(text))
    return lines


def typical_of(lines: list[Line]) -> Typical:
    """Return how long the phases of a whole run took."""
    began: dict[tuple[int, str], float] = {}
    seconds = defaultdict(list)
    points: dict[tuple[str, int], int] = {}
    for line in lines:
        if line["event"] == "begin":
            began[line["rank"], line["phase"]] = line["time"]
        if line["event"] == "end":
            key = line["phase"], line["rank"]
            points[key] = min(points.get(key, line["points"]), line["points"])
            seconds[line["phase"]].append(line["time"] - began[line["rank"], line["phase"]])
    return Typical({phase: statistics.median(all_) for phase, all_ in seconds.items()}, points)


def open_phases(lines: list[Line], ranks: tuple[int, ...]) -> list[str]:
    """Return the phases that had begun and not ended on these ranks."""
    inside: set[tuple[int, str]] = set()
    for line in lines:
        if line["event"] == "begin":
            inside.add((line["rank"], line["phase"]))
        if line["event"] in ("end", "failed"):
            inside.discard((line["rank"], line["phase"]))
    return sorted({phase for rank, phase in inside if rank in ranks})


def last_words(lines: list[Line], ranks: tuple[int, ...]) -> dict[str, list[Line]]:
    """Return what these ranks wrote last: whatever had begun and not ended, and the very last line."""
    words: dict[str, list[Line]] = {}
    for rank in ranks:
        mine = [line for line in lines if line["rank"] == rank]
        inside: dict[str, Line] = {}
        for line in mine:
            if line["event"] == "begin":
                inside[line["phase"]] = line
            if line["event"] in ("end", "failed"):
                inside.pop(line["phase"], None)
        chosen = [*inside.values(), *(line for line in mine[-1:] if line not in inside.values())]
        words[str(rank)] = [
            {key: value for key, value in line.items() if key not in ("rank", "points")}
            for line in chosen
        ]
    return words


def follow(agent: int, journal: Path, plan: Plan | None) -> Death:
    """Wait for the end of a run, and bring it about when it is time; return when no process of it is left."""
    has_shot = False
    give_up = time.monotonic() + LONGEST_RUN
    target: float | None = None
    while True:
        ended, status = os.waitpid(agent, os.WNOHANG)
        if ended:
            break
        lines = read_journal(journal)
        now = time.monotonic()
        if plan and plan.delay is not None and target is None:
            target = next(
                (line["time"] + plan.delay for line in lines if _is_due(line, plan)), None
            )
        if target is not None and now >= target and not has_shot and plan:
            _shoot(agent, lines, plan)
            has_shot = True
        if any(line["event"] == "kill" for line in lines):
            has_shot = True
        if has_shot:
            give_up = min(give_up, now + LONGEST_END)
        if now > give_up:
            os.killpg(agent, signal.SIGKILL)
        time.sleep(0.004)
    _end_group(agent)
    lines = read_journal(journal)
    complete = sum(line["event"] == "complete" for line in lines)
    was_killed = has_shot or any(line["event"] == "kill" for line in lines)
    killed: tuple[int, ...] = ()
    if was_killed and plan:
        killed = (0, 1) if plan.whole else (plan.actor,)
    return Death(complete == 2 and status == 0, was_killed, killed)


def _is_due(line: Line, plan: Plan) -> bool:
    if plan.phase == "start":
        return bool(line["event"] == "start" and line["rank"] == plan.actor)
    wanted = ("begin", plan.phase, plan.nth, plan.actor)
    return (line["event"], line.get("phase"), line.get("nth"), line["rank"]) == wanted


def _shoot(agent: int, lines: list[Line], plan: Plan) -> None:
    with contextlib.suppress(ProcessLookupError):
        if plan.whole:
            os.killpg(agent, signal.SIGKILL)
            return
        starts = [line for line in lines if line["event"] == "start"]
        os.kill(next(one["pid"] for one in starts if one["rank"] == plan.actor), signal.SIGKILL)


def _end_group(group: int) -> None:
    """Kill what is left of a process group, and wait until it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    give_up = time.monotonic() + 30
    while _members(group):
        if time.monotonic() > give_up:
            raise SystemExit(f"process group {group} does not end")
        time.sleep(0.01)


def _members(group: int) -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == group and fields[0] not in "ZX":
                    members.append(int(entry.name))
    return members


def in_child(action: Callable[[], Any]) -> Any:
    """Return what an action returns, done in a process of its own: clients of stores start threads."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            with os.fdopen(write_end, "w") as out:
                json.dump(action(), out)
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write_end)
    with os.fdopen(read_end) as answer:
        text = answer.read()
    if os.waitpid(pid, 0)[1]:
        raise SystemExit("looking at what a kill left failed: see above")
    return json.loads(text)


def look(local: Path, remote: str | None, published: int, sent: int) -> dict[str, Any]:
    """Return the newest checkpoints here and in the store, verified, and what is not as it should be.

    published, sent: the steps of the newest checkpoints whose save, whose upload had ended: those must be
    there.
    """
    problems: list[str] = []
    here, leftovers = _look_here(local, published, problems)
    there = None
    if remote is not None:
        there, more = _look_there(remote, sent, problems)
        leftovers += more
    return {"local": here, "remote": there, "leftovers": leftovers, "problems": problems}


def _look_here(local: Path, published: int, problems: list[str]) -> tuple[Any, list[str]]:
    found = list_checkpoints(local)
    names = [path.name for path in local.iterdir()] if local.is_dir() else []
    leftovers = sorted(name for name in names if name.startswith((".saving", ".repl", ".del")))
    whole = {path.name for path, _ in found}
    strangers = {name for name in names if not name.startswith(".")} - whole - KNOWN
    problems += [f"{name} is no checkpoint and not hidden" for name in sorted(strangers)]
    restored = False
    if published and (not found or found[-1][1].step < published):
        # Killed between the two renames of a replacement: the next start puts it back.
        restored = bool(clean(Store(local)))
        found = list_checkpoints(local)
    newest: dict[str, Any] | None = None
    if found:
        path, manifest = found[-1]
        verify(path)
        newest = {"name": path.name, "step": manifest.step, "verified": True}
        if restored:
            newest["restored"] = True
    if (newest or {"step": 0})["step"] < published:
        problems.append(f"step {published} had been published, {newest} is the newest here")
    return newest, leftovers


def _look_there(remote: str, sent: int, problems: list[str]) -> tuple[Any, list[str]]:
    store = Store(remote)
    names = store.names()
    found = checkpoints_in(store)
    leftovers = [name for name in names if name.startswith(".")]
    strangers = set(names) - {name for name, _ in found} - set(leftovers) - KNOWN
    problems += [f"{name} in the store is no checkpoint" for name in sorted(strangers)]
    newest: dict[str, Any] | None = None
    if found:
        name, manifest = found[-1]
        verify(f"{remote}/{name}")
        newest = {"name": name, "step": manifest.step, "verified": True}
    if (newest or {"step": 0})["step"] < sent:
        problems.append(f"step {sent} had been sent, {newest} is the newest in the store")
    return newest, [f"store: {name}" for name in leftovers]


def compare(job: Job, found: dict[str, Any], reference: Path) -> list[str]:
    """Return how the last checkpoint, and that in the store, differ from the undisturbed run's."""
    ours = job.local / found["local"]["name"]
    manifest, theirs = verify(ours), verify(reference)
    if manifest.step != theirs.step:
        return [f"the run ended at step {manifest.step}, not {theirs.step}"]
    differences = []
    for name in theirs.files:
        if (ours / name).read_bytes() != (reference / name).read_bytes():
            differences.append(f"{name} has other bytes")
    there = verify(f"{job.remote}/{found['remote']['name']}")
    if there.files != theirs.files:
        differences.append("the last one in the store is another one")
    return differences
