"""The moving average of the weights: its values, in evaluations, in checkpoints, after a resume."""

import pytest
import torch

from plsc import Callback, load_network
from plsc.checkpoint import load_weights
from tests.images import write_dataset, write_pair_file
from tests.system.small_entry import entry

DECAY = 0.9


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = write_dataset(tmp_path_factory.mktemp("data") / "faces", classes=4, per_class=12)
    write_pair_file(folder / "lfw.bin", folder)
    return folder


class Reference(Callback):
    """Averages the weights with the formula of the docstring; notes the weights that are evaluated."""

    def __init__(self):
        self.average, self.evaluated_with = {}, {}

    def run_start(self, context):
        self.average = {name: p.detach().clone() for name, p in context.network.named_parameters()}

    def after_step(self, context):
        decay = min(DECAY, (1 + context.step) / (10 + context.step))
        for name, p in context.network.named_parameters():
            self.average[name] = decay * self.average[name] + (1 - decay) * p.detach()

    def evaluation_start(self, context):
        self.evaluated_with = {name: p.detach().clone() for name, p in context.network.named_parameters()}


def test_the_average_is_evaluated_saved_and_loaded_and_the_weights_train_on(dataset, tmp_path):
    reference = Reference()
    ins = entry(dataset, tmp_path / "run", set_ema_decay=DECAY, set_with_test=True)
    ins.add_callback(reference)
    result = ins.train()
    plain = entry(dataset, tmp_path / "plain").train()
    averaged, raw = load_weights(result.checkpoint), load_weights(result.checkpoint, averaged=False)
    torch.testing.assert_close(reference.evaluated_with, reference.average)
    for name, value in reference.average.items():
        torch.testing.assert_close(averaged[name], value)
    assert not torch.equal(averaged["stem.0.weight"], raw["stem.0.weight"])
    assert not torch.equal(averaged["neck.norm_out.running_mean"], raw["neck.norm_out.running_mean"])
    others = load_weights(plain.checkpoint)
    assert all(raw[name].equal(value) for name, value in others.items())
    network = load_network(result.checkpoint)
    assert torch.equal(network.state_dict()["stem.0.weight"], averaged["stem.0.weight"])
    test = entry(dataset, tmp_path / "test", set_checkpoint_dir=result.checkpoint, set_with_test=True).test()
    assert test["lfw"].accuracy == result.evaluation["lfw"].accuracy


def test_a_resumed_run_has_the_same_average_and_one_without_starts_from_the_weights(dataset, tmp_path):
    whole = entry(dataset, tmp_path / "whole", set_ema_decay=DECAY, set_train_epochs=2).train()
    entry(dataset, tmp_path / "half", set_ema_decay=DECAY).train()
    ins = entry(dataset, tmp_path / "half", set_train_epochs=2, set_checkpoint_dir=tmp_path / "half/0")
    resumed = ins.train()  # the option is adopted from the checkpoint
    expected = load_weights(whole.checkpoint)
    assert all(value.equal(expected[name]) for name, value in load_weights(resumed.checkpoint).items())
    entry(dataset, tmp_path / "plain").train()
    ins = entry(dataset, tmp_path / "plain", set_train_epochs=2, set_checkpoint_dir=tmp_path / "plain/0",
                set_ema_decay=0.5)  # fmt: skip
    started = ins.train().checkpoint
    assert not torch.equal(
        *(load_weights(started, averaged=choice)["stem.0.weight"] for choice in (True, False))
    )


class Counter(Callback):
    """Keeps a tensor that it does not have before the first step."""

    counts = None

    def after_step(self, context):
        self.counts = torch.ones(3) if self.counts is None else self.counts + 1

    def state_dict(self):
        return {} if self.counts is None else {"counts": self.counts, "kind": "ones"}

    def load_state_dict(self, state):
        assert state["kind"] == "ones"
        self.counts = state["counts"]


def test_tensors_of_a_callback_of_ones_own_are_saved_and_restored(dataset, tmp_path):
    for epochs in (1, 2):
        counter = Counter()
        ins = entry(dataset, tmp_path / "run", set_train_epochs=epochs, set_checkpoint_dir="last")
        ins.add_callback(counter)
        result = ins.train()
        assert counter.counts.tolist() == [result.steps] * 3
