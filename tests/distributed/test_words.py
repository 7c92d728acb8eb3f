"""Input that is no image, and sparse gradients, give the weights of a plain loop on any number of ranks."""

from pathlib import Path

import pytest
import torch
from torch import nn

from plsc.checkpoint import load_weights
from plsc.heads import ShardedHead, build_margin
from tests.distributed.launch import run_ranks
from tests.distributed.words_worker import (
    BATCH,
    CASES,
    CLASSES,
    DIMENSION,
    EPOCHS,
    WeightedWords,
    samples,
)
from tests.resuming import saved_at

pytestmark = pytest.mark.slow


def stacked(parts):
    if not isinstance(parts[0], dict):
        return torch.stack(list(parts))
    return {name: torch.stack([torch.as_tensor(part[name]) for part in parts]) for name in parts[0]}


def optimizers_of(name, network, lr=0.1):
    sparse, dense = [network.embedding.weight], list(network.fc.parameters())
    if name == "sparse_adam":
        return [torch.optim.SparseAdam(sparse, lr), torch.optim.Adam(dense, lr, weight_decay=0.01)]
    if name == "sgd":
        return [torch.optim.SGD(sparse, lr), torch.optim.SGD(dense, lr, 0.9, weight_decay=0.01)]
    return [torch.optim.Adagrad(sparse, lr), torch.optim.Adagrad(dense, lr, weight_decay=0.01)]


def plain(case):
    """Return the network and the class weights that a loop in plain PyTorch trains, in one process."""
    kind, optimizer, settings = CASES[case]
    torch.manual_seed(5)
    network = kind().double()
    head = ShardedHead(CLASSES, DIMENSION, build_margin("softmax"), row_dtype="float64")  # its initial values
    weight, bias = nn.Parameter(head.weight.detach().clone()), nn.Parameter(head.bias.detach().clone())
    optimizers = optimizers_of(optimizer, network)
    optimizers.append(torch.optim.SGD([weight, bias], 0.1, 0.9, weight_decay=0.01))
    found = samples(kind is WeightedWords)
    for _ in range(EPOCHS):
        for start in range(0, len(found), BATCH):
            inputs, labels = zip(*found[start : start + BATCH], strict=True)
            logits = nn.functional.linear(network(stacked(inputs)), weight, bias)
            for one in optimizers:
                one.zero_grad()
            nn.functional.cross_entropy(logits, torch.tensor(labels)).backward()
            if clip := settings.get("optim__clip_norm"):
                gradients = [p.grad for p in network.parameters()]
                norm = torch.stack([gradient.to_dense().norm() for gradient in gradients]).norm()
                assert norm > clip  # it is effective
                for gradient in gradients:
                    gradient.mul_(clip / (norm + 1e-6))
            for one in optimizers:
                one.step()
    return network.state_dict(), weight, bias


def test_one_two_and_three_ranks_equal_a_plain_loop_and_resume_to_the_same_bits(tmp_path):
    run_ranks(Path(__file__).with_name("words_worker.py"), 3, str(tmp_path), timeout=300)
    for case in CASES:
        network, weight, bias = plain(case)
        for ranks in (1, 2, 3):
            saved = saved_at(tmp_path / str(ranks) / case / "run", 8)
            classes = load_weights(saved, "class_weights")
            found = {**load_weights(saved), "weight": classes["weight"], "bias": classes["bias"]}
            expected = {**network, "weight": weight, "bias": bias}
            far = {name: float((found[name] - one).detach().abs().max()) for name, one in expected.items()}
            assert max(far.values()) < 1e-12, (case, ranks, far)
