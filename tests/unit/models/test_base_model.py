import pytest
import torch
from torch import nn

from plsc.errors import OptionError
from plsc.models import BaseModel, check_model


class Recorder(BaseModel):
    def __init__(self, emb_size=8):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.fc = nn.Linear(3, emb_size)
        self.calls = []

    def build_network(self, input, label, is_train=True):
        self.calls.append((label, is_train))
        return self.fc(self.norm(input).mean((2, 3)))


def test_is_train_defaults_to_the_mode_and_label_to_none():
    model, images, labels = Recorder(), torch.zeros(2, 3, 4, 4), torch.tensor([1, 2])
    model(images, labels)
    model.eval()
    model(images)
    model(images, labels, is_train=True)
    assert model.calls == [(labels, True), (None, False), (labels, True)]


def test_check_model_accepts_a_valid_network_without_side_effects():
    model = Recorder()
    model.fc.eval()  # frozen by user code
    before = {key: value.clone() for key, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    check_model(model, (3, 8, 8), 8)
    assert model.training
    assert model.norm.training
    assert not model.fc.training
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("output", "noun"),
    [
        (lambda x: x.mean((2, 3)), r"\[2, 3\].*\[2, 8\]"),
        (lambda x: torch.zeros(2, 8, dtype=torch.int64), "int64"),
        (lambda x: (torch.zeros(2, 8),), "tuple"),
        (lambda x: x @ torch.zeros(7, 7), "RuntimeError"),
    ],
)
def test_check_model_rejects(output, noun):
    class Wrong(BaseModel):
        build_network = staticmethod(lambda input, label, is_train=True: output(input))

    with pytest.raises(OptionError, match=noun):
        check_model(Wrong(), (3, 4, 4), 8)


def test_a_network_without_build_network_cannot_be_made():
    class Empty(BaseModel):
        pass

    with pytest.raises(TypeError, match="build_network"):
        Empty()


def test_check_model_does_not_break_tensors_cached_in_the_first_call():
    class Lazy(BaseModel):
        def __init__(self):
            super().__init__()
            self.fc = nn.LazyLinear(8)
            self.grid = None

        def build_network(self, input, label, is_train=True):
            if self.grid is None:
                self.grid = torch.ones_like(input)
            return self.fc((input * self.grid).flatten(1))

    model = Lazy()
    check_model(model, (1, 4, 4), 8)
    model(torch.ones(2, 1, 4, 4)).sum().backward()
    assert model.fc.weight.grad is not None


class MadeInACall(BaseModel):
    """Creates a layer in its forward pass, in different ways."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.kept = [nn.Linear(12, 8)] if way == "in a list" else []
        if way == "frozen anew":
            self.first = nn.Linear(12, 12)

    def build_network(self, input, label, is_train=True):
        input = input.flatten(1)
        if self.way == "in a list":
            return self.kept[0](input)
        layer = nn.Linear(12, 8)
        if self.way == "added":
            self.add_module(f"layer{len(list(self.children()))}", layer)
        elif self.way == "frozen anew":
            self.layer, input = layer.requires_grad_(False), self.first(input)
        elif self.way != "local":
            self.layer = layer
        return layer(input)


@pytest.mark.parametrize(
    ("way", "what"),
    [
        ("replaced", "layer.weight"), ("frozen anew", "layer.weight"), ("added", "layer1.weight"),
        ("local", "not registered"), ("in a list", "not registered"),
    ],
)  # fmt: skip
def test_check_model_rejects_parameters_created_in_each_call(way, what):
    with pytest.raises(OptionError, match=what):
        check_model(MadeInACall(way), (3, 2, 2), 8)
