"""Several heads over one backbone, against the textbook's loss of each on its own images."""

import pytest
import torch

from plsc.errors import DataError
from plsc.heads import RowSGD, build_head
from plsc.heads.base import effective_rank, join_outputs
from plsc.heads.joint import Heads
from tests import reference

DIMENSION, LR = 6, 0.3
KINDS = {"faces": ("dist_arcface", 7), "glyphs": ("cosface", 5), "cars": ("dist_softmax", 4)}
FIRST = {"faces": 0, "glyphs": 7, "cars": 12}


def heads():
    return {
        name: build_head(kind, classes, DIMENSION, row_dtype="float64", seed=seed).double()
        for seed, (name, (kind, classes)) in enumerate(KINDS.items())
    }


def batch(*labels, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(labels), DIMENSION, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), torch.tensor(labels)


def textbook(alone, x, labels):
    """Return the sum over the heads of (its images / images) times its mean loss, and these means."""
    means, total = {}, 0.0
    for name, head in alone.items():
        mine = (labels >= FIRST[name]) & (labels < FIRST[name] + head.class_num)
        if mine.any():
            bias = head.bias
            y = labels[mine] - FIRST[name]
            means[name] = reference.mean_loss(head.margin, x[mine], head.weight, bias, y)
            total = total + means[name] * (int(mine.sum()) / len(labels))
    return total, means


def test_the_loss_and_all_gradients_are_the_textbooks_over_each_heads_images():
    x, labels = batch(3, 12, 8, 0, 6, 15, 3, 11, 7)  # mixed, one class twice
    alone = heads()
    expected, means = textbook(alone, x, labels)
    wanted = torch.autograd.grad(expected, [x, *(p for h in alone.values() for p in h.parameters())])

    named = heads()
    joint = Heads(named, {n: RowSGD(named[n], lr=LR, momentum=0) for n in ("faces", "cars")})
    before = [p.detach().clone() for p in joint.parameters()]
    output = joint(x, labels, with_accuracy=True, with_gauge=True)
    output.loss.backward()
    joint.update()
    torch.testing.assert_close(output.loss, expected, rtol=1e-12, atol=0)
    assert output.batch == 9
    for name, mean in means.items():
        torch.testing.assert_close(output.parts[name].mean_loss, mean.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(x.grad, wanted[0], rtol=1e-10, atol=1e-14)
    for (key, parameter), old, gradient in zip(joint.named_parameters(), before, wanted[1:], strict=True):
        if "glyphs" in key:  # all its rows are here, for a torch optimizer
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-14)
            continue
        torch.testing.assert_close(parameter.detach(), old - LR * gradient)
    hits = sum(float(part.accuracy) * part.batch for part in output.parts.values())
    assert float(output.accuracy) == pytest.approx(hits / 9)
    faces = labels < 7
    assert float(output.parts["faces"].effective_rank) == pytest.approx(
        float(effective_rank(x[faces])), abs=1e-6
    )


def test_a_head_without_an_image_is_left_out_and_keeps_its_rows():
    x, labels = batch(1, 8, 2)
    named = heads()
    joint = Heads(named, {n: RowSGD(named[n], weight_decay=0.1) for n in ("faces", "cars")})
    before = joint.by_name["cars"].weight.detach().clone()
    output = joint(x, labels)
    output.loss.backward()
    joint.update()
    assert list(output.parts) == ["faces", "glyphs"]
    assert output.accuracy is None
    assert joint.by_name["cars"].weight.equal(before)
    torch.testing.assert_close(output.mean_loss, textbook(heads(), x, labels)[0].detach())


def test_micro_batches_together_say_what_the_whole_batch_says():
    x, labels = batch(0, 8, 13, 2, 4, 9, 3)
    joint = Heads(heads())
    whole = joint(x, labels, with_accuracy=True)
    parts = [joint(x[s], labels[s], with_accuracy=True) for s in (slice(0, 2), slice(2, None))]
    joined = join_outputs(parts)
    torch.testing.assert_close(joined.mean_loss, whole.mean_loss)
    assert joined.batch == whole.batch
    assert joined.parts.keys() == whole.parts.keys()
    for name, part in whole.parts.items():
        assert joined.parts[name].batch == part.batch
        torch.testing.assert_close(joined.parts[name].mean_loss, part.mean_loss)
        torch.testing.assert_close(joined.parts[name].accuracy, part.accuracy)


def test_a_label_out_of_range_and_an_empty_batch_are_refused():
    joint = Heads(heads())
    for label in (-1, 16):
        with pytest.raises(DataError, match=r"1 labels .* outside 0\.\.15"):
            joint(*batch(3, label))
    with pytest.raises(DataError, match="no rank has a sample"):
        joint(torch.empty(0, DIMENSION).double(), torch.empty(0, dtype=torch.int64))
