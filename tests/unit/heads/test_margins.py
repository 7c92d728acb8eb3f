"""Compare the margins with the reference: values, slopes, edge cases, statistics, bounds, options."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.errors import OptionError
from plsc.heads.margins import COSINE_LIMIT, build_margin
from tests import reference

COSINE_MARGINS = [
    ("arcface", {}),
    ("arcface", {"margin": 0.0}),
    ("arcface", {"margin": math.pi / 2}),
    ("arcface", {"margin": 0.3, "easy_margin": True}),
    ("cosface", {}),
    ("cosface", {"margin": 0.0}),
    ("sphereface", {}),
    ("sphereface", {"margin": 4}),
    ("combined", {}),
    ("combined", {"margins": (0.9, 0.4, 0.15)}),
    ("combined", {"margins": [2.3, 0.7, 0.1]}),
    ("adaface", {}),
    ("adaface", {"margin": 1.2, "h": 3.0}),
    ("magface", {}),
    ("magface", {"easy_margin": False}),
    ("curricularface", {}),
]
every_cosine_margin = pytest.mark.parametrize(("name", "options"), COSINE_MARGINS, ids=str)


def built(name, options=None):
    """Return a margin in float64, for two classes."""
    margin = build_margin(name, **(options or {})).double()
    margin.set_class_num(2)
    return margin


def plane(angles, norms=1.0):
    """Return vectors [n, 2] with these angles to the first axis."""
    angles = torch.as_tensor(angles, dtype=torch.float64)
    norms = torch.as_tensor(norms, dtype=torch.float64)
    return torch.stack([angles.cos() * norms, angles.sin() * norms], dim=1)


def with_slope(margin, cosine, norm=30.0):
    """Return psi and its derivative at these cosines."""
    c = cosine.detach().clone().requires_grad_()
    psi = margin.target(c, torch.full_like(c, norm))
    return psi.detach(), torch.autograd.grad(psi.sum(), c)[0]


@every_cosine_margin
@settings(max_examples=40)
@given(
    samples=st.lists(
        # Below an angle of 0.05 the slope of acos is inaccurate; separate tests cover the edge cases.
        st.tuples(st.floats(0.05, math.pi - 0.05), st.floats(0.5, 150.0)),
        min_size=1,
        max_size=8,
    ),
    state=st.floats(-1, 1),
)
def test_target_and_its_gradient_equal_the_reference_in_fp64(name, options, samples, state):
    margin = built(name, options)
    if name == "adaface":
        margin.mean.fill_(40 + 20 * state)
        margin.std.fill_(25 + 20 * state)
    angles, norms = zip(*samples, strict=True)
    x = plane(angles, norms).requires_grad_()
    rows = plane([0.0, 2.0])
    labels = torch.zeros(len(x), dtype=torch.int64)

    right = reference.logits(margin, x, rows, None, labels)[:, 0]
    mine = margin.scale * margin.target(reference.cosines(x, rows)[:, 0], x.norm(dim=1))
    torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-9)
    gradient, right_gradient = (torch.autograd.grad(z.sum(), x)[0] for z in (mine, right))
    torch.testing.assert_close(gradient, right_gradient, rtol=1e-9, atol=1e-9)


@every_cosine_margin
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [1, -1])
def test_value_and_slope_at_a_saturated_cosine_equal_those_at_the_limit(name, options, dtype, sign):
    margin = build_margin(name, **options).to(dtype)
    cosine = sign * torch.tensor([COSINE_LIMIT, 1.0, 1.0000001, 1.00001], dtype=dtype)
    for norm in (1.0, 20.0, 500.0):
        psi, slope = with_slope(margin, cosine, norm)
        assert torch.isfinite(psi).all()
        assert torch.isfinite(slope).all()
        torch.testing.assert_close(psi, psi[:1].expand(4), rtol=0, atol=2e-5)
        torch.testing.assert_close(slope, slope[:1].expand(4), rtol=1e-5, atol=0)


@every_cosine_margin
def test_fp32_slopes_are_accurate_close_to_saturation(name, options):
    # Here 1 - c^2 and the slope of torch.acos would have an error of 4e-5.
    cosine = 1 - 2.0**-24 * torch.arange(1000, 6000)
    margin = build_margin(name, **options)
    _, slope = with_slope(margin, cosine)
    _, exact = with_slope(margin.double(), cosine.double())
    torch.testing.assert_close(slope.double(), exact, rtol=5e-6, atol=5e-6)


def test_sphereface_has_the_values_of_its_paper():
    cosine = torch.tensor([math.pi / 4, math.pi / 2, 3 * math.pi / 4], dtype=torch.float64).cos()
    psi, _ = with_slope(build_margin("sphereface", margin=4).double(), cosine)
    torch.testing.assert_close(psi, torch.tensor([-1.0, -3.0, -5.0], dtype=torch.float64))
    ends, _ = with_slope(build_margin("sphereface", margin=4), torch.tensor([1.0, -1.0]))
    torch.testing.assert_close(ends, torch.tensor([1.0, -7.0]), rtol=0, atol=1e-4)


def test_adaface_statistics_equal_a_loop_over_the_batches():
    adaface = build_margin("adaface", momentum=0.9).double()
    mean, std = 20.0, 100.0
    generator = torch.Generator().manual_seed(5)
    for size in (7, 2, 1, 0, 30):
        norms = torch.rand(size, generator=generator, dtype=torch.float64) * 200  # some above 100
        adaface.observe(None, norms)
        clipped = [min(max(norm, 1e-3), 100.0) for norm in norms.tolist()]
        if clipped:
            average = sum(clipped) / size
            mean = 0.9 * mean + 0.1 * average
        if size > 1:
            variance = sum((norm - average) ** 2 for norm in clipped) / (size - 1)
            std = 0.9 * std + 0.1 * math.sqrt(variance)
        assert adaface.mean.item() == pytest.approx(mean, rel=1e-12)
        assert adaface.std.item() == pytest.approx(std, rel=1e-12)


def test_curricularface_t_equals_a_loop_over_the_batches():
    curricular = build_margin("curricularface", momentum=0.8).double()
    assert curricular.needs_all_cosines
    t = 0.0
    for batch in ([0.5, -0.25], [1.0000001], [], [0.9, 0.8, 0.1]):
        cosine = torch.tensor(batch, dtype=torch.float64)
        curricular.observe(cosine, torch.ones_like(cosine))
        if batch:
            t = 0.8 * t + 0.2 * sum(min(c, 1.0) for c in batch) / len(batch)
        assert curricular.t.item() == pytest.approx(t, rel=1e-12)


@every_cosine_margin
@settings(max_examples=40)
@given(
    angles=st.lists(st.floats(0, 2 * math.pi), min_size=1, max_size=5),
    rows=st.lists(st.floats(0, 2 * math.pi), min_size=2, max_size=6),
    norm=st.floats(0.1, 200.0),
    t=st.sampled_from([-1.0, -0.5, 0.0, 0.3, 1.0]),
)
def test_all_logits_are_within_the_bounds(name, options, angles, rows, norm, t):
    margin = built(name, options)
    if name == "curricularface":
        margin.t.fill_(t)
    z = reference.logits(
        margin, plane(angles, norm), plane(rows), None, torch.zeros(len(angles), dtype=torch.int64)
    )
    assert z.max() <= margin.highest() + 1e-9
    assert z[:, 1:].min() >= margin.lowest_other() - 1e-9


@pytest.mark.parametrize(
    ("name", "options", "noun"),
    [
        ("softmax", {"scale": 64}, "scale"),
        ("adaface", {"momentun": 0.9}, "did you mean 'momentum'"),
        ("adaface", {"h": "x"}, "expected numbers"),
        ("adaface", {"momentum": 1.5}, "at most 1"),
        ("cosface", {"scale": math.inf}, "scale"),
        ("arcface", {"margin": 1.6}, r"at most 1\.57"),
        ("cosface", {"margin": math.nan}, "margin"),
        ("combined", {"margins": (0, 0.5, 0)}, r"margins\[0\].*more than 0"),
        ("combined", {"margins": (1.0, 0.3)}, "expected numbers"),
        ("magface", {"norm_range": (50, 10)}, r"norm_range\[1\].*more than 50"),
        ("magface", {"margin_range": (0.8, 0.4)}, r"margin_range\[1\].*at least 0\.8"),
        ("magface", {"regularisation": -1}, "regularisation"),
    ],
)
def test_invalid_margin_options_raise_with_the_expected_value(name, options, noun):
    with pytest.raises(OptionError, match=noun):
        build_margin(name, **options)
