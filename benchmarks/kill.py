"""Kill a training a hundred times; see each time that its newest checkpoint is whole, here and in the store.

python benchmarks/kill.py results/                100 kills, 205 MB of rows and momentum: half an hour
python benchmarks/kill.py results/ --kills 20     so many more, added to the log
python benchmarks/kill.py results/ --quick --phases save upload retention     3 kills of a small head

Two gloo ranks train, save beside training every other step, keep two checkpoints and send each to an HDFS
that runs on this machine (a fresh one; java is needed). A run is killed, looked at, started again from the
newest checkpoint, here or in the store, killed again, and so on until it is through its steps: then its
weights must be those of a run that nobody disturbed, bit for bit; and the next run begins. Moments and
victims are drawn by chance.

results/kill.jsonl has a line for each kill: the plan, the last words of each rank that was killed (what had
begun and not ended proves where it was), the newest checkpoints and whether they verified. results/kill.md is
the summary. Stops at the first thing that is not as it should be, and leaves all of it in results/work.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "benchmarks")]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: it is forked afterwards

from kill_job import (  # noqa: E402
    DELETION,
    REMOTE_DELETION,
    SAVE,
    UPLOAD,
    Job,
    Plan,
    launch,
    plan_as_dict,
)
from kill_log import Log, summarise  # noqa: E402
from kill_look import (  # noqa: E402
    Death,
    Typical,
    compare,
    follow,
    in_child,
    last_words,
    look,
    open_phases,
    read_journal,
    typical_of,
)

from tests.hdfs_server import hdfs_server  # noqa: E402
from tests.images import write_dataset  # noqa: E402

START = "start"
WEIGHTS = {SAVE: 38, UPLOAD: 30, DELETION: 11, REMOTE_DELETION: 11, START: 10}


def main() -> int:
    """Kill as often as wanted; return 0 if all was well."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("results", type=Path, help="folder for the log, the summary and the work")
    parser.add_argument("--kills", type=int, default=100, help="kills in this call")
    parser.add_argument("--classes", type=int, default=200_000)
    parser.add_argument("--steps", type=int, default=40, help="of a run, in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="2,000 classes, 30 steps")
    parser.add_argument(
        "--phases", nargs="+", choices=WEIGHTS, default=[], help="die in these, in turn"
    )
    parser.add_argument(
        "--store", help="URL of an empty folder to send to, instead of an HDFS of its own"
    )
    given = parser.parse_args()
    if given.quick:
        given.classes, given.steps = 2000, 30
    if given.phases:
        given.kills = len(given.phases)
    work = given.results.resolve() / "work"
    work.mkdir(parents=True, exist_ok=True)
    os.environ["PLSC_CACHE_DIR"] = str(work / "cache")
    log = Log(given.results / "kill.jsonl")
    with contextlib.ExitStack() as stack:
        url = given.store or stack.enter_context(hdfs_server()).url
        Killer(given, work, url, log).kill_all()
    summary = summarise(log)
    (given.results / "kill.md").write_text(summary)
    print(summary)
    shutil.rmtree(work / "cache", ignore_errors=True)
    return 0


class Killer:
    """Starts runs, kills them and looks at what they leave."""

    def __init__(self, given: argparse.Namespace, work: Path, url: str, log: Log) -> None:
        self._work = work
        self._url = url
        self._log = log
        self._left = given.kills
        self._phases: list[str] = list(given.phases)
        self._dice = random.Random(f"{given.seed} {len(log.kills)}")
        self._job = Job(
            self._dataset(), Path(), "", classes=given.classes, steps=given.steps, save_every=2
        )
        self._reference, self._typical = self._undisturbed()

    def kill_all(self) -> None:
        """Kill run after run until there are kills enough; the last run comes to its end."""
        while self._left:
            self._disturb(len(self._log.runs))

    def _dataset(self) -> Path:
        folder = self._work / "images"
        if not folder.exists():
            write_dataset(folder, classes=20, per_class=8)
        return folder

    def _undisturbed(self) -> tuple[Path, Typical]:
        """Return the last checkpoint of a run that nobody disturbed, and how long its parts took."""
        kept = self._work / f"reference-{self._job.classes}-{self._job.steps}"
        journal = kept / "journal"
        if not (kept / "done").exists():
            shutil.rmtree(kept, ignore_errors=True)
            kept.mkdir()
            job = dataclasses.replace(
                self._job, local=kept / "run", remote=f"{self._url}/reference"
            )
            death = follow(launch(job, journal, None, kept / "output"), journal, None)
            if not death.is_complete:
                raise SystemExit(f"the undisturbed run failed: see {kept / 'output'}")
            (kept / "done").touch()
        newest = in_child(lambda: look(kept / "run", None, 0, 0))["local"]
        return kept / "run" / newest["name"], typical_of(read_journal(journal))

    def _disturb(self, number: int) -> None:
        """Kill one run again and again, and have it come to its end."""
        folder = self._work / f"run-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        remote = f"{self._url}/run-{number}"
        job = dataclasses.replace(self._job, local=folder / "run", remote=remote)
        found: dict[str, Any] = {"local": None, "remote": None}
        published = sent = 0
        for life in range(1000):
            job = dataclasses.replace(job, load=self._choose_load(job, found))
            plan = self._choose_plan(found) if self._left else None
            journal = folder / f"journal-{life}"
            death = follow(launch(job, journal, plan, folder / "output"), journal, plan)
            lines = read_journal(journal)
            ended = [line for line in lines if line["event"] == "end"]
            published = max([published, *(one["step"] for one in ended if one["phase"] == SAVE)])
            sent = max([sent, *(one["step"] for one in ended if one["phase"] == UPLOAD)])
            if not death.is_complete and not death.was_killed:
                raise SystemExit(f"a run failed by itself: see {folder / 'output'}, {journal}")
            found = in_child(functools.partial(look, job.local, job.remote, published, sent))
            if death.is_complete:
                break
            self._note(number, job, plan, death, lines, found)
            if found["problems"]:
                raise SystemExit(f"{'; '.join(found['problems'])}: see {folder}, {journal}")
        differences = in_child(lambda: compare(job, found, self._reference))
        self._log.add(run=number, starts=life + 1, same_bits=not differences, problems=differences)
        print(f"run {number}: complete after {life + 1} starts, {differences or 'the same bits'}")
        if differences or found["problems"]:
            raise SystemExit(f"{differences} {found['problems']}: see {folder}")
        shutil.rmtree(folder)

    def _choose_load(self, job: Job, found: dict[str, Any]) -> str | None:
        """Return where the next start goes on from: the newest here, or now and then that in the store."""
        if found["remote"] and self._dice.random() < 0.25:
            return f"{job.remote}/{found['remote']['name']}"
        return str(job.local / found["local"]["name"]) if found["local"] else None

    def _choose_plan(self, found: dict[str, Any]) -> Plan:
        """Return when the next run is to die; not before there is something in the store to look at."""
        dice, wait = self._dice, found["remote"] is None
        if self._phases:
            phase, is_early = self._phases[0], True
        else:
            phases = [phase for phase in WEIGHTS if not (wait and phase == START)]
            phase = dice.choices(phases, [WEIGHTS[one] for one in phases])[0]
            is_early = False
        is_deletion = phase in (DELETION, REMOTE_DELETION)
        actor = 0 if is_deletion else dice.randrange(2)
        point = delay = None
        if phase == START:
            delay = dice.uniform(0, 3)
        elif is_deletion or is_early or dice.random() < 0.5:
            least = 2 if is_deletion else 1  # from the second on the deletion has begun
            point = dice.randint(least, max(least, self._typical.points.get((phase, actor), 1)))
        else:
            delay = dice.uniform(0, self._typical.seconds[phase])
        nth = 1 if is_early or phase == START else dice.randint(1, 3 if phase == SAVE else 2)
        return Plan(phase, nth, actor, point, delay, whole=dice.random() < 0.5, wait=wait)

    def _note(
        self,
        number: int,
        job: Job,
        plan: Plan | None,
        death: Death,
        lines: list[dict[str, Any]],
        found: dict[str, Any],
    ) -> None:
        """Put a kill into the log."""
        assert plan is not None
        self._left -= 1
        self._phases[:1] = []
        phases = open_phases(lines, death.killed)
        self._log.add(
            kill=len(self._log.kills) + 1,
            run=number,
            victims="launcher and both ranks" if plan.whole else f"rank {plan.actor}",
            in_phases=phases,
            plan=plan_as_dict(plan),
            last_words=last_words(lines, death.killed),
            loaded=None if job.load is None else job.load.rsplit("/", 1)[-1],
            loaded_from_store=bool(job.load and "://" in job.load),
            **found,
        )
        print(
            f"kill {len(self._log.kills)} of {'all' if plan.whole else f'rank {plan.actor}'} in "
            f"{', '.join(phases) or 'none'}: {_step(found['local'])} here, {_step(found['remote'])} in the "
            f"store; {found['problems'] or 'whole'}",
            flush=True,
        )


def _step(found: dict[str, Any] | None) -> str:
    return f"step {found['step']}" if found else "none"


if __name__ == "__main__":
    sys.exit(main())
