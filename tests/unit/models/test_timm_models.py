from __future__ import annotations

import sys

import pytest
import torch

from plsc.errors import OptionError
from plsc.models import build_model, check_model


def test_without_timm_the_error_has_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(OptionError, match=r"pip install 'plsc-torch\[timm\]'"):
        build_model("timm/vit_tiny_patch16_224", 8, (3, 64, 64), 0.1)


@pytest.mark.parametrize("shape", [(1, 32, 48)])
@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "resnet18.a1_in1k",
        "mobilenetv3_small_100",  # has a layer of 1024 after its 576 features
        "deit_tiny_distilled_patch16_224",  # has two classifiers
        "convnext_atto",
    ],
)
def test_timm_networks_return_embeddings_for_the_image_size(name, shape):
    pytest.importorskip("timm", reason="needs the extra plsc-torch[timm]")
    check_model(build_model(f"timm/{name}", 24, shape, 0.4), shape, 24)


def test_features_equal_timm_with_the_same_weights():
    timm = pytest.importorskip("timm", reason="needs the extra plsc-torch[timm]")
    ours = build_model("timm/vit_tiny_patch16_224", 16, (3, 32, 32), 0.3, "dropout-linear").eval()
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=16, img_size=32).eval()
    theirs.load_state_dict(ours.network.state_dict(), strict=False)
    theirs.head.load_state_dict(ours.neck.fc.state_dict())
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images))


@pytest.mark.parametrize(
    ("name", "noun"),
    [
        ("vit_tinny_patch16_224", "did you mean 'vit_tiny_patch16_224'"),
        ("hf-hub:somebody/something", "has no network"),  # would be downloaded
        ("swin_tiny_patch4_window7_224", "cannot create"),
    ],
)
def test_networks_that_cannot_be_created_raise(name, noun):
    pytest.importorskip("timm", reason="needs the extra plsc-torch[timm]")
    with pytest.raises(OptionError, match=noun):
        build_model(f"timm/{name}", 8, (3, -1, 32), 0.4)
