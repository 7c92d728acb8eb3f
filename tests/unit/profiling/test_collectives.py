"""Collectives in a trace, and what of them computation hid."""

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plsc.marks import Part
from plsc.profiling.collectives import Collective, collectives_of, overlap, union

spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda s: (s[0], sum(s))))


def covered(some):
    return {point for start, stop in some for point in range(start, stop)}


@given(spans, spans)
def test_unions_and_overlaps_cover_what_sets_of_points_cover(some, others):
    first, second = union(some), union(others)
    assert covered(first) == covered(some)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(first))
    assert covered(overlap(first, second)) == covered(some) & covered(others)
    assert sum(b - a for a, b in overlap(first, second)) == len(covered(some) & covered(others))


def event(name, start, stop, device="CPU", is_range=False):
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=stop),
        device_type=SimpleNamespace(name=device),
        is_user_annotation=is_range,
    )


def test_over_gloo_what_the_rank_does_not_wait_for_is_hidden():
    events = [
        event("gloo:all_reduce", 1000, 5000),
        event("gloo:all_reduce", 4000, 9000),
        event("gloo:all_gather", 20000, 21000),
        event(Part.BACKWARD.value, 0, 8000),
        event(Part.GRADIENTS.value, 8000, 10000),
        event(Part.GATHER.value, 19000, 22000),
        event("gloo:reduce_scatter", 30000, 32000),
        event(Part.FORWARD.value, 29000, 33000),
        event("FSDP::all_gather (blocks.0)", 30500, 32500),
        event("c10d::allreduce_", 1000, 1001),
    ]
    assert collectives_of(events, steps=2) == [
        Collective("gloo:all_reduce", 1.0, 4.0, 3.5),
        Collective("gloo:reduce_scatter", 0.5, 1.0, 0.25),
        Collective("gloo:all_gather", 0.5, 0.5, 0.0),
    ]


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWork)", "all_gather"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(x)", "reduce_scatter"),
    ],
)
def test_over_nccl_what_runs_beside_another_kernel_is_hidden(kernel, name):
    events = [
        event(kernel, 1000, 5000, "CUDA"),
        event("sm90_xmma_gemm", 0, 2000, "CUDA"),
        event("Memcpy HtoD", 2000, 5000, "CUDA"),
        event(Part.BACKWARD.value, 0, 9000, "CUDA", is_range=True),
        event("nccl:all_reduce", 0, 9000, "CUDA", is_range=True),
        event("nccl:all_reduce", 0, 9000, "CPU", is_range=True),
    ]
    assert collectives_of(events, steps=1) == [Collective(f"nccl:{name}", 1.0, 4.0, 1.0)]
