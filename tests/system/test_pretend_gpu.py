"""What a training step would do on a GPU, without one: see tests/pretend_gpu.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plsc.heads.margins import MARGINS
from tests.pretend_gpu import Case, Report, faults, run_cases, unavailable

REASON = unavailable()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON)]

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
LARGE = {"batch": 1024, "classes": 1_000_000}
BUDGETS = {"arcface": 47.0, "softmax": 50.0, "curricularface": 50.0}  # GB of a step of the head
SAMPLED = {"sample_ratio": 0.1}
HARD = {"sample_ratio": 0.1, "hard": 0.5}


def of_step(name: str, *, ranks: int = 1, network: str = "SmallResNet", **options: object) -> Case:
    return Case(name, network, ranks, options=options)


HEADS = {
    case.name: case
    for ranks in (1, 8)
    for products in ("bfloat16", "float32")
    for base in [Case("", ranks=ranks, classes=200_000, options={"products": products})]
    for name, options in {
        **{loss: {"loss_type": loss} for loss in MARGINS},
        "sampled": SAMPLED,
        "hard negatives": HARD,
        "micro-batches": {"parts": 2},
        "sampled micro-batches": {"parts": 2, **SAMPLED},
        "sub-centres": {"sub_centers": 3},
        "int8": {"row_dtype": "int8"},
        "offload": {"offload": True},
        "sampled offload": {"offload": True, **SAMPLED},
    }.items()
    for case in [replace(base, name=f"{name}, {products}, {ranks}", options={**base.options, **options})]
}
STEPS = {
    case.name: case
    for ranks in (1, 8)
    for case in (
        *(
            of_step(f"step {mode}, {ranks}", ranks=ranks, **{"precision.mode": mode})
            for mode in ("float32", "float16")
        ),
        of_step(f"step sampled, {ranks}", ranks=ranks, **{"head.sample_ratio": 0.1}),
        of_step(
            f"step hard negatives, {ranks}",
            ranks=ranks,
            **{"head.sample_ratio": 0.1, "head.hard_share": 0.5},
        ),
        of_step(f"step micro-batches, {ranks}", ranks=ranks, **{"train.micro_batches": 2}),
    )
}
STEPS["step ResNet50"] = of_step(
    "step ResNet50", ranks=8, network="ResNet50", **{"precision.mode": "bfloat16"}
)
LARGE_HEADS = {
    f"{loss} of {LARGE}": Case(f"{loss} of {LARGE}", options={"loss_type": loss}, **LARGE) for loss in BUDGETS
}
KERNELS = {
    case.name: case
    for architecture in ARCHITECTURES
    for batch in (768, 1000, 1024)
    for case in [Case(f"sm_{architecture} {batch}", batch=batch, architecture=architecture, compiles=True)]
}
COPIES = Case("copies", "SmallResNet", batch=16, copies=True)
OF_BENCHMARK = Case("of a benchmark", way="PartialFC rewritten, fp16", classes=5000)  # last: it patches torch
PLANTED = {
    "item": (Case("item", plant="item"), "host waits"),
    "cpu tensor": (Case("cpu tensor", ranks=8, plant="cpu tensor"), "collective on the CPU"),
    "unaligned tile": (
        Case("unaligned tile", batch=768, plant="unaligned tile", compiles=True),
        "scalar loads",
    ),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, Report]:
    planted = [case for case, _ in PLANTED.values()]
    cases = [COPIES, *HEADS.values(), *LARGE_HEADS.values(), *STEPS.values(), *KERNELS.values(), *planted]
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


def named(cases: dict[str, Case]) -> list[object]:
    """Return parameters."""
    return [pytest.param(case, id=name) for name, case in cases.items()]


@pytest.mark.parametrize("case", named(HEADS))
def test_a_step_of_the_head_never_waits(reports, case):
    assert faults(reports[case.name], **limits(case)) == []


@pytest.mark.parametrize("case", named(STEPS))
def test_a_training_step_never_waits(reports, case):
    assert faults(reports[case.name], **limits(case)) == []


def test_embeddings_and_snapshots_arrive_in_page_locked_memory_while_the_device_goes_on(reports):
    report = reports["copies"]
    assert faults(report, waits=1000) == []
    assert {place.split()[0] for place in report.waits} == {"synchronize"}  # events after the copies
    assert report.waits.total() == 3 + 3 + 1  # batches, and pieces of 64 MiB


@pytest.mark.parametrize("case", named(LARGE_HEADS))
def test_a_step_of_a_large_head_stays_within_its_bytes(reports, case):
    report = reports[case.name]
    assert faults(report) == []
    assert report.gigabytes < BUDGETS[case.options["loss_type"]]


@pytest.mark.parametrize("case", named(KERNELS))
def test_every_kernel_compiles_without_spills_and_with_vector_loads(reports, case):
    report = reports[case.name]
    assert {kernel["name"] for kernel in report.kernels} >= {
        "tile_weights",
        "exponentials",
        "coefficients",
        "update",
    }
    assert faults(report) == []


def test_a_way_of_the_benchmarks_is_counted(reports):
    report, case = reports[OF_BENCHMARK.name], OF_BENCHMARK
    assert report.error == ""
    assert report.flops == {"float16": 3 * 2 * case.batch * case.classes * case.dimension}
    assert report.waits.total() == 1  # the gradient scaler


@pytest.mark.parametrize(("case", "noun"), PLANTED.values(), ids=PLANTED)
def test_a_planted_fault_is_found(reports, case, noun):
    assert any(noun in fault for fault in faults(reports[case.name]))
