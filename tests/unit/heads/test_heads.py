"""The fast heads against the textbook, in one process."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.errors import DataError, OptionError
from plsc.heads import LOSS_TYPES, build_head, reference
from plsc.heads.margins import COSINE_LIMIT, _add_angle
from plsc.heads.rows import initial_rows


def reference_loss(loss_type, embeddings, weight, bias, labels, scale=64.0, margin=0.5):
    if loss_type.endswith("arcface"):
        logits = reference.arcface_logits(embeddings, weight, labels, scale, margin)
    else:
        logits = reference.softmax_logits(embeddings, weight, bias)
    return reference.cross_entropy(logits, labels)


def gradients(loss, *tensors):
    return torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 9),
    classes=st.integers(1, 12),
    # In few dimensions cosines come close to 1 by chance, where acos in the textbook loses its digits;
    # what happens there has tests of its own below.
    size=st.integers(5, 8),
    seed=st.integers(0, 99),
)
def test_every_loss_type_equals_the_textbook_in_fp64(loss_type, batch, classes, size, seed):
    torch.manual_seed(seed)
    head = build_head(loss_type, classes, size, seed=seed).double()
    embeddings = torch.randn(batch, size, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(classes, (batch,))
    output = head(embeddings, labels, with_accuracy=True)

    parameters = [p for p in (head.weight, head.bias) if p is not None]
    truth = reference_loss(loss_type, embeddings, head.weight, head.bias, labels)
    assert output.mean_loss.item() == pytest.approx(truth.item(), rel=1e-9, abs=1e-9)
    ours = gradients(output.loss, embeddings, *parameters)
    theirs = gradients(truth, embeddings, *parameters)
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-9)


def test_accuracy_is_counted_without_the_margin_and_ties_go_to_the_lowest_class():
    head = build_head("dist_arcface", 3, 2).double()
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.9, 0.1]]))
    # Close to two rows: right without the margin, wrong with it.
    output = head(torch.tensor([[1.0, 0.02]]).double(), torch.tensor([0]), with_accuracy=True)
    assert output.accuracy == 1.0
    tied = head(torch.tensor([[0.9, 0.1]]).double(), torch.tensor([2]), with_accuracy=True)
    assert tied.accuracy == 0.0
    collapsed = head(torch.zeros(3, 2).double(), torch.tensor([0, 1, 2]), with_accuracy=True)
    assert collapsed.accuracy == pytest.approx(1 / 3)


def test_added_angle_has_the_derivative_that_finite_differences_find():
    cosine = torch.linspace(-0.99, 0.99, 66, dtype=torch.float64, requires_grad=True)
    for margin in (0.0, 0.3, 0.5, math.pi / 2):  # none of the points is where the fallback begins
        assert torch.autograd.gradcheck(lambda c, m=margin: _add_angle(c, m), (cosine,))


@pytest.mark.parametrize("cosine", [1.0, -1.0, 1.0000001, -1.0000001])
def test_added_angle_stays_finite_where_the_slope_of_acos_is_not(cosine):
    c = torch.tensor([cosine], requires_grad=True)
    target = _add_angle(c, 0.5)
    target.sum().backward()
    assert torch.isfinite(target).all()
    assert torch.isfinite(c.grad).all()
    edge = math.cos(math.acos(COSINE_LIMIT) + 0.5)
    if cosine > 0:
        assert target.item() == pytest.approx(edge, abs=1e-3)


def test_mean_cosine_equals_the_mean_over_all_pairs_of_different_samples():
    head = build_head("softmax", 4, 6)
    embeddings = torch.randn(7, 6)
    gauge = head(embeddings, torch.zeros(7, dtype=torch.int64), with_gauge=True).mean_cosine
    unit = torch.nn.functional.normalize(embeddings)
    every = unit @ unit.T
    naive = (every.sum() - every.trace()) / (7 * 6)
    assert gauge.item() == pytest.approx(naive.item(), abs=1e-6)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("label", [-1, 5])
def test_a_label_out_of_range_is_named(loss_type, label):
    head = build_head(loss_type, 5, 4)
    with pytest.raises(DataError, match=rf"label {label} at position 1 .* outside 0\.\.4"):
        head(torch.randn(2, 4), torch.tensor([0, label]))


def test_an_unknown_loss_type_gets_the_nearest_name():
    with pytest.raises(OptionError, match="did you mean 'dist_arcface'"):
        build_head("dist_arcfase", 5, 4)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 9000), st.integers(0, 5000))
def test_a_class_has_the_same_initial_row_in_any_shard(start, length):
    whole = initial_rows(3, 0, 14000, 2)
    assert torch.equal(initial_rows(3, start, start + length, 2), whole[start : start + length])


def test_initial_rows_differ_by_seed_and_by_class():
    rows = initial_rows(0, 0, 9000, 4)
    assert len(torch.unique(rows, dim=0)) == 9000
    assert not torch.equal(rows, initial_rows(1, 0, 9000, 4))
    assert rows.std().item() == pytest.approx(0.01, rel=0.05)
