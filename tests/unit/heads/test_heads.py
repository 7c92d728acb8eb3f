"""Compare the heads with the reference implementation in one process: loss, gradients, updates."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.errors import DataError, OptionError
from plsc.heads import (
    MARGINS,
    Execution,
    RowAdamW,
    RowSGD,
    Sampling,
    ShardedHead,
    build_head,
    build_margin,
    margins_of_counts,
)
from plsc.heads.kernels import choose_backend
from plsc.heads.margins import ArcFace
from plsc.heads.sampling import draw_classes
from plsc.heads.weights import initial_rows
from tests import reference
from tests.devices import GPU, group_of_one

CPU = torch.device("cpu")
COSINE_MARGINS = [name for name in MARGINS if name != "softmax"]


def filled(head, seed=0):
    """Fill the head with class weights of norm about 1, for cosines of all sizes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn)
    return head


def gradients(loss, head, embeddings):
    parameters = [p for p in (head.weight, head.bias) if p is not None]
    return torch.autograd.grad(loss, [embeddings, *parameters])


def batch(size, dimension, classes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(size, dimension, dtype=torch.float64, generator=generator) * 5
    return embeddings.requires_grad_(), torch.randint(classes, (size,), generator=generator)


def assert_equals_reference(head, embeddings, labels):
    output = head(embeddings, labels)
    truth = reference.mean_loss(head.margin, embeddings, head.weight, head.bias, labels)
    torch.testing.assert_close(output.mean_loss, truth.detach(), rtol=1e-9, atol=1e-9)
    ours = gradients(output.loss, head, embeddings)
    theirs = gradients(truth, head, embeddings)
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MARGINS)
@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(1, 9),
    classes=st.integers(1, 12),
    # In few dimensions some cosines are close to 1, where acos in the reference is inaccurate. Separate tests
    # below cover that case.
    dimension=st.integers(5, 8),
    centers=st.integers(1, 3),
    tile=st.integers(1, 13),
    keep=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_margin_equals_the_reference_in_fp64(name, size, classes, dimension, centers, tile, keep, seed):
    centers = 1 if name == "softmax" else centers
    head = ShardedHead(
        classes,
        dimension,
        build_margin(name),
        centers=centers,
        execution=Execution(tile=tile, keep_bytes=10**6 if keep else 0),
        row_dtype=torch.float64,
    )
    assert_equals_reference(filled(head, seed), *batch(size, dimension, classes, seed))


@pytest.mark.parametrize(
    ("loss_type", "share"),
    [("dist_arcface", 0.25), ("sphereface", 0.7), ("magface", 0.25), ("dist_curricularface", 0.7)],
)
def test_margin_warm_up_equals_the_reference_in_fp64(loss_type, share):
    head = filled(build_head(loss_type, 7, 6, centers=2, row_dtype="float64"))
    assert_equals_reference(head, *batch(9, 6, 7))
    full = head(*batch(9, 6, 7)).mean_loss
    head.margin.share = share
    assert_equals_reference(head, *batch(9, 6, 7))
    assert head(*batch(9, 6, 7)).mean_loss < full


@pytest.mark.parametrize(
    ("loss_type", "classes", "expected"),
    [("dist_cosface", 2, 1.0), ("cosface", 89, math.sqrt(2) * math.log(88)), ("cosface", 10_000, 64.0)],
)
def test_automatic_scale_depends_on_the_number_of_classes(loss_type, classes, expected):
    margin = build_margin("cosface", scale="auto")
    head = filled(build_head(loss_type, classes, 6, margin=margin, centers=3, row_dtype="float64"))
    assert margin.scale == pytest.approx(expected)
    assert_equals_reference(head, *batch(9, 6, classes))


@pytest.mark.parametrize(
    ("loss_type", "kernels"),
    [
        ("arcface", None),
        ("dist_arcface", "torch"),
        ("dist_arcface", "auto"),
        ("dist_adaface", "auto"),
    ],
)
def test_extreme_norms_equal_the_reference(loss_type, kernels):
    parts = {"execution": Execution(kernels=kernels)} if kernels else {}
    head = filled(build_head(loss_type, 61, 8, **parts))
    embeddings, labels = batch(31, 8, 61)
    with torch.no_grad():
        head.weight *= 10 ** torch.linspace(-30, 30, 61)[:, None]
        embeddings = (embeddings * 10 ** torch.linspace(-30, 30, 31)[:, None]).float()
    embeddings.requires_grad_()
    output = head(embeddings, labels)
    exact = [t.detach().double().requires_grad_() for t in (embeddings, head.weight)]
    truth = reference.mean_loss(head.margin, exact[0], exact[1], None, labels)
    assert output.mean_loss.item() == pytest.approx(truth.item(), rel=1e-5)
    theirs = torch.autograd.grad(truth, exact)
    for mine, right, x in zip(gradients(output.loss, head, embeddings), theirs, exact, strict=True):
        length = x.detach().norm(dim=1, keepdim=True)
        torch.testing.assert_close(mine * length, right * length, rtol=1e-4, atol=1e-5)

    head.eval()  # do not update statistics
    # Too short: counts as a zero vector, which has no gradient.
    losses = []
    for value in (1e-38, 0.0):
        with torch.no_grad():
            head.weight[7] = value
        loss = head(embeddings, labels).loss
        losses.append(loss.item())
        assert not gradients(loss, head, embeddings)[1][7].any()
    assert losses[0] == losses[1]


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_group_of_one_rank_equals_no_group(device):
    embeddings, labels = batch(7, 6, 11)
    with group_of_one(device) as group:
        heads = [filled(build_head("dist_curricularface", 11, 6, group=one)) for one in (group, None)]
        for head in heads:
            rows = RowSGD(head.to(device))
            x = embeddings.detach().float().to(device).requires_grad_()
            head(x, labels.to(device), with_accuracy=True).loss.backward()
            rows.step()
    torch.testing.assert_close(heads[0].weight, heads[1].weight)


def test_evaluation_uses_all_classes_and_does_not_update_running_statistics():
    head = filled(build_head("dist_curricularface", 30, 6, sampling=Sampling(0.2), row_dtype=torch.float64))
    head.eval()
    embeddings, labels = batch(5, 6, 30)
    assert_equals_reference(head, embeddings, labels)
    assert head.margin.t == 0


SATURATED = {
    "cosine one": lambda w: w[[0, 1]],
    "cosine minus one": lambda w: -w[[0, 1]],
    "zero embedding": lambda w: torch.zeros_like(w[[0, 1]]),
    "far out": lambda w: w[[0, 1]] * 1e6,
}


@pytest.mark.parametrize("name", COSINE_MARGINS)
@pytest.mark.parametrize("case", SATURATED)
def test_saturated_samples_give_finite_losses_and_gradients(name, case):
    head = filled(ShardedHead(9, 6, build_margin(name)))
    embeddings = SATURATED[case](head.weight.detach()).requires_grad_()
    output = head(embeddings, torch.tensor([0, 1]))
    found = gradients(output.loss, head, embeddings)
    assert output.loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in found)
    if case == "zero embedding":
        assert not found[0].any()


def test_two_classes_do_not_underflow():
    head = ShardedHead(2, 4, build_margin("arcface"))
    with torch.no_grad():
        head.weight.copy_(torch.eye(4)[:2] * torch.tensor([[1.0], [-1.0]]))
    output = head(torch.tensor([[-1.0, 0, 0, 0]], requires_grad=True), torch.tensor([0]))
    assert output.loss.item() == pytest.approx(64 * 1.24, abs=2)


def test_nan_counts_as_the_lowest_logit():
    scores, classes = build_head("dist_arcface", 3, 2).topk(torch.tensor([[math.nan, 1.0]]), 5)
    assert (scores.tolist(), classes.tolist()) == ([[-math.inf] * 3], [[0, 1, 2]])


@pytest.mark.parametrize(
    ("make", "noun"),
    [
        (lambda: build_head("dist_arcfase", 5, 4), "did you mean 'dist_arcface'"),
        (lambda: build_head("dist_softmax", 5, 4, centers=2), "sub-centres"),
        (lambda: build_head("dist_arcface", 5, 4, row_dtype="half"), "row_dtype"),
        (lambda: Sampling(1.5), "sample ratio"),
        (lambda: Sampling(1.0, hard=0.5), "hard fraction"),
        (lambda: Sampling({5: 1.0}), "sample ratio"),
        (lambda: Execution(products="float16"), "products"),
        (lambda: RowSGD(build_head("dist_arcface", 5, 4), lr=-1.0), "lr"),
        (lambda: RowAdamW(build_head("dist_arcface", 5, 4), state_dtype="int8"), "state_dtype"),
        (lambda: choose_backend("triton", CPU, torch.float32, torch.float32, None, 32), "triton kernels"),
    ],
)
def test_settings_of_the_head_that_cannot_be_are_refused(make, noun):
    with pytest.raises(OptionError, match=noun):
        make()


def test_non_finite_embeddings_raise_or_pass():
    embeddings = torch.randn(3, 4)
    embeddings[1, 2] = math.inf
    labels = torch.tensor([0, 4, 1])
    with pytest.raises(DataError, match=r"position 1 \(label 4\)"):
        build_head("dist_arcface", 5, 4)(embeddings, labels)
    passed = build_head("dist_arcface", 5, 4, on_nonfinite="pass")(embeddings, labels)
    assert not passed.mean_loss.isfinite()


@pytest.mark.parametrize("loss_type", ["dist_arcface", "dist_softmax", "magface"])
def test_embeddings_may_be_non_contiguous_or_bfloat16(loss_type):
    x, labels = batch(6, 4, 5)
    head = filled(build_head(loss_type, 5, 4))
    with torch.no_grad():
        expected = copy.deepcopy(head)(x.float(), labels).loss
        transposed = copy.deepcopy(head)(x.float().T.contiguous().T, labels).loss
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = copy.deepcopy(head)(x.bfloat16(), labels).loss
    torch.testing.assert_close(transposed, expected)
    torch.testing.assert_close(low, expected, rtol=0.05, atol=0.5)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 9000), st.integers(0, 5000))
def test_initial_class_weights_do_not_depend_on_the_shard(start, length):
    whole = initial_rows(3, 0, 14000, 2)
    assert torch.equal(initial_rows(3, start, start + length, 2), whole[start : start + length])
    codes = initial_rows(3, start, start + length, 2, torch.int8)
    assert torch.equal(codes, initial_rows(3, 0, 14000, 2, torch.int8)[start : start + length])
    assert len(torch.unique(whole, dim=0)) == 14000
    assert not torch.equal(whole, initial_rows(1, 0, 14000, 2))


class GrowingScale(ArcFace):
    """A margin whose `observe` changes the scale."""

    def observe(self, cosine, norm):
        self.scale = 40.0


def test_a_margin_may_change_its_scale_in_observe():
    x, labels = batch(6, 4, 5)
    expected = filled(build_head("arcface", 5, 4, margin=ArcFace(scale=40.0)))(x.float(), labels).mean_loss
    for loss_type in ("arcface", "dist_arcface"):
        head = filled(build_head(loss_type, 5, 4, margin=GrowingScale(scale=10.0)))
        torch.testing.assert_close(head(x.float(), labels).mean_loss, expected)


def test_wrong_margins_per_class_are_refused_with_class_count_margin_and_range():
    counts = torch.tensor([0, 16, 1])
    margins = margins_of_counts(counts, a=2.0, b=0.5)
    assert margins.tolist() == [2.5, 1.5, 2.5]
    for name, wrong, noun in (
        ("arcface", margins, r"class 0 \(0 images\)"),
        ("cosface", torch.tensor([2.0, math.nan, -5.0]), "class 1"),
        ("sphereface", torch.tensor([1.0, 50.0, math.inf]), "class 2"),
    ):
        with pytest.raises(OptionError, match=noun):
            build_margin(name).set_class_margins(wrong, counts)


@pytest.mark.parametrize("loss_type", ["arcface", "dist_arcface"])
def test_labels_may_be_an_array_or_a_list(loss_type):
    head, embeddings = filled(build_head(loss_type, 5, 4)), torch.arange(8.0).view(2, 4)
    wanted = head(embeddings, torch.tensor([1, 4])).loss
    for labels in (
        [1, 4],
        np.array([1, 4], np.int32),
        np.array([1, 4], np.uint8),
        torch.tensor([1, 4], dtype=torch.int32),
    ):
        assert head(embeddings, labels).loss.equal(wanted)
    for x, y in (
        (embeddings, [1.0, 4.0]), (embeddings, [1]), (embeddings[:, :3], [1, 4]), (embeddings.long(), [1, 4]),
    ):  # fmt: skip
        with pytest.raises(DataError):
            head(x, y)


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
    for count in (8, 24):  # less and more than half of the others: different algorithms
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
