"""The head in other people's loops. The loops are those of docs/head.md, run as they stand there."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import plsc.heads
from plsc.errors import CheckpointError
from plsc.heads import RowSGD, Sampling, ShardedHead, build_margin
from tests.distributed.launch import run_ranks
from tests.system import head_alone_worker as alone
from tests.system.head_alone_worker import AUTOCAST, BLOCKS, LOOP, PAGE, SCHEDULES, SETUP, train

WORKER = Path(alone.__file__)


@pytest.fixture(scope="module")
def plain():
    return train(SETUP, LOOP)


def assert_same(run, other, rtol=0.0, atol=0.0):
    """The rows, the backbones and the losses of two trainings are equal, to the bit by default."""
    torch.testing.assert_close(run.head.weight, other.head.weight, rtol=rtol, atol=atol)
    for one, two in zip(run.backbone.parameters(), other.backbone.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=rtol, atol=atol)
    torch.testing.assert_close(run.losses, other.losses, rtol=rtol, atol=atol)


def with_torch(batches, max_norm=None, steps_of_schedule=None):
    """The same training with whole gradients of the rows and a torch optimizer: no row optimizer."""
    backbone = alone.make_backbone()
    head = ShardedHead(alone.CLASSES, 512, build_margin("arcface", scale=64, margin=0.5))
    everything = [*backbone.parameters(), head.weight]
    optimizer = torch.optim.SGD(everything, lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = None
    if steps_of_schedule:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps_of_schedule)
    losses, norms = [], []
    for images, labels in batches:
        loss = head(backbone(images), labels).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        if max_norm:
            norms.append(float(nn.utils.clip_grad_norm_(everything, max_norm)))
        optimizer.step()
        if schedule:
            schedule.step()
    return alone.Run(head, backbone, losses, {"norms": norms})


def test_the_plain_loop_learns_and_equals_a_torch_optimizer_on_whole_gradients(plain):
    assert plain.losses[-1] < 0.7 * plain.losses[0]
    assert plain.head.weight.grad is None
    assert_same(plain, with_torch(alone.make_batches()), rtol=1e-4, atol=1e-5)


def test_a_loss_scale_changes_no_bit():
    # It is a power of two; in bfloat16 nothing overflows, so no step is skipped.
    scaled = BLOCKS["GradScaler"][0].replace("torch.float16", "torch.bfloat16")
    assert_same(train(SETUP, scaled), train(SETUP, AUTOCAST))


@pytest.mark.parametrize("margin", ["adaface", "curricularface"])
def test_a_step_that_overflows_leaves_no_trace_in_rows_backbone_and_statistics(margin):
    setup = re.sub(r'build_margin\(".*?\)', f'build_margin("{margin}", momentum=0.5)', SETUP)
    assert setup != SETUP
    loop = BLOCKS["GradScaler"][0].replace("torch.float16", "torch.bfloat16")
    good = alone.make_batches(8)
    images, labels = good[0]
    bad = images.clone()
    bad[5, 3] = torch.inf
    with_bad = train(setup, loop, batches=[*good[:4], (bad, labels), *good[4:]])
    without = train(setup, loop, batches=good)

    assert with_bad.names["scaler"].get_scale() == without.names["scaler"].get_scale() / 2
    statistics = dict(with_bad.head.margin.named_buffers())
    assert statistics
    for name, value in without.head.margin.named_buffers():
        assert torch.equal(statistics[name], value), name
    del with_bad.losses[4]
    assert_same(with_bad, without)


def test_accumulation_over_micro_batches_equals_whole_batches(plain):
    run = train(SETUP, *BLOCKS["Gradient accumulation"])
    pairs = zip(run.losses[::2], run.losses[1::2], strict=True)
    run.losses = [(one + two) / 2 for one, two in pairs]
    assert_same(run, plain, rtol=1e-4, atol=1e-5)


def test_two_heads_on_one_backbone_equal_replicated_heads_and_a_torch_optimizer():
    run = alone.train_two_heads(SETUP, alone.TWO_HEADS)
    backbone = alone.make_backbone()
    heads = [plsc.heads.build_head("arcface", alone.CLASSES, 512) for _ in run.names["heads"]]
    everything = [*backbone.parameters(), *(head.weight for head in heads)]
    optimizer = torch.optim.SGD(everything, lr=0.1, momentum=0.9, weight_decay=5e-4)
    both = zip(alone.make_batches(), run.names["other_batches"], strict=True)
    for (images, labels), (others, numbers) in both:
        first, second = heads[0](backbone(images), labels), heads[1](backbone(others), numbers)
        optimizer.zero_grad()
        ((2 * first.loss + second.loss) / 3).backward()  # twice as many images
        optimizer.step()
    ours = [head.weight for head in run.names["heads"]] + list(run.backbone.parameters())
    theirs = [head.weight for head in heads] + list(backbone.parameters())
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)


def test_clipping_over_all_parameters_equals_that_of_torch():
    clipped = train(SETUP, *BLOCKS["Gradient clipping"], max_norm=20.0)
    truth = with_torch(alone.make_batches(), max_norm=20.0)
    assert min(truth.names["norms"]) < 20 < max(truth.names["norms"])
    assert_same(clipped, truth, rtol=1e-4, atol=1e-5)


def test_schedules_of_torch_work_on_the_row_optimizer(plain):
    run = train(SETUP, SCHEDULES)
    assert_same(run, with_torch(alone.make_batches(), steps_of_schedule=30), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(run.head.weight, plain.head.weight, rtol=1e-2)


def test_a_run_goes_on_from_its_state_dicts_bit_for_bit(tmp_path):
    def start():
        # Rounding and sampling depend on the count of steps, which must come back too.
        head = ShardedHead(
            alone.CLASSES,
            512,
            build_margin("curricularface"),
            sampling=Sampling(ratio=0.9),
            row_dtype=torch.bfloat16,
        )
        rows = RowSGD(head, lr=0.1, momentum=0.9, state_dtype="bfloat16")
        backbone = alone.make_backbone()
        optimizer = torch.optim.SGD(backbone.parameters(), lr=0.1, momentum=0.9)
        return {"head": head, "head_optimizer": rows, "backbone": backbone, "optimizer": optimizer}

    batches, path = alone.make_batches(), tmp_path / "rank0.pt"
    keep, (state_dicts,) = start(), BLOCKS["Checkpoints"]
    train(LOOP, state_dicts, "save(path)", batches=batches[:6], path=path, **keep)
    straight = train(LOOP, batches=batches[6:], **keep)
    resumed = train(state_dicts, "load(path)", LOOP, batches=batches[6:], path=path, **start())
    assert_same(resumed, straight)
    for name, value in keep["head_optimizer"].state[straight.head.weight].items():
        assert torch.equal(resumed.names["head_optimizer"].state[resumed.head.weight][name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp", "lightning", "accelerate", "two_heads"])
def test_on_two_processes_rows_and_backbone_equal_those_of_one(mode):
    if mode in ("lightning", "accelerate"):
        pytest.importorskip(mode, reason=f"{mode} is not installed")
    # Without the variable Accelerate sees one process where there is no GPU.
    run_ranks(WORKER, 2, mode, timeout=120, env={"ACCELERATE_USE_CPU": "true"})


def test_the_backbone_may_be_inside_recomputation(plain):
    backbone = alone.make_backbone()
    layers = backbone.forward
    backbone.forward = lambda images: checkpoint(layers, images, use_reentrant=False)
    assert_same(train(SETUP, LOOP, backbone=backbone), plain)


def test_a_second_backward_raises_and_the_rows_are_changed_by_the_first_alone():
    once, twice = train(SETUP), train(SETUP)
    (images, labels) = alone.make_batches(1)[0]
    for run, times in ((once, 1), (twice, 2)):
        head, rows = run.names["head"], run.names["head_optimizer"]
        loss = head(run.backbone(images).detach().requires_grad_(), labels).loss
        loss.backward(retain_graph=True)
        if times == 2:
            with pytest.raises(RuntimeError, match="twice"):
                loss.backward()
        rows.step()
    before = train(SETUP).names["head"].weight
    assert not torch.equal(once.names["head"].weight, before)
    assert torch.equal(once.names["head"].weight, twice.names["head"].weight)


def table_of_bytes():
    return re.findall(r"^\| (\w+) \| `(.*?)` \| (\d+) \|$", PAGE.read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize(("row_type", "optimizer", "size"), table_of_bytes())
def test_rows_take_the_bytes_that_the_page_says(row_type, optimizer, size):
    head = ShardedHead(10, 512, build_margin("arcface"), row_dtype=getattr(torch, row_type))
    rows = eval(optimizer, {**vars(plsc.heads), "head": head})
    tensors = [head.weight, *rows.state[head.weight].values()]
    assert sum(tensor.nbytes for tensor in tensors) == 10 * int(size)


def test_another_ranks_state_is_refused():
    head = ShardedHead(10, 8, build_margin("arcface"))
    state = head.state_dict()
    ShardedHead(10, 8, build_margin("arcface")).load_state_dict(state)
    other = dict(state, _extra_state=torch.tensor([3, 20, 10, 20]))  # of rank 1 of 2, 20 classes
    with pytest.raises(CheckpointError, match=r"classes 10\.\.20 of 20"):
        head.load_state_dict(other)
    assert head.step == 0


def test_very_many_backward_passes_without_a_step_are_warned_of():
    head = ShardedHead(10, 8, build_margin("arcface"))
    rows = RowSGD(head)

    def go(times):
        for _ in range(times):
            head(torch.randn(2, 8, requires_grad=True), torch.tensor([1, 2])).loss.backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        go(3)
        rows.step()
        go(255)
    with pytest.warns(UserWarning, match="256 backward passes"):
        go(1)
