"""Class sampling."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.heads.sampling import draw_classes, nearest_classes
from plsc.heads.softmax import Queries
from plsc.heads.weights import Rows


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


def test_nearest_classes_have_the_highest_cosines_in_the_searched_half():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 6, generator=generator, dtype=torch.float64)
    unit = torch.nn.functional.normalize(torch.randn(3, 6, generator=generator, dtype=torch.float64))
    scores = (torch.nn.functional.normalize(weight) @ unit.T).amax(dim=1)
    positives = torch.tensor([0, 5, 9])
    found, often = [], torch.zeros(40)
    for key in range(40):
        near = nearest_classes(Rows(weight), Queries(unit, positives), 6, 7, key)
        assert len(near) == 6
        assert not set(near.tolist()) & set(positives.tolist())
        found.append(scores[near].mean())
        often[near] += 1
    scores[positives] = -2
    assert torch.stack(found).mean() > scores.sort(descending=True).values[:18].mean() - 0.05
    best = scores.argmax()
    assert 8 <= often[best] <= 32  # searched in about half of the steps, and then always found
