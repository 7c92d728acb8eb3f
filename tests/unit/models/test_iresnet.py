"""Compare the iresnet with a second implementation of insightface's published structure."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from plsc.models import build_model
from plsc.models.resnet import IRESNET_BLOCKS, IResNet
from tests.unit.checkpoint.external_files import random_network


def norm(state, name, x):
    parts = (state[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
    return F.batch_norm(x, *parts, training=False, eps=1e-5)


def published(state, x, blocks):
    """Compute recognition/arcface_torch/backbones/iresnet.py in evaluation mode, from its state dict."""
    x = F.conv2d(x, state["conv1.weight"], padding=1)
    x = F.prelu(norm(state, "bn1", x), state["prelu.weight"])
    for stage, count in enumerate(blocks, start=1):
        for block in range(count):
            at = f"layer{stage}.{block}"
            stride = 2 if block == 0 else 1
            y = F.conv2d(norm(state, f"{at}.bn1", x), state[f"{at}.conv1.weight"], padding=1)
            y = F.prelu(norm(state, f"{at}.bn2", y), state[f"{at}.prelu.weight"])
            y = F.conv2d(y, state[f"{at}.conv2.weight"], stride=stride, padding=1)
            y = norm(state, f"{at}.bn3", y)
            if block == 0:
                x = F.conv2d(x, state[f"{at}.downsample.0.weight"], stride=2)
                x = norm(state, f"{at}.downsample.1", x)
            x = x + y
    x = norm(state, "bn2", x).flatten(1)
    x = F.linear(x, state["fc.weight"], state["fc.bias"])
    return norm(state, "features", x)


@pytest.mark.parametrize(("depth", "side"), [(18, 112), (50, 32)])
def test_embeddings_equal_the_published_network(depth, side):
    model = random_network(f"IResNet{depth}", 32, (3, side, side)).eval()
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = published(model.state_dict(), images, IRESNET_BLOCKS[depth])
        torch.testing.assert_close(model(images), expected, rtol=1e-5, atol=1e-5)
        assert float(expected.std()) > 1e-3


# For images of 112 x 112 and 512-d embeddings; published as 24.03, 34.14, 43.59 and 65.16 million.
@pytest.mark.parametrize(
    ("depth", "parameters"),
    [(18, 24_025_600), (34, 34_139_328), (50, 43_590_848), (100, 65_156_160)],
)
def test_the_number_of_parameters_equals_the_published_one(depth, parameters):
    with torch.device("meta"):
        model = IResNet(depth)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_the_scale_of_the_embedding_is_fixed_to_one():
    model = build_model("IResNet18", 8, (3, 16, 16), 0.0)
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["features.weight"]
    assert model.features.weight.tolist() == [1.0] * 8
