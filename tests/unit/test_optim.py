"""Optimizers, parameter groups, freezing, initialisation and schedules of the learning rate."""

import functools

import pytest
import torch
from torch import nn

from plsc.checkpoint import load_weights
from plsc.config import Options
from plsc.config.train import read_parameter_groups
from plsc.entry import Entry
from plsc.errors import OptionError
from plsc.models import BaseModel
from plsc.models.base_model import Initialization, freeze, initialise_by_rule
from plsc.names import find_parameters
from plsc.optim import (
    OPTIMIZERS,
    assign_parameters,
    build_custom,
    build_optimizer,
    set_rates,
)
from plsc.train.build import build_schedule, check_combinations, with_rate
from plsc.train.callbacks import Length
from tests.images import write_dataset
from tests.system.small_entry import entry


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
    "sgd": {"nesterov": True}, "adam": {"betas": (0.8, 0.9), "amsgrad": True},
    "rmsprop": {"momentum": 0.9, "centered": True},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_equal_a_torch_optimizer_with_the_same_groups(name):
    kind = OPTIMIZERS[name]
    given = {"optimizer_arguments": MORE[name]} if name in MORE else {}
    by_hand = MORE.get(name, {}) | ({"momentum": 0.9} if name == "sgd" else {})
    decay = {"weight_decay": 0.02} if kind.takes else {}
    none = {"weight_decay": 0.0} if kind.takes else {}
    mine = weights()
    groups = [{"params": [mine[0]]}, {"params": [mine[1]], "lr_factor": 0.1, **none}]
    ours = built(groups, optimizer=name.upper(), weight_decay=0.02, **given)
    theirs = weights()
    rate = 0.05 * 0.5
    hand_groups = [{"params": [theirs[0]], **decay}, {"params": [theirs[1]], "lr": rate * 0.1, **none}]
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
        assert way in ("auto", "for_loop") or optimizer.defaults[way]
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


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
        ("*", STEM + PLAIN + FC),
    ],
)
def test_patterns_match_names_modules_and_types(pattern, names):
    assert find_parameters(pattern, Small(), "here") == names


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


def initialised(*rules, seed=3):
    torch.manual_seed(0)
    network = Small()
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    initialise_by_rule(network, rules, seed)
    changed = {n: p.detach() for n, p in network.named_parameters() if not p.equal(before[n])}
    return network, changed


def test_initialisation_depends_on_seed_and_name_and_changes_only_matches():
    xavier = Initialization("stem", "xavier_uniform", {})
    constant = Initialization("*.bias", "constant", {"val": 0.5})
    _, changed = initialised(constant, xavier)
    assert set(changed) == {"stem.0.weight", *(n for n in STEM + PLAIN + FC if "bias" in n)}
    assert all(bool((p == 0.5).all()) for name, p in changed.items() if "bias" in name)
    _, alone = initialised(xavier)
    assert alone["stem.0.weight"].equal(changed["stem.0.weight"])
    _, other = initialised(xavier, seed=4)
    assert not other["stem.0.weight"].equal(changed["stem.0.weight"])


def test_the_setter_adds_rules_that_apply_to_built_in_networks(tmp_path):
    ins = entry(write_dataset(tmp_path / "set", classes=2, per_class=6), tmp_path / "run", set_lr=1e-12)
    ins.set_initialization("type:Conv2d", "kaiming_normal", mode="fan_out")
    ins.set_initialization("neck", "normal", std=0.01)
    weight = load_weights(ins.train().checkpoint)["neck.fc.weight"]
    assert weight.std().item() == pytest.approx(0.01, rel=0.2)


def schedule(function=None, total=None, epoch=None, **changes):
    optim, until = options_of(**changes).optim, Length(0, 0, epoch).until
    return build_schedule(optim.schedule, optim.lr or 0.1, optim.warmup_steps, total, until, function)


def halving(step, total_steps):
    return 0.5 if step >= total_steps / 2 else 1.0


def resolved(changes, saved=None, total=370):
    return with_rate(options_of(**changes).resolve(saved and {"optim": saved}), 512, total).optim


COSINE = {"name": "cosine", "steps": 50}


@pytest.mark.parametrize(
    ("changes", "saved", "total", "expected"),
    [
        ({}, None, 370, {"schedule": "cosine", "lr": 0.05, "warmup_steps": 37}),
        ({}, None, 10**6, {"warmup_steps": 1000}),
        ({}, None, None, {"schedule": "constant", "warmup_steps": 100}),
        ({"schedule": COSINE}, None, None, {"schedule": COSINE, "warmup_steps": 5}),
        ({"schedule": "my_package.rates:falling"}, None, 370, {"warmup_steps": 0}),
        ({}, {"schedule": "step", "schedule_arguments": None}, 370, {"schedule": "step"}),
        ({"lr": 0.01}, None, 370, {"lr": 0.01, "clip_norm": 20}),
        ({"lr": 0.1, "clip_norm": 0}, None, 370, {"clip_norm": 0}),
        ({"clip_norm": 7}, None, 370, {"clip_norm": 7}),
        ({"warmup_steps": "2ep"}, None, 370, {"warmup_steps": "2ep"}),
        # An option that is gone, in a checkpoint; the script's warm-up replaces that of the checkpoint.
        ({}, {"warmup_epochs": 0, "warmup_steps": 12}, 370, {"warmup_steps": 12}),
        ({"warmup_steps": "1ep"}, {"warmup_steps": 12}, 370, {"warmup_steps": "1ep"}),
        ({"warmup_steps": 5}, {"warmup_steps": "2ep"}, 370, {"warmup_steps": 5}),
    ],
)
def test_defaults_of_rate_schedule_clipping_and_warm_up_depend_on_batch_and_length(
    changes, saved, total, expected
):
    optim = resolved(changes, saved, total)
    assert {name: getattr(optim, name) for name in expected} == expected


@pytest.mark.parametrize("warmup", [{"warmup_steps": 4}, {"warmup_steps": "2ep", "epoch": 2}])
def test_warm_up_increases_linearly_to_the_base_rate(warmup):
    rate = schedule(schedule="constant", **warmup)
    assert [rate(step) for step in range(6)] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])


def test_decaying_schedules_go_from_base_to_end_after_the_warm_up():
    falling = functools.partial(schedule, lr=0.2, total=12, warmup_steps=2)
    rate = falling(schedule={"name": "polynomial", "end_factor": 0.1, "power": 2.0})
    assert [rate(0), rate(1), rate(2)] == pytest.approx([0.1, 0.2, 0.2])
    assert rate(7) == pytest.approx(0.2 * (0.1 + 0.9 * 0.25))
    assert rate(12) == rate(100) == pytest.approx(0.02)
    rate = schedule(schedule="cosine", total=10)
    assert [rate(0), rate(5), rate(10), rate(11)] == pytest.approx([0.1, 0.05, 0, 0])
    rate = schedule(schedule={"name": "cosine", "steps": 4}, total=10)
    assert rate(2) == pytest.approx(0.05)
    assert rate(4) == pytest.approx(0)
    assert schedule(schedule="constant")(10**6) == 0.1
    assert schedule(schedule="cosine", total=3, warmup_steps=5)(0) > 0  # a short trial run


def test_a_custom_schedule_multiplies_the_rate_after_the_warm_up():
    ins = Entry()
    ins.set_lr_schedule(lambda step: 2.0**-step)
    assert ins.options.optim.schedule.startswith(f"{__name__}:test_a_custom")
    rate = schedule(lambda step: 2.0**-step, schedule=ins.options.optim.schedule, warmup_steps=2)
    assert [rate(0), rate(1), rate(3)] == pytest.approx([0.05, 0.1, 0.1 / 8])
    by_name = schedule(schedule=f"{__name__}:halving", total=10)
    assert [by_name(4), by_name(5)] == pytest.approx([0.1, 0.05])


def two(factory):
    """Build a factory's optimizer of two groups."""
    mine = weights()
    return build_custom(factory, "mine", [{"params": [mine[0]]}, {"params": [mine[1]], "lr_factor": 2.0}], {})


def checked(**changes):
    """Check settings before data are read."""
    check_combinations(options_of(**changes).resolve(), 1)


def made(group=None, **changes):
    return built([{"params": list(weights()), **(group or {})}], **changes)


def grouped(**group):
    return options_of(groups=(group,))


def ruling(rule, pattern="fc", **arguments):
    return initialised(Initialization(pattern, rule, arguments))


def rated(function, step=0):
    return schedule(function, schedule="some.module:function")(step)


@pytest.mark.parametrize(
    ("call", "noun"),
    [
        (lambda: two(losing), "1 of the 2 given parameters"),
        (lambda: two(flattening), "lr_factor"),
        (lambda: two(lambda groups: groups), "list"),
        (lambda: two(lambda groups: 1 / 0), "ZeroDivisionError"),
        (lambda: two(Holding), "separate state"),
        (lambda: checked(optimizer="adamm"), "'adam'"),
        (lambda: checked(optimizer=":f"), "factory"),
        (lambda: checked(groups=({"pattern": "fc", "momentum": -5},)), "momentum"),
        (lambda: checked(optimizer="adam", groups=({"pattern": "fc", "weight_decay": -1},)), "weight_decay"),
        (lambda: checked(optimizer_arguments={"lr": 1}), r"optim\.lr"),
        (lambda: checked(optimizer_arguments={"not a name": 1}), "names"),
        (lambda: checked(optimizer_arguments={"eps": [object()]}), "plain values"),
        (lambda: checked(schedule="exponential"), "schedule"),
        (lambda: made(optimizer="radam", optimizer_arguments={"fused": True}), "fused"),
        (lambda: made(optimizer="adam", optimizer_arguments={"epps": 1}), "'epps'.*'eps'"),
        (lambda: made(optimizer="adam", optimizer_arguments={"eps": -1}), "epsilon"),
        (lambda: made(optimizer_arguments={"momentum": 0.5}), r"optim\.momentum"),
        (lambda: made(optimizer_arguments={"nesterov": True}, momentum=0.0), "Nesterov"),
        (lambda: made({"momentun": 0.5}), "'momentum'"),
        (lambda: made({"weight_decay": 0.5}, optimizer="rprop"), "weight_decay"),
        (lambda: grouped(patern="neck"), "pattern"),
        (lambda: grouped(pattern="fc", lr_factor=0), "lr_factor"),
        (lambda: grouped(pattern="fc", lr=0.1), "optim.lr"),
        (lambda: grouped(pattern="fc", betas=[0.9, object()]), "plain values"),
        (lambda: ruling("xavier"), "unknown initialisation rule"),
        (lambda: ruling("normal", sd=1.0), "'sd'"),
        (lambda: ruling("normal", std=-1.0), "fc.weight"),
        (lambda: ruling("orthogonal", "*.bias"), "2 or more dimensions"),
        (lambda: ruling("normal", "ffc"), "'ffc' matches no"),
        (lambda: rated(lambda step: -1.0), "returned -1.0 for step 0"),
        (lambda: rated(lambda step: None), "None"),
        (lambda: rated(lambda: 1.0), "TypeError"),
        (lambda: rated(lambda step: [1.0, 1.0][step], 2), "step 2: IndexError"),
        (lambda: rated(lambda step: 10**400 if step else 1.0, 2), "step 2"),
        (lambda: schedule(schedule="cosine"), r"train\.steps"),
        (lambda: schedule(schedule={"name": "cosine", "steps": 3}, total=10, warmup_steps=5), "warm-up"),
        (lambda: schedule(warmup_steps="2ep"), r"optim\.warmup_steps"),
        (lambda: schedule(schedule="cosin"), "did you mean 'cosine'"),
        (lambda: schedule(schedule="__main__:mine"), "no attribute 'mine'"),
        (lambda: schedule(schedule=f"{__name__}:halvin"), "no attribute 'halvin'"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(call, noun):
    with pytest.raises(OptionError, match=noun):
        call()
