"""What a training step would do on a GPU, without one: see tests/pretend_gpu.py."""

from __future__ import annotations

import pytest

from plsc.heads.margins import MARGINS
from tests.pretend_gpu import Case, Report, faults, run_cases, unavailable

REASON = unavailable()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON)]

LARGE = {"batch": 1024, "classes": 1_000_000}
BUDGETS = {"arcface": 47.0, "softmax": 50.0, "curricularface": 50.0}  # GB of a step of the head
SAMPLED = {"sample_ratio": 0.1}


def named(cases: list[Case]) -> dict[str, Case]:
    return {case.name: case for case in cases}


HEADS = named([
    Case(f"{name}, {ranks}", ranks=ranks, classes=25_000 * ranks, options={"products": products, **options})
    for ranks, products in ((1, "float32"), (8, "bfloat16"))
    for name, options in {
        **{loss: {"loss_type": loss} for loss in MARGINS},
        "sampled": SAMPLED,
        "hard negatives": {"hard": 0.5, **SAMPLED},
        "micro-batches": {"parts": 2},
        "sampled micro-batches": {"parts": 2, **SAMPLED},
        "sub-centres": {"sub_centers": 3},
        "int8": {"row_dtype": "int8"},
        "offload": {"offload": True},
        "sampled offload": {"offload": True, **SAMPLED},
    }.items()
    if ranks == 8 or name in ("arcface", "softmax", "sampled", "sampled micro-batches", "offload")
])  # fmt: skip
STEPS = named([
    Case(f"step {name}, {ranks}", "SmallResNet", ranks, options=options)
    for ranks, name, options in (
        (1, "float32", {"precision.mode": "float32"}),
        (8, "float16", {"precision.mode": "float16"}),
        (8, "bfloat16", {"precision.mode": "bfloat16"}),
        (1, "sampled", {"head.sample_ratio": 0.1}),
        (8, "hard negatives", {"head.sample_ratio": 0.1, "head.hard_share": 0.5}),
        (8, "micro-batches", {"train.micro_batches": 2}),
    )
])  # fmt: skip
LARGE_HEADS = named([Case(f"{loss} of {LARGE}", options={"loss_type": loss}, **LARGE) for loss in BUDGETS])
COPIES = Case("copies", "SmallResNet", batch=16, copies=True)
OF_BENCHMARK = Case("of a benchmark", way="PartialFC rewritten, fp16", classes=5000)  # last: it patches torch
PLANTED = {
    "item": (Case("item", plant="item"), "host waits"),
    "cpu tensor": (Case("cpu tensor", ranks=8, plant="cpu tensor"), "collective on the CPU"),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, Report]:
    planted = [case for case, _ in PLANTED.values()]
    cases = [COPIES, *HEADS.values(), *LARGE_HEADS.values(), *STEPS.values(), *planted]
    cases.append(OF_BENCHMARK)
    return run_cases(cases, tmp_path_factory.mktemp("driver"))


def limits(case: Case) -> dict[str, int]:
    """Return the arguments of `faults`."""
    parts = case.options.get("parts", case.options.get("train.micro_batches", 1))
    is_hard = "hard" in case.name
    # The lists of hard negatives come from the device. Offload waits for class weights and their state, once.
    waits = parts if is_hard else 2 if "offload" in case.name else 0
    is_scaled = case.options.get("precision.mode") == "float16"
    if is_scaled:
        waits = 3  # loss scaling: two flags that decide about the update, then the loss
    return {"waits": waits, "collectives": 4 * parts + is_scaled}


@pytest.mark.parametrize("name", [*HEADS, *STEPS])
def test_a_step_never_waits(reports, name):
    assert faults(reports[name], **limits((HEADS | STEPS)[name])) == []


def test_embeddings_and_snapshots_arrive_in_page_locked_memory_while_the_device_goes_on(reports):
    report = reports["copies"]
    assert faults(report, waits=1000) == []
    assert {place.split()[0] for place in report.waits} == {"synchronize"}  # events after the copies
    assert report.waits.total() == 3 + 3 + 1  # batches, and pieces of 64 MiB


@pytest.mark.parametrize("case", LARGE_HEADS.values(), ids=LARGE_HEADS)
def test_a_step_of_a_large_head_stays_within_its_bytes(reports, case):
    report = reports[case.name]
    assert faults(report) == []
    assert report.gigabytes < BUDGETS[case.options["loss_type"]]


def test_a_way_of_the_benchmarks_is_counted(reports):
    report, case = reports[OF_BENCHMARK.name], OF_BENCHMARK
    assert report.error == ""
    assert report.flops == {"float16": 3 * 2 * case.batch * case.classes * case.dimension}
    assert report.waits.total() == 1  # the gradient scaler


@pytest.mark.parametrize(("case", "noun"), PLANTED.values(), ids=PLANTED)
def test_a_planted_fault_is_found(reports, case, noun):
    assert any(noun in fault for fault in faults(reports[case.name]))
