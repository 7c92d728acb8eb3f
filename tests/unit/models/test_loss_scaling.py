"""Changes of the loss scale, and its effect on gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plsc.models.precision import HIGHEST_SCALE, MOST_SKIPS, LossScaler, scale_gradient, unscale

SMALL = {"incr_every": 3, "decr_every": 2}


def run(scaler, script):
    """Return the scale after each step of a script: ``x`` overflows, ``.`` does not."""
    scales = []
    for letter in script:
        scaler.update(letter == "x")
        scales.append(scaler.scale)
    return scales


@pytest.mark.parametrize(
    ("script", "settings", "scales"),
    [
        ("......", {}, [8, 8, 16, 16, 16, 32]),
        ("..x...", {}, [8, 8, 8, 8, 8, 16]),  # an overflow restarts the count
        ("x.x.xx", {}, [8, 8, 8, 8, 8, 4]),  # and so does a finite step
        ("xxxxxxxx", {}, [8, 4, 4, 2, 2, 1, 1, 1]),
        ("xx", {"scale": 1.5}, [1.5, 1]),
        ("...", {"scale": HIGHEST_SCALE / 1.5}, [HIGHEST_SCALE / 1.5] * 2 + [HIGHEST_SCALE]),
        ("...xx", {"incr_ratio": 1.5, "decr_ratio": 0.25}, [8, 8, 12, 12, 3]),
        ("...xxx", {"is_dynamic": False}, [8] * 6),
        (".x", {"incr_every": 1, "decr_every": 1}, [16, 8]),
    ],
)
def test_the_scale_changes_as_in_the_table(script, settings, scales):
    scaler = LossScaler(**{"scale": 8.0, **SMALL, **settings})
    assert run(scaler, script) == scales
    assert scaler.skipped == script.count("x")


@given(st.text(".x", max_size=30), st.text(".x", max_size=30), st.booleans())
def test_a_scaler_resumes_from_its_state(before, after, is_dynamic):
    whole, first, second = (LossScaler(8.0, 3, 2, is_dynamic=is_dynamic) for _ in range(3))
    run(whole, before + after)
    run(first, before)
    second.load(first.state())
    run(second, after)
    assert second == whole


def test_a_scaler_can_resume_with_shorter_periods():
    scaler = LossScaler(8.0, incr_every=2)
    scaler.load({"scale": 64.0, "finite": 1999, "overflowed": 0, "skipped": 0, "stuck": 0})
    assert run(scaler, "...") == [128, 128, 256]


@pytest.mark.parametrize("settings", [{"scale": 1.0}, {"scale": 64.0, "is_dynamic": False}])
def test_repeated_overflows_are_hopeless_once_the_scale_cannot_decrease(settings):
    scaler = LossScaler(**settings)
    run(scaler, "x" * (MOST_SKIPS - 1))
    assert not scaler.is_hopeless
    run(scaler, ".")
    run(scaler, "x" * (MOST_SKIPS - 1))
    assert not scaler.is_hopeless
    run(scaler, "x")
    assert scaler.is_hopeless


def test_only_the_gradient_of_the_embeddings_is_scaled_before_rounding():
    embeddings = torch.full((2, 3), 0.5, dtype=torch.float16, requires_grad=True)
    scaled = scale_gradient(embeddings, 1024.0)
    assert scaled.dtype is torch.float32
    assert torch.equal(scaled, embeddings.detach().float())
    tiny = 2.0**-30  # the smallest float16 is 2^-24
    (scaled * tiny).sum().backward()
    assert torch.equal(embeddings.grad, torch.full_like(embeddings, 2.0**-20))
    plain = embeddings.detach().requires_grad_()
    (scale_gradient(plain, 1.0) * tiny).sum().backward()
    assert not plain.grad.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
def test_unscale_supports_dense_sparse_and_distributed_gradients(bad):
    dense, empty = torch.full((2, 2), 8.0), torch.zeros(0)
    double = torch.full((3,), 16.0, dtype=torch.float64)
    indices = torch.tensor([[0, 2]])
    sparse = torch.sparse_coo_tensor(indices, torch.tensor([8.0, 8.0]), (4,), check_invariants=True)
    for wrong in (dense, double, sparse._values()):
        before = wrong[-1].clone()
        if bad is not None:
            wrong[-1] = bad
        assert bool(unscale([dense, empty, double, sparse], 4.0)) == (bad is not None)
        wrong[-1] = before / 4
    assert dense.tolist() == [[8 / 4**3] * 2] * 2
    assert sparse._values().tolist() == [8 / 4**3] * 2
    assert not unscale([], 2.0)
