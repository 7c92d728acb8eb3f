"""Time and memory of a step of the head, compared with other implementations.

    python benchmarks/head.py                                 # C = 1e5 and 1e6, B = 128, D = 512
    python benchmarks/head.py --classes 1e7                   # only ways with sampling
    python benchmarks/head.py --batch 1024 --classes 1e5
    python benchmarks/head.py --slopes --traffic --no-table   # growth of memory and network traffic
    python benchmarks/head.py --ways 'plain PyTorch, fp32|plsc, fp32, native-avx2'
    python benchmarks/head.py --quick                         # to test the script, 1 to 2 minutes

A step is the forward pass, the gradient of the embeddings, and the update of the class weights; ways.py
describes each way. Time: all ways run in one process and take turns, one step each, for many rounds; the
table has the median of each round's ratio to plain PyTorch. Memory: one process per way, killed after
--rival-timeout; its times are printed next to its memory. Runs on a CUDA device if there is one. To install
the other implementations: pip install pytorch-metric-learning liger-kernel cut-cross-entropy.

Appends to head.jsonl (every measurement) and head.md (the printed text) in the output folder; plots
head-B*.png.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from measuring import (
    is_out_of_memory,
    limit_memory,
    measure,
    measure_rates,
    outcome_of,
    print_json,
    take_turns,
)
from ways import BASELINE, BY_NAME, WAYS, Way

HERE = Path(__file__).resolve().parent
ROWS_FIT = 2_000_000  # with more classes, only ways with for_millions
SLOPE_WAYS = (BASELINE, "plsc, fp32", "plsc, bf16", "plsc, bf16, kept")
GIB = 2**30

Sample = dict[str, Any]


class Report:
    """Append measurements to a file of JSON lines, and the printed text to a Markdown file.

    is_main: False on ranks that write nothing.
    """

    def __init__(self, folder: Path, name: str, is_main: bool = True) -> None:
        self._is_main = is_main
        self.samples: list[Sample] = []
        if is_main:
            folder.mkdir(parents=True, exist_ok=True)
            self._raw = (folder / f"{name}.jsonl").open("a")
            self._text = (folder / f"{name}.md").open("a")

    def keep(self, **sample: Any) -> None:
        """Add a measurement."""
        self.samples.append(sample)
        if self._is_main:
            self._raw.write(json.dumps(sample) + "\n")
            self._raw.flush()

    def print(self, line: str = "") -> None:
        """Print a line and append it to the Markdown file."""
        if self._is_main:
            print(line, flush=True)
            self._text.write(line + "\n")
            self._text.flush()


def machine(threads: int, device: str) -> Sample:
    """Return hardware and versions, without the host name."""
    facts: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    known = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return {
        "kind": "machine",
        "date": datetime.date.today().isoformat(),
        "processor": facts.get("model name", platform.machine()),
        "instructions": [flag for flag in known if flag in facts.get("flags", "").split()],
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB, 1),
        "device": device,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def run_child(arguments: list[str], timeout: float | None) -> tuple[list[Sample], str | None]:
    """Run a script in a separate process; return its samples and, if it failed, the reason."""
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]  # this checkout's plsc
    child = subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that its children can be ended with it
    )
    trouble = None
    try:
        text, errors = child.communicate(timeout=timeout)
        if child.returncode == -signal.SIGKILL:
            trouble = "killed (out of memory?)"
        elif child.returncode:
            last = (errors.strip().splitlines() or ["?"])[-1]
            trouble = "out of memory" if is_out_of_memory(last) else f"failed: {last[:120]}"
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        text, _ = child.communicate()
        trouble = f"over {timeout:g} s"
    except BaseException:  # this process was asked to end
        os.killpg(child.pid, signal.SIGKILL)
        raise
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")], trouble


def measure_apart(
    options: argparse.Namespace,
    way: Way,
    classes: int,
    batch: int,
    report: Report,
    timeout: float | None = None,
) -> Sample | str:
    """Measure the memory of a way in a separate process; return the sample, or why there is none.

    timeout: seconds; None: --rival-timeout, except for plsc.
    """
    reason = way.missing(options.device)
    if reason is not None:
        report.keep(kind="failed", way=way.name, C=classes, B=batch, outcome=reason)
        return reason
    samples, trouble = run_child(
        [
            str(HERE / "head.py"),
            "--measure",
            way.name,
            str(classes),
            str(batch),
            *passed_on(options),
        ],
        timeout or (None if way.is_ours else options.rival_timeout),
    )
    for sample in samples:
        if sample["kind"] == "memory":
            report.keep(**sample)
            return sample
        trouble = sample["outcome"]
    trouble = trouble or "failed: said nothing"
    report.keep(kind="failed", way=way.name, C=classes, B=batch, outcome=trouble)
    return trouble


def passed_on(options: argparse.Namespace) -> list[str]:
    """Return the options to pass to the processes."""
    passed = ["--dimension", str(options.dimension), "--threads", str(options.threads)]
    passed += ["--device", options.device, "--steps", str(options.steps)]
    if options.memory_limit is not None:
        passed += ["--memory-limit", str(options.memory_limit)]
    return passed


def compare(options: argparse.Namespace, classes: int, batch: int, report: Report) -> None:
    """Measure all ways at one size and print the table."""
    ways = WAYS if options.ways is None else [BY_NAME[name] for name in options.ways]
    if classes > ROWS_FIT:
        ways = [way for way in ways if way.for_millions]
    found = {way.name: measure_apart(options, way, classes, batch, report) for way in ways}
    able = [name for name, result in found.items() if not isinstance(result, str)]
    samples: list[Sample] = []
    trouble: str | None = None
    if able:
        samples, trouble = run_child(
            [
                str(HERE / "head.py"),
                *("--take-turns", "|".join(able), str(classes), str(batch)),
                *("--rounds", str(options.rounds)),
                *passed_on(options),
            ],
            None,
        )
    for sample in samples:
        report.keep(**sample)
    report.print(f"\n### C = {classes:,}, B = {batch}, D = {options.dimension}\n")
    report.print(
        "| way | loss | ms per step: median (least to most) | / plain PyTorch | peak GiB | over, GiB | "
        "ms per step where the peak was taken | |"
    )
    report.print("|---|---|---|---|---|---|---|---|")
    times = {
        name: {s["round"]: s["seconds"] for s in samples if s["kind"] == "time" and s["way"] == name}
        for name in able
    }
    failed = {s["way"]: s["outcome"] for s in samples if s["kind"] == "failed"}
    for way in ways:
        result = found[way.name]
        if isinstance(result, str):
            report.print(f"| {way.name} | {way.loss} | {result} | | | | | |")
            continue
        mine = times[way.name]
        ratio, shown = "", failed.get(way.name, trouble or "failed")
        if mine:
            ms = [1000 * seconds for seconds in mine.values()]
            shown = f"{statistics.median(ms):.3g} ({min(ms):.3g} to {max(ms):.3g})"
            other = times.get(BASELINE, {})
            ratios = [mine[turn] / other[turn] for turn in mine if turn in other]
            ratio = f"{statistics.median(ratios):.3f}" if ratios else ""
        report.print(
            f"| {way.name} | {way.loss} | {shown} | {ratio} | {result['peak'] / GIB:.2f} | "
            f"{result['over'] / GIB:.2f} | {1000 * result['median']:.3g} | {result['note']} |"
        )


def compare_with_plan(options: argparse.Namespace, classes: int, batch: int, report: Report) -> None:
    """Compare `plsc plan` with the measurements of each way of plsc."""
    sys.path.insert(0, str(HERE.parent))  # this checkout's plsc
    from plsc.plan import plan_head

    samples, trouble = run_child([str(HERE / "head.py"), "--rates", str(batch), *passed_on(options)], None)
    if not samples:
        report.print(f"\nThe rates of this machine are unknown: {trouble}")
        return
    rates = samples[0]
    report.keep(**rates)
    report.print(
        "\n`plsc plan` with the rates of this machine ("
        + ", ".join(
            f"{name} {rate / 1e12:.2f} TFLOP/s"
            for name, rate in rates.items()
            if name not in ("kind", "copy")
        )
        + f", copies {rates['copy'] / 1e9:.1f} GB/s):\n"
    )
    report.print(
        "| way | rows and states: planned | measured | in a step, bytes: planned, at most | measured | ms of "
        "products + rows: planned | measured | measured / planned |"
    )
    report.print("|---|---|---|---|---|---|---|---|")
    for sample in list(report.samples):
        is_this = (sample.get("C"), sample.get("B"), sample["kind"]) == (classes, batch, "memory")
        way = BY_NAME[sample["way"]] if is_this else None
        if way is None or way.planned is None:
            continue
        products = "bfloat16" if "bf16" in way.name else "tf32" if way.tf32 else "float32"
        made = plan_head(
            {
                "head.class_num": classes,
                "train.batch_size": batch,
                "model.emb_size": options.dimension,
                "runtime.device": options.device,
                **way.planned,
            }
        )
        seconds = [
            one["seconds"]
            for one in report.samples
            if one["kind"] == "time" and (one["C"], one["B"], one["way"]) == (classes, batch, way.name)
        ]
        taken = statistics.median(seconds or sample["seconds"])
        parts = [made.operations / rates[products], made.rows_moved / rates["copy"]]
        report.keep(kind="limit", way=way.name, C=classes, B=batch, seconds=taken, parts=parts)
        report.print(
            f"| {way.name} | {made.stored_bytes:,} | {sample['needed']:,} | "
            f"{sum(made.step.values()):,} | {max(0, sample['over']):,} | "
            f"{1000 * parts[0]:.3g} + {1000 * parts[1]:.3g} | {1000 * taken:.3g} | "
            f"{taken / sum(parts):.2f} |"
        )


def slopes(options: argparse.Namespace, classes: int, batch: int, report: Report) -> None:
    """Print how the peak memory grows when B doubles, for two values of C, and when C doubles."""
    report.print(f"\n### Growth of the peak memory: C = {classes:,}, B = {batch}, D = {options.dimension}\n")
    report.print(
        "| way | bytes per sample, C classes | bytes per sample, 2 C classes | bytes per class | without "
        "class weights and states |"
    )
    report.print("|---|---|---|---|---|")
    for name in SLOPE_WAYS:
        sizes = (
            (classes, batch),
            (classes, 2 * batch),
            (2 * classes, batch),
            (2 * classes, 2 * batch),
        )
        found = [measure_apart(options, BY_NAME[name], c, b, report) for c, b in sizes]
        troubles = [result for result in found if isinstance(result, str)]
        if troubles:
            report.print(f"| {name} | {troubles[0]} | | | |")
            continue
        measured = [result for result in found if not isinstance(result, str)]
        low, more_samples, more_classes, more_of_both = (one["peak"] for one in measured)
        needed = (measured[2]["needed"] - measured[0]["needed"]) / classes
        per_class = (more_classes - low) / classes
        report.print(
            f"| {name} | {(more_samples - low) / batch:,.0f} | "
            f"{(more_of_both - more_classes) / batch:,.0f} | {per_class:,.0f} | "
            f"{per_class - needed:,.0f} |"
        )


def draw(samples: list[dict[str, Any]], batch: int, title: str, path: Path) -> None:
    """Write a plot of the samples with this batch size: median step in seconds, peak memory in GiB."""
    import matplotlib  # here, so that measuring processes do not import it

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    times: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    peaks: dict[str, dict[int, float]] = defaultdict(dict)
    for sample in samples:
        if sample.get("B") != batch:
            continue
        if sample["kind"] == "time":
            times[sample["way"]][sample["C"]].append(sample["seconds"])
        elif sample["kind"] == "memory":
            peaks[sample["way"]][sample["C"]] = sample["peak"] / 2**30
    medians = {
        way: {classes: statistics.median(seconds) for classes, seconds in by_classes.items()}
        for way, by_classes in times.items()
    }
    figure, panels = plt.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    parts = ((medians, "seconds per step (median)"), (peaks, "peak memory in GiB"))
    colours = matplotlib.color_sequences["tab20"]
    for panel, (values, label) in zip(panels, parts, strict=True):
        for number, way in enumerate(WAYS):
            points = sorted(values.get(way.name, {}).items())
            if points:
                panel.plot(
                    *zip(*points, strict=True),
                    label=way.name,
                    color=colours[number % len(colours)],
                    linestyle="-" if way.is_ours else "--",
                    marker="o" if way.is_ours else "x",
                )
        panel.set(xscale="log", yscale="log", xlabel="classes C", ylabel=label)
        panel.grid(which="both", alpha=0.3)
    handles, names = panels[1].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def traffic(options: argparse.Namespace, classes: int, batch: int, report: Report) -> None:
    """Print the bytes that a rank passes to each collective per step, and those of the formula."""
    report.print(f"\n### Network traffic of a rank per step: B = {batch}, D = {options.dimension}\n")
    report.print("| ranks | C | collective | bytes | by the formula |")
    report.print("|---|---|---|---|---|")
    remarks = []
    for ranks in options.ranks:
        for c in (classes, 2 * classes):
            samples, trouble = run_child(
                [
                    *("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"),
                    str(HERE / "traffic.py"),
                    *(str(c), str(batch), str(options.dimension), "10"),
                ],
                600,
            )
            found = [sample for sample in samples if sample["kind"] == "traffic"]
            if not found:
                report.print(f"| {ranks} | {c:,} | {trouble} | | |")
                continue
            report.keep(**found[0])
            given, formula = found[0]["given"], found[0]["expected"]
            for name in sorted(given.keys() | formula.keys()):
                report.print(
                    f"| {ranks} | {c:,} | {name} | {given.get(name, 0):,} | {formula.get(name, 0):,} |"
                )
            if found[0]["loopback"] is not None:
                remarks.append(f"{ranks} ranks, C = {c:,}: {found[0]['loopback']:,}")
    report.print(
        "\nOn the loopback device, bytes per step of all ranks together, with headers and other programs: "
        + "; ".join(remarks or ["unknown, it could not be read"])
        + "."
    )


def numbers(text: str) -> list[int]:
    """Return the integers of a list such as 1e5,1e6."""
    return [int(float(part)) for part in text.split(",")]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "output",
        nargs="?",
        type=Path,
        default=Path("build/benchmarks"),
        help="folder to write into",
    )
    add("--classes", type=numbers, default=[10**5, 10**6], help="such as 1e5,1e6 (the default)")
    add("--batch", type=numbers, default=[128], help="as in 128,1024")
    add("--dimension", type=int, default=512)
    add("--rounds", type=int, default=15, help="rounds of the timing")
    add("--steps", type=int, default=3, help="steps in the process that measures memory, after a warm-up")
    add(
        "--ways",
        type=lambda text: text.split("|"),
        help="only these ways, such as 'plsc, fp32|plsc, bf16'",
    )
    add("--slopes", action="store_true", help="measure how the peak grows with B and C")
    add("--traffic", action="store_true", help="measure the network traffic of --ranks")
    add("--ranks", type=numbers, default=[2, 4], help="such as 2,4 (the default)")
    add("--no-table", action="store_true", help="only --slopes and --traffic")
    add("--rival-timeout", type=float, default=300, help="seconds per memory run, except of plsc")
    add(
        "--memory-limit",
        type=float,
        help="GiB of CPU memory per process; default: 0.9 of the free memory",
    )
    add("--threads", type=int, default=torch.get_num_threads())
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--quick", action="store_true", help="C = 2000, B = 32, 3 rounds, to test the script")
    add("--measure", nargs=3, metavar=("NAME", "C", "B"), help="memory and time of one way, as JSON")
    add("--rates", type=int, metavar="B", help="rates of plain products and copies, as JSON")
    add("--take-turns", nargs=3, metavar=("NAMES", "C", "B"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.quick:
        options.classes, options.batch, options.rounds = [2000], [32], 3
    unknown = [name for name in options.ways or [] if name not in BY_NAME]
    if unknown:
        parser.error(f"unknown way {unknown[0]!r}; known: {' | '.join(BY_NAME)}")
    return options


def work(options: argparse.Namespace) -> None:
    """Run a process that measures."""
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    if device.type == "cpu":
        limit_memory(options.memory_limit)
    if options.rates:
        measure_rates(options.rates, options.dimension, device)
        return
    name, classes, batch = options.measure or options.take_turns
    size = (int(float(classes)), int(batch), options.dimension)
    if options.take_turns:
        take_turns(name.split("|"), *size, options.rounds, device)
        return
    try:
        measure(name, *size, options.steps, device)
    except Exception as error:  # the parent prints it as a row
        print_json("failed", way=name, outcome=outcome_of(error))


def main() -> None:
    """Run the chosen measurements."""
    options = parse()
    if options.measure or options.take_turns or options.rates:
        work(options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no child process remains
    report = Report(options.output, "head")
    facts = machine(options.threads, options.device)
    report.keep(**facts)
    where = facts["gpu"] or f"{facts['processor']}, {facts['cores']} cores, {facts['threads']} threads"
    title = f"{where} ({', '.join(facts['instructions'])}), torch {facts['torch']}, {facts['date']}"
    report.print(f"`{' '.join(['python', 'benchmarks/head.py', *sys.argv[1:]])}`")
    report.print(f"on {title}")
    for batch in options.batch:
        if not options.no_table:
            for classes in options.classes:
                compare(options, classes, batch, report)
                compare_with_plan(options, classes, batch, report)
            draw(
                report.samples,
                batch,
                f"B = {batch}: {title}",
                options.output / f"head-B{batch}.png",
            )
        if options.slopes:
            slopes(options, min(options.classes), batch, report)
        if options.traffic:
            traffic(options, min(options.classes), batch, report)
    if not options.no_table:
        base = [s["ready"] for s in report.samples if s["kind"] == "memory"] or [0]
        memory = "allocated on the GPU" if options.device == "cuda" else "the process's resident set"
        report.print(
            f"\nPeak: {memory}; over: peak minus class weights, optimizer states, and the memory "
            "of the process after a step with 64 classes (torch and late imports: "
            f"{statistics.median(base) / GIB:.2f} GiB). The loss is ArcFace, or plain softmax, which is less "
            "work. The last column is the backend."
        )
    report.print(f"Raw samples and plots: {options.output}")
    broken = {
        s["way"]
        for s in report.samples
        if s["kind"] == "failed" and BY_NAME[s["way"]].is_ours and s["outcome"].startswith("failed")
    }
    if broken:
        sys.exit(f"ways of plsc that failed: {', '.join(sorted(broken))}; see the table")


if __name__ == "__main__":
    main()
