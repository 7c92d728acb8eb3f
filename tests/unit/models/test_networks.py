"""Networks by name: our own, those of torchvision, timm and users, and the published iresnet."""

import itertools
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision import models

from plsc.errors import OptionError
from plsc.models.base_model import NETWORKS, build_model, check_model, load_custom
from plsc.models.resnet import IRESNET_BLOCKS, ResNet, initialise
from tests.unit.checkpoint.external_files import random_network

ONE_OF_EACH = list({made: name for name, (made, _) in reversed(NETWORKS.items())}.values())
"""One network per class: the first of NETWORKS."""
OTHERS = [
    "timm/vit_tiny_patch16_224", "timm/convnext_atto", "torchvision/resnet18",
    "timm/mobilenetv3_small_100",  # has a layer of 1024 after its 576 features
    "timm/deit_tiny_distilled_patch16_224",  # has two classifiers
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "image_shape"),
    [
        *itertools.product(ONE_OF_EACH, [(1, 32, 32), (3, 48, 16)]),
        ("ResNet50", (1, 32, 16)),
        *itertools.product(OTHERS, [(1, 32, 48)]),
    ],
)
def test_every_network_supports_gray_and_colour_images_of_multiples_of_16(name, image_shape):
    if name.startswith("timm/"):
        pytest.importorskip("timm", reason="needs the extra plsc-torch[timm]")
    check_model(build_model(name, 24, image_shape, 0.4), image_shape, 24)


def test_initial_weights_have_the_fan_out_deviation_and_biases_are_zero():
    model = ResNet(18, 512, (3, 32, 32))
    for layer in model.modules():
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


@pytest.mark.parametrize(("depth", "side"), [(18, 48), (50, 32)])
def test_embeddings_equal_the_published_network(depth, side):
    model = random_network(f"IResNet{depth}", 32, (3, side, side)).eval()
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = published(model.state_dict(), images, IRESNET_BLOCKS[depth])
        torch.testing.assert_close(model(images), expected, rtol=1e-5, atol=1e-5)
        assert float(expected.std()) > 1e-3


# With images of 112 x 112 and 512-d embeddings. IResNet: published as 24.03, 34.14, 43.59 and 65.16 million.
# ResNet: the layers of PLSC 0.1's models/resnet.py, counted by hand.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("ResNet18", 24_023_625), ("ResNet34", 34_135_505), ("ResNet50", 43_584_985),
        ("ResNet101", 93_939_459), ("ResNet152", 109_613_861),
        ("IResNet18", 24_025_600), ("IResNet34", 34_139_328), ("IResNet50", 43_590_848),
        ("IResNet100", 65_156_160),
    ],
)  # fmt: skip
def test_the_number_of_parameters_equals_the_published_one(name, parameters):
    with torch.device("meta"):
        model = build_model(name, 512, (3, 112, 112), 0.4)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_the_scale_of_the_embedding_is_fixed_to_one():
    model = build_model("IResNet18", 8, (3, 16, 16), 0.0)
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["features.weight"]
    assert model.features.weight.tolist() == [1.0] * 8


def test_without_timm_the_error_has_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(OptionError, match=r"pip install 'plsc-torch\[timm\]'"):
        build_model("timm/vit_tiny_patch16_224", 8, (3, 64, 64), 0.1)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
def test_dropout_is_applied_once_before_the_embedding(name):
    with torch.device("meta"):
        model = build_model(f"torchvision/{name}", 16, (3, 32, 32), 0.9)
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout) and m.p] == [0.9]
    assert model.neck.dropout.p == 0.9


# googlenet and inception also have auxiliary classifiers; densenet uses functional pooling.
@pytest.mark.parametrize(
    ("name", "side", "features"),
    [
        ("mobilenet_v3_small", 32, 1024),
        ("vit_b_16", 32, 768),
        ("densenet121", 32, 1024),
        ("googlenet", 32, 1024),
        ("inception_v3", 96, 2048),
        ("vgg11", 32, 4096),
    ],
)
def test_the_neck_replaces_the_last_layer(name, side, features):
    with torch.device("meta"):
        model = build_model(f"torchvision/{name}", 16, (3, side, side))
        embeddings = model(torch.randn(2, 3, side, side))
    assert model.neck.fc.in_features == features
    embeddings.sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize(
    ("name", "head"), [("timm/vit_tiny_patch16_224", "head"), ("torchvision/resnet18", "fc")]
)
def test_features_equal_those_of_the_library_with_the_same_weights(name, head):
    library, kind = name.split("/")
    ours = build_model(name, 16, (3, 32, 32), 0.3, "dropout-linear").eval()
    if library == "timm":
        timm = pytest.importorskip("timm", reason="needs the extra plsc-torch[timm]")
        theirs = timm.create_model(kind, num_classes=16, img_size=32).eval()
    else:
        theirs = getattr(models, kind)(num_classes=16).eval()
    theirs.load_state_dict(ours.network.state_dict(), strict=False)
    theirs.get_submodule(head).load_state_dict(ours.neck.fc.state_dict())
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images))


@pytest.mark.parametrize(
    ("name", "shape", "noun"),
    [
        ("ResNet51", (3, 32, 32), "'ResNet50'"),
        ("timm/vit_tinny_patch16_224", (3, 32, 32), "'vit_tiny_patch16_224'"),
        ("timm/hf-hub:somebody/something", (3, 32, 32), "has no network"),  # would be downloaded
        ("timm/swin_tiny_patch4_window7_224", (3, -1, 32), "cannot create"),
        ("torchvision/resnet19", (3, 33, 33), "'resnet18'"),
        ("torchvision/squeezenet1_1", (3, 33, 33), "linear layer"),
        ("torchvision/vit_b_32", (3, 33, 33), "cannot create"),
        ("IResNet18", (3, 16, 16), "neck"),
    ],
)
def test_networks_that_cannot_be_made_raise(name, shape, noun):
    if name.startswith("timm/"):
        pytest.importorskip("timm", reason="needs the extra plsc-torch[timm]")
    with pytest.raises(OptionError, match=noun):
        build_model(name, 8, shape, 0.1, *(["linear"] if name == "IResNet18" else []))
