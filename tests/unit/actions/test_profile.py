from types import SimpleNamespace

import pytest
import torch

from plsc.actions.profile import phases_of
from plsc.spans import PREFIX, span


def event(name, start, stop, *, kind="CPU", number=0):
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=stop),
        device_type=SimpleNamespace(name=kind),
        id=number,
        is_user_annotation=name.startswith(PREFIX),
    )


STEPS = [
    event("ProfilerStep*", 0.0, 1000.0),
    event(PREFIX + "head", 100.0, 600.0),
    event(PREFIX + "logits", 200.0, 400.0),
    event("aten::mm", 250.0, 350.0),
    event(PREFIX + "backward", 600.0, 900.0),
    event(PREFIX + "sum over ranks", 600.0, 700.0),  # in autograd's thread, from the same moment on
    event("ProfilerStep*", 1200.0, 1400.0),  # an epoch ended before it
    event(PREFIX + "head", 1300.0, 1400.0),
]


def test_each_moment_of_a_step_belongs_to_the_innermost_span():
    host, device = phases_of(reversed(STEPS), steps=2)
    expected = {"other": 150, "head": 200, "logits": 100, "backward": 100, "sum over ranks": 50}
    assert host == pytest.approx({name: time / 1000 for name, time in expected.items()})
    assert sum(host.values()) == pytest.approx(0.6)
    assert device == {}


def test_kernels_count_to_the_phase_that_launched_them():
    launches = [
        event("cudaLaunchKernel", 300.0, 301.0, number=1),
        event("cuLaunchKernelEx", 800.0, 801.0, number=2),
    ]
    kernels = [
        event("sgemm", 700.0, 950.0, kind="CUDA", number=1),
        event("dgrad", 950.0, 1050.0, kind="CUDA", number=2),
        event(PREFIX + "head", 650.0, 990.0, kind="CUDA"),  # a range as the device saw it
    ]
    _, device = phases_of([*STEPS, *launches, *kernels], steps=1)
    assert device == pytest.approx({"logits": 0.25, "backward": 0.1})


def test_spans_are_in_the_trace_of_any_torch_profiler():
    @span("inner")
    def inner():
        return torch.ones(2) + 1

    with torch.profiler.profile() as recorded, span("outer"):
        inner()
    found = {one.name: one.cpu_parent for one in recorded.events()}
    assert found[PREFIX + "inner"].name == PREFIX + "outer"
