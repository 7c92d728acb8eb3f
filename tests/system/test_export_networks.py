"""A network of each kind of block, and networks of other libraries, can be exported; the graph agrees."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.models import shufflenetv2, swin_transformer

from plsc.checkpoint import Manifest
from plsc.checkpoint.manifest import HeadInfo
from plsc.config import Options
from plsc.export.folder import write_about, write_weights
from plsc.export.graph import as_served, write_graph
from plsc.models import BaseModel, build_model, resnet
from plsc.models.libraries import Adapter
from plsc.predict.exporter import compare, load_graph

onnxruntime = pytest.importorskip("onnxruntime", reason="plsc-torch[export] is not installed")
pytestmark = pytest.mark.slow
SHAPE = (3, 32, 32)
# Deeper ones only repeat their blocks; those of ResNet18 and SmallResNet are in other tests of this file.
OURS = "ResNet101", "IResNet18"
OTHERS = "torchvision/shufflenet_v2_x0_5", "torchvision/swin_t"


class TwoTowers(BaseModel):
    """A custom network with Python conditions, and a batch norm before its convolution."""

    def __init__(self, emb_size=64):
        super().__init__()
        self.left = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.GELU())
        self.right = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 16, 3, bias=False), nn.PReLU(16))
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.fc = nn.Linear(16, emb_size)

    def build_network(self, input, label, is_train=True):
        if input.shape[1] != 3:
            raise ValueError("expected RGB")
        maps = (self.left(input) * self.right(input)).flatten(2).transpose(1, 2)[:, ::16]
        return self.fc(self.attention(maps, maps, maps)[0].mean(1))


class Normalised(BaseModel):
    """A network that normalises its embeddings itself."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 8, 8), nn.Linear(128, 64)

    def build_network(self, input, label, is_train=True):
        return F.normalize(self.fc(self.conv(input).flatten(1)))


def seen(network, shape):
    """Return images, after giving the batch norms statistics with which embeddings are well conditioned."""
    torch.manual_seed(0)
    images = F.interpolate(torch.rand(64, shape[0], 4, 4) * 2 - 1, size=shape[1:], mode="bilinear")
    for layer in network.modules():
        if isinstance(layer, _BatchNorm):
            layer.running_mean.normal_(0, 0.1)
            layer.running_var.uniform_(0.5, 1.5)
            layer.momentum = 1
        elif isinstance(layer, nn.Dropout):
            layer.p = 0
    if not isinstance(network, Adapter):  # the weights of deep ones would overflow with other statistics
        with torch.no_grad():
            network.train()(images)
    return images.numpy()


def difference(folder, network, shape, kind="onnx", flip=False):
    images = seen(network, shape)
    config = Options().resolve().changed({"model.image_shape": shape, "model.emb_size": 64})
    manifest = Manifest("0", 1, 0, 0, 1, 64, {"": HeadInfo(2, [(0, 2)])})
    about = write_weights(folder, network, config.as_dict(), manifest)
    served = as_served(network, flip)
    about["graph"] = write_graph(folder, served, kind, shape)
    write_about(folder, about)
    return compare(served, load_graph(folder, kind), images)


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch):
    """Make networks of few blocks, but each kind of them: deeper ones take long to export."""
    monkeypatch.setitem(resnet.DEPTHS, 18, ((1, 2, 1, 1), False))
    monkeypatch.setitem(resnet.DEPTHS, 101, ((1, 2, 1, 1), True))
    monkeypatch.setitem(resnet.IRESNET_BLOCKS, 18, (1, 2, 1, 1))
    swin, shuffle = swin_transformer.SwinTransformer, shufflenetv2.ShuffleNetV2
    first = {"depths": [2, 1], "num_heads": [3, 6]}  # of four stages
    monkeypatch.setattr(swin_transformer, "SwinTransformer", lambda **how: swin(**{**how, **first}))
    few = [1, 2, 1]
    monkeypatch.setattr(shufflenetv2, "ShuffleNetV2", lambda _, *more, **how: shuffle(few, *more, **how))


@pytest.mark.parametrize("name", [*OURS, *OTHERS])
def test_the_graph_of_every_kind_of_network_equals_the_network(name, tmp_path):
    network = build_model(name, 64, SHAPE)
    assert difference(tmp_path, network, SHAPE)[0] <= 1e-5


@pytest.mark.parametrize(
    ("kind", "flip"),
    [
        ("onnx", False),
        ("onnx", True),
        ("torch", True),
    ],
)
def test_a_custom_network_in_both_graphs(kind, flip, tmp_path):
    difference(tmp_path, TwoTowers(), SHAPE, kind, flip)


@pytest.mark.parametrize(
    ("make", "layout", "flip"),
    [
        (lambda: build_model("SmallResNet", 64, SHAPE), "plain", True),
        (lambda: build_model("SmallResNet", 64, SHAPE), "insightface", False),
        (Normalised, "plain", False),
    ],
)
def test_opencv_and_the_preprocessing_for_quantisation_read_the_graph(make, layout, flip, tmp_path):
    from onnxruntime.quantization.shape_inference import quant_pre_process

    network = make()
    images = seen(network, SHAPE)[:4]
    served = as_served(network, flip)
    write_graph(tmp_path, served, "onnx", SHAPE, layout)
    expected = served(torch.from_numpy(images)).numpy()
    given = images if layout == "plain" else images * np.float32(128 / 127.5)
    quant_pre_process(tmp_path / "model.onnx", tmp_path / "prepared.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "prepared.onnx")
    assert np.abs(session.run(None, {"images": given})[0] - expected).max() < 1e-5
    cv2 = pytest.importorskip("cv2", reason="opencv-python-headless is not installed")
    graph = cv2.dnn.readNetFromONNX(str(tmp_path / "model.onnx"))
    for size in (1, 4):
        graph.setInput(given[:size])
        assert np.abs(graph.forward() - expected[:size]).max() < 1e-5


def test_an_embedding_of_zero_remains_zero(tmp_path):
    network = TwoTowers()
    images = seen(network, SHAPE)[:4]
    for parameter in network.fc.parameters():
        torch.nn.init.zeros_(parameter)
    write_graph(tmp_path, as_served(network, True), "onnx", SHAPE)
    assert not onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, {"images": images})[0].any()
