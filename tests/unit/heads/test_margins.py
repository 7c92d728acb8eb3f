"""Compare the margins with the reference: values, slopes, edge cases, statistics, bounds, options."""

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.errors import OptionError
from plsc.heads.geometry import COSINE_LIMIT
from plsc.heads.margins import MARGINS, build_margin
from tests import reference

COSINE_MARGINS = [
    ("normface", {}),
    ("arcface", {}),
    ("arcface", {"margin": 0.0}),
    ("arcface", {"margin": math.pi / 2}),
    ("arcface", {"margin": 0.3, "easy_margin": True}),
    ("arcface", {"straight_through": True}),
    ("cosface", {}),
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


@pytest.mark.parametrize(
    ("name", "options"),
    # The straight-through slope is not the derivative; a separate test covers it.
    [(name, options) for name, options in COSINE_MARGINS if "straight_through" not in options],
    ids=str,
)
def test_slopes_equal_finite_differences(name, options):
    margin = build_margin(name, **options).double()
    # None of the points is at a kink of a formula.
    cosine = torch.linspace(-0.983, 0.981, 40, dtype=torch.float64, requires_grad=True)
    norm = torch.linspace(3.0, 140.0, 40, dtype=torch.float64, requires_grad=margin.uses_norm)
    assert torch.autograd.gradcheck(margin.target, (cosine, norm))


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


@pytest.mark.parametrize("margin", [0.0, 0.5, 1.3])
def test_arcface_adds_the_angle_until_pi_and_subtracts_m_sin_m_beyond(margin):
    arcface = build_margin("arcface", margin=margin).double()
    angles = torch.linspace(0.01, math.pi - 0.01, 50, dtype=torch.float64)
    psi, _ = with_slope(arcface, angles.cos())
    for angle, value in zip(angles.tolist(), psi.tolist(), strict=True):
        beyond = angle + margin > math.pi
        right = math.cos(angle) - margin * math.sin(margin) if beyond else math.cos(angle + margin)
        assert value == pytest.approx(right, abs=1e-12)


def test_easy_margin_does_not_change_cosines_at_or_below_zero():
    easy = build_margin("arcface", easy_margin=True).double()
    cosine = torch.tensor([-1.0, -0.9, -0.2, 0.0, 0.2, 0.9], dtype=torch.float64) * COSINE_LIMIT
    psi, slope = with_slope(easy, cosine)
    hard_psi, hard_slope = with_slope(build_margin("arcface").double(), cosine)
    assert torch.equal(psi[:4], cosine[:4])
    assert torch.equal(slope[:4], torch.ones(4, dtype=torch.float64))
    assert torch.equal(psi[4:], hard_psi[4:])
    assert torch.equal(slope[4:], hard_slope[4:])


def test_straight_through_changes_only_the_slope():
    cosine = torch.linspace(-1, 1, 41, dtype=torch.float64)
    psi, slope = with_slope(build_margin("arcface", straight_through=True).double(), cosine)
    torch.testing.assert_close(psi, with_slope(build_margin("arcface").double(), cosine)[0])
    assert torch.equal(slope, torch.ones_like(slope))


def test_sphereface_has_the_values_of_its_paper():
    cosine = torch.tensor([math.pi / 4, math.pi / 2, 3 * math.pi / 4], dtype=torch.float64).cos()
    psi, _ = with_slope(build_margin("sphereface", margin=4).double(), cosine)
    torch.testing.assert_close(psi, torch.tensor([-1.0, -3.0, -5.0], dtype=torch.float64))
    ends, _ = with_slope(build_margin("sphereface", margin=4), torch.tensor([1.0, -1.0]))
    torch.testing.assert_close(ends, torch.tensor([1.0, -7.0]), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("margins", "name", "margin"),
    [
        ((1, 0, 0.35), "cosface", 0.35),
        ((1.7, 0, 0), "sphereface", 1.7),
        ((1, 0.5, 0), "arcface", 0.5),
    ],
)
def test_combined_margin_includes_the_other_margins(margins, name, margin):
    # Only angles for which ArcFace stays below pi; beyond, the two differ.
    cosine = torch.linspace(0.01, math.pi - 0.51, 30, dtype=torch.float64).cos()
    combined = with_slope(build_margin("combined", margins=margins).double(), cosine)
    single = with_slope(build_margin(name, margin=margin).double(), cosine)
    torch.testing.assert_close(combined, single, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sphereface", {"margin": 1.7}),
        ("sphereface", {"margin": 4}),
        ("combined", {"margins": (1, 0.5, 0)}),
        ("combined", {"margins": (2.3, 0.7, 0.1)}),
    ],
)
def test_targets_with_multiplied_angles_decrease_continuously(name, options):
    angles = torch.linspace(0.001, math.pi - 0.001, 20_001, dtype=torch.float64)
    psi, slope = with_slope(build_margin(name, **options).double(), angles.cos())
    falls = psi[:-1] - psi[1:]
    assert (falls >= 0).all()
    assert falls.max() < 4.1 * math.pi / 20_000  # four times the step of the angle
    assert (slope >= 0).all()


@pytest.mark.parametrize(
    ("norm", "right"),
    [
        (50.0, lambda angle: math.cos(angle) - 0.4),  # mean quality: CosFace
        (0.0, lambda angle: math.cos(angle + 0.4)),  # lowest quality: ArcFace
        (99.0, lambda angle: math.cos(angle - 0.4) - 0.8),  # highest quality
    ],
)
def test_adaface_is_arcface_or_cosface_depending_on_the_norm(norm, right):
    adaface = build_margin("adaface", h=1.0).double()
    adaface.mean.fill_(50)
    adaface.std.fill_(10)
    psi, _ = with_slope(adaface, torch.tensor([1.1], dtype=torch.float64).cos(), norm)
    assert psi.item() == pytest.approx(right(1.1), abs=1e-12)


def test_adaface_gradient_never_decreases_the_cosine_of_a_good_sample():
    adaface = build_margin("adaface").double()
    cosine = torch.linspace(-1, 1, 2001, dtype=torch.float64)
    for norm in (0.0, 10.0, 60.0, 300.0):
        assert (with_slope(adaface, cosine, norm)[1] >= 0).all()


def test_adaface_depends_on_norms_without_a_gradient():
    adaface = build_margin("adaface").double()
    norm = torch.tensor([15.0, 40.0], dtype=torch.float64, requires_grad=True)
    cosine = torch.tensor([0.3, 0.3], dtype=torch.float64, requires_grad=True)
    psi = adaface.target(cosine, norm)
    assert psi[0] != psi[1]
    assert torch.autograd.grad(psi.sum(), norm, allow_unused=True) == (None,)
    assert not adaface.uses_norm


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


def test_curricularface_hard_classes_exceed_the_target_with_margin():
    curricular = build_margin("curricularface").double()
    curricular.t.fill_(0.3)
    cosine = torch.tensor([0.9, 0.1, -0.95], dtype=torch.float64, requires_grad=True)
    threshold, t = curricular.hard(cosine)
    right = [math.cos(math.acos(c) + 0.5) for c in cosine.tolist()]  # also beyond pi
    assert threshold.tolist() == pytest.approx(right, abs=1e-12)
    assert t.shape == ()
    assert t.item() == pytest.approx(0.3)
    assert not threshold.requires_grad
    # A later batch must not change a returned value.
    curricular.observe(cosine.detach(), cosine.detach())
    assert t.item() == pytest.approx(0.3)


def test_curricularface_hard_logits_equal_the_reference():
    curricular = build_margin("curricularface", scale=10).double()
    curricular.t.fill_(0.4)
    torch.manual_seed(0)
    x, rows = torch.randn(20, 3).double(), torch.randn(30, 3).double()
    labels = torch.randint(30, (20,))
    c = reference.cosines(x, rows)
    threshold, t = curricular.hard(c.gather(1, labels[:, None])[:, 0])
    is_hard = c > threshold[:, None]
    assert 0 < is_hard.sum() < is_hard.numel()
    z = 10 * torch.where(is_hard, c * (t + c), c)
    right = reference.logits(curricular, x, rows, None, labels)
    others = torch.nn.functional.one_hot(labels, 30) == 0
    torch.testing.assert_close(z[others], right[others])


def test_only_curricularface_has_hard_classes_and_needs_all_cosines():
    for name in MARGINS:
        margin = build_margin(name)
        is_curricular = name == "curricularface"
        assert (margin.hard(torch.zeros(2)) is not None) == is_curricular
        assert margin.needs_all_cosines == is_curricular


def test_magface_margin_grows_linearly_with_the_norm():
    magface = build_margin("magface", norm_range=(10, 20), margin_range=(0.2, 0.6)).double()
    norm = torch.tensor([1.0, 10.0, 15.0, 20.0, 90.0], dtype=torch.float64)
    psi = magface.target(torch.full_like(norm, math.cos(0.7)), norm)
    right = [math.cos(0.7 + margin) for margin in (0.2, 0.2, 0.4, 0.6, 0.6)]
    assert psi.tolist() == pytest.approx(right, abs=1e-12)


def test_magface_regulariser_and_its_slope_equal_the_paper():
    magface = build_margin("magface")
    norm = torch.tensor([4.0, 10.5, 60.0, 109.0, 200.0], dtype=torch.float64, requires_grad=True)
    added = magface.regulariser(norm)
    slope = torch.autograd.grad(added.sum(), norm)[0]
    inside = [10.0, 10.5, 60.0, 109.0, 110.0]
    right = [35 * (a / 110**2 + 1 / a) for a in inside]
    assert added.tolist() == pytest.approx(right, rel=1e-12)
    right = [0.0, *(35 * (1 / 110**2 - 1 / a**2) for a in inside[1:4]), 0.0]
    assert slope.tolist() == pytest.approx(right, rel=1e-12)
    naive = reference.magface_regulariser(norm, (10.0, 110.0), 35.0)
    torch.testing.assert_close(added, naive, rtol=1e-12, atol=0)


def test_only_magface_has_a_regulariser_and_a_norm_gradient():
    for name in MARGINS:
        margin = build_margin(name)
        assert (margin.regulariser(torch.ones(2)) is not None) == (name == "magface")
        assert margin.uses_norm == (name == "magface")


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


def test_bounds_are_tight():
    # An embedding equal to the weights of another class, and its negative.
    x, rows, labels = plane([0.0, math.pi]), plane([2.0, 0.0]), torch.tensor([0, 0])
    for name in MARGINS.keys() - {"softmax"}:
        margin = built(name)
        if name == "curricularface":
            margin.t.fill_(1)
        z = reference.logits(margin, x, rows, None, labels)
        assert z[0, 1].item() == pytest.approx(margin.highest())
        assert margin.lowest_other() == -margin.scale
        if name != "curricularface":
            assert z[1, 1].item() == pytest.approx(margin.lowest_other())


def test_softmax_has_no_bounds_and_no_scale():
    softmax = build_margin("softmax")
    assert (softmax.highest(), softmax.lowest_other(), softmax.scale) == (None, None, 1.0)
    assert not softmax.is_cosine
    logit = torch.tensor([-300.0, 0.0, 8.5])
    assert torch.equal(softmax.target(logit, torch.ones(3)), logit)


def test_reference_softmax_has_unnormalised_weights_and_a_bias():
    x, rows = torch.tensor([[2.0, 1.0]]), torch.tensor([[3.0, 0.0], [1.0, -4.0]])
    bias = torch.tensor([0.5, 10.0])
    z = reference.logits(build_margin("softmax"), x, rows, bias, torch.tensor([0]))
    assert z.tolist() == [[6.5, 8.0]]
    # One class with two sub-centres.
    z = reference.softmax_logits(x, rows[None], bias[None])
    assert z.tolist() == [[8.0]]


@pytest.mark.parametrize("name", sorted(MARGINS.keys() - {"softmax"}))
def test_reference_uses_the_nearest_sub_centre_of_each_class(name):
    margin = built(name)
    x = plane([0.3, 2.0], 20.0)
    centres = plane([0.1, 3.0, 1.4, 2.1]).reshape(2, 2, 2)
    labels = torch.tensor([0, 1])
    z = reference.logits(margin, x, centres, None, labels)
    assert z.shape == (2, 2)
    # Sample 0 is nearest to the first sub-centre of both classes, sample 1 to the second.
    for sample, centre in ((0, 0), (1, 1)):
        rows = centres[:, centre]
        alone = reference.logits(margin, x[sample, None], rows, None, labels[sample, None])
        torch.testing.assert_close(z[sample], alone[0])


def test_reference_loss_masks_classes_that_are_not_sampled_and_adds_the_regulariser():
    magface = build_margin("magface", scale=2).double()
    x, rows = plane([0.3, 2.0], [20.0, 50.0]), plane([0.1, 3.0, 1.4, 2.1])
    labels, allowed = torch.tensor([0, 3]), torch.tensor([True, False, False, True])
    loss = reference.mean_loss(magface, x, rows, None, labels, allowed)
    fewer = reference.logits(magface, x, rows[allowed], None, torch.tensor([0, 1])).tolist()
    right = 0.0
    for label, norm in ((0, 20.0), (1, 50.0)):
        z = fewer[label]
        right += math.log(sum(map(math.exp, z))) - z[label] + 35 * (norm / 110**2 + 1 / norm)
    assert loss.item() == pytest.approx(right / 2, rel=1e-12)


def test_the_error_for_an_unknown_margin_suggests_a_name():
    with pytest.raises(OptionError, match=r"unknown margin 'arcfase'; .*did you mean 'arcface'"):
        build_margin("arcfase")


@pytest.mark.parametrize(
    ("name", "options"),
    [("combined", {"margins": (1.0, 0.3)}), ("adaface", {"h": "x"}), ("magface", {"norm_range": 3})],
)
def test_an_argument_of_another_kind_is_refused(name, options):
    with pytest.raises(OptionError, match=rf"cannot make {name} of .*expected numbers"):
        build_margin(name, **options)


def test_build_margin_builds_every_margin_with_scale_64():
    for name in MARGINS:
        margin = build_margin(name)
        assert margin.name == name
        assert margin.scale == 64 or "scale" not in inspect.signature(type(margin)).parameters


def test_defaults_are_the_published_settings():
    assert build_margin("arcface").margin == 0.5
    assert build_margin("cosface").margin == 0.35
    assert build_margin("sphereface").margin == 1.7
    assert build_margin("combined").margins == (1.0, 0.3, 0.2)
    adaface, magface = build_margin("adaface"), build_margin("magface")
    assert (adaface.margin, adaface.h, adaface.momentum) == (0.4, 0.333, 0.99)
    assert (adaface.mean.item(), adaface.std.item()) == (20, 100)
    assert (magface.norm_range, magface.margin_range) == ((10, 110), (0.45, 0.8))
    assert magface.regularisation == 35
    curricular = build_margin("curricularface")
    assert (curricular.margin, curricular.momentum, curricular.t.item()) == (0.5, 0.99, 0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("softmax", {"margin": 0.5}, "softmax has no option margin; it has no options"),
        ("softmax", {"scale": 64}, "softmax has no option scale"),
        (
            "cosface",
            {"easy_margin": True},
            "cosface has no option easy_margin; its options are scale",
        ),
        ("adaface", {"momentun": 0.9}, "adaface has no option momentun; .*did you mean 'momentum'"),
        ("normface", {"scale": 0}, "scale of normface is 0; expected a number, more than 0"),
        ("normface", {"scale": math.inf}, "scale of normface is inf; expected a number"),
        (
            "arcface",
            {"margin": 1.6},
            "margin of arcface is 1.6; .* at least 0 and at most 1.57",
        ),
        ("arcface", {"margin": -0.1}, "margin of arcface is -0.1"),
        ("cosface", {"margin": 2.1}, "margin of cosface is 2.1; .* at least 0 and at most 2"),
        ("cosface", {"margin": math.nan}, "margin of cosface is nan"),
        (
            "sphereface",
            {"margin": 0.9},
            "margin of sphereface is 0.9; expected a number, at least 1",
        ),
        ("combined", {"margins": (0, 0.5, 0)}, r"margins\[0\] of combined is 0; .* more than 0"),
        ("combined", {"margins": (1, 0, 2.5)}, r"margins\[2\] of combined is 2.5"),
        ("adaface", {"h": -1}, "h of adaface is -1; expected a number, at least 0"),
        ("adaface", {"momentum": 1.5}, "momentum of adaface is 1.5; .* at least 0 and at most 1"),
        ("magface", {"norm_range": (0, 110)}, r"norm_range\[0\] of magface is 0"),
        (
            "magface",
            {"norm_range": (50, 10)},
            r"norm_range\[1\] of magface is 10; .*more than 50",
        ),
        ("magface", {"margin_range": (0.8, 0.4)}, r"margin_range\[1\] .* at least 0.8"),
        ("magface", {"margin_range": (0.8, 4)}, r"margin_range\[1\] of magface is 4"),
        ("magface", {"regularisation": -1}, "regularisation of magface is -1"),
    ],
)
def test_invalid_margin_options_raise_with_the_expected_value(name, options, message):
    with pytest.raises(OptionError, match=message):
        build_margin(name, **options)
