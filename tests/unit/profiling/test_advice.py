"""Advice of a profile: each part that takes much has a line, and what it proposes can be set."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from plsc import Entry
from plsc.config import Options
from plsc.marks import Part
from plsc.profiling import advice
from plsc.profiling.advice import advice_of
from plsc.profiling.result import PartTime, ProfileResult, RankTimes
from plsc.train.advice import Reading
from plsc.train.build import check_combinations

READING = Reading("here", 8, 1, "threads", 0.0, 1.0, 0.1, 0.1, 0.5)


def advised(options: Options, shares: dict[Part, float], ranks: int = 1) -> list[str]:
    """Return the advice for a step of which the parts have these shares."""
    parts = [PartTime(part, share, share, share, share, share) for part, share in shares.items()]
    result = ProfileResult("cpu", ranks, 1, 1.0, 1.0, 1.0, parts, 1.0, 0, Path())
    rank = RankTimes(shares, None, 1.0, 1.0, 1.0, 1.0, 0, READING)
    world = SimpleNamespace(size=ranks, device=SimpleNamespace(type="cpu"))
    run = SimpleNamespace(options=options, world=world, head=SimpleNamespace(class_num=1000))
    return advice_of(result, [rank] * ranks, run)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (Part.HEAD_PASSES, "head 50%: set_head_products"),
        (Part.FORWARD, "backbone 50%: it computes on"),
        (Part.GRADIENTS, "waiting for the sum of the gradients 50%"),
        (Part.BATCH_NORM, "batch norm over the ranks 50%"),
        (Part.GATHER, "the head's collectives 50%"),
        (Part.CONTROL, "the ranks wait for each other 50%"),
        (Part.OPTIMIZER, "optimizer 50%"),
        (Part.COPY, "copying 50%"),
        (Part.LOGGING, "logging 50%: set_log_period"),
    ],
)
def test_a_part_that_takes_half_a_step_has_a_line_of_its_own(part, said):
    (line,) = advised(Options(), {part: 0.5, Part.OTHER: 0.5}, ranks=2)
    assert line.startswith(said)


def test_parts_that_take_little_have_none():
    assert not advised(Options(), {Part.FORWARD: 0.4, Part.HEAD: 0.3, Part.OTHER: 0.3})


OTHERS = {
    "plain": {},
    "synchronised": {"model.sync_batch_norm": True},
    "sharded": {"parallel.backbone": "sharded"},
    "checkpointed": {"memory.checkpoint_stages": "all"},
    "deterministic": {"train.deterministic": True},
    "lists": {"precision.mode": "bfloat16", "precision.black_list": ("softmax",)},
    "float64": {"runtime.dtype": "float64"},
    "dense": {"head.loss_type": "arcface"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_proposed_can_be_set_beside_the_runs_other_options(name, monkeypatch):
    monkeypatch.setattr(advice, "_has_fast_bfloat16", lambda run: True)
    parts = (Part.HEAD, Part.FORWARD, Part.GRADIENTS, Part.BATCH_NORM, Part.LOGGING)
    options = Options()
    for path, value in OTHERS[name].items():
        options.set(path, value)
    lines = advised(options, dict.fromkeys(parts, 0.6), ranks=2)
    assert len(lines) == len(parts)
    calls = re.findall(r"(set_\w+)\(([^)]*)\)", " ".join(lines))
    assert len(calls) >= 5
    assert (("set_compile", "True") in calls) == (name in ("plain", "float64", "dense"))
    for setter, value in calls:
        ins = Entry()
        for path, other in OTHERS[name].items():
            ins.options.set(path, other)
        getattr(ins, setter)(ast.literal_eval(value))
        check_combinations(ins.options, 2)


def test_where_rows_travel_copying_is_theirs():
    (said,) = advised(Options(), {Part.COPY: 0.5})
    assert "uint8 images" in said
    options = Options()
    options.set("head.offload", True)
    (said,) = advised(options, {Part.COPY: 0.5})
    assert "class rows travel" in said
    assert "set_row_dtype('bfloat16')" in said
    assert "uint8" not in said
