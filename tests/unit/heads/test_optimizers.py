"""Compare row optimizers with torch's optimizers on full gradients."""

import copy

import pytest
import torch

from plsc.heads import (
    Execution,
    RowAdagrad,
    RowAdamW,
    RowSGD,
    Sampling,
    ShardedHead,
    build_margin,
)
from tests import reference
from tests.devices import GPU

CLASSES, DIMENSION, BATCH = 40, 6, 7


def make_head(margin="arcface", row_dtype=torch.float64, centers=1, offload=False, **parts):
    head = ShardedHead(
        CLASSES,
        DIMENSION,
        build_margin(margin),
        centers=centers,
        row_dtype=row_dtype,
        offload=offload,
        **parts,
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn)
    return head


def batches(count, dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    for _ in range(count):
        x = torch.randn(BATCH, DIMENSION, generator=generator, dtype=torch.float64) * 5
        yield x.to(dtype).requires_grad_(), torch.randint(CLASSES, (BATCH,), generator=generator)


class NaiveAdagrad(torch.optim.Optimizer):
    """Row-wise Adagrad on full gradients."""

    def __init__(self, parameters, lr, eps, weight_decay):
        super().__init__(list(parameters), {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        for p in group["params"]:
            g = p.grad + group["weight_decay"] * p
            rows = g.view(len(p) if p.ndim < 3 else p.shape[0] * p.shape[1], -1)
            state = self.state[p].setdefault("h", torch.zeros(len(rows), dtype=p.dtype))
            state += rows.square().mean(dim=1)
            step = group["lr"] * rows / (state.sqrt() + group["eps"])[:, None]
            p -= step.view_as(p)


OPTIMIZERS = {
    "sgd": (
        lambda head, **k: RowSGD(head, lr=0.1, momentum=0.9, weight_decay=0.01, **k),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    ),
    "nesterov": (
        lambda head, **k: RowSGD(head, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True, **k),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    ),
    "plain sgd": (
        lambda head, **k: RowSGD(head, lr=0.1, momentum=0.0, weight_decay=0.01, **k),
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    ),
    "adamw": (
        lambda head, **k: RowAdamW(head, lr=0.01, weight_decay=0.1, **k),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    ),
    "adagrad": (
        lambda head, **k: RowAdagrad(head, lr=0.1, weight_decay=0.01, **k),
        lambda p: NaiveAdagrad(p, lr=0.1, eps=1e-10, weight_decay=0.01),
    ),
}


def assert_same_parameters(head, truth, tolerance):
    for mine, right in zip(head.parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(mine.double(), right.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("margin", ["arcface", "curricularface", "magface", "softmax"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_row_optimizers_equal_torch_optimizers_on_full_gradients(margin, name):
    ours, theirs = OPTIMIZERS[name]
    centers = 1 if margin == "softmax" else 2
    execution = Execution(tile=9, keep_bytes=10**6 if margin == "magface" else 0)
    head = make_head(margin, centers=centers, execution=execution)
    truth = make_head(margin, centers=centers)
    rows, optimizer = ours(head), theirs(truth.parameters())
    for x, y in batches(5):
        head(x, y).loss.backward()
        assert head.weight.grad is None
        truth(x.detach().requires_grad_(), y).loss.backward()
        rows.step()
        optimizer.step()
        optimizer.zero_grad()
        assert_same_parameters(head, truth, 1e-9)


@pytest.mark.parametrize("sampling", [None, Sampling(0.3)])
@pytest.mark.parametrize("margin", ["arcface", "softmax"])
def test_accumulated_micro_batches_equal_one_step_with_summed_gradients(sampling, margin):
    head = make_head(margin, sampling=sampling, execution=Execution(tile=9))
    truth = copy.deepcopy(head)
    rows = RowSGD(head, weight_decay=0.01)
    optimizer = torch.optim.SGD(truth.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    before = copy.deepcopy(head.state_dict())
    shares, touched = (0.5, 0.3, 0.2), torch.zeros(CLASSES, dtype=torch.bool)
    for share, (x, y) in zip(shares, batches(3), strict=True):
        (head(x, y).loss * share).backward()
        context = head.contexts[-1]
        touched[context.rows.selected if sampling else slice(None)] = True
        # The reference masks the classes that were not sampled.
        allowed = context.rows.selected if sampling else torch.arange(CLASSES)
        mask = torch.zeros(CLASSES, dtype=torch.bool)
        mask[allowed] = True
        loss = reference.mean_loss(truth.margin, x.detach(), truth.weight, truth.bias, y, allowed=mask)
        (loss * share).backward()
    norm = torch.cat([p.grad.flatten() for p in truth.parameters()]).norm()
    assert rows.gradient_norm().item() == pytest.approx(norm.item(), rel=1e-9)
    rows.step()
    optimizer.step()
    for mine, right in zip(head.parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(mine[touched], right[touched], rtol=1e-9, atol=1e-9)
    assert torch.equal(head.weight[~touched], before["weight"][~touched])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("margin", "row_dtype"), [("arcface", torch.bfloat16), ("softmax", torch.float32)])
def test_class_weights_and_states_that_are_not_sampled_do_not_change(name, margin, row_dtype):
    ours, _ = OPTIMIZERS[name]
    head = make_head(margin, row_dtype=row_dtype, sampling=Sampling(0.2))
    rows = ours(head)
    states = [(key, t) for p in head.parameters() for key, t in rows.state[p].items()]
    tensors = [*(p.detach() for p in head.parameters()), *(t for _, t in states)]
    sampled = torch.zeros(CLASSES, dtype=torch.bool)
    for x, y in batches(20, torch.float32):
        before = [t.clone() for t in tensors]
        head(x, y).loss.backward()
        drawn = torch.zeros(CLASSES, dtype=torch.bool)
        drawn[head.contexts[0].rows.selected] = True
        rows.step()
        sampled |= drawn
        changed = 0
        for old, new in zip(before, tensors, strict=True):
            assert torch.equal(old[~drawn], new[~drawn])
            changed += int((old != new).sum())
        numbers = int(drawn.sum()) * sum(t[0].numel() for t in tensors)
        assert 0.5 * numbers < changed <= numbers
    assert sampled.sum() > 20  # each step samples other classes


@pytest.mark.parametrize(("kernels", "row_dtype"), [("torch", torch.bfloat16), ("auto", torch.float32)])
@pytest.mark.parametrize("name", ["sgd", "adamw", "adagrad"])
def test_class_weights_of_extreme_norms_are_updated_as_in_float64_and_stay_finite(name, row_dtype, kernels):
    head = make_head(row_dtype=row_dtype, execution=Execution(kernels=kernels))
    truth = make_head()
    with torch.no_grad():
        head.weight *= 10 ** torch.linspace(-30, 30, CLASSES)[:, None]
        truth.weight.copy_(head.weight)
    # The gradient is as large as 1 / norm: its square, the state of adamw and adagrad, exceeds float32.
    is_exact = truth.weight.norm(dim=1) > (1e-18 if name.startswith("ada") else 0)
    ours, theirs = OPTIMIZERS[name]
    rows, exact = ours(head), theirs(truth.parameters())
    (x, y), *others = batches(3)
    truth(x, y).loss.backward()
    exact.step()
    for embeddings, labels in ((x, y), *others):
        head(embeddings.detach().float().requires_grad_(), labels).loss.backward()
        rows.step()
        if labels is y:
            error = (head.weight - truth.weight).norm(dim=1) / truth.weight.norm(dim=1)
            assert error[is_exact].max() < (1e-4 if row_dtype == torch.float32 else 1e-2)
        assert head.weight.isfinite().all()


def test_stochastic_rounding_is_unbiased():
    head = make_head(row_dtype=torch.bfloat16)
    exact = make_head()
    with torch.no_grad():
        exact.weight.copy_(head.weight)
    rows = RowSGD(head, lr=0.01, state_dtype="bfloat16")
    exact_rows = RowSGD(exact, lr=0.01)
    start = exact.weight.detach().clone()
    for x, y in batches(30):
        head(x.detach().float().requires_grad_(), y).loss.backward()
        exact(x, y).loss.backward()
        rows.step()
        exact_rows.step()
    moved = (exact.weight - start).flatten()
    error = (head.weight.double() - exact.weight).flatten()
    assert error.norm() < 0.05 * moved.norm()
    assert abs(error.mean()) < 4 * error.std() / len(error) ** 0.5 + 1e-6  # no drift


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("margin", "sampling"), [("softmax", None), ("arcface", Sampling(0.3))])
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_offload_gives_the_same_class_weights(name, margin, sampling, device):
    ours, _ = OPTIMIZERS[name]
    head = make_head(margin, sampling=sampling)
    away = make_head(margin, sampling=sampling, offload=True).to(device)
    rows, away_rows = ours(head), ours(away)
    for x, y in batches(3):
        for h, r, place in ((head, rows, "cpu"), (away, away_rows, device)):
            h(x.detach().to(place).requires_grad_(), y.to(place)).loss.backward()
            r.step()
    assert_same_parameters(away, head, 1e-12)
