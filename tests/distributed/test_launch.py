"""`plsc launch` with real processes: logs, failures, signals, several machines; and `plsc doctor`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.distributed.launch import ROOT, Ranks, run_ranks
from tests.distributed.test_interruption import wait_for, worker_pids

COMMAND = ROOT / "plsc" / "cli" / "__main__.py"
SCRIPT = """
import os, signal, sys, time
rank, what = int(os.environ["RANK"]), sys.argv[1]
print(f"rank {rank} of {os.environ['WORLD_SIZE']}: {sys.argv[1:]}", flush=True)
print(f"rank {rank} has {os.environ['OMP_NUM_THREADS']} threads", file=sys.stderr, flush=True)
if rank == 0:
    open("started", "w").close()
while what != "done" and not os.path.exists("started"):
    time.sleep(0.05)
if what == "fail" and rank == 1:
    raise ValueError("boom")
if what == "plsc" and rank == 1:
    from plsc.errors import OptionError, record_failure
    record_failure(OptionError("set_x(3) is wrong"))
    sys.exit(3)
if what == "killed" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if what.isdigit() and rank == 1:
    sys.exit(int(what))
if what != "done":
    time.sleep(100)
"""


def start(*arguments: str, cwd: Path) -> Ranks:
    """Start the launcher as a fork, which needs no seconds of imports."""
    return Ranks(COMMAND, 0, "launch", *arguments, cwd=cwd, env={"OMP_NUM_THREADS": None})


def run(*arguments: str, cwd: Path) -> tuple[int, str, str]:
    """Run the launcher to its end."""
    launcher = start(*arguments, cwd=cwd)
    out, err = launcher.communicate(240)
    assert launcher.returncode is not None
    return launcher.returncode, out, err


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "job.py").write_text(SCRIPT)
    return tmp_path


def test_each_rank_has_a_log_file_which_the_next_launch_keeps_and_rank_0_is_on_the_console(folder):
    words = "--nproc 2 --log-dir logs --cpu_threads 3 job.py done --log-dir x"
    (folder / "logs").mkdir()
    (folder / "logs/rank1.log").symlink_to(folder / "outside")  # a link that leads nowhere is renamed, too
    for _ in range(2):
        code, out, err = run(*words.split(), cwd=folder)
        line = "rank {} of 2: ['done', '--log-dir', 'x']\nrank {} has 3 threads\n"
        assert (code, out, err) == (0, line.format(0, 0), "")
        for rank in range(2):
            assert (folder / f"logs/rank{rank}.log").read_text() == line.format(rank, rank)
    assert sorted(path.name for path in (folder / "logs").iterdir()) == [
        "rank0.1.log", "rank0.log", "rank1.1.log", "rank1.2.log", "rank1.log",
    ]  # fmt: skip
    assert not (folder / "outside").exists()


@pytest.mark.parametrize(
    ("what", "code", "message"), [("fail", 1, "exit code 1"), ("plsc", 3, "set_x(3) is wrong")]
)
def test_the_message_of_the_failing_rank_is_printed_last_and_once(what, code, message, folder):
    found, out, err = run("--nproc", "2", "--log-dir", "logs", "job.py", what, cwd=folder)
    assert (found, err) == (code, f"plsc: error: rank 1 failed: {message}; see logs/rank1.log\n")
    assert "rank 0 of 2" in out


def test_a_command_under_launch_leaves_its_message_to_the_launcher(folder):
    code, _, err = run("--nproc", "2", "-m", "plsc.cli", "config", "--train.epochs", "0", cwd=folder)
    assert code == 1
    assert len(err.splitlines()) == 1
    assert " failed: train.epochs is 0; expected a number of at least 1 " in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_when_the_launcher_is_stopped_or_killed_no_process_is_left(number, folder):
    launcher = start("--nproc", "2", "--log-dir", "logs", "job.py", "wait", cwd=folder)
    logs = [folder / f"logs/rank{rank}.log" for rank in range(2)]
    wait_for(lambda: all(log.exists() and "threads" in log.read_text() for log in logs), launcher)
    assert len(worker_pids(launcher)) == 2
    os.kill(launcher.pid, number)
    launcher.communicate()  # returns when no process is left
    assert launcher.returncode == (-number if number == signal.SIGKILL else 128 + number)


def test_a_restart_is_reported_with_rank_reason_and_attempt(folder):
    arguments = ("--nproc", "2", "--max-restarts", "2", "--log-dir", "logs", "job.py", "killed")
    code, _, err = run(*arguments, cwd=folder)
    message = "rank 1 failed: ended by SIGKILL (out of memory?); see logs/rank1.log"
    restarts = [f"plsc: warning: {message}; starting all ranks again ({number} of 2)" for number in (1, 2)]
    assert (code, err.splitlines()) == (137, [*restarts, f"plsc: error: {message}"])
    assert len(list((folder / "logs").glob("rank1*.log"))) == 3


@pytest.mark.parametrize("status", [3, 143])
def test_ranks_that_could_not_save_or_were_told_to_stop_are_not_started_again(status, folder):
    code, _, err = run("--nproc", "2", "--max-restarts", "2", "job.py", str(status), cwd=folder)
    assert code == status
    assert err.count("rank 1 has") == 1


LISTENING = """
import os
from pathlib import Path
from plsc.parallel.world import World

world = World.from_environment("cpu")
rows = [row.split() for name in ("tcp", "tcp6") for row in open(f"/proc/net/{name}").readlines()[1:]]
listening = {f"socket:[{row[9]}]": row[1].partition(":")[0] for row in rows if row[3] == "0A"}
for pid in (os.getpid(), os.getppid()):
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if link.is_symlink() and (address := listening.get(os.readlink(link))):
            print(f"listens at {address}\\n", end="", flush=True)  # in one piece: ranks share the pipe
folder = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[3]
print(f"mode {folder.stat().st_mode & 0o777:o}\\n", end="", flush=True)
world.barrier()
if world.rank == 1 and not os.path.exists("failed"):
    Path("failed").touch()
    os._exit(1)
print(f"sum {sum(world.all_gather_object(world.rank))}\\n", end="", flush=True)
world.close()
os._exit(0)  # gloo's threads can abort a process while the interpreter exits: pytorch/pytorch#179291
"""


@pytest.mark.parametrize("more", [("--max-restarts", "1"), ("--rdzv-endpoint", "127.0.0.1:29555")])
def test_on_one_machine_only_gloo_listens_and_only_on_loopback_and_the_store_is_private(folder, more):
    (folder / "job.py").write_text(LISTENING)
    if "--max-restarts" not in more:
        (folder / "failed").touch()
    code, out, err = run("--devices", "cpu", "--nproc", "2", *more, "job.py", cwd=folder)
    assert code == 0, err
    lines = out.splitlines()
    assert {line for line in lines if "listens" in line} == {"listens at 0100007F"}
    assert (lines.count("mode 700"), lines.count("sum 1")) == (4 if "--max-restarts" in more else 2, 2)


VANISHING = """
import os, shutil
from pathlib import Path
from plsc.parallel.failure import FailureWatch
from plsc.parallel.world import World

world = World.from_environment("cpu", timeout_seconds=5)
with FailureWatch(world):
    world.barrier()
    if world.is_main:
        shutil.rmtree(Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[3])
    world.barrier()
world.close()
print("closed\\n", end="", flush=True)
"""


def test_a_store_that_vanishes_does_not_hang_the_ranks_or_the_launcher(folder):
    (folder / "job.py").write_text(VANISHING)
    code, out, _ = run("--devices", "cpu", "--nproc", "2", "--max-restarts", "1", "job.py", cwd=folder)
    assert (code, out) == (0, "closed\n" * 2)


def test_doctor_sums_over_the_ranks(folder):
    done = run_ranks(COMMAND, 2, "doctor", "--runtime.device", "cpu", cwd=folder)
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert {status for status, _ in lines} <= {"ok", "warning"}
    assert lines[0][1].split()[:2] == ["versions", "plsc"]
    assert any(
        text.startswith("collective") and "2 ranks, gloo: the sum of 4 MiB" in text for _, text in lines
    )
