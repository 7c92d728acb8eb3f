"""Kill a training run a hundred times; check each time that no checkpoint is lost, local or uploaded.

    python benchmarks/kill.py build/kill                # 100 kills, 205 MB of head state: an hour
    python benchmarks/kill.py build/kill --kills 20     # 20 more kills, appended to the log
    python benchmarks/kill.py build/kill --quick --phases save upload retention     # 3 kills of a small head
    python benchmarks/kill.py build/kill --files        # the class weights in files, without uploads

Two gloo ranks train. They save asynchronously every second step, keep two checkpoints, and upload each to an
HDFS on this machine (needs java). SIGKILL ends a random rank, or the launcher and both ranks, at a random
moment of a phase: a save, an upload, a deletion of old checkpoints, or the start; with --files, also while
pages or the journal are written, or undone. Then the newest checkpoints
are verified, and the run resumes from one of them, until it is complete. Its last checkpoint must be
identical to that of an uninterrupted run. Then the next run starts.

results/kill.jsonl has a line per kill and per complete run. A problem ends the benchmark and keeps
results/work.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import read_lines

import plsc.checkpoint.remote
import plsc.checkpoint.save
import plsc.train.saving
from plsc.checkpoint.manifest import checkpoints_in, rank_of_shard
from plsc.checkpoint.remote import clean, verify
from plsc.checkpoint.rollback import Journal
from plsc.checkpoint.weights_file import WeightsFile, copy_complete
from plsc.storage.store import Store
from tests.distributed.job import small_entry
from tests.distributed.launch import run_ranks
from tests.hdfs_server import hdfs_server
from tests.images import write_dataset

WEIGHTS = {"save": 38, "upload": 30, "retention": 22, "start": 10}  # percent of the kills
OF_FILES = {"save": 30, "journal": 20, "pages": 30, "undo": 10, "start": 10}
NOT_CHECKPOINTS = {"metrics.jsonl", "loss.png", "best.json", "bad_samples.txt"}

Facts = dict[str, Any]


def train(job: Facts) -> None:
    """Train on this rank; write a line to the journal at the end of each phase; be killed as planned.

    job["plan"]: the rank to kill, the phase and its number, the seconds after its start, and whether to kill
    all ranks. A phase does not end before its kill.
    """
    rank, plan = int(os.environ["RANK"]), job["plan"]
    begun: Counter[str] = Counter()
    inside: list[str] = []

    def note(event: str, **facts: object) -> None:
        with Path(job["journal"]).open("ab", buffering=0) as file:
            file.write(json.dumps({"event": event, **facts}).encode() + b"\n")

    def die() -> None:
        note("kill", phases=sorted(inside))
        launcher = os.getppid()
        ranks = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        for pid in (launcher, *map(int, ranks)) if plan["all"] else ():
            if pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def begin(phase: str) -> threading.Timer | None:
        begun[phase] += 1
        if not plan or (rank, phase, begun[phase]) != (plan["rank"], plan["phase"], plan["nth"]):
            return None
        timer = threading.Timer(plan["delay"], die)
        timer.daemon = True
        timer.start()
        return timer

    def watch(module: Any, name: str, phase: str, step_of: Callable[..., int]) -> None:
        original = getattr(module, name)

        def watched(*args: Any, **options: Any) -> Any:
            step = step_of(*args)
            inside.append(phase)
            timer = begin(phase)
            answer = original(*args, **options)
            if timer is not None:
                timer.join()
            inside.remove(phase)
            note("end", phase=phase, step=step)
            return answer

        setattr(module, name, watched)

    watch(plsc.train.saving, "save_checkpoint", "save", lambda *args: args[2].manifest.step)
    watch(plsc.checkpoint.remote, "upload", "upload", lambda *args: args[2].step)
    watch(plsc.checkpoint.save, "withdraw", "retention", lambda *_: 0)
    watch(WeightsFile, "_transfer", "pages", lambda *_: 0)
    watch(WeightsFile, "_undo", "undo", lambda *_: 0)
    watch(Journal, "append", "journal", lambda *_: 0)
    begin("start")
    ins = small_entry(job["dataset"], job["local"])
    ins.set_class_num(job["classes"])
    ins.set_emb_size(128)
    ins.set_train_epochs(1000)
    ins.set_train_steps(job["steps"])
    ins.set_save_every_n_steps(2)
    ins.set_save_every_n_epochs(0)
    ins.set_max_last_checkpoint_num(2)
    ins.set_save_top_k(0)
    if job["files"]:
        ins.set_weights_file(job["files"])
        ins.set_row_dtype("int8")
        ins.set_head_optimizer("adagrad")
        ins.set_sample_ratio(0.1)
    else:
        ins.set_upload_dir(job["remote"])
    if job["load"]:
        ins.set_checkpoint_dir(job["load"])
    ins.train()


def launch(job: Facts) -> tuple[bool, list[Facts]]:
    """Run a job on two ranks; return whether it finished, and its journal."""
    done = run_ranks(__file__, 2, json.dumps(job), timeout=900, check=False)
    journal = read_lines(Path(job["journal"]))
    if done.returncode and not any(line["event"] == "kill" for line in journal):
        raise SystemExit(f"{done.stdout}{done.stderr}\na run failed without a kill; see {job['journal']}")
    return done.returncode == 0, journal


def newest_in(place: str, least: int, problems: list[str]) -> str | None:
    """Verify the newest checkpoint of a folder or URL and return its path or URL; add problems to the list.

    least: a step whose checkpoint was published there; it or a newer one must exist.
    """
    store = Store(place)
    found = checkpoints_in(store)
    if not store.is_remote and (not found or found[-1][1].step < least):
        clean(store)  # killed between the two renames of a replacement; the next start does the same
        found = checkpoints_in(store)
    others = set(store.names()) - {name for name, _ in found} - NOT_CHECKPOINTS
    problems += [f"{place}/{name} is not hidden" for name in others if not name.startswith(".")]
    if (found[-1][1].step if found else 0) < least:
        problems.append(f"step {least} is missing in {place}, which has {[name for name, _ in found]}")
    if not found:
        return None
    verify(f"{place}/{found[-1][0]}")
    return f"{place}/{found[-1][0]}"


def differences(ours: str | None, theirs: str) -> list[str]:
    """Return our checkpoint if it differs from the other, by the checksums in their manifests."""
    if ours is None:
        return ["there is no checkpoint"]
    files = (verify(one).files.items() for one in (ours, theirs))
    mine, other = (sorted((str(rank_of_shard(n)), i.bytes, i.crc32) for n, i in one) for one in files)
    return [] if mine == other else [ours]


def with_weights(checkpoint: str | None, files: str | None) -> str | None:
    """Return a complete copy of a checkpoint whose class weights are in files."""
    if checkpoint is None or files is None:
        return checkpoint
    whole = f"{files}-whole"
    copy_complete(Path(checkpoint), Path(whole), Path(files))
    return whole


def new_job(given: argparse.Namespace, url: str, name: str) -> Facts:
    """Return the job of a new run."""
    folder = given.results.resolve() / "work" / name
    shutil.rmtree(folder, ignore_errors=True)
    if not (folder.parent / "images").exists():
        write_dataset(folder.parent / "images", classes=20, per_class=8)
    folder.mkdir()
    return {
        "dataset": str(folder.parent / "images"),
        "local": str(folder / "run"),
        "remote": f"{url}/{name}",
        "journal": str(folder / "journal-0"),
        "files": str(folder / "files") if given.files else None,
        "classes": 2000 if given.quick else 200_000,
        "steps": 30 if given.quick else 40,
        "load": None,
        "plan": None,
    }


def plan_kill(dice: random.Random, phase: str | None, has_files: bool) -> Facts:
    """Plan a random kill, in this phase if one is given."""
    weights = OF_FILES if has_files else WEIGHTS
    phase = phase or dice.choices(list(weights), list(weights.values()))[0]
    most = {"pages": 60, "journal": 20}.get(phase, 3)
    return {
        "phase": phase,
        "nth": 1 if phase in ("start", "undo") else dice.randint(1, most),
        "rank": 0 if phase == "retention" else dice.randrange(2),  # only rank 0 deletes
        "delay": dice.uniform(0, 3) if phase == "start" else 10 ** dice.uniform(-3, -0.3),
        "all": dice.random() < 0.5,
    }


def disturb(job: Facts, dice: random.Random, phases: list[str | None], reference: str, log: Path) -> None:
    """Kill one run in each phase of the list, removing it, until the run is complete."""
    here = there = is_complete = None
    published: Counter[str] = Counter()  # the highest step of a save and of an upload
    while not is_complete:
        job["plan"] = plan_kill(dice, phases[0], bool(job["files"])) if phases else None
        is_same = Path(here or "").name == Path(there or "").name
        job["load"] = there if there and is_same and dice.random() < 0.5 else here
        is_complete, journal = launch(job)
        for line in journal:
            if line["event"] == "end":
                published[line["phase"]] = max(published[line["phase"]], line["step"])
        problems: list[str] = []
        here = newest_in(job["local"], published["save"], problems)
        there = None if job["files"] else newest_in(job["remote"], published["upload"], problems)
        facts: Facts = {"run": job["local"], "here": here, "there": there}
        if is_complete:
            problems += differences(with_weights(here, job["files"]), reference)
            problems += [] if job["files"] else differences(there, reference)
            facts["same_bits"] = not problems
        else:
            phases.pop(0)
            kill = next(line for line in journal if line["event"] == "kill")
            facts |= {"load": job["load"], **job["plan"], "in_phases": kill["phases"]}
        Path(job["journal"]).unlink(missing_ok=True)  # a run that was complete has no phase
        with log.open("a") as file:
            file.write(json.dumps({**facts, "problems": problems}) + "\n")
        print({**facts, "problems": problems}, flush=True)
        if problems:
            raise SystemExit(f"{problems}: see {job['local']}")
    shutil.rmtree(Path(job["local"]).parent)


def summarise(lines: list[Facts]) -> str:
    """Return the numbers of docs/benchmarks/measured.md."""
    kills, runs = [x for x in lines if "phase" in x], [x for x in lines if "same_bits" in x]
    return (
        f"kills: {len(kills)}, {sum(x['all'] for x in kills)} of the launcher and both ranks at once\n"
        f"phases (a kill can be in several): {Counter(phase for x in kills for phase in x['in_phases'])}\n"
        f"kills with a lost checkpoint or a visible leftover: {sum(bool(x['problems']) for x in kills)}\n"
        f"complete runs: {len(runs)}, bit-identical: {sum(x['same_bits'] for x in runs)}"
    )


def main() -> None:
    """Run the chosen number of kills."""
    if "RANK" in os.environ:
        train(json.loads(sys.argv[1]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", type=Path, help="folder for the log and the work")
    parser.add_argument("--kills", type=int, help="kills in this call; default: 100, or 1 with --quick")
    parser.add_argument("--quick", action="store_true", help="2,000 classes, 30 steps")
    parser.add_argument("--phases", nargs="+", choices=WEIGHTS | OF_FILES, help="one kill in each of these")
    parser.add_argument("--files", action="store_true", help="class weights in files; no uploads")
    parser.add_argument("--store", help="URL of an empty folder to upload to, instead of a local HDFS")
    given = parser.parse_args()
    work, log = given.results.resolve() / "work", given.results / "kill.jsonl"
    work.mkdir(parents=True, exist_ok=True)
    os.environ["PLSC_CACHE_DIR"] = str(work / "cache")
    phases: list[str | None] = list(given.phases or [None] * (given.kills or (1 if given.quick else 100)))
    dice = random.Random(len(read_lines(log)))
    with contextlib.ExitStack() as stack:
        url = given.store or ("" if given.files else stack.enter_context(hdfs_server()).url)
        undisturbed = new_job(given, url, "reference")
        launch(undisturbed)
        newest = newest_in(undisturbed["local"], undisturbed["steps"], [])
        reference = with_weights(newest, undisturbed["files"])
        while phases and reference is not None:
            job = new_job(given, url, f"run-{len(read_lines(log))}")
            disturb(job, dice, phases, reference, log)
    print(summarise(read_lines(log)))
    shutil.rmtree(work / "cache", ignore_errors=True)


if __name__ == "__main__":
    main()
