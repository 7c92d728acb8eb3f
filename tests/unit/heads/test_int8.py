"""8-bit class weights: codes and scale of each row, compared with float64 formulas."""

import numpy as np
import pytest
import torch

from plsc.errors import OptionError
from plsc.heads import RowAdagrad, RowSGD, Sampling, ShardedHead, build_margin
from plsc.heads.softmax import Execution
from plsc.heads.weights import decode_rows, encode_rows, noise
from plsc.seeds import hash_key

CLASSES, DIMENSION = 300, 96


def make_head(margin="arcface", row_dtype="int8", **settings):
    return ShardedHead(CLASSES, DIMENSION, build_margin(margin), row_dtype=row_dtype, seed=4, **settings)


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, DIMENSION, generator=generator)
    return x.requires_grad_(), torch.randint(CLASSES, (40,), generator=generator)


def parts_of(rows):
    """Return codes and scales as float64 arrays."""
    raw = rows.detach().numpy()
    return raw[:, :-4].astype(np.float64), raw[:, -4:].copy().view(np.float32).astype(np.float64)


def expected_codes(w, scale, bits):
    """Return codes and scales of updated class weights, float64. scale: the old ones; bits: of `noise`."""
    peak = np.abs(w).max(axis=1, keepdims=True)
    scale = np.where((peak <= 127 * scale) & (peak >= 63 * scale), scale, peak / 96)
    levels = np.divide(w, scale, out=np.zeros_like(w), where=scale > 0)
    return np.clip(np.floor(levels + (bits >> 8) / 2**24), -127, 127), scale


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_codes_equal_a_float64_reference_of_the_update(kernels):
    head = make_head(execution=Execution(kernels=kernels))
    rows = RowAdagrad(head, lr=0.3, eps=1e-10)
    wrong = 0
    for step in range(4):
        x, y = batch(step)
        head(x, y).loss.backward()
        (context,) = head.contexts
        everything = slice(0, CLASSES)
        g = context.backend.gradients(context, everything)[0].double().numpy()
        codes, scale = parts_of(head.weight)
        sums = rows.state[head.weight]["sum_of_squares"].double().numpy()
        bits = noise(torch.arange(CLASSES), DIMENSION, hash_key(head.seed, head.step, 3)).numpy()
        sums = sums + (g * g).mean(axis=1)
        w = codes * scale - 0.3 * g / (np.sqrt(sums) + 1e-10)[:, None]
        expected, scale = expected_codes(w, scale, bits)

        rows.step()

        found, found_scale = parts_of(head.weight)
        np.testing.assert_allclose(found_scale, scale, rtol=1e-5)
        assert np.abs(found - expected).max() <= 1
        wrong += int((found != expected).sum())
    assert wrong <= 1e-4 * 4 * CLASSES * DIMENSION


def test_rounding_is_unbiased_and_keeps_a_scale_that_fits():
    values = torch.randn(1, 64, generator=torch.Generator().manual_seed(0)) / 8
    stored = encode_rows(values * 0.9)
    draws = torch.cat([noise(torch.tensor([row]), 64, 5) for row in range(4000)]) >> 8
    coded = encode_rows(values.expand(4000, -1), stored.expand(4000, -1), draws.float() / 2**24)
    assert torch.equal(coded[:, -4:], stored[:, -4:].expand(4000, -1))
    decoded = decode_rows(coded)
    error = (decoded.mean(dim=0) - values[0]).abs()
    assert (error <= 4.5 * decoded.std(dim=0) / 4000**0.5 + 1e-7).all()
    for factor, is_kept in ((0.5, False), (0.7, True), (1.3, True), (1.4, False)):
        new = encode_rows(values * 0.9 * factor, stored)
        assert torch.equal(new[:, -4:], stored[:, -4:]) == is_kept
        largest = new[:, :-4].abs().max()
        assert (63 if is_kept else 95) <= largest <= 127


def test_a_row_that_is_not_finite_becomes_nan_and_an_empty_one_zero():
    rows = torch.ones(4, 8)
    rows[0, 3], rows[1, 2], rows[2] = float("nan"), float("inf"), 0
    decoded = decode_rows(encode_rows(rows))
    assert decoded[:2].isnan().all()
    assert torch.equal(decoded[2:], torch.stack([torch.zeros(8), torch.ones(8)]).round(decimals=6))


@pytest.mark.parametrize(
    ("margin", "centers"), [("arcface", 1), ("curricularface", 1), ("softmax", 1), ("cosface", 3)]
)
@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_a_head_computes_with_the_decoded_class_weights(margin, centers, kernels):
    how = {"centers": centers, "execution": Execution(kernels=kernels), "sampling": Sampling(0.5)}
    coded, plain = make_head(margin, **how), make_head(margin, "float32", **how)
    with torch.no_grad():
        plain.weight.copy_(decode_rows(coded.weight))
    RowSGD(coded), RowSGD(plain)
    x, y = batch(1)
    outputs = [head(x, y, with_accuracy=True) for head in (coded, plain)]
    torch.testing.assert_close(outputs[0].loss, outputs[1].loss)
    assert outputs[0].accuracy == outputs[1].accuracy
    torch.testing.assert_close(coded.topk(x, 3)[0], plain.topk(x, 3)[0])


def test_offloaded_rows_get_the_same_codes():
    heads = [make_head(offload=offload, sampling=Sampling(0.3)) for offload in (False, True)]
    optimizers = [RowSGD(head, lr=0.2, state_dtype="bfloat16") for head in heads]
    for step in range(3):
        for head, rows in zip(heads, optimizers, strict=True):
            head(*batch(step)).loss.backward()
            rows.step()
    assert torch.equal(heads[0].weight, heads[1].weight)


def test_optimizers_of_torch_are_refused():
    head = make_head()
    with pytest.raises(OptionError, match=r"int8 class weights have no gradient, .*RowSGD"):
        head(*batch(0)).loss.backward()
