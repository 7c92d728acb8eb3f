"""Trains a small network with the head as docs/head.md shows it; under torchrun, compares with one process.

The code is taken from the page, so that the page cannot rot.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from plsc.heads import ShardedHead

PAGE = Path(__file__).resolve().parents[2] / "docs" / "head.md"
PLAIN, SEVERAL = "Use the head in your own training loop", "DDP and FSDP2"
HEADS_EACH = "Several datasets with a head each"
CLASSES, BATCH, STEPS = 40, 32, 12

Batches = list[tuple[Tensor, Tensor]]


@dataclass
class Run:
    """What a training left: the head, its row optimizer, the backbone, and the loss of each step."""

    head: ShardedHead
    backbone: nn.Module
    losses: list[float]
    names: dict[str, Any]


def read_blocks() -> dict[str, list[str]]:
    """Return the Python of the page by heading."""
    blocks: dict[str, list[str]] = {}
    for section in re.split(r"^## ", PAGE.read_text("utf-8").removeprefix("# "), flags=re.MULTILINE):
        code = re.findall(r"^```python\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
        if code:
            blocks[section.splitlines()[0]] = code
    return blocks


BLOCKS = read_blocks()
# The first block in its paragraphs: imports; the page's own network and data; head and optimizers; the loop.
TORCH, HEADS, _, CONSTRUCTION, LOOP = BLOCKS[PLAIN][0].split("\n\n")
SETUP = f"{TORCH}\n{HEADS}\n{CONSTRUCTION}"
PROCESSES, FSDP = BLOCKS[SEVERAL]
TWO_HEADS = BLOCKS[HEADS_EACH][0].partition("\n\n")[2]  # without the page's own data
# What the page says in words: the head under autocast, a scheduler for each optimizer.
FORWARD = "    out = head(backbone(images), labels)"
AUTOCAST = LOOP.replace(
    FORWARD, f"    with torch.autocast(images.device.type, dtype=torch.bfloat16):\n    {FORWARD}"
)
SCHEDULES = f"""
cosine = torch.optim.lr_scheduler.CosineAnnealingLR
schedulers = [cosine(o, T_max=30) for o in (optimizer, head_optimizer)]
{LOOP}
    for scheduler in schedulers:
        scheduler.step()
"""


def make_backbone() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 512))


def make_batches(steps: int = STEPS, seed: int = 4) -> Batches:
    """Clusters: each sample is the centre of its class and some noise. inputs [BATCH, 16]."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, 16, generator=generator)
    batches = []
    for _ in range(steps):
        labels = torch.randint(CLASSES, (BATCH,), generator=generator)
        noise = 0.1 * torch.randn(BATCH, 16, generator=generator)
        batches.append((centres[labels] + noise, labels))
    return batches


def train(*code: str, **names: Any) -> Run:
    """Run code of the page with these names, and those that it takes for granted."""
    names = {
        "torch": torch,
        "device": "cpu",
        "classes": CLASSES,
        "backbone": make_backbone(),
        "batches": make_batches(),
        **names,
    }
    heads, losses = [], []

    def watch(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(module, ShardedHead):
            heads.append(module)
            losses.append(float(output.mean_loss))

    handle = register_module_forward_hook(watch)
    try:
        for block in (HEADS, *code):
            exec(compile(block, str(PAGE), "exec"), names)
    finally:
        handle.remove()
    head = heads[-1] if heads else names["head"]
    return Run(head, names["backbone"], losses, names)


def shares(batches: Batches, rank: int, ranks: int) -> Batches:
    """Each rank's samples of each batch; the first rank has more than the others."""
    cuts = [0, *(BATCH * (r + 1) // ranks + (3 if r + 1 < ranks else 0) for r in range(ranks))]
    mine = slice(cuts[rank], cuts[rank + 1])
    return [(images[mine], labels[mine]) for images, labels in batches]


def train_two_heads(*code: str, rank: int = 0, ranks: int = 1, **names: Any) -> Run:
    """Train on the usual data and on others, half as many: of two ranks, only the first has any of these."""
    others = [(images[: BATCH // 2], labels[: BATCH // 2]) for images, labels in make_batches(seed=5)]
    return train(*code, other_classes=CLASSES, other_batches=shares(others, rank, ranks), **names)


LIGHTNING = """
trainer = lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    devices=ranks,
    strategy=strategy,
    use_distributed_sampler=False,
    barebones=True,
)
network = Network(backbone, classes)
trainer.fit(network, torch.utils.data.DataLoader(batches, batch_size=None))
"""


def train_lightning(ranks: int, batches: Batches, **names: Any) -> Run:
    from lightning.pytorch.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend="gloo")
    code = (*BLOCKS["Lightning"], LIGHTNING)
    return train(*code, ranks=ranks, strategy=strategy, batches=batches, **names)


def train_ranks(mode: str, rank: int, ranks: int, batches: Batches) -> Run:
    """Train on the ranks that torchrun started, in one of the ways of the page."""
    hook = {}
    definition = re.search(r"^def sum_gradients.*?(?=^\S)", PROCESSES, re.MULTILINE | re.DOTALL)
    assert definition is not None
    exec("import torch.distributed as dist\n" + definition.group(), hook)
    hooked = {"sum_gradients": hook["sum_gradients"]}
    if mode == "ddp":
        return train(PROCESSES, LOOP, batches=batches)
    if mode == "fsdp":
        wrapped = PROCESSES.replace("backbone = DistributedDataParallel(backbone)\n", FSDP)
        wrapped = wrapped.replace("backbone.register_comm_hook(None, sum_gradients)\n", "")
        return train(wrapped, LOOP, batches=batches)
    if mode == "two_heads":
        two = TWO_HEADS.replace('build_margin("arcface"))', 'build_margin("arcface"), group=head.group)')
        assert two != TWO_HEADS
        return train_two_heads(PROCESSES, two, rank=rank, ranks=ranks, batches=batches)
    if mode == "accelerate":
        return train(*BLOCKS["Accelerate"], batches=batches, **hooked)
    assert mode == "lightning"
    return train_lightning(ranks, batches, **hooked)


def parameters(backbone: nn.Module) -> Iterator[Tensor]:
    for parameter in backbone.parameters():
        whole = parameter.detach()
        yield whole.full_tensor() if hasattr(whole, "full_tensor") else whole


def main(mode: str, rank: int, ranks: int) -> None:
    whole = train_two_heads(SETUP, TWO_HEADS) if mode == "two_heads" else train(SETUP, LOOP)
    mine = train_ranks(mode, rank, ranks, shares(make_batches(), rank, ranks))
    close = {"rtol": 1e-4, "atol": 1e-5}
    assert mine.losses[-1] < 0.7 * mine.losses[0], mine.losses
    torch.testing.assert_close(mine.losses, whole.losses, rtol=1e-4, atol=0)
    for ours, theirs in zip(*(run.names.get("heads", [run.head]) for run in (mine, whole)), strict=True):
        start, stop = ours.class_range
        assert stop - start == len(ours.weight) < CLASSES
        torch.testing.assert_close(ours.weight, theirs.weight[start:stop], **close)
    for one, other in zip(parameters(mine.backbone), parameters(whole.backbone), strict=True):
        torch.testing.assert_close(one, other, **close)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    if sys.argv[1] == "fsdp":
        # FSDP2 on gloo leaves a thread that now and then aborts the interpreter's exit ("terminate called
        # without an active exception"), with nothing of plsc in the process too. All checks are done here.
        sys.stdout.flush()
        os._exit(0)
