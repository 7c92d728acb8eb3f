"""Which modules of a network are sharded as units."""

import pytest
from torch import nn

from plsc.errors import OptionError
from plsc.models import BaseModel, build_model
from plsc.models.dry_run import count_calls
from plsc.parallel import sharding
from plsc.parallel.sharding import choose_units, match_units

SHAPE = (3, 32, 32)


def choose(network):
    return choose_units(network, count_calls(network, SHAPE))


def match(network, *patterns):
    return match_units(network, patterns, count_calls(network, SHAPE))


class Layer(nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.attention = nn.MultiheadAttention(size, 2)
        self.linear = nn.Linear(size, size)

    def forward(self, x):
        return self.linear(self.attention(x, x, x)[0])


class Network(BaseModel):
    """Layers in a list, and an embedding layer beside it."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 8, stride=8)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.fc = nn.Linear(8, 4)
        self.for_later = nn.Linear(8, 4)

    def build_network(self, input, label, is_train=True):
        x = self.patches(input).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.fc(x.mean(1))


@pytest.fixture
def small(monkeypatch):
    """Units of a few parameters."""
    monkeypatch.setattr(sharding, "LEAST_BLOCK", 10)
    monkeypatch.setattr(sharding, "LEAST_OTHER", 10)


def test_a_residual_network_is_split_into_its_large_blocks_and_its_embedding_layer():
    network = build_model("ResNet50", 512, (3, 32, 32), dropout=0.4)
    found = choose(network)
    assert found[0] == "stages.1.0", "the blocks of the first stage are small"
    assert len(found) == 4 + 14 + 3 + 1
    assert found[-1].startswith("neck")


def test_blocks_are_units_and_so_are_other_layers_that_run(small):
    # Attention uses its last layer's weight without calling it; one layer is not used at all.
    assert choose(Network()) == ["patches", "layers.0", "layers.1", "layers.2", "fc"]


def test_a_module_that_runs_twice_is_no_unit(small):
    network = Network()
    network.layers[2] = network.layers[0]
    assert choose(network) == ["patches", "layers.1", "fc"]


def test_modules_with_a_parameter_in_common_are_no_units(small):
    network = Network()
    network.layers[2].linear.weight = network.layers[0].linear.weight
    assert choose(network) == ["patches", "layers.1", "fc"]


def test_patterns_name_units_by_component(small):
    assert match(Network(), "layers.*") == ["layers.0", "layers.1", "layers.2"]
    assert match(Network(), "fc", "layers.[12]") == ["fc", "layers.1", "layers.2"]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("layer.*", "no module with parameters is named 'layer.*'; did you mean 'layers"),
        ("*.out_proj", "no module with parameters is named"),
        ("layers.*.attention.out_proj", "is called 0 times"),
        ("layers", "layers is called 0 times"),
        ("for_later", "for_later is called 0 times"),
    ],
)
def test_a_pattern_that_gives_no_unit_is_refused(pattern, said):
    with pytest.raises(OptionError) as caught:
        match(Network(), pattern)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_patterns_that_part_tied_weights_are_refused():
    network = Network()
    network.layers[2].linear.weight = network.layers[0].linear.weight
    with pytest.raises(OptionError, match=r"layers\.0, layers\.2 have a parameter that is used"):
        match(network, "layers.*")
