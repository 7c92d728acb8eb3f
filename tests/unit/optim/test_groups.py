"""Patterns, parameter groups, freezing, and initialisation rules."""

import pytest
import torch
from torch import nn

from plsc.config import Options
from plsc.config.train import read_parameter_groups
from plsc.entry import Entry
from plsc.errors import OptionError
from plsc.models import BaseModel, build_model
from plsc.models.base_model import Initialization, freeze, initialise_by_rule
from plsc.names import find_parameters
from plsc.optim import assign_parameters


class Small(BaseModel):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.PReLU())
        self.plain = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=False), nn.Dropout(0.5))
        self.fc = nn.Linear(3, 4)

    def build_network(self, input, label, is_train=True):
        return self.fc(self.plain(self.stem(input).mean((2, 3))))


STEM = ["stem.0.weight", "stem.0.bias", "stem.1.weight", "stem.1.bias", "stem.2.weight"]
PLAIN, FC = ["plain.0.weight", "plain.0.bias"], ["fc.weight", "fc.bias"]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("stem", STEM),
        ("stem.1", ["stem.1.weight", "stem.1.bias"]),
        ("*.bias", ["stem.0.bias", "stem.1.bias", "plain.0.bias", "fc.bias"]),
        ("fc.weight", ["fc.weight"]),
        ("type:BatchNorm*", ["stem.1.weight", "stem.1.bias"]),
        ("type:Linear", PLAIN + FC),
        ("re:(fc|stem\\.0)\\.b.*", ["stem.0.bias", "fc.bias"]),
        ("*", STEM + PLAIN + FC),
    ],
)
def test_patterns_match_names_modules_types_and_regular_expressions(pattern, names):
    assert find_parameters(pattern, Small(), "here") == names


def test_the_error_for_a_pattern_without_match_suggests_names():
    for pattern, near in (("fc.weigth", "fc.weight"), ("type:BatchNorm3d", "type:BatchNorm2d")):
        with pytest.raises(OptionError, match=f"'{near}'"):
            find_parameters(pattern, Small(), "here")


def assigned(network=None, freeze=(), groups=(), **settings):
    read = read_parameter_groups(groups)
    plain = [(group.pattern, None if group.frozen else group.settings) for group in read]
    return assign_parameters(network or Small(), plain, freeze, **settings)


def test_the_first_matching_group_applies_and_the_rest_is_the_first_group():
    ins = Entry()
    ins.add_parameter_group("fc.bias", weight_decay=0.0)
    ins.add_parameter_group("fc", lr_factor=0.1, momentum=0.5)
    ins.add_parameter_group("stem.0", frozen=True)
    network = Small()
    network.plain[0].bias.requires_grad_(False)
    got = assigned(network, groups=ins.options.optim.groups)
    assert got.groups == [
        ([*STEM[2:], "plain.0.weight"], {}),
        (["fc.bias"], {"weight_decay": 0.0}),
        (["fc.weight"], {"momentum": 0.5, "lr_factor": 0.1}),
    ]
    assert got.frozen == {"stem.0.weight", "stem.0.bias"}
    with pytest.raises(OptionError, match="put the more specific pattern first"):
        assigned(groups=({"pattern": "fc"}, {"pattern": "fc.bias", "lr_factor": 2.0}))


def test_groups_are_split_without_decay_of_norms_and_biases_unless_they_set_a_decay():
    got = assigned(
        decay_norm_and_bias=False,
        l1_decay=0.1,
        groups=({"pattern": "fc", "weight_decay": 0.2}, {"pattern": "plain", "lr_factor": 3.0}),
    )
    none = {"weight_decay": 0.0, "l1_decay": 0.0}
    assert [group for group in got.groups if group[0]] == [
        (["stem.0.weight"], {"l1_decay": 0.1}),
        (STEM[1:], none),
        (["fc.weight"], {"weight_decay": 0.2, "l1_decay": 0.1}),
        (["fc.bias"], {"weight_decay": 0.2, "l1_decay": 0.0}),
        (["plain.0.weight"], {"lr_factor": 3.0, "l1_decay": 0.1}),
        (["plain.0.bias"], {"lr_factor": 3.0, **none}),
    ]


@pytest.mark.parametrize(
    ("group", "noun"),
    [
        ({"patern": "neck"}, "pattern"),
        ({"pattern": "re:("}, "regular expression"),
        ({"pattern": "fc", "lr_factor": 0}, "lr_factor"),
        ({"pattern": "fc", "lr": 0.1}, "optim.lr"),
        ({"pattern": "fc", "frozen": True, "weight_decay": 0.1}, "frozen"),
        ({"pattern": "fc", "betas": [0.9, object()]}, "plain values"),
    ],
)
def test_an_invalid_group_raises_when_it_is_set(group, noun):
    with pytest.raises(OptionError, match=noun):
        Options().set("optim.groups", (group,))


def frozen(*patterns, network=None):
    network = network or Small()
    freeze(network, assigned(network, freeze=patterns).frozen)
    return network


def test_only_frozen_batch_norms_stay_in_evaluation_mode():
    network = frozen("stem", "plain")
    for mode in (True, False, True):
        network.train(mode)
        modes = {name: module.training for name, module in network.named_modules()}
        assert {name for name, is_on in modes.items() if is_on != mode} == (
            {"stem.1", "plain.1"} if mode else set()
        )
    assert [name for name, p in network.named_parameters() if p.requires_grad] == FC
    before = network.stem[1].running_mean.clone(), network.plain[1].running_mean.clone()
    network(torch.randn(4, 1, 5, 5)).sum().backward()
    assert network.stem[1].running_mean.equal(before[0])
    assert network.plain[1].running_mean.equal(before[1])
    partly = frozen("stem.1.bias", "plain.0.bias").train()
    assert partly.stem[1].training
    assert partly.plain[1].training


def test_a_synchronised_batch_norm_is_frozen_by_its_original_type_name():
    network = Small()
    names = assigned(network, freeze=["type:BatchNorm2d"]).frozen
    network.stem[1] = nn.SyncBatchNorm.convert_sync_batchnorm(network.stem[1])
    freeze(network, names)
    network.train()
    assert not network.stem[1].training


def ruled(pattern, rule, **arguments):
    return Initialization(pattern, rule, arguments)


def initialised(*rules, seed=3):
    torch.manual_seed(0)
    network = Small()
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    initialise_by_rule(network, [ruled(**rule) for rule in rules], seed)
    changed = {n: p.detach() for n, p in network.named_parameters() if not p.equal(before[n])}
    return network, changed


def test_initialisation_depends_on_seed_and_name_and_changes_only_matches():
    xavier = {"pattern": "stem", "rule": "xavier_uniform"}
    constant = {"pattern": "*.bias", "rule": "constant", "val": 0.5}
    _, changed = initialised(constant, xavier)
    assert set(changed) == {"stem.0.weight", *(n for n in STEM + PLAIN + FC if "bias" in n)}
    assert all(bool((p == 0.5).all()) for name, p in changed.items() if "bias" in name)
    _, alone = initialised(xavier)
    assert alone["stem.0.weight"].equal(changed["stem.0.weight"])
    _, other = initialised(xavier, seed=4)
    assert not other["stem.0.weight"].equal(changed["stem.0.weight"])


@pytest.mark.parametrize(
    ("rule", "holds"),
    [
        ({"rule": "orthogonal", "gain": 2.0}, lambda w: (w @ w.T).allclose(4 * torch.eye(16), atol=1e-4)),
        ({"rule": "kaiming_normal", "mode": "fan_out"}, lambda w: abs(w.std() - (2 / 16) ** 0.5) < 0.02),
        ({"rule": "trunc_normal", "std": 1.0, "a": -0.5, "b": 0.5}, lambda w: w.abs().max() <= 0.5),
    ],
    ids=lambda value: value["rule"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_rules_and_arguments_are_those_of_torch(rule, holds):
    network = nn.Sequential(nn.Linear(900, 16))
    initialise_by_rule(network, [ruled("0.weight", **rule)], 1)
    assert holds(network[0].weight.detach())


@pytest.mark.parametrize(
    ("rule", "noun"),
    [
        ({"rule": "xavier"}, "unknown initialisation rule"),
        ({"rule": "normal", "sd": 1.0}, "'sd'"),
        ({"rule": "normal", "std": -1.0}, "fc.weight"),
        ({"rule": "orthogonal", "pattern": "*.bias"}, "2 or more dimensions"),
        ({"rule": "normal", "pattern": "ffc"}, "'ffc' matches no"),
    ],
)
def test_an_invalid_rule_raises(rule, noun):
    with pytest.raises(OptionError, match=noun):
        initialised({"pattern": "fc", **rule})


def test_the_setter_adds_rules_that_apply_to_built_in_networks():
    ins = Entry()
    ins.set_initialization("type:Conv2d", "kaiming_normal", mode="fan_out")
    ins.set_initialization("neck", "normal", std=0.01)
    network = build_model("SmallResNet", 8, (1, 16, 16))
    initialise_by_rule(network, ins._initializations, 0)
    assert float(network.neck.fc.weight.detach().std()) == pytest.approx(0.01, rel=0.2)
