"""Accuracy of plsc and of pytorch-metric-learning in a plain loop: same network, images, order and epochs.

    pip install pytorch-metric-learning
    python benchmarks/accuracy_peer.py build/glyphs --glyphs demo/output/glyphs
    python benchmarks/accuracy_peer.py build/omniglot --omniglot ../shared/data/omniglot_small2.zip
    python benchmarks/accuracy_peer.py build/study --omniglot ... --rates 0.02 --no-peer \\
        --variant "no clipping: optim.clip_norm=0" --variant "no warm-up: optim.warmup_steps=0"

- The peer: the network of its package followed by BatchNorm1d; ArcFaceLoss with its defaults (margin 28.6
  degrees, scale 64); SGD with momentum 0.9 and weight decay 5e-4; a constant learning rate.
- The peer with our loop: the same loss, with the neck, dropout, warm-up, schedule and clipping that are the
  defaults of plsc; and the same with plsc's margin and scale, too. What is left is the head.
- plsc: `Entry` with its defaults except the sizes. A variant changes some of its options.
- Both run at every rate of --rates, plsc also at its default rate. A variant that sets optim.lr runs
  only at that rate.
- No augmentation. Verification uses pairs of classes that were not trained: 200 classes of the glyphs; three
  alphabets of Omniglot, of which two others are trained.

Every run is a process with one thread. Finished runs are not repeated. Writes results.md.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import io
import json
import math
import os
import re
import statistics
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from measuring import Report
from PIL import Image
from torch import Tensor, nn

from plsc.config import Options
from plsc.config.train import CLIP_NORM, CLIPPED_STEP
from plsc.models import build_model
from plsc.train.build import default_warmup, margin_of

TRAINED = ("Japanese_(katakana)", "Sanskrit")  # alphabets of Omniglot
UNSEEN_GLYPHS = 200  # classes
PAIRS = 6000
CLASSES = 200  # of the glyphs
SIZE, EMB_SIZE, BATCH = 32, 64, 48  # side of the images
COLUMNS = ("accuracy", "TAR at FAR 1e-2")
PEERS = ("peer", "peer with our loop", "peer with our loop, margin and scale")


@dataclass(frozen=True)
class Way:
    """One row of the table: a trainer, its learning rate (None: the default), and changed options."""

    name: str
    rate: float | None
    options: tuple[str, ...] = ()

    def path(self, folder: Path, seed: int) -> Path:
        """Return the file of the result of a seed."""
        name = re.sub(r"[^\w.]+", "-", self.name)
        return folder / f"{name}-{'default' if self.rate is None else self.rate}-{seed}.json"


class Images:
    """Training images, float32 [N, 3, H, W] in -1..1, their labels [N], and pairs of unseen classes."""

    def __init__(self, options: argparse.Namespace) -> None:
        read = _read_glyphs if options.glyphs else _read_omniglot
        sets: dict[bool, dict[str, list[Tensor]]] = {True: {}, False: {}}
        for is_trained, name, data in read(options):
            sets[is_trained].setdefault(name, []).append(_to_tensor(data, SIZE))
        self.train, labels = _stack(sets[True])
        self.labels = torch.from_numpy(labels)
        self.test, classes = _stack(sets[False])
        generator = np.random.default_rng(1)
        by_class = [np.flatnonzero(classes == one) for one in np.unique(classes)]
        pairs = []
        for pair in range(PAIRS):
            one, other = generator.choice(len(by_class), 2, replace=False)
            if pair % 2:
                pairs.append(generator.choice(by_class[one], 2, replace=False))
            else:
                pairs.append(np.array([generator.choice(by_class[c]) for c in (one, other)]))
        self.pairs = np.array(pairs).flatten()
        self.is_same = np.arange(PAIRS) % 2 == 1

    def order(self, seed: int, epoch: int) -> list[int]:
        """Return the order of the images in an epoch, the same for all ways."""
        generator = torch.Generator().manual_seed(1000 * seed + epoch)
        return torch.randperm(len(self.train), generator=generator).tolist()

    def judge(self, embeddings: np.ndarray) -> dict[str, float]:
        """Return the verification of embeddings [N, D] of the unseen images."""
        from plsc.evaluate.verification import verify

        found = verify(embeddings[self.pairs], self.is_same)
        return dict(zip(COLUMNS, (found.accuracy, found.tar_at_far[0.01]), strict=True))


def _read_omniglot(options: argparse.Namespace) -> Any:
    with zipfile.ZipFile(options.omniglot) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".png"):
                character = name.rpartition("/")[0]
                yield character.split("/")[1] in TRAINED, character, archive.read(name)


def _read_glyphs(options: argparse.Namespace) -> Any:
    lines = [line.split() for line in (options.glyphs / "label.txt").read_text().splitlines()]
    highest = max(int(label) for _, label in lines)
    for path, label in lines:
        is_trained = int(label) < CLASSES
        if is_trained or int(label) > highest - UNSEEN_GLYPHS:
            yield is_trained, label, (options.glyphs / path).read_bytes()


def _to_tensor(data: bytes, size: int) -> Tensor:
    image = Image.open(io.BytesIO(data)).convert("L").resize((size, size), Image.Resampling.BILINEAR)
    return (torch.from_numpy(np.array(image)).float() - 127.5) / 128


def _stack(classes: dict[str, list[Tensor]]) -> tuple[Tensor, np.ndarray]:
    images = torch.stack([one for name in sorted(classes) for one in classes[name]])
    labels = [index for index, name in enumerate(sorted(classes)) for _ in classes[name]]
    return images[:, None].repeat(1, 3, 1, 1), np.array(labels)


def train_peer(images: Images, options: argparse.Namespace, way: Way) -> dict[str, Any]:
    """Train in a plain PyTorch loop with pytorch-metric-learning."""
    from pytorch_metric_learning.losses import ArcFaceLoss

    assert way.rate is not None
    torch.manual_seed(options.seed)
    classes = int(images.labels.max()) + 1
    network: nn.Module
    if way.name == "peer":
        network = nn.Sequential(_plain_network(options), nn.BatchNorm1d(EMB_SIZE))
    else:
        shape = (3, SIZE, SIZE)
        network = build_model(options.network, EMB_SIZE, shape, Options().get("model.dropout"))
    settings = {}
    if way.name == PEERS[2]:
        margin = margin_of(Options().resolve())
        margin.set_class_num(classes)
        settings = {"margin": math.degrees(vars(margin)["margin"]), "scale": margin.scale}
    loss_of = ArcFaceLoss(classes, EMB_SIZE, **settings)
    parameters = [*network.parameters(), *loss_of.parameters()]
    sgd = torch.optim.SGD(parameters, way.rate, momentum=0.9, weight_decay=5e-4)
    total = options.epochs * (len(images.train) // BATCH)
    warmup = default_warmup(total)
    step = 0
    for epoch in range(options.epochs):
        network.train()
        for chosen in torch.tensor(images.order(options.seed, epoch)).split(BATCH):
            if len(chosen) < BATCH:
                continue
            sgd.zero_grad()
            loss_of(network(images.train[chosen]), images.labels[chosen]).backward()
            if way.name != "peer":
                done = max(0, step - warmup) / max(1, total - warmup)
                factor = (step + 1) / warmup if step < warmup else (1 + math.cos(math.pi * done)) / 2
                sgd.param_groups[0]["lr"] = way.rate * factor
                nn.utils.clip_grad_norm_(network.parameters(), min(CLIP_NORM, CLIPPED_STEP / way.rate))
            sgd.step()
            step += 1
    network.eval()
    with torch.no_grad():
        embeddings = torch.cat([network(part) for part in images.test.split(200)])
    return images.judge(embeddings.numpy())


def _plain_network(options: argparse.Namespace) -> nn.Module:
    package, _, name = options.network.partition("/")
    if package == "torchvision":
        import torchvision

        return torchvision.models.get_model(name, weights=None, num_classes=EMB_SIZE)
    if package == "timm":
        import timm

        return timm.create_model(name, num_classes=EMB_SIZE)
    # Its neck ends in batch norm already; the caller adds another one.
    return build_model(options.network, EMB_SIZE, (3, SIZE, SIZE), 0.0)


def train_ours(images: Images, options: argparse.Namespace, way: Way) -> dict[str, Any]:
    """Train with the defaults of Entry, except the learning rate and the options of the way."""
    from plsc import Entry

    ins = Entry()
    ins.set_model_name(options.network)
    ins.set_emb_size(EMB_SIZE)
    ins.set_image_shape((3, SIZE, SIZE))
    ins.set_train_batch_size(BATCH)
    ins.set_train_epochs(options.epochs)
    ins.set_seed(options.seed)
    ins.set_with_test(False)
    ins.set_log_period(10)
    ins.set_num_workers(0)  # the reader below counts epochs, so it must run in this process
    ins.set_last_batch("drop")
    folder = way.path(options.folder, options.seed).with_suffix("")
    ins.set_model_save_dir(str(folder))
    ins.set_class_num(int(images.labels.max()) + 1)
    ins.set_train_image_num(len(images.train))
    if way.rate is not None:
        ins.set_lr(way.rate)
    for one in way.options:
        path, _, value = one.partition("=")
        ins.options.set(path, yaml.safe_load(value))
    epochs = iter(range(options.epochs))

    def reader() -> Any:
        for index in images.order(options.seed, next(epochs)):
            yield images.train[index].numpy(), int(images.labels[index])

    ins.train_reader = reader
    result = ins.train()
    ins.set_checkpoint_dir(str(result.checkpoint))
    ins.predict_reader = lambda: ((image.numpy(), 0) for image in images.test)
    return images.judge(ins.predict().embeddings)


def run_one(way: Way, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the result of one training; run it in a separate process if it is not finished."""
    path = way.path(options.folder, seed)
    if not path.exists():
        one = ["--run", way.name, "--seed", str(seed)]
        one += [] if way.rate is None else ["--rate", str(way.rate)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with path.with_suffix(".log").open("w") as log:
            subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], *one],
                check=True, env=environment, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
    return json.loads(path.read_text())


def print_results(results: dict[Way, list[dict[str, Any]]], raw: dict[str, float], folder: Path) -> None:
    """Print a table of mean and standard deviation over the seeds."""
    (folder / "results.md").unlink(missing_ok=True)
    report = Report(folder, "results")
    report.header("way", "rate", *COLUMNS)
    report.row("raw pixels", "", *(f"{raw[column]:.3f}" for column in COLUMNS))
    for way, found in results.items():
        cells = []
        for column in COLUMNS:
            values = [one[column] for one in found]
            spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.3f}{spread}")
        own = [value.partition("=")[2] for value in way.options if value.startswith("optim.lr=")]
        report.row(way.name, f"{way.rate:g}" if way.rate is not None else (*own, "default")[0], *cells)


def read_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the results")
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--omniglot", type=Path, help="omniglot_small2.zip")
    data.add_argument("--glyphs", type=Path, help="folder that demo/make_glyphs.py made")
    parser.add_argument("--network", default="torchvision/resnet18")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rates", type=float, nargs="*", default=[0.005, 0.02, 0.08])
    parser.add_argument("--no-peer", action="store_true", help="run only plsc")
    parser.add_argument(
        "--variant", action="append", default=[], metavar="NAME: OPTION=VALUE ...",
        help="Entry with changed options; may be repeated",
    )  # fmt: skip
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run the missing trainings, two at a time, and report."""
    options = read_arguments()
    options.folder.mkdir(parents=True, exist_ok=True)
    images = Images(options)
    changed: dict[str, tuple[str, ...]] = {} if options.no_peer else dict.fromkeys(PEERS, ())
    changed["plsc"] = ()
    for variant in options.variant:
        name, _, values = variant.partition(":")
        changed[name] = tuple(values.split())
    if options.run:
        way = Way(options.run, options.rate, changed[options.run])
        found = (train_peer if way.name in PEERS else train_ours)(images, options, way)
        way.path(options.folder, options.seed).write_text(json.dumps(found))
        return
    ways = []
    for name, values in changed.items():
        has_rate = any(value.startswith("optim.lr=") for value in values)
        ways += [Way(name, rate, values) for rate in ([] if has_rate else options.rates)]
        if name == "plsc" or has_rate:
            ways.append(Way(name, None, values))
    seeds = range(1, options.seeds + 1)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        jobs = {(way, seed): pool.submit(run_one, way, seed, options) for seed in seeds for way in ways}
    results = {way: [jobs[way, seed].result() for seed in seeds] for way in ways}
    print_results(results, images.judge(images.test[:, 0].flatten(1).numpy()), options.folder)


if __name__ == "__main__":
    main()
