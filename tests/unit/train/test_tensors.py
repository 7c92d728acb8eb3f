"""The state of optimizers, by name: any of torch's comes back and goes on to the same bits."""

import functools
import json

import pytest
import torch
from torch import nn

from plsc.checkpoint.manifest import OPTIMIZER, TensorInfo
from plsc.checkpoint.save import info_of
from plsc.errors import CheckpointError
from plsc.heads import build_head
from plsc.optim import OPTIMIZERS as BY_NAME
from plsc.optim import build_optimizer
from plsc.train.snapshot import collect_numbers, collect_tensors, make_state
from tests.devices import GPU
from tests.roles import role_of_key


class CountingInNumbers(torch.optim.SGD):
    """Some optimizers outside of torch count in plain numbers."""

    def step(self, closure=None):
        outcome = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["decay"] = 0.5 ** state["count"]
        return outcome


def by_name(name, parameters):
    return build_optimizer(name, [{"params": parameters}], 0.01, arguments=ARGUMENTS.get(name))


ARGUMENTS = {"adam": {"amsgrad": True}, "rmsprop": {"momentum": 0.9, "centered": True}}
OPTIMIZERS = {name: functools.partial(by_name, name) for name in BY_NAME} | {
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "numbers": lambda p: CountingInNumbers(p, 0.1, momentum=0.9),
}


def parts(make, device="cpu"):
    torch.manual_seed(1)
    network, head = nn.Linear(6, 4).to(device), build_head("arcface", 5, 4).to(device)
    return network, head, make([*network.parameters(), *head.parameters()])


def steps(network, head, optimizer, count):
    for _ in range(count):
        optimizer.zero_grad()
        device = network.weight.device
        images, labels = torch.randn(8, 6), torch.randint(5, (8,))
        output = head(network(images.to(device)), labels.to(device))
        output.loss.backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_an_optimizer_goes_on_to_the_same_bits(name, device):
    first = parts(OPTIMIZERS[name], device)
    steps(*first, 3)
    saved = {role: tensor.clone() for role, tensor in collect_tensors(*first, None).items()}
    numbers = json.loads(json.dumps(collect_numbers(*first)))
    random = torch.get_rng_state()
    steps(*first, 2)

    second = parts(OPTIMIZERS[name], device)
    make_state(*second, {role.key: info_of(role, t) for role, t in saved.items()}, numbers)
    into = collect_tensors(*second, None)
    assert into.keys() == saved.keys()
    assert any(role.kind == OPTIMIZER for role in saved)
    for role, tensor in into.items():
        tensor.copy_(saved[role])
    torch.set_rng_state(random)
    steps(*second, 2)
    ours, theirs = (collect_tensors(*each, None) for each in (second, first))
    assert all(tensor.equal(theirs[role]) for role, tensor in ours.items())
    assert collect_numbers(*second) == collect_numbers(*first)


def test_state_that_no_parameter_here_can_have_is_refused():
    for key, size, noun in (
        ("optimizer.exp_avg.backbone.no", 6, "this network"),
        ("momentum.backbone.bias", 2**40, "its parameter"),
    ):
        saved = {key: TensorInfo((size,), "float32", False, role_of_key(key))}
        with pytest.raises(CheckpointError, match=noun):
            make_state(*parts(OPTIMIZERS["Adam"]), saved, {})
