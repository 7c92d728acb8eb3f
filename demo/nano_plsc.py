"""plsc in one file: train a classifier over very many classes, with class weights sharded over the ranks.

    python demo/nano_plsc.py                          # about a minute on two CPU cores
    torchrun --nproc-per-node 2 demo/nano_plsc.py     # two ranks: the same weights, up to rounding
    ... --resume                                      # from the last checkpoint, on any number of ranks
    ... --data demo/output/glyphs                     # a folder with label.txt instead of drawings

Face recognition and product search train a network to classify C known classes. Then they drop the class
weights and compare the embeddings of images of unseen classes. With millions of classes, the class weights
W [C, D] are larger than the network, and the logits [B, C] and gradients are as large again. Three ideas:

1. Each rank has the weights of its own classes: class c is on rank c // ceil(C / R). The ranks exchange the
   embeddings, B x D numbers, and three numbers per sample that complete the softmax. No communication
   grows with C.
2. The matrix [B, C] never exists. Class weights are read tile by tile; the logits of a tile are added to a
   few sums and dropped. The update computes them again, so the gradient of all weights never exists either.
3. A step may use a sample of the classes: those of the batch, and random others (PartialFC).

Read ShardedArcFace, then train(). tests/system/test_demo.py compares this file with the library, which
adds margins, optimizers, precisions, kernels, data formats and checks. More: docs/life_of_a_step.md.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.optim import SGD

SEED, BATCH, DIM, RATE, SCALE, MARGIN = 1, 120, 128, 0.1, 32.0, 0.3  # BATCH: global batch size


def start() -> tuple[int, int]:
    """Start the process group, with or without torchrun; return the rank and the world size."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size()


def gather(x: Tensor) -> Tensor:
    """Gather x [b, ...] of all ranks; return [R b, ...], in rank order."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


class ShardedArcFace:
    """ArcFace head (Deng et al. 2019) over C classes: loss, gradients, update of the class weights.

    x_i: embedding of sample i, y: its label, e_i = x_i / |x_i|, w_j = W_j / |W_j|, c_ij = e_i . w_j.

        z_ij = s c_ij  for j != y,      z_iy = s psi(c_iy),      psi(c) = cos(acos(c) + m)
        loss = mean over the B samples of  -log P_iy,            P_ij = exp(z_ij) / sum over k of exp(z_ik)

        G_ij = P_ij    for j != y,      G_iy = -(1 - P_iy) psi'(c_iy)
        de_i = s / B sum over j of G_ij w_j,                     dx_i = (de_i - (de_i . e_i) e_i) / |x_i|
        dw_j = s / B sum over i of G_ij e_i,                     dW_j = (dw_j - (dw_j . w_j) w_j) / |W_j|

    This rank has `weight` and `momentum` [C_local, D] of the classes start..stop - 1. The sums stay in the
    range of float32 while 2 s + ln C is at most 170.
    """

    tile = 4096  # classes per tile

    def __init__(
        self, classes: int, dim: int, scale: float = 64.0, margin: float = 0.5, ratio: float = 1.0
    ) -> None:
        rank, per_rank = dist.get_rank(), math.ceil(classes / dist.get_world_size())
        self.start, self.stop = min(classes, rank * per_rank), min(classes, (rank + 1) * per_rank)
        self.classes, self.scale, self.margin, self.ratio = classes, scale, margin, ratio
        self.weight = torch.empty(self.stop - self.start, dim)
        for c in range(self.start, self.stop):  # one generator per class: identical on any number of ranks
            generator = torch.Generator().manual_seed(SEED * 2**32 + c)
            self.weight[c - self.start].normal_(0, 0.01, generator=generator)
        self.momentum = torch.zeros_like(self.weight)

    def sample(self, labels: Tensor, step: int) -> Tensor:
        """Sample the classes of this rank for a step; return them in ascending order, int64.

        They are the classes of the labels [B] of the global batch, and random others up to ratio x C_local.
        """
        classes = torch.arange(self.start, self.stop)
        taken = torch.isin(classes, labels)
        missing = math.ceil(len(classes) * self.ratio) - int(taken.sum())
        generator = torch.Generator().manual_seed((SEED * 10**9 + step) * 10**4 + dist.get_rank())
        others = torch.randperm(len(classes), generator=generator)
        taken[others[~taken[others]][: max(0, missing)]] = True
        return classes[taken]

    def tiles(self, e: Tensor, y: Tensor, chosen: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Iterate over the chosen classes in tiles of t classes, for e [B, D] and labels y [B].

        Yields indices into `weight` [t], w [t, D], |W| [t, 1], cosines [B, t], and the mask of labels [B, t].
        """
        for c in chosen.split(self.tile) if len(chosen) else ():
            w, length = unit(self.weight[c - self.start])
            yield c - self.start, w, length, e @ w.T, y[:, None] == c

    def forward(self, x: Tensor, y: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, the accuracy of the batch, and the gradient of the loss with respect to x.

        x [B, D], labels y [B]: the global batch, identical on all ranks. chosen: from `sample`.
        """
        e, length = unit(x.detach())
        shift = self.scale + math.log(self.classes) - 85  # keeps exp(z - shift) in range
        total, cosine, highest = e.new_zeros(3, len(y)).unbind()
        weighted, highest = torch.zeros_like(e), highest - math.inf
        for _, w, _, c, is_label in self.tiles(e, y, chosen):
            cosine += torch.where(is_label, c, 0).sum(1)
            c.masked_fill_(is_label, -math.inf)  # the sums are over the OTHER classes
            highest = torch.maximum(highest, c.amax(1))
            p = (self.scale * c - shift).exp()
            total += p.sum(1)  # [B]    sum of exp(z_ij - shift)
            weighted += p @ w  # [B, D]    sum of exp(z_ij - shift) w_j

        # Three numbers per sample. A label's cosine is 0 on all ranks but the one with its class.
        total, cosine, highest = gather(torch.stack([total, cosine, highest])[None]).unbind(1)
        total, cosine, highest = total.sum(0), cosine.sum(0), highest.amax(0)
        psi, slope = self.psi(cosine)
        log_others = total.log() + shift
        excess = log_others - self.scale * psi
        loss = F.softplus(excess).mean()  # -log P_iy = log(1 + exp(excess))
        g_label = -excess.sigmoid() * slope  # G_iy; exact where P_iy is almost 1
        log_total = torch.logaddexp(log_others, self.scale * psi)

        de = weighted * (shift - log_total).exp()[:, None]
        mine = ((y >= self.start) & (y < self.stop)).nonzero()[:, 0]
        de[mine] += g_label[mine, None] * unit(self.weight[y[mine] - self.start])[0]
        dist.all_reduce(de)  # sum over the classes of all ranks
        dx = through_unit(de * (self.scale / len(y)), e, length)
        self.left = e, y, chosen, log_total, g_label  # for update(): about B x D numbers
        return loss, (cosine > highest).float().mean(), dx

    def psi(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos(acos(c) + m) and its derivative; linear where the angle exceeds pi."""
        c = c.clamp(-1 + 1e-7, 1 - 1e-7)  # the derivative of acos is infinite at +-1
        sin, cos_m, sin_m = ((1 - c) * (1 + c)).sqrt(), math.cos(self.margin), math.sin(self.margin)
        inside = c >= -cos_m
        psi = torch.where(inside, c * cos_m - sin * sin_m, c - self.margin * sin_m)
        return psi, torch.where(inside, cos_m + c / sin * sin_m, 1)

    def update(self, rate: float, momentum: float = 0.9, decay: float = 5e-4) -> None:
        """Update the chosen class weights as torch.optim.SGD does; the others do not change."""
        e, y, chosen, log_total, g_label = self.left
        for rows, w, length, c, is_label in self.tiles(e, y, chosen):
            p = (self.scale * c - log_total[:, None]).exp()
            dw = torch.where(is_label, g_label[:, None], p).T @ e * (self.scale / len(y))
            gradient = through_unit(dw, w, length) + decay * self.weight[rows]
            self.momentum[rows] = momentum * self.momentum[rows] + gradient
            self.weight[rows] -= rate * self.momentum[rows]


def unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x / |x| and |x| over the last dimension."""
    length = x.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    return x / length, length


def through_unit(gradient: Tensor, u: Tensor, length: Tensor) -> Tensor:
    """Return the gradient with respect to x, given that with respect to u = x / |x|."""
    return (gradient - (gradient * u).sum(-1, keepdim=True) * u) / length


def save(run: Path, step: int, model: nn.Module, optimizer: SGD, head: ShardedArcFace) -> None:
    """Write a checkpoint atomically: rename its folder when all files are on the disk."""
    partial, rank = run / "partial", dist.get_rank()
    state = {"start": head.start, "weight": head.weight, "momentum": head.momentum}
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed
        partial.mkdir(parents=True)
        state |= {"step": step, "classes": head.classes}
        state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dist.barrier()
    with (partial / f"rank-{rank}.pt").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    dist.barrier()
    if rank == 0:
        partial.rename(run / f"step-{step:07d}")
        for old in sorted(run.glob("step-*"))[:-2]:
            shutil.rmtree(old.rename(partial))  # a checkpoint's name never refers to a partial folder


def load(folder: Path, model: nn.Module, optimizer: SGD, head: ShardedArcFace) -> int:
    """Load a checkpoint written by any number of ranks; return its step."""
    state = torch.load(folder / "rank-0.pt", weights_only=True)
    if state["classes"] != head.classes:
        sys.exit(f"{folder} has {state['classes']} classes, this run {head.classes}; see --folder")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for file in folder.glob("rank-*.pt"):
        shard = torch.load(file, weights_only=True, mmap=True)  # reads only what is copied
        first, stop = shard["start"], shard["start"] + len(shard["weight"])
        low, high = max(first, head.start), min(stop, head.stop)  # classes in both shards
        if low < high:
            for mine, theirs in (head.weight, "weight"), (head.momentum, "momentum"):
                rows = shard[theirs][low - first : high - first]
                mine[low - head.start : high - head.start] = rows
    return int(state["step"])


def draw(classes: int, per_class: int = 10) -> tuple[Tensor, Tensor]:
    """Draw random letters, several images each; return images [N, 1, 32, 32] in -1..1 and labels [N].

    A letter is three or four curved strokes. Each image varies their points, the slant, size and line width.
    """
    images = np.zeros((classes * per_class, 32, 32), np.float32)
    t = np.linspace(0, 1, 9)[:, None]
    for i in range(len(images)):
        letter, hand = np.random.default_rng(i // per_class), np.random.default_rng([1, i])
        points = letter.uniform(-1, 1, (letter.integers(3, 5), 3, 2))
        points += hand.normal(0, 0.08, points.shape)
        points = points @ (np.eye(2) * hand.uniform(0.75, 1.05) + hand.normal(0, 0.12, (2, 2)))
        image, width = Image.new("L", (64, 64)), int(hand.integers(3, 7))
        for a, b, c in 32 + 22 * points + hand.normal(0, 2, 2):
            curve = (1 - t) ** 2 * a + 2 * t * (1 - t) * b + t**2 * c
            ImageDraw.Draw(image).line(curve.ravel().tolist(), fill=255, width=width)
        images[i] = np.asarray(image.reduce(2)) / 127.5 - 1 + hand.normal(0, 0.1, (32, 32))
    return torch.from_numpy(images)[:, None], torch.arange(classes).repeat_interleave(per_class)


def read(folder: Path) -> tuple[Tensor, Tensor]:
    """Read the images of label.txt (lines of path, tab, label); return images and labels as `draw` does."""
    lines = [line.split("\t") for line in (folder / "label.txt").read_text().splitlines()]
    gray = [np.asarray(Image.open(folder / p).convert("L").resize((32, 32))) for p, _ in lines]
    images = torch.from_numpy(np.stack(gray)).float() / 127.5 - 1
    return images[:, None], torch.tensor([int(label) for _, label in lines])


def batch_of(step: int, images: int) -> Tensor:
    """Return the indices of a step's global batch; they depend on the step only, so that a run can resume."""
    epoch, part = divmod(step, images // BATCH)
    order = torch.randperm(images, generator=torch.Generator().manual_seed(SEED + epoch))
    return order[part * BATCH : (part + 1) * BATCH]


def network() -> nn.Module:
    """Build a small convolutional network: [N, 1, 32, 32] to [N, DIM]."""
    layers: list[nn.Module] = []
    for i, o in ((1, 32), (32, 64), (64, 128), (128, 256)):
        layers += [nn.Conv2d(i, o, 3, stride=2, padding=1), nn.GroupNorm(8, o), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, DIM))


@torch.no_grad()
def accuracy(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of images whose nearest other image, by cosine, has the same class."""
    net.eval()
    e = torch.cat([unit(net(part))[0] for part in images.split(500)])
    net.train()
    return float((labels[(e @ e.T).fill_diagonal_(-1).argmax(1)] == labels).float().mean())


def train(options: argparse.Namespace) -> None:
    """Train, print, and save every 100 steps."""
    rank, ranks = start()
    if BATCH % ranks:
        sys.exit(f"{ranks} ranks cannot share a batch of {BATCH} equally; expected a divisor of it")
    images, labels = read(options.data) if options.data else draw(options.classes)
    known = int(labels.max() + 1) * 9 // 10  # a tenth of the classes is for evaluation only
    unseen, images = (images[labels >= known], labels[labels >= known]), images[labels < known]
    labels = labels[labels < known]

    torch.manual_seed(SEED)  # identical initial weights on all ranks
    # Batch norm over the global batch. Without it at the end of the network, embeddings can collapse.
    model = nn.Sequential(network(), nn.BatchNorm1d(DIM, affine=False))
    net, neck = model
    optimizer = SGD(net.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4)
    head = ShardedArcFace(known, DIM, SCALE, MARGIN, options.ratio)
    saved = sorted(options.folder.glob("step-*"))
    if saved and not options.resume:
        sys.exit(f"{options.folder} has checkpoints; add --resume, or give another --folder")
    first = load(saved[-1], model, optimizer, head) if saved else 0
    if rank == 0:
        by_pixels = accuracy(nn.Flatten(), *unseen)
        print(f"{known} classes, step {first}; on unseen classes, by their pixels: {by_pixels:.3f}")

    for step in range(first, options.steps):
        rate = RATE * min(1, step / 100) * (1 + math.cos(math.pi * step / options.steps)) / 2
        optimizer.param_groups[0]["lr"] = rate
        batch = batch_of(step, len(images))
        mine = net(images[batch.chunk(ranks)[rank]])  # [b, D], embeddings of this rank
        every = gather(mine.detach()).requires_grad_()  # [B, D], embeddings of all ranks
        x = neck(every)
        loss, right, gradient = head.forward(x, labels[batch], head.sample(labels[batch], step))
        optimizer.zero_grad()
        (gradient,) = torch.autograd.grad(x, every, gradient)
        mine.backward(gradient.chunk(ranks)[rank])
        for parameter in net.parameters():  # the loss is that of the global batch, so sum, not mean
            dist.all_reduce(parameter.grad)  # type: ignore[arg-type]
        optimizer.step()
        head.update(rate)
        if (step + 1) % 100 == 0 or step + 1 == options.steps:
            save(options.folder, step + 1, model, optimizer, head)
            if rank == 0:
                figures = f"loss {loss:.3f}, accuracy of the batch {right:.3f}"
                print(f"step {step + 1}: {figures}, on unseen {accuracy(model, *unseen):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    formatter = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--data", type=Path, help="folder with images and label.txt")
    parser.add_argument("--folder", type=Path, default="demo/output/nano", help="folder for checkpoints")
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint")
    parser.add_argument("--classes", type=int, default=1000, help="number to draw; a tenth is for evaluation")
    parser.add_argument("--ratio", type=float, default=1.0, help="share of the classes per step")
    parser.add_argument("--steps", type=int, default=600)
    train(parser.parse_args())
