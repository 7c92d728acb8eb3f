"""The parts of a step add up to the step, whatever is marked."""

import threading
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plsc.marks import Part, mark, mark_backward, no_recorder, set_recorder
from plsc.profiling.timeline import Timeline

CPU = torch.device("cpu")


@pytest.fixture
def timeline():
    made = Timeline(CPU)
    set_recorder(made)
    yield made
    set_recorder(None)


class Clock:
    """Goes on by the next of some numbers each time that it is read."""

    def __init__(self, steps):
        self.now, self.steps = 0, iter(steps)

    def __call__(self):
        self.now += next(self.steps, 1)
        return self.now


moves = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["enter", "switch"]), st.sampled_from(list(Part))),
        st.just(("leave", None)),
    )
)


@given(st.lists(moves, min_size=1, max_size=3), st.lists(st.integers(0, 10**9)))
def test_the_parts_add_up_to_the_steps_to_the_nanosecond(steps, ticks):
    clock = Clock(ticks)
    timeline = Timeline(CPU, clock)
    expected, whole = Counter(), 0
    for step in steps:
        timeline.begin()
        began = before = clock.now
        opened = [Part.OTHER]  # the naive account: at each move the time goes to what was open
        for what, part in step:
            getattr(timeline, what)(*([part] if part else []))
            expected[opened[-1]] += clock.now - before
            before = clock.now
            if what == "enter":
                opened.append(part)
            elif len(opened) > 1:
                opened[-1:] = [part] if what == "switch" else []
        timeline.end()
        expected[opened[-1]] += clock.now - before
        whole += clock.now - began
    found = timeline.host_nanoseconds()
    assert +found == +expected
    assert sum(found.values()) == timeline.whole_nanoseconds() == whole
    assert timeline.device_nanoseconds() is None


def test_a_part_inside_another_has_its_time_to_itself_and_a_function_is_a_part(timeline):
    @mark(Part.REDUCE)
    def reduce(a, *, b):
        return a + b

    timeline.begin()
    with mark(Part.HEAD), mark(Part.HEAD_PASSES):
        assert reduce(1, b=2) == 3
    timeline.end()
    names = [stretch.part for stretch in timeline._steps[0]]
    passes = Part.HEAD_PASSES
    assert names == [
        Part.OTHER, Part.OTHER, Part.HEAD, passes, Part.REDUCE, passes, Part.HEAD, Part.OTHER,
    ]  # fmt: skip
    assert timeline.marks == 6


def test_marks_between_steps_of_other_threads_and_of_nobody_are_not_heard(timeline):
    with mark(Part.DATA):
        timeline.begin()  # what was open before is none of the step's
    with no_recorder(), mark(Part.DATA):
        pass
    thread = threading.Thread(target=mark(Part.COPY)(lambda: None))
    thread.start()
    thread.join()
    timeline.end()
    with mark(Part.DATA):
        pass
    assert timeline.host_nanoseconds().keys() == {Part.OTHER}


def test_an_exception_closes_its_parts(timeline):
    timeline.begin()
    with pytest.raises(ZeroDivisionError), mark(Part.HEAD), mark(Part.REDUCE):
        raise ZeroDivisionError
    with mark(Part.COPY):
        pass
    timeline.end()
    assert [stretch.part for stretch in timeline._steps[0]][-3:] == [
        Part.OTHER, Part.COPY, Part.OTHER,
    ]  # fmt: skip


def test_backward_is_told_apart_into_head_backbone_and_the_wait_for_the_sum(timeline):
    backbone, head = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
    seen = []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(timeline._open[-1])
            return gradient

    inputs = torch.ones(2, 3, requires_grad=True)
    embeddings = backbone(Noting.apply(inputs))
    mark_backward(embeddings)
    loss = head(Noting.apply(embeddings)).sum()
    timeline.begin()
    with mark(Part.HEAD_BACKWARD):
        loss.backward()
    timeline.end()
    assert seen == [Part.HEAD_BACKWARD, Part.BACKWARD]
    parts = [stretch.part for stretch in timeline._steps[0]]
    assert parts[1:] == [
        Part.OTHER, Part.HEAD_BACKWARD, Part.BACKWARD, Part.GRADIENTS, Part.OTHER,
    ]  # fmt: skip
    with no_recorder():
        frozen = torch.ones(2, 3)
        mark_backward(frozen)
    mark_backward(frozen)  # a frozen backbone: nothing to tell apart
