"""Input that is no image, and sparse gradients, on one and three ranks: words_worker.py FOLDER

Exits with 1 if weights differ from those of a plain loop, or a resumed run from an uninterrupted one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from plsc.checkpoint import load_weights
from plsc.heads import ShardedHead, build_margin
from plsc.models import BaseModel
from plsc.parallel.world import World
from plsc.train.callbacks import UserParts
from tests.distributed.worker import run_worker, smaller_world
from tests.resuming import compute_in_float64, different, losses_of, options_of, saved_at, train

WORDS, CLASSES, DIMENSION = 20, 9, 6
BATCH, EPOCHS = 7, 2  # 3 batches of 7 and one of 2 samples: on 3 ranks 1, 1 and 0


class Words(BaseModel):
    """Adds up the vectors of four words."""

    def __init__(self, is_sparse: bool = True) -> None:
        super().__init__()
        self.example_input = torch.zeros(2, 4, dtype=torch.int64)
        self.embedding = nn.Embedding(WORDS, 5, sparse=is_sparse)
        self.fc = nn.Linear(5, DIMENSION)

    def build_network(self, input, label, is_train=True):
        return self.fc(torch.tanh(self.embedding(input).sum(1)))


class WeightedWords(Words):
    """The same with a weight per word: the input is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input = {"words": torch.zeros(2, 4, dtype=torch.int64), "weights": torch.zeros(2, 4)}

    def build_network(self, input, label, is_train=True):
        vectors = self.embedding(input["words"]) * input["weights"][:, :, None]
        return self.fc(torch.tanh(vectors.sum(1)))


def samples(is_weighted: bool) -> list[tuple[object, int]]:
    """Return 23 samples; words repeat within a sample and within a batch."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(WORDS // 2, (23, 4), generator=generator)
    weights = torch.rand(23, 4, generator=generator)
    labels = torch.randint(CLASSES, (23,), generator=generator).tolist()
    if is_weighted:
        parts = zip(words.numpy(), weights, labels, strict=True)
        return [({"words": word, "weights": weight}, label) for word, weight, label in parts]
    return list(zip(words, labels, strict=True))


CASES = {
    # network, optimizer of the network, further options
    "sgd, Dataset": (Words, "sgd", {"train__micro_batches": 2, "optim__clip_norm": 0.005}),
    "sparse_adam, generator of dicts": (WeightedWords, "sparse_adam", {"optim__clip_norm": 0.005}),
    "adagrad, generator that prefetches": (Words, "adagrad", {"data__num_workers": 1}),
}


def reader_of(case: str):
    found = samples(CASES[case][0] is WeightedWords)
    return found if "Dataset" in case else lambda: iter(found)


def train_case(world: World, folder: Path, case: str, **more):
    network, optimizer, settings = CASES[case]
    options = options_of(
        folder, folder / "run", head__class_num=CLASSES, head__loss_type="dist_softmax",
        model__emb_size=DIMENSION, train__global_batch_size=BATCH,
        train__epochs=EPOCHS, data__order="sequential", data__last_batch="keep", optim__lr=0.1,
        optim__optimizer=optimizer, optim__weight_decay=0.01, **settings, **more,
    )  # fmt: skip
    return train(options, world, network, UserParts(train_reader=reader_of(case)))


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


def check_plain(case: str, checkpoint: Path) -> None:
    network, weight, bias = plain(case)
    classes = load_weights(checkpoint, "class_weights")
    found = {**load_weights(checkpoint), "weight": classes["weight"], "bias": classes["bias"]}
    expected = {**network, "weight": weight, "bias": bias}
    far = {name: float((found[name] - one).detach().abs().max()) for name, one in expected.items()}
    assert max(far.values()) < 1e-12, (case, far)


def main() -> None:
    folder = Path(sys.argv[1])
    compute_in_float64(pytest.MonkeyPatch())
    full = World.from_environment("cpu")
    for ranks in (1, 3):
        world = smaller_world(full, ranks)
        for case in CASES if world else ():
            place = folder / str(ranks) / case
            train_case(world, place, case, checkpoint__every_n_steps=3, checkpoint__keep_last=-1)
            saved = saved_at(place / "run", 3)  # within the first epoch
            train_case(world, place / "resumed", case, checkpoint__load_dir=str(saved))
            if world.is_main:
                resumed, whole = saved_at(place / "resumed/run", 8), saved_at(place / "run", 8)
                assert different(resumed, whole) == [], (ranks, case)
                assert losses_of(place / "resumed/run").keys() == {4, 5, 6, 7, 8}
                check_plain(case, whole)
            world.barrier()
        full.barrier()
    full.close()


if __name__ == "__main__":
    run_worker(main)
