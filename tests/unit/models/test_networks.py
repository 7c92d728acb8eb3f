from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from plsc.config import Options
from plsc.errors import OptionError
from plsc.models import build_model, check_model, load_custom
from plsc.models.layers import initialise
from plsc.models.registry import NETWORKS
from plsc.models.resnet import ResNet

ONE_OF_EACH = list({made: name for name, (made, _) in reversed(NETWORKS.items())}.values())
"""One network per class: the first of NETWORKS."""


def shortcut(inputs, outputs):
    return inputs * outputs + 2 * outputs


def basic(inputs, outputs, stride):
    count = 2 * inputs + 9 * inputs * outputs + 2 * outputs + 1 + 9 * outputs**2 + 2 * outputs
    return count + (shortcut(inputs, outputs) if inputs != outputs or stride != 1 else 0)


def bottleneck(inputs, outputs, stride):
    w = outputs // 4
    count = 2 * inputs + inputs * w + 2 * w + 1 + 9 * w * w + 2 * w + 1 + w * outputs + 2 * outputs
    return count + (shortcut(inputs, outputs) if inputs != outputs or stride != 1 else 0)


@pytest.mark.parametrize(
    ("depth", "blocks", "widths", "block"),
    [
        (18, (2, 2, 2, 2), (64, 128, 256, 512), basic),
        (34, (3, 4, 6, 3), (64, 128, 256, 512), basic),
        (50, (3, 4, 14, 3), (64, 128, 256, 512), basic),
        (101, (3, 4, 23, 3), (256, 512, 1024, 2048), bottleneck),
        (152, (3, 8, 36, 3), (256, 512, 1024, 2048), bottleneck),
    ],
)
def test_parameters_match_the_published_structure(depth, blocks, widths, block):
    expected, inputs = 3 * 64 * 9 + 2 * 64 + 1, 64
    for repeats, width in zip(blocks, widths, strict=True):
        for index in range(repeats):
            expected += block(inputs, width, 2 if index == 0 else 1)
            inputs = width
    expected += 2 * inputs + inputs * 49 * 512 + 512 + 2 * 512
    with torch.device("meta"):
        model = build_model(f"ResNet{depth}", 512, (3, 112, 112), 0.4)
    assert sum(p.numel() for p in model.parameters()) == expected


@pytest.mark.parametrize(
    ("name", "image_shape"),
    [
        *itertools.product(ONE_OF_EACH, [(1, 32, 32), (3, 48, 16)]),
        ("ResNet18", (3, 112, 112)),
        ("ResNet34", (3, 32, 32)),
        ("ResNet50", (1, 32, 16)),
        ("ResNet101", (3, 16, 16)),
        ("ResNet152", (1, 16, 16)),
    ],
)
def test_every_network_supports_multiples_of_16(name, image_shape):
    check_model(build_model(name, 24, image_shape, 0.4), image_shape, 24)


def test_every_parameter_of_the_small_network_gets_a_gradient():
    model = build_model("SmallResNet", 16, (1, 32, 32), 0.0)
    images = torch.randn(8, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    (model(images) * torch.linspace(-1, 1, 16).expand(8, 16).cumsum(0)).square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_initial_weights_have_the_fan_out_deviation_and_biases_are_zero():
    model = ResNet(18, 512, (3, 32, 32))
    for layer in model.modules():
        if isinstance(layer, nn.PReLU):
            assert layer.weight.tolist() == [0.25]
        if isinstance(layer, (nn.Conv2d, nn.Linear)) and layer.weight.numel() > 10_000:
            fan_out = layer.weight.shape[0] * math.prod(layer.weight.shape[2:])
            assert float(layer.weight.detach().std()) == pytest.approx((2 / fan_out) ** 0.5, rel=0.05)
    assert not model.neck.fc.bias.any()
    depthwise = nn.Conv2d(512, 512, 7, groups=512)
    initialise(depthwise)
    assert float(depthwise.weight.detach().std()) == pytest.approx((2 / 49) ** 0.5, rel=0.05)


@pytest.mark.parametrize("shape", [(3, 100, 112), (3, 112, 8), (2, 32, 32), (32, 32)])
def test_an_unsupported_image_shape_raises(shape):
    for name in ONE_OF_EACH:
        with pytest.raises(OptionError, match="multiples of 16"):
            build_model(name, 64, shape, 0.4)


def test_the_error_for_an_unknown_model_suggests_a_name():
    with pytest.raises(OptionError, match="did you mean 'ResNet50'"):
        build_model("ResNet51")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ("norm-dropout-linear-norm", ["norm", "dropout", "flatten", "fc", "norm_out"]),
        ("dropout-linear", ["dropout", "flatten", "fc"]),
        ("norm-linear", ["norm", "flatten", "fc"]),
        ("linear-norm", ["flatten", "fc", "norm_out"]),
        ("linear", ["flatten", "fc"]),
    ],
)
@pytest.mark.parametrize(
    "name", sorted({*ONE_OF_EACH, "torchvision/resnet18", "timm/resnet18"} - {"IResNet18"})
)
def test_the_neck_option_sets_the_neck_of_every_network(name, parts, expected):
    if name.startswith("timm/"):
        pytest.importorskip("timm", reason="needs the extra plsc-torch[timm]")
    model = build_model(name, 24, (3, 32, 32), 0.3, parts)
    assert [child for child, _ in model.neck.named_children()] == expected
    norms = [child for at, child in model.neck.named_children() if "norm" in at]
    assert all(isinstance(norm, (nn.BatchNorm1d, nn.BatchNorm2d)) for norm in norms)
    embeddings = model(torch.randn(4, 3, 32, 32))
    assert embeddings.shape == (4, 24)
    (embeddings * torch.randn(4, 24)).sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("parts", ["", "norm-norm", "dropout-norm-linear", "linear-"])
def test_an_invalid_neck_raises_with_the_valid_ones(parts):
    with pytest.raises(OptionError, match="optionally with 'norm-', 'dropout-'"):
        Options().set("model.neck", parts)


def test_an_iresnet_supports_only_the_default_neck():
    with pytest.raises(OptionError, match="neck is 'linear'; IResNet18 supports only"):
        build_model("IResNet18", 8, (3, 16, 16), 0.1, "linear")


@pytest.fixture
def users_module(tmp_path, monkeypatch):
    (tmp_path / "users_nets.py").write_text(
        "from torch import nn\n"
        "from plsc.models.base_model import BaseModel\n"
        "class Net(BaseModel):\n"
        "    def __init__(self, depth=2, emb_size=5):\n"
        "        super().__init__()\n"
        "        self.fc = nn.Linear(3, emb_size)\n"
        "    def build_network(self, input, label, is_train=True):\n"
        "        return self.fc(input.mean((2, 3)))\n"
        "class Necked(Net):\n"
        "    def __init__(self, neck, emb_size):\n"
        "        super().__init__(emb_size=emb_size)\n"
        "        self.parts = neck\n"
        "class Needy(Net):\n"
        "    def __init__(self, secret):\n"
        "        super().__init__()\n"
        "NUMBER = 3\n"
        "class Other(nn.Linear): pass\n"
    )
    (tmp_path / "users_broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("users_module")
def test_a_custom_class_gets_the_options_that_its_constructor_has():
    check_model(build_model("users_nets:Net", 7, (3, 20, 20), 0.4), (3, 20, 20), 7)
    assert build_model("users_nets:Necked", 7, neck="linear").parts == "linear"


@pytest.mark.usefixtures("users_module")
@pytest.mark.parametrize(
    ("reference", "noun"),
    [
        ("users_absent:Net", "ModuleNotFoundError"),
        ("users_broken:Net", "ZeroDivisionError"),
        ("users_nets:Nett", "no attribute 'Nett'"),
        ("users_nets:NUMBER", "not a network"),
        ("users_nets:Other", "subclass"),
        ("users_nets:Needy", "'secret'"),
        (":Net", "cannot import"),
    ],
)
def test_a_custom_class_that_cannot_be_created_raises(reference, noun):
    with pytest.raises(OptionError, match=noun):
        load_custom(reference, emb_size=7)
