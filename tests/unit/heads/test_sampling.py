"""Class sampling."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.heads.sampling import draw_classes


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.data())
def test_a_draw_has_all_positives_and_the_requested_size(classes, data):
    positives = torch.tensor(data.draw(st.lists(st.integers(0, classes - 1), max_size=40)), dtype=torch.int64)
    count = data.draw(st.integers(1, classes))
    drawn = draw_classes(positives, classes, count, key=data.draw(st.integers(0, 2**64 - 1)))
    unique = set(positives.tolist())
    assert drawn.tolist() == sorted(set(drawn.tolist()))
    assert unique <= set(drawn.tolist()) <= set(range(classes))
    assert len(drawn) == max(count, len(unique))


def test_draws_are_uniform_and_depend_on_the_key():
    positives = torch.tensor([3, 3, 17])
    for count in (
        8,
        24,
    ):  # less and more than half of the others, which use different algorithms
        times = torch.zeros(30)
        for key in range(3000):
            drawn = draw_classes(positives, 30, count, key)
            times[drawn] += 1
            assert torch.equal(drawn, draw_classes(positives, 30, count, key))
        assert times[3] == times[17] == 3000
        others = times[[i for i in range(30) if i not in (3, 17)]]
        expected = 3000 * (count - 2) / 28
        # Six standard deviations of a binomial distribution.
        deviation = (expected * (1 - expected / 3000)) ** 0.5
        assert (others - expected).abs().max() < 6 * deviation
