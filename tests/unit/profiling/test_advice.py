"""What a profile advises can be followed."""

from __future__ import annotations

from pathlib import Path

import pytest

from plsc.marks import Part
from plsc.parallel.world import World
from plsc.profiling.advice import advice_of
from plsc.profiling.result import RankTimes, combine
from plsc.train.advice import Reading
from plsc.train.build import UserParts, build_run
from tests.option_pairs import Images, options_with


def advised(part: Part, values: dict) -> str:
    """Return the advice where a part takes all of the time."""
    run = build_run(options_with(values), World.single(), UserParts(train_reader=Images()))
    reading = Reading("here", 1, 0, "threads", 0.0, 1.0, 0.0, 0.0, 1.0)
    ranks = [RankTimes({part: 10.0}, None, 10.0, 10.0, 10.0, 100.0, 2**30, reading)]
    return "\n".join(advice_of(combine(ranks, "cpu", 1, Path()), ranks, run))


@pytest.mark.parametrize(
    "values", [{"memory.checkpoint_stages": "all"}, {"precision.black_list": ("batch_norm",)}]
)
def test_compiling_is_advised_where_it_is_not_refused(values):
    assert "set_compile(True)" in advised(Part.BACKWARD, {})
    assert "set_compile(True)" not in advised(Part.BACKWARD, values)


def test_where_rows_travel_copying_is_theirs():
    assert "uint8 images" in advised(Part.COPY, {})
    said = advised(Part.COPY, {"head.offload": True})
    assert "class rows travel" in said
    assert "set_row_dtype('bfloat16')" in said
    assert "uint8" not in said
