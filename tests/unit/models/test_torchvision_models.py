from __future__ import annotations

import pytest
import torch
from torchvision import models

from plsc.errors import OptionError
from plsc.models import build_model, check_model


@pytest.mark.parametrize("shape", [(3, 64, 64), (1, 32, 48)])
def test_torchvision_networks_return_embeddings_of_colour_and_gray_images(shape):
    check_model(build_model("torchvision/resnet18", 24, shape, 0.4), shape, 24)


def test_features_equal_torchvision_with_the_same_weights():
    ours = build_model("torchvision/resnet18", 16, (3, 32, 32), neck="dropout-linear").eval()
    theirs = models.resnet18(num_classes=16).eval()
    theirs.load_state_dict(ours.network.state_dict(), strict=False)
    theirs.fc.load_state_dict(ours.neck.fc.state_dict())
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images))


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
def test_dropout_is_applied_once_before_the_embedding(name):
    model = build_model(f"torchvision/{name}", 16, (3, 32, 32), 0.9)
    norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    images = torch.randn(2, 3, 32, 32)
    model.eval()
    assert torch.equal(model(images), model(images))
    model.train()
    for norm in norms:
        norm.eval()
    assert not torch.equal(model(images), model(images))
    dropouts = [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    assert [p for p in dropouts if p] == [0.9]


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


def test_networks_that_depend_on_the_image_size_get_it():
    with torch.device("meta"):
        model = build_model("torchvision/vit_b_32", 16, (3, 64, 64), 0.0)
    assert model.network.image_size == 64


@pytest.mark.parametrize(
    ("name", "noun"),
    [
        ("resnet19", "did you mean 'resnet18'"),
        ("fasterrcnn_resnet50_fpn", "has no network"),
        ("squeezenet1_1", "linear layer"),
        ("vit_b_32", "cannot create"),
        ("inception_v3", "cannot create"),
    ],
)
def test_unsupported_networks_raise(name, noun):
    with pytest.raises(OptionError, match=noun):
        build_model(f"torchvision/{name}", 8, (3, 33, 33), 0.4)
