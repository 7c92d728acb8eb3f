"""Compare the C kernels with the formulas in float64."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plsc.errors import OptionError
from plsc.heads.kernels import NativeBackend, choose_backend, unavailable
from plsc.heads.softmax import ENGINES, Execution, ForwardContext, Queries, Sums
from plsc.heads.weights import SCALE_BYTES, Rows, Rule, States, apply_rule, decode_rows, encode_rows

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"native kernels: {unavailable()}")

FLOAT, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8
SUPPORTED = [engine for engine in ENGINES if unavailable(BF16, engine) is None]
SCALE, SHIFT = 16.0, 3.0
each_engine = pytest.mark.parametrize("engine", SUPPORTED)


@dataclass(frozen=True)
class Shape:
    """The parameters of a case."""

    batch: int = 21
    classes: int = 50
    dimension: int = 37
    centers: int = 1
    row_dtype: torch.dtype = FLOAT
    cosine: bool = True
    is_sampled: bool = False
    has_hard: bool = False
    has_extremes: bool = False
    products: torch.dtype = FLOAT
    threads: int = 2
    seed: int = 0
    engine: str | None = None


def on(engine: str, **parts: Any) -> Shape:
    """Return a shape for an engine and the products that it computes."""
    products = FLOAT if unavailable(FLOAT, engine) is None else BF16
    return Shape(engine=engine, products=products, **parts)


shapes = st.builds(
    on,
    batch=st.integers(0, 40) | st.just(150),
    classes=st.integers(0, 40) | st.integers(200, 300),
    dimension=st.integers(1, 70),
    centers=st.sampled_from([1, 1, 2, 3]),
    row_dtype=st.sampled_from([FLOAT, BF16, INT8]),
    cosine=st.booleans(),
    is_sampled=st.booleans(),
    has_hard=st.booleans(),
    has_extremes=st.booleans(),
    engine=st.sampled_from(SUPPORTED or ENGINES),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)


def make(shape: Shape) -> tuple[Rows, Queries]:
    generator = torch.Generator().manual_seed(shape.seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    k, n = shape.centers, shape.classes * shape.centers
    held = 2 * shape.classes if shape.is_sampled else shape.classes
    weight = normal(held * k, shape.dimension)
    if shape.cosine and shape.has_extremes:
        weight *= 10 ** torch.linspace(-30, 30, len(weight))[:, None]
    if shape.cosine and len(weight):
        weight[0] = 0  # counts as zero
    selected = None
    if shape.is_sampled:
        chosen = torch.randperm(held, generator=generator)[: shape.classes].sort().values
        selected = (chosen[:, None] * k + torch.arange(k)).flatten()
    assert selected is None or len(selected) == n
    unit = normal(shape.batch, shape.dimension)
    if shape.cosine:
        unit = torch.nn.functional.normalize(unit)
    target = torch.randint(-1, max(shape.classes, 1), (shape.batch,), generator=generator)
    if not shape.classes:
        target.fill_(-1)
    rows = Rows(
        encode_rows(weight) if shape.row_dtype is INT8 else weight.to(shape.row_dtype),
        bias=None if shape.cosine else normal(len(weight)),
        centers=k,
        cosine=shape.cosine,
        first_row=2**32 - 7,
    )
    rows = rows if selected is None else rows.of_rows(selected)
    has_hard = shape.has_hard and shape.cosine
    queries = Queries(
        unit,
        target,
        scale=SCALE if shape.cosine else 1.0,
        threshold=0.3 * normal(shape.batch) if has_hard else None,
        hard_factor=torch.tensor(0.2) if has_hard else None,
    )
    return rows, queries


def backend(shape: Shape) -> NativeBackend:
    return NativeBackend(shape.products, threads=shape.threads, engine=shape.engine)


def unit_rows(rows: Rows, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return normalised class weights, rounded as inputs of the products, and their norms, in float64."""
    w = rows.values(rows.positions(slice(0, len(rows)))).double()
    length = w.norm(dim=1)
    if rows.cosine:
        w = torch.where(length[:, None] > 0, w / length[:, None], 0)
    return w.float().to(dtype).double(), length


def logits(rows: Rows, queries: Queries, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return z [B, n], -inf for the label and for losing sub-centres, and the slopes."""
    w, _ = unit_rows(rows, dtype)
    c = queries.unit.to(dtype).double() @ w.T
    if rows.bias is not None:
        c += rows.bias[rows.positions(slice(0, len(rows)))].double()
    by_class = c.view(len(c), c.shape[1] // rows.centers, rows.centers)
    if by_class.numel():
        winner = by_class.argmax(dim=2, keepdim=True)
        loses = torch.ones_like(by_class, dtype=torch.bool).scatter_(2, winner, False)
    else:
        loses = torch.ones_like(by_class, dtype=torch.bool)
    z, slope = queries.scale * c, torch.ones_like(c)
    if queries.threshold is not None:
        hard = c > queries.threshold[:, None]
        z = torch.where(hard, z * (queries.hard_factor + c), z)
        slope = torch.where(hard, queries.hard_factor + 2 * c, slope)
    target = queries.target[:, None] == torch.arange(by_class.shape[1])
    masked = (loses | target[:, :, None]).view_as(z)
    return z.masked_fill(masked, -math.inf), slope


def near_threshold(rows: Rows, queries: Queries, dtype: torch.dtype) -> bool:
    """Return whether rounding may change which classes are hard, or which sub-centre wins."""
    w, _ = unit_rows(rows, dtype)
    c = queries.unit.to(dtype).double() @ w.T
    margin = 1e-5 if dtype is FLOAT else 1e-2
    close = torch.zeros(())
    if queries.threshold is not None:
        close = close + ((c - queries.threshold[:, None]).abs() < margin).sum()
    if rows.centers > 1 and c.numel():
        if rows.bias is not None:
            c += rows.bias[rows.positions(slice(0, len(rows)))].double()
        top = c.view(len(c), c.shape[1] // rows.centers, rows.centers).topk(2, dim=2).values
        close = close + ((top[..., 0] - top[..., 1]) < margin).sum()
    return bool(close)


def some_context(shape: Shape, rows: Rows, queries: Queries) -> ForwardContext:
    generator = torch.Generator().manual_seed(shape.seed + 1)
    z, _ = logits(rows, queries, shape.products)
    own = torch.randn(len(z), generator=generator).double()
    within = torch.randint(0, rows.centers, (len(z),), generator=generator)
    target_row = torch.where(queries.target >= 0, queries.target * rows.centers + within, -1)
    return ForwardContext(
        backend=backend(shape),
        rows=rows,
        stored=rows,
        queries=queries,
        log_total=torch.cat([z, own[:, None]], dim=1).logsumexp(dim=1).float(),
        weight=torch.rand(len(z), generator=generator) + 0.5,
        target_row=target_row,
        target_coefficient=-torch.rand(len(z), generator=generator),
        shift=torch.full((len(z),), SHIFT),
        factor=0.7,
    )


def gradients(context: ForwardContext, tile: slice | None = None) -> tuple[Tensor, Tensor | None]:
    return context.backend.gradients(context, tile or slice(0, len(context.rows)))


def update(context: ForwardContext, rule: Rule, states: States) -> Tensor | None:
    return context.backend.update([context], context.rows, rule, states)


def expected_gradients(shape: Shape, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of class weights times |W| and of biases, each with its magnitude for tolerances."""
    rows, queries = context.rows, context.queries
    z, slope = logits(rows, queries, shape.products)
    g = (z - context.log_total.double()[:, None]).exp() * slope
    here = (context.target_row >= 0).nonzero()[:, 0]
    g[here, context.target_row[here]] = context.target_coefficient[here].double()
    g *= context.weight.double()[:, None] * context.factor
    dw, size = g.T @ queries.unit.double(), g.abs().T @ queries.unit.double().abs()
    if rows.cosine:
        w, length = unit_rows(rows, FLOAT)
        dw = (dw - (dw * w).sum(dim=1, keepdim=True) * w) * (length > 0)[:, None]
        size = size + (size * w.abs()).sum(dim=1, keepdim=True)
    return dw, g.sum(dim=0), size, g.abs().sum(dim=0)


def times_norms(gradients: Tensor, rows: Rows) -> Tensor:
    """Multiply gradients by |W| if class weights are normalised: their size then does not depend on |W|."""
    _, length = unit_rows(rows, FLOAT)
    by = torch.where(length > 0, length, 1)[:, None] if rows.cosine else 1
    return gradients.cpu().double() * by


def assert_near(actual: Tensor, expected: Tensor, size: Tensor, tolerance: float) -> None:
    """Assert that sums are equal up to rounding, relative to the sum of the magnitudes of their terms."""
    worst = ((actual.double() - expected).abs() - tolerance * size).max() if size.numel() else -1
    assert worst <= 1e-30, float(worst)


def tolerance(shape: Shape) -> float:
    return 2e-5 if shape.products is FLOAT else 3e-2


def assert_sums(shape: Shape, rows: Rows, queries: Queries, sums: Sums, allowed: float) -> None:
    """Compare the sums of a forward pass, on any device, with the formula."""
    z, slope = logits(rows, queries, shape.products)
    shift = sums.shift.cpu().double()
    p = (z - torch.where(shift.isfinite(), shift, 0)[:, None]).exp()
    assert_near(sums.total.cpu(), p.sum(dim=1), p.sum(dim=1), allowed)
    if sums.weighted is not None:
        w, _ = unit_rows(rows, shape.products)
        assert_near(sums.weighted.cpu(), (p * slope) @ w, (p * slope).abs() @ w.abs(), allowed)


def assert_gradients(
    shape: Shape, context: ForwardContext, here: ForwardContext, middle: int, allowed: float
) -> None:
    """Compare the gradients of two tiles with the formula; here: the context on the device of the kernels."""
    rows = context.rows
    parts = [gradients(here, tile) for tile in (slice(0, middle), slice(middle, len(rows)))]
    dw, db, size, bias_size = expected_gradients(shape, context)
    if rows.cosine:  # denormal gradients are flushed to zero
        size = size + unit_rows(rows, FLOAT)[1][:, None] * 2.0**-126 / allowed
    assert_near(times_norms(torch.cat([part[0] for part in parts]), rows), dw, size, allowed)
    biases = [part[1] for part in parts if part[1] is not None]
    assert bool(biases) == (rows.bias is not None)
    if biases:
        assert_near(torch.cat(biases).cpu(), db, bias_size, allowed)


@given(shapes, st.booleans(), st.booleans())
def test_forward_sums_equal_the_formula(shape: Shape, is_fixed: bool, want_weighted: bool) -> None:
    rows, queries = make(shape)
    if near_threshold(rows, queries, shape.products):
        return
    shift = SHIFT if is_fixed else None
    sums = backend(shape).forward(rows, queries, fixed_shift=shift, want_weighted=want_weighted)
    assert (sums.weighted is not None) == want_weighted
    if is_fixed:
        assert torch.equal(sums.shift, torch.full((shape.batch,), SHIFT))
    else:
        z, _ = logits(rows, queries, shape.products)
        highest = z.amax(dim=1) if z.shape[1] else z.new_full((len(z),), -math.inf)
        atol = 1e-2 * tolerance(shape) * SCALE
        torch.testing.assert_close(sums.shift.double(), highest, rtol=tolerance(shape), atol=atol)
    assert_sums(shape, rows, queries, sums, tolerance(shape))


@given(shapes, st.booleans())
def test_weight_gradients_equal_the_formula(shape: Shape, with_kept: bool) -> None:
    rows, queries = make(shape)
    if near_threshold(rows, queries, shape.products):
        return
    context = some_context(shape, rows, queries)
    allowed = tolerance(shape)
    if with_kept:
        sums = backend(shape).forward(rows, queries, fixed_shift=SHIFT, keep=True)
        context = replace(context, shift=sums.shift, kept=sums.kept)
        allowed = max(allowed, 2**-8)
    assert_gradients(shape, context, context, shape.classes // 2 * shape.centers, allowed)


RULES = [
    Rule("sgd", lr=0.1),
    Rule("sgd", lr=0.1, momentum=0.9, weight_decay=0.02),
    Rule("sgd", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.02),
    Rule("adamw", lr=0.1, weight_decay=0.02, beta2=0.99),
    Rule("adagrad", lr=0.1, weight_decay=0.02),
]


def states_of(rule: Rule, rows: Rows, dtype: torch.dtype) -> dict[str, Tensor]:
    shape = (len(rows.weight), rows.dimension)
    generator = torch.Generator().manual_seed(5)
    if rule.kind == "adagrad":
        return {"sum_of_squares": torch.rand(shape[0], generator=generator).to(dtype)}
    if rule.kind == "adamw":
        return {
            "exp_avg": torch.randn(shape, generator=generator).to(dtype),
            "exp_avg_sq": torch.rand(shape, generator=generator).to(dtype),
            "steps": torch.randint(0, 5, shape[:1], generator=generator, dtype=torch.int32),
        }
    momentum = torch.randn(shape, generator=generator)
    return {"momentum_buffer": momentum.to(dtype)}


def assert_update(
    context: ForwardContext, rule: Rule, states: States, precision: float = 1e-5, share: float = 0.99
) -> None:
    """Compare an update with the rule in PyTorch; only selected class weights and states change.

    precision: of float32. share: of bfloat16 values that must be equal.
    """
    rows, everything = context.rows, slice(0, len(context.rows))
    dw, db = gradients(context)
    plain = replace(rows, weight=rows.weight.clone())
    plain_states = {name: state.clone() for name, state in states.items()}
    apply_rule(rule, plain, everything, dw, plain_states)
    untouched = torch.ones(len(rows.weight), dtype=torch.bool, device=dw.device)
    untouched[rows.positions(everything)] = False
    before = {name: x.clone() for name, x in {"": rows.weight, **states}.items()}

    torch.testing.assert_close(update(context, rule, states), db)

    for name, actual in {"": rows.weight, **states}.items():
        expected = {"": plain.weight, **plain_states}[name]
        assert torch.equal(actual[untouched], before[name][untouched])
        is_equal = (actual == expected).double()
        if actual.dtype is INT8:  # one code more or less where a rounding error meets the noise
            step = decode_rows(expected).abs().amax(dim=1, keepdim=True) / 60
            assert ((decode_rows(actual) - decode_rows(expected)).abs() <= step).all()
            assert is_equal[:, :-SCALE_BYTES].mean() > 0.999
            continue
        # A difference in the last bit of float32 may change the rounding.
        allowed = {FLOAT: precision, BF16: 2**-7, torch.int32: 0.0}[actual.dtype]
        torch.testing.assert_close(actual, expected, rtol=allowed, atol=precision / 5 if allowed else 0)
        assert is_equal.mean() > (share if actual.dtype is BF16 else 0.1)


@each_engine
@pytest.mark.parametrize(
    ("row_dtype", "state_dtype", "is_sampled"),
    [
        (FLOAT, FLOAT, True),
        (FLOAT, BF16, False),
        (BF16, BF16, True),
        (INT8, FLOAT, False),
        (INT8, BF16, True),
    ],
)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.kind}-{rule.momentum}-{rule.nesterov}")
def test_update_changes_only_the_selected_class_weights(
    rule: Rule, is_sampled: bool, row_dtype: torch.dtype, state_dtype: torch.dtype, engine: str
) -> None:
    shape = on(engine, row_dtype=row_dtype, is_sampled=is_sampled, classes=130, cosine=not is_sampled)
    rows, queries = make(shape)
    assert_update(some_context(shape, rows, queries), rule, states_of(rule, rows, state_dtype))


@each_engine
def test_an_update_does_not_depend_on_the_number_of_threads(engine: str) -> None:
    shape = on(engine, batch=140, classes=1000, row_dtype=BF16)
    changed = []
    for threads in (1, 2, 5):
        rows, queries = make(shape)
        context = some_context(shape, rows, queries)
        states = states_of(RULES[1], rows, BF16)
        context.backend = backend(replace(shape, threads=threads))
        update(context, RULES[1], states)
        changed.append((rows.weight, states["momentum_buffer"]))
    for weight, momentum in changed[1:]:
        assert torch.equal(weight, changed[0][0])
        assert torch.equal(momentum, changed[0][1])


@each_engine
def test_large_logits_do_not_overflow_with_a_running_maximum(engine: str) -> None:
    shape = on(engine, cosine=False, classes=900, batch=33)
    rows, queries = make(shape)
    rows.weight *= torch.linspace(1, 40, len(rows))[:, None]
    sums = backend(shape).forward(rows, queries, fixed_shift=None)
    z, _ = logits(rows, queries, shape.products)
    assert z.max() > 500
    log_total = sums.total.double().log() + sums.shift.double()
    rtol = 1e-5 if shape.products is FLOAT else 1e-2
    torch.testing.assert_close(log_total, z.logsumexp(dim=1), rtol=rtol, atol=0)
    assert_sums(shape, rows, queries, sums, 1e-3 if shape.products is FLOAT else 3e-2)


@pytest.mark.parametrize("engine", [engine for engine in SUPPORTED if on(engine).products is FLOAT])
def test_bfloat16_products_are_float32_products_without_their_instructions(engine: str) -> None:
    rows, queries = make(Shape())
    totals = [
        NativeBackend(products, engine=engine).forward(rows, queries, fixed_shift=SHIFT).total
        for products in (FLOAT, BF16)
    ]
    assert torch.equal(*totals)


@pytest.mark.parametrize("engine", ENGINES)
def test_execution_selects_the_kernels_of_an_instruction_set(engine: str) -> None:
    parts = (torch.device("cpu"), FLOAT, BF16, None, 8)
    kernels = Execution(kernels=engine).kernels
    if engine in SUPPORTED:
        backend = choose_backend(kernels, *parts)
        assert isinstance(backend, NativeBackend)
        assert backend.engine == engine
    else:
        with pytest.raises(OptionError, match=f"does not support {engine}"):
            choose_backend(kernels, *parts)


@each_engine
def test_exponentials_are_exact_to_float32_over_the_whole_range_of_logits(engine: str) -> None:
    # One class with exact products: total = exp(x - shift) for each sample.
    products = on(engine).products
    x = torch.cat([torch.linspace(-84, 88.7, 4001), torch.tensor([89.0, 1e9, math.inf])]).to(products).float()
    queries = Queries(x[:, None].clone(), torch.full((len(x),), -1))
    rows = Rows(torch.ones(1, 1), cosine=False)
    one = NativeBackend(products, engine=engine)
    sums = one.forward(rows, queries, fixed_shift=0.0, want_weighted=False)
    torch.testing.assert_close(sums.total.double(), x.double().exp().float().double(), rtol=2e-7, atol=0)


@each_engine
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_inputs_make_the_sums_non_finite(bad: float, engine: str) -> None:
    rows, queries = make(Shape())
    queries.unit[3, 5] = bad
    sums = backend(on(engine)).forward(rows, queries, fixed_shift=SHIFT)
    assert sums.total.isfinite().tolist() == [i != 3 for i in range(21)]


@each_engine
def test_rounding_keeps_non_finite_values(engine: str) -> None:
    rows, queries = make(Shape(row_dtype=BF16, cosine=False))
    context = some_context(on(engine, cosine=False), rows, queries)
    rows.weight[7, 3], rows.weight[8, 3] = math.nan, math.inf
    context.weight.zero_()
    update(context, Rule("sgd", lr=0.0), {})
    assert rows.weight[7, 3].isnan()
    assert not rows.weight[8, 3].isfinite()


def test_unsupported_tensors_raise() -> None:
    rows, queries = make(Shape())
    for weight in (rows.weight.double(), rows.weight[:, ::2]):
        with pytest.raises(ValueError, match="contiguous"):
            NativeBackend().forward(replace(rows, weight=weight), queries, fixed_shift=0.0)
