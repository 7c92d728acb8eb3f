"""A network that returns nan for a constant image, and a callback that puts one into a batch."""

from __future__ import annotations

import torch
from torch import nn

from plsc import Callback
from plsc.models import BaseModel


class Spoil(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()  # a block has child modules

    def forward(self, images):
        images = self.inner(images)
        is_constant = images.flatten(1).amax(1) == images.flatten(1).amin(1)
        return torch.where(is_constant[:, None, None, None], torch.nan, images)


class Spoiled(BaseModel):
    """The layer block.1 returns nan for constant images; batch norm spreads it to all images."""

    def __init__(self, emb_size=8):
        super().__init__()
        self.block = nn.Sequential(nn.Identity(), Spoil())
        self.conv = nn.Conv2d(3, 6, 4, stride=4)
        self.norm = nn.BatchNorm2d(6)
        self.fc = nn.Linear(6 * 4 * 4, emb_size)

    def build_network(self, input, label, is_train=True):
        return self.fc(self.norm(self.conv(self.block(input))).flatten(1))


class SpoilImage(Callback):
    """Make one image black in one step on one rank."""

    def __init__(self, step=3, image=4, rank=0):
        self.step, self.image, self.rank = step, image, rank

    def batch_start(self, context):
        if (context.step, context.rank) == (self.step, self.rank):
            context.batch.images[self.image] = 0
            self.names, self.labels = list(context.batch.names), context.batch.labels
            self.images = context.batch.final_images().cpu()
