"""Tests that test_triton.py runs in a separate process: in Triton's interpreter on a CPU, or on a GPU."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from plsc.heads import Execution, RowSGD, ShardedHead, build_margin
from plsc.heads.kernels.triton_backend import TritonBackend
from plsc.heads.softmax import ForwardContext, Sums, rows_of
from plsc.heads.weights import Rule, apply_rule, decode_rows, encode_rows, noise, scale_bytes
from tests.unit.heads.test_int8 import expected_codes, parts_of
from tests.unit.heads.test_kernels import (
    BF16,
    FLOAT,
    INT8,
    RULES,
    SHIFT,
    Shape,
    assert_gradients,
    assert_near,
    assert_sums,
    assert_update,
    expected_gradients,
    gradients,
    logits,
    make,
    near_threshold,
    some_context,
    states_of,
    unit_rows,
    update,
)

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
TILE = 16

SHAPES = [  # as small as two tiles allow: the interpreter takes milliseconds per row and sample
    Shape(7, 18),
    Shape(12, 5),  # repeated labels
    Shape(7, 32, row_dtype=BF16, dimension=64, is_sampled=True),
    Shape(7, 20, has_hard=True, is_sampled=True),
    Shape(7, 18, has_extremes=True, row_dtype=BF16, products=BF16),
    Shape(7, 18, cosine=False, dimension=5),
    Shape(7, 18, products=BF16, cosine=False, dimension=1),
    Shape(7, 18, row_dtype=INT8, is_sampled=True, cosine=False),
    Shape(7, 20, row_dtype=INT8, dimension=64, has_hard=True, has_extremes=True),
    Shape(7, 18, row_dtype=INT8, is_sampled=True, products=BF16),
    Shape(7, 7, centers=3, has_hard=True),  # 15 of 16 columns of a tile
    Shape(7, 10, centers=2, is_sampled=True, row_dtype=BF16),
    Shape(7, 7, centers=3, cosine=False),
]


def there(x):
    """Move the tensors of a dataclass to the device of the kernels."""
    moved = {name: value.to(DEVICE) for name, value in vars(x).items() if isinstance(value, Tensor)}
    if isinstance(x, ForwardContext):
        rows = there(x.rows)
        moved |= {"rows": rows, "stored": rows, "queries": there(x.queries)}
    return replace(x, **moved)


def tolerance(shape: Shape) -> float:
    # Triton's interpreter truncates to bfloat16 instead of rounding.
    return 2e-5 if shape.products is FLOAT else 6e-2 if IS_INTERPRETED else 3e-2


def case(shape: Shape) -> ForwardContext:
    """Return the context of a forward pass of the kernels, on the CPU."""
    rows, queries = make(shape)
    has_choice = shape.has_hard or shape.centers > 1
    assert not (has_choice and near_threshold(rows, queries, shape.products)), "another seed"
    backend = TritonBackend(shape.products, TILE)
    return replace(some_context(shape, rows, queries), backend=backend)


def forward(context: ForwardContext, shift: float | None = SHIFT, **how: bool) -> Sums:
    here = there(context)
    return context.backend.forward(here.rows, here.queries, fixed_shift=shift, **how)


@pytest.mark.parametrize(
    ("shape", "shift", "keep"),
    [(shape, *((SHIFT, True), (None, False))[number % 2]) for number, shape in enumerate(SHAPES)],
)
def test_forward_sums_equal_the_formula(shape: Shape, shift: float | None, keep: bool) -> None:
    context = case(shape)
    sums = forward(context, shift, keep=keep)
    z, slope = logits(context.rows, context.queries, shape.products)
    if shift is None:
        torch.testing.assert_close(sums.shift.cpu().double(), z.amax(dim=1), rtol=1e-2, atol=1e-2)
    assert_sums(shape, context.rows, context.queries, sums, tolerance(shape))
    assert (sums.kept is not None) == keep
    if sums.kept is not None:
        assert sums.kept.stride(0) % 16 == 0  # rows are aligned
        p = (z - sums.shift.cpu().double()[:, None]).exp() * slope
        assert_near(sums.kept.cpu(), p, p.abs(), max(2**-7, tolerance(shape)))


def test_totals_are_the_same_without_the_weighted_sum() -> None:
    context = case(SHAPES[0])
    sums = forward(context, want_weighted=False)
    assert sums.weighted is None
    assert torch.equal(sums.total, forward(context).total)


@pytest.mark.parametrize(
    ("shape", "with_kept"), [(shape, number % 2 == 0) for number, shape in enumerate(SHAPES)]
)
def test_weight_gradients_equal_the_formula(shape: Shape, with_kept: bool) -> None:
    context = case(shape)
    rows, here, allowed = context.rows, there(context), tolerance(shape)
    if with_kept:
        sums = forward(context, keep=True)
        here = replace(here, shift=sums.shift, kept=sums.kept)
        allowed = max(allowed, 2**-7)
    assert_gradients(shape, context, here, 3 * rows.centers, allowed)


@pytest.mark.parametrize(
    ("rule", "row_dtype", "state_dtype"),
    [
        (RULES[0], INT8, FLOAT),
        (RULES[1], FLOAT, FLOAT),
        *((rule, BF16, BF16) for rule in RULES[2:]),
        (RULES[4], FLOAT, FLOAT),
    ],
)
def test_update_changes_only_the_selected_class_weights(
    rule: Rule, row_dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    is_sampled = row_dtype is not FLOAT
    shape = Shape(6, 20, 21, row_dtype=row_dtype, is_sampled=is_sampled, cosine=not is_sampled)
    context = there(case(shape))
    states = states_of(rule, context.rows, state_dtype)
    # Sampled class weights are rounded, so this also checks that the noise uses the global row index.
    assert_update(context, rule, {name: x.to(DEVICE) for name, x in states.items()}, 2e-5, share=0.97)


@pytest.mark.parametrize("rule", RULES[2:])
def test_codes_equal_a_float64_reference_of_the_update(rule: Rule) -> None:
    # 301 columns: most scales are not aligned. Short rows get new scales, long ones keep theirs.
    context = replace(there(case(Shape(6, 20, 301, row_dtype=INT8))), factor=30.0)
    rows, everything = context.rows, slice(0, 20)
    lengths = torch.logspace(-3, 0, 20, device=DEVICE)[:, None]
    rows.weight.copy_(encode_rows(decode_rows(rows.weight) * lengths))
    states = {name: state.to(DEVICE) for name, state in states_of(rule, rows, FLOAT).items()}
    codes, scale = parts_of(rows.weight.cpu())
    bits = noise(rows.global_indices(everything).cpu(), 301, rule.key).numpy()
    dw, _ = gradients(context)
    exact = replace(rows, weight=decode_rows(rows.weight).double())
    exact_states = {name: x.double() if x.is_floating_point() else x.clone() for name, x in states.items()}
    apply_rule(rule, exact, everything, dw.double(), exact_states)

    update(context, rule, states)

    expected, expected_scale = expected_codes(exact.weight.cpu().numpy(), scale, bits)
    found, found_scale = parts_of(rows.weight.cpu())
    np.testing.assert_allclose(found_scale, expected_scale, rtol=1e-5)
    assert 0.1 < (found_scale == scale).mean() < 0.9
    assert (found != codes).mean() > 0.5
    assert np.abs(found - expected).max() <= 1
    assert (found != expected).mean() <= 1e-4


@pytest.mark.parametrize(
    ("key", "is_compact", "row_dtype"),
    [
        (5, False, BF16),
        (2**40 + 2**32 - 1, True, BF16),
        (2**40 + 2**32 - 1, False, INT8),
        (2**31, True, INT8),
    ],
)
def test_rounding_depends_on_key_row_and_column(key: int, is_compact: bool, row_dtype: torch.dtype) -> None:
    # From zero weights, a step with lr 1 gives exactly the negative momentum before rounding.
    shape = Shape(cosine=False, is_sampled=True, dimension=21, classes=18, batch=12)
    context = case(shape)
    rows = context.rows
    assert rows.selected is not None
    rows.bias = None
    rows.weight = torch.zeros(len(rows.weight), 21 + scale_bytes(row_dtype), dtype=row_dtype)
    if is_compact:
        rows.weight, rows.is_compact = rows.weight[rows.selected], True
    context = there(context)
    rows, everything = context.rows, slice(0, len(rows))
    where, numbers = rows.positions(everything), rows.global_indices(everything)
    assert numbers.min() < 2**32 < numbers.max()
    momentum = torch.zeros(len(rows.weight), 21, dtype=BF16, device=DEVICE)
    row = 0 if isinstance(where, slice) else int(where[0])
    momentum[row, 0], momentum[row, 1] = torch.inf, torch.nan
    dw, _ = gradients(context)
    rule = Rule("sgd", lr=1.0, momentum=1.0, key=key)
    plain = replace(rows, weight=rows.weight.cpu().clone(), selected=rows.selected.cpu())
    expected = momentum.cpu().clone()  # a GPU's division by 96 is not exact
    apply_rule(rule, plain, everything, dw.cpu(), {"momentum_buffer": expected})
    update(context, rule, {"momentum_buffer": momentum})
    for actual, rounded in ((rows.weight, plain.weight), (momentum, expected)):
        found = decode_rows(actual.cpu())
        torch.testing.assert_close(found, decode_rows(rounded), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("row_dtype", [BF16, INT8])
def test_rounding_keeps_every_nan(row_dtype: torch.dtype) -> None:
    # A GPU's NaN has all bits set: adding noise would overflow it to -0.
    context = there(case(Shape(row_dtype=row_dtype, classes=20)))
    rows = context.rows
    momentum = torch.zeros(len(rows), rows.dimension, device=DEVICE)
    momentum[3] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(FLOAT)
    states, rule = {"momentum_buffer": momentum}, Rule("sgd", lr=1.0, momentum=1.0)
    update(context, rule, states)
    assert decode_rows(rows.weight[3]).isnan().all()
    assert decode_rows(rows.weight[4:]).isfinite().all()


@pytest.mark.parametrize("beta", [0.0, 0.9999])
def test_the_bias_correction_of_adamw_is_accurate(beta: float) -> None:
    # From zero states and with eps 0, the first step of Adam is lr per element for any betas.
    context = there(case(Shape(classes=9)))
    rows = context.rows
    before = rows.weight.clone()
    states = {name: torch.zeros_like(rows.weight) for name in ("exp_avg", "exp_avg_sq")}
    states["steps"] = torch.zeros(len(rows), dtype=torch.int32, device=DEVICE)
    rule = Rule("adamw", lr=0.5, beta1=beta, beta2=beta, eps=1e-30)
    update(context, rule, states)
    changed = (rows.weight - before)[1:]  # row 0 counts as zero
    torch.testing.assert_close(changed.abs(), torch.full_like(changed, 0.5), rtol=1e-5, atol=1e-6)


def test_large_logits_do_not_overflow_with_a_running_maximum() -> None:
    # Each tile has higher logits than the last; a sample whose only class is its label has no other classes.
    shape = Shape(batch=6, classes=40, cosine=False, dimension=3)
    context = case(shape)
    rows, queries = context.rows, context.queries
    rows.weight *= torch.linspace(1, 300, 40)[:, None]
    sums = forward(context, None)
    z, _ = logits(rows, queries, FLOAT)
    assert z.max() > 300
    found = sums.shift.cpu().double() + sums.total.cpu().double().log()
    torch.testing.assert_close(found, z.logsumexp(dim=1), rtol=1e-5, atol=1e-5)
    assert_sums(shape, rows, queries, sums, 1e-3)

    one = replace(rows, weight=rows.weight[:1], bias=None)
    alone = replace(context, rows=one, queries=replace(queries, target=torch.zeros_like(queries.target)))
    sums = forward(alone, None)
    assert (sums.shift == -torch.inf).all()
    assert not sums.total.any()


@pytest.mark.parametrize("shift", [SHIFT, None])
def test_nan_in_class_weights_makes_the_sums_nan(shift: float | None) -> None:
    context = case(Shape(batch=4, classes=20, centers=2, cosine=False, dimension=3))
    context.rows.weight[7, 1] = torch.nan
    context.queries.target.fill_(9)
    assert forward(context, shift).total.isnan().all()


@pytest.mark.parametrize("shape", SHAPES[2::2])
def test_class_logits_equal_the_formula(shape: Shape) -> None:
    context = case(shape)
    here, k = there(context), shape.centers
    w, _ = unit_rows(context.rows, shape.products)
    z = context.queries.unit.to(shape.products).double() @ w.T
    if context.rows.bias is not None:
        z += context.rows.bias[context.rows.positions(slice(0, len(w)))].double()
    z = z.view(len(z), -1, k).amax(dim=2) * context.queries.scale
    found = context.backend.class_logits(here.rows, here.queries, slice(k, len(w)))
    torch.testing.assert_close(found.cpu().double(), z[:, 1:], rtol=0, atol=10 * tolerance(shape))


@pytest.mark.parametrize(
    "shape",
    [Shape(8, 20, 21), Shape(8, 20, 21, is_sampled=True, cosine=False), Shape(8, 20, 21, centers=2)],
)
def test_micro_batches_are_summed_in_one_update(shape: Shape) -> None:
    context = case(shape)
    other = replace(shape, batch=5, seed=4)
    others, queries = make(other)
    rows = context.rows if others.on_host is None else context.rows.of_rows(others.on_host)
    second = some_context(other, rows, queries)
    contexts = [context, replace(second, backend=context.backend, factor=0.3)]
    before, sum_dw = context.rows.weight.double(), torch.zeros(context.rows.weight.shape).double()
    sum_db, touched = torch.zeros(len(before)).double(), torch.zeros(len(before), dtype=torch.bool)
    _, length = unit_rows(replace(context.rows, selected=None), FLOAT)
    for one, of in zip(contexts, (shape, other), strict=True):
        where = one.rows.positions(slice(0, len(one.rows)))
        dw, db, _, _ = expected_gradients(of, one)
        sum_dw[where] += dw / (length.where(length > 0, 1)[where, None] if shape.cosine else 1)
        sum_db[where] += db
        touched[where] = True

    contexts = [there(one) for one in contexts]
    weight = contexts[0].rows.weight
    contexts[1].rows.weight = weight
    stored, rows = rows_of(contexts)
    assert stored is rows
    biases = contexts[0].backend.update(contexts, rows, Rule("sgd", lr=1.0), {})

    assert (len(rows) > len(context.rows)) == shape.is_sampled
    torch.testing.assert_close(weight.cpu().double(), before - sum_dw, rtol=1e-5, atol=1e-5)
    if biases is not None:
        torch.testing.assert_close(biases.cpu().double(), sum_db[touched], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(IS_INTERPRETED, reason="NumPy computes in one order")
def test_the_same_call_gives_the_same_bits() -> None:
    context = case(Shape(classes=40, batch=18, products=BF16))
    first, second = (forward(context, keep=True) for _ in range(2))
    for name in ("total", "weighted", "kept"):
        assert torch.equal(getattr(first, name), getattr(second, name))


@pytest.mark.parametrize(("kind", "row_dtype"), [("sgd", BF16), ("adagrad", INT8)])
def test_class_weights_beyond_2_31_elements_are_indexed_correctly(kind: str, row_dtype: torch.dtype) -> None:
    # 4.3 GB of bfloat16, but the CPU allocates only pages that are used.
    shape = Shape(4, 6, 512, row_dtype=row_dtype)
    context = there(case(shape))
    rows, queries = context.rows, context.queries
    first = 2**31 // 512 + 40
    far = replace(rows, weight=rows.weight.new_empty(first + 6, rows.weight.shape[1]))
    far.weight[first:] = rows.weight
    selected = torch.arange(first, first + 6, device=DEVICE)
    some = replace(context, rows=replace(far, selected=selected))
    rows.first_row += first

    behind = replace(
        context,
        rows=far,
        queries=replace(queries, target=queries.target + first),
        target_row=context.target_row + first,
    )
    last = gradients(behind, slice(first, first + 6))[0]
    assert torch.equal(last, gradients(context)[0])

    rule, states, far_states = Rule(kind, lr=0.1, momentum=0.9), {}, {}
    if kind == "sgd":
        states["momentum_buffer"] = torch.ones(6, 512, dtype=BF16, device=DEVICE)
        far_states["momentum_buffer"] = torch.empty(first + 6, 512, dtype=BF16, device=DEVICE)
        far_states["momentum_buffer"][first:] = 1
    else:
        states["sum_of_squares"] = torch.zeros(6, device=DEVICE)
        far_states["sum_of_squares"] = torch.zeros(first + 6, device=DEVICE)
    assert torch.equal(forward(some).total, forward(context).total)
    update(context, rule, states)
    update(some, rule, far_states)
    assert torch.equal(far.weight[first:], rows.weight)
    for name, state in states.items():
        assert torch.equal(far_states[name][first:], state)


@pytest.mark.skipif(IS_INTERPRETED, reason="the head takes these kernels on a CUDA device only")
@pytest.mark.parametrize("margin", ["arcface", "softmax", "curricularface"])
@pytest.mark.parametrize("row_dtype", [FLOAT, BF16, INT8])
def test_a_head_trains_as_with_the_torch_backend(margin: str, row_dtype: torch.dtype) -> None:
    losses = {}
    products = FLOAT if row_dtype is FLOAT else BF16
    for kernels in ("torch", "triton"):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(48, 512, generator=generator).to(DEVICE)
        labels = torch.randint(0, 3000, (48,), generator=generator).to(DEVICE)
        execution = Execution(products=products, kernels=kernels, tile=700)
        head = ShardedHead(3000, 512, build_margin(margin), execution=execution, row_dtype=row_dtype).to(
            DEVICE
        )
        rows = RowSGD(head, lr=0.1, momentum=0.9, weight_decay=5e-4)
        losses[kernels] = []
        for _ in range(4):
            loss = head(x.clone().requires_grad_(), labels).loss
            loss.backward()
            rows.step()
            losses[kernels].append(float(loss))
    allowed = 1e-4 if row_dtype is FLOAT else 2e-3
    assert losses["triton"] == pytest.approx(losses["torch"], rel=allowed)
    assert losses["triton"][-1] < losses["triton"][0]
