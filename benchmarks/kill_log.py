"""The log of benchmarks/kill.py and its summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kill_job import DELETION, REMOTE_DELETION, SAVE, UPLOAD

REQUIRED = {"a save": ({SAVE}, 25), "an upload": ({UPLOAD}, 15)}
REQUIRED["retention"] = ({DELETION, REMOTE_DELETION}, 5)


class Log:
    """The lines of kill.jsonl, those of earlier calls included."""

    def __init__(self, path: Path) -> None:
        self._path = path
        text = path.read_text() if path.exists() else ""
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]

    def add(self, **facts: Any) -> None:
        """Append a line."""
        self.lines.append(facts)
        with self._path.open("a") as file:
            file.write(json.dumps(facts) + "\n")

    @property
    def kills(self) -> list[dict[str, Any]]:
        """The kills so far."""
        return [line for line in self.lines if "kill" in line]

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The runs that came to their end."""
        return [line for line in self.lines if "run" in line and "kill" not in line]


def summarise(log: Log) -> str:
    """Return the table for the documentation."""
    kills, runs = log.kills, log.runs
    rows = [f"| kills | {len(kills)} |"]
    rows.append(
        f"| of the launcher and both ranks at once | {_count(kills, 'launcher and both ranks')} |"
    )
    for what, (phases, least) in REQUIRED.items():
        count = sum(bool(phases & set(kill["in_phases"])) for kill in kills)
        rows.append(f"| proven to be within {what} (wanted: {least}) | {count} |")
    rows.append(f"| within none of these | {sum(not kill['in_phases'] for kill in kills)} |")
    for place, name in (("local", "here"), ("remote", "in the store")):
        whole = sum(bool(kill[place] and kill[place]["verified"]) for kill in kills)
        rows.append(f"| newest checkpoint {name} verified | {whole} |")
    rows.append(
        f"| kills with any other trace than hidden leftovers | {sum(map(_is_bad, kills))} |"
    )
    rows.append(f"| starts from the store | {sum(kill['loaded_from_store'] for kill in kills)} |")
    same = sum(run["same_bits"] for run in runs)
    rows.append(f"| runs that came to their end, with the same bits | {len(runs)}, {same} |")
    return "\n".join(["| | |", "|---|---|", *rows, ""])


def _count(kills: list[dict[str, Any]], victims: str) -> int:
    return sum(kill["victims"] == victims for kill in kills)


def _is_bad(kill: dict[str, Any]) -> bool:
    return bool(kill["problems"])
