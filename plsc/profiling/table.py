"""A profile as text."""

from __future__ import annotations

from plsc.profiling.result import ProfileResult
from plsc.profiling.watch import TRACED


def render(result: ProfileResult) -> str:
    """Return the table, what was measured beside it, the advice and where the files are."""
    on_gpu = result.device == "cuda"
    lines = [
        f"{result.steps} steps on {result.ranks} rank{'s' * (result.ranks > 1)}, {result.device}: "
        f"{result.step:.2f} ms a step, {result.images_per_second:,.0f} images a second, "
        f"{'device memory' if on_gpu else 'memory'} up to {result.memory / 2**20:,.0f} MiB a rank",
        "",
        *_parts(result, on_gpu),
    ]
    if result.collectives:
        lines += ["", *_collectives(result)]
    lines += [
        "",
        f"with nothing recorded a step takes {result.plain_step:.2f} ms; the {TRACED} steps of the trace, "
        f"under the profiler, took {result.traced_step:.2f} ms each",
    ]
    if result.advice:
        lines += ["", *(f"advice: {line}" for line in result.advice)]
    lines += ["", f"traces (ui.perfetto.dev, chrome://tracing) and operators: {result.folder}"]
    return "\n".join(lines)


def _parts(result: ProfileResult, on_gpu: bool) -> list[str]:
    has_ranks = result.ranks > 1
    width = max(len(part.part.value) for part in result.parts)
    titles = f"{'part of a step':{width}} {'ms':>9} {'share':>7}"
    titles += f" {'least':>9} {'most':>9}" if has_ranks else ""
    titles += f" {'host ms':>9}" if on_gpu else ""
    lines = [titles]
    for part in result.parts:
        line = f"{part.part.value:{width}} {part.milliseconds:9.2f} {part.share:7.1%}"
        line += f" {part.least:9.2f} {part.most:9.2f}" if has_ranks else ""
        line += f" {part.host:9.2f}" if on_gpu else ""
        lines.append(line)
    host = sum(part.host for part in result.parts)
    whole = f"{'a step':{width}} {result.step:9.2f} {1:7.1%}"
    whole += " " * 20 if has_ranks else ""
    lines.append(whole + (f" {host:9.2f}" if on_gpu else ""))
    return lines


def _collectives(result: ProfileResult) -> list[str]:
    lines = [f"{'collective (trace of rank 0)':32} {'a step':>7} {'ms':>9} {'hidden':>9}"]
    for one in result.collectives:
        lines.append(f"{one.name:32} {one.count:7.1f} {one.milliseconds:9.2f} {one.hidden:9.2f}")
    return lines
