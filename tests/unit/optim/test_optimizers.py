"""Optimizers by name and by factory give the updates of torch's optimizers."""

import functools

import pytest
import torch
from torch import nn

from plsc.config import Options
from plsc.entry import Entry
from plsc.errors import OptionError
from plsc.optim import (
    OPTIMIZERS,
    ExpectedStates,
    build_custom,
    build_optimizer,
    describe_implementation,
    set_rates,
)
from plsc.train.build import check_combinations


def weights(layout=torch.contiguous_format):
    torch.manual_seed(1)
    matrix, vector = torch.randn(3, 2, 3, 3).to(memory_format=layout), torch.randn(3)
    return nn.Parameter(matrix), nn.Parameter(vector)


def put_gradients(parameters, step):
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def options_of(**changes):
    options = Options()
    for name, value in changes.items():
        options.set(f"optim.{name}", value)
    return options


def built(groups, rate=0.05, **changes):
    optim = options_of(**changes).optim
    decays = {"momentum": optim.momentum, "weight_decay": optim.weight_decay}
    return build_optimizer(optim.optimizer, groups, rate, **decays, arguments=optim.optimizer_arguments)


def steps(optimizer, parameters, count=3, factor=1.0):
    for step in range(count):
        put_gradients(parameters, step)
        set_rates(optimizer.param_groups, factor)
        optimizer.step()


WAYS = {"auto": None, "for_loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
MORE = {
    "sgd": (
        {"momentum": 0.8, "optimizer_arguments": {"nesterov": True}},
        {"momentum": 0.8, "nesterov": True},
    ),
    "adam": (
        {"optimizer_arguments": {"betas": (0.8, 0.9), "amsgrad": True}},
        {"betas": (0.8, 0.9), "amsgrad": True},
    ),
    "rmsprop": (
        {"optimizer_arguments": {"momentum": 0.9, "centered": True}},
        {"momentum": 0.9, "centered": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_equal_a_torch_optimizer_with_the_same_groups(name):
    kind = OPTIMIZERS[name]
    given, by_hand = MORE.get(name, ({}, {}))
    decay = {"weight_decay": 0.02} if kind.takes else {}
    none = {"weight_decay": 0.0} if kind.takes else {}
    mine = weights()
    groups = [{"params": [mine[0]]}, {"params": [mine[1]], "lr_factor": 0.1, **none}]
    ours = built(groups, optimizer=name.upper(), weight_decay=0.02, **given)
    theirs = weights()
    rate = 0.05 * 0.5
    hand_groups = [
        {"params": [theirs[0]], **decay},
        {"params": [theirs[1]], "lr": rate * 0.1, **none},
    ]
    hand = getattr(torch.optim, kind.class_name)(hand_groups, lr=rate, foreach=False, **by_hand)
    steps(ours, mine, factor=0.5)
    for step in range(3):
        put_gradients(theirs, step)
        hand.step()
    assert not mine[0].equal(weights()[0])
    for a, b in zip(mine, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_implementations_give_the_same_update_for_any_memory_layout(name):
    layout = torch.channels_last if OPTIMIZERS[name].has_fused else torch.contiguous_format
    ways = ["for_loop", "foreach", *(["fused"] if OPTIMIZERS[name].has_fused else []), "auto"]
    results = []
    for way in ways:
        mine = weights(layout)
        optimizer = built([{"params": list(mine)}], optimizer=name, optimizer_arguments=WAYS[way])
        steps(optimizer, mine)  # with contiguous gradients
        results.append(mine)
        assert way == "auto" or describe_implementation(optimizer) == f"{way} on cpu"
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_l1_decay_adds_the_sign_of_the_weights_to_the_gradients_of_its_groups():
    mine = weights()
    before = [p.detach().clone() for p in mine]
    groups = [{"params": [mine[0]], "l1_decay": 0.5}, {"params": [mine[1]], "l1_decay": 0.0}]
    optimizer = built(groups, rate=0.1, momentum=0.0, weight_decay=0.0)
    for parameter in mine:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(mine[0], before[0] - 0.05 * before[0].sign(), atol=1e-7)
    assert mine[1].equal(before[1])


def test_the_schedule_multiplies_the_learning_rates_of_a_factory():
    mine = weights()
    groups = [{"params": [mine[0]]}, {"params": [mine[1]], "lr_factor": 2.0, "weight_decay": 0.0}]

    def factory(groups, eps):
        groups[0]["lr"] = 0.3
        return torch.optim.AdamW(groups, lr=0.001, eps=eps, weight_decay=0.7)

    optimizer = build_custom(factory, "mine", groups, {"eps": 1e-7})
    set_rates(optimizer.param_groups, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.15, 0.001]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.7, 0.0]
    assert optimizer.defaults["eps"] == 1e-7


def losing(groups):
    return torch.optim.SGD([groups[0]], 0.1)


def flattening(groups):
    return torch.optim.SGD([p for group in groups for p in group["params"]], 0.1)


class Holding(torch.optim.Optimizer):
    def __init__(self, groups, shares=False):
        self.inner = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups
        if shares:
            self.inner.state = self.state

    def step(self):
        self.inner.step()


def test_an_inner_optimizer_must_share_the_outer_state():
    mine = weights()
    made = build_custom(Holding, "mine", [{"params": list(mine)}], {"shares": True})
    for one in mine:
        one.grad = torch.ones_like(one)
    made.step()
    assert all("momentum_buffer" in made.state[one] for one in mine)


@pytest.mark.parametrize(
    ("factory", "noun"),
    [
        (losing, "without 1 of the 2 given parameters"),
        (flattening, "lr_factor"),
        (lambda groups: groups, "returned a list"),
        (lambda groups: 1 / 0, "ZeroDivisionError"),
        (Holding, "separate state"),
    ],
)
def test_unusable_factories_raise_with_the_reason(factory, noun):
    mine = weights()
    groups = [{"params": [mine[0]]}, {"params": [mine[1]], "lr_factor": 2.0}]
    with pytest.raises(OptionError, match=noun):
        build_custom(factory, "mine", groups, {})


def test_set_optimizer_accepts_names_and_factories_and_the_last_call_applies():
    ins = Entry()
    ins.set_optimizer(functools.partial(torch.optim.AdamW, lr=0.1), eps=1e-7)
    assert ins.options.optim.optimizer == "torch.optim.adamw:AdamW"
    assert ins.options.optim.optimizer_arguments == {"eps": 1e-7}
    ins.set_optimizer("RMSprop", centered=True)
    assert ins.options.optim.optimizer_arguments == {"centered": True}
    ins.set_optimizer("adam")
    assert ins.options.optim.optimizer_arguments is None
    made = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    with pytest.raises(OptionError, match="the optimizer is a SGD; expected a name, or a function"):
        ins.set_optimizer(made)


@pytest.mark.parametrize(
    ("changes", "noun"),
    [
        ({"optimizer": "adamm"}, "'adam'"),
        ({"optimizer": ":f"}, "factory"),
        ({"groups": ({"pattern": "fc", "momentum": -5},)}, "momentum"),
        ({"optimizer": "adam", "groups": ({"pattern": "fc", "weight_decay": -1},)}, "weight_decay"),
        ({"optimizer_arguments": {"lr": 1}}, r"optim\.lr"),
        ({"optimizer_arguments": {"not a name": 1}}, "names"),
        ({"optimizer_arguments": {"eps": [object()]}}, "plain values"),
        ({"schedule": "exponential"}, "schedule"),  # without an end
    ],
)
def test_wrong_settings_are_refused_before_data_are_read(changes, noun):
    with pytest.raises(OptionError, match=noun):
        check_combinations(options_of(**changes).resolve(), 1)


@pytest.mark.parametrize(
    ("changes", "group", "noun"),
    [
        ({"optimizer": "radam", "optimizer_arguments": {"fused": True}}, {}, "fused"),
        ({"optimizer": "adam", "optimizer_arguments": {"epps": 1}}, {}, "'epps'.*'eps'"),
        ({"optimizer": "adam", "optimizer_arguments": {"eps": -1}}, {}, "epsilon"),
        ({"optimizer_arguments": {"momentum": 0.5}}, {}, r"optim\.momentum"),
        ({"optimizer_arguments": {"nesterov": True}, "momentum": 0.0}, {}, "Nesterov"),
        ({}, {"momentun": 0.5}, "'momentum'"),
        ({"optimizer": "rprop"}, {"weight_decay": 0.5}, "weight_decay"),
    ],
)
def test_wrong_arguments_and_groups_are_refused_when_the_optimizer_is_created(changes, group, noun):
    with pytest.raises(OptionError, match=noun):
        built([{"params": list(weights()), **group}], **changes)


def test_expected_states_of_a_custom_optimizer_are_unknown():
    class Mine(torch.optim.SGD):
        pass

    parameter = nn.Parameter(torch.ones(3))
    assert ExpectedStates(Mine([parameter], 0.1, momentum=0.9)).of(parameter) is None
