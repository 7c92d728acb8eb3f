"""Golden results: what a change of the structure must leave as it is.

    python tests/golden.py                    # this checkout against the commit before, on this machine
    python tests/golden.py --against COMMIT

All values are compared bit for bit. Each checkout runs this file, so it uses public names only.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
CLASSES, IMAGES, BATCH = 30, 4, 12

# Name: ranks and setters.
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "arcface": (1, {}),
    "arcface of 2": (2, {}),
    "arcface of 3": (3, {}),
    "softmax": (1, {"set_loss_type": "softmax"}),
    "curricularface of 2": (2, {"set_loss_type": "curricularface"}),
    "sampled of 2": (2, {"set_sample_ratio": 0.5}),
    "int8": (1, {"set_row_dtype": "int8", "set_head_optimizer": "adagrad"}),
    "weights in files of 2": (
        2,
        {
            "set_weights_file": "{folder}/weights",
            "set_row_dtype": "int8",
            "set_head_optimizer": "adagrad",
            "set_sample_ratio": 0.5,
        },
    ),
    "bfloat16": (1, {"set_precision": "bfloat16"}),
    "micro-batches of 2": (2, {"set_micro_batches": 2}),
    "sub-centres": (1, {"set_sub_centers": 2}),
    "resume of 3": (3, {}),
    "named network": (1, {"set_model_name": "SmallResNet"}),
}


class Network(nn.Sequential):
    """Batch norm and dropout on 16x16 images."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 6, 4, stride=4), nn.BatchNorm2d(6), nn.Flatten(), nn.Dropout(0.2), nn.Linear(96, 8)
        )


def write_images(folder: Path) -> None:
    """Write PNG images of random classes, with label.txt."""
    from PIL import Image

    rng, lines = np.random.default_rng(0), []
    (folder / "images").mkdir(parents=True)
    for label in range(CLASSES):
        base = rng.integers(0, 255, (16, 16, 3))
        for index in range(IMAGES):
            noisy = (base + rng.integers(-30, 30, base.shape)).clip(0, 255).astype(np.uint8)
            name = f"images/{label}_{index}.png"
            Image.fromarray(noisy).save(folder / name)
            lines.append(f"{name} {label}\n")
    (folder / "label.txt").write_text("".join(lines))


def train(name: str, folder: Path) -> None:
    """Train a run of RUNS as one rank, or its second half if the first is there."""
    from plsc import Entry
    from plsc.models import BaseModel

    class Model(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.network = Network()
            self.labels: list[Any] = []

        def build_network(self, input: Any, label: Any, is_train: bool = True) -> Any:
            if is_train and label is not None:
                self.labels.append(label.tolist())
            return self.network(input)

    torch.manual_seed(7)
    model, ins = Model(), Entry()
    if "set_model_name" not in RUNS[name][1]:
        ins.set_model(model)
    settings = {
        "set_seed": 3,
        "set_emb_size": 8,
        "set_image_shape": (3, 16, 16),
        "set_dataset_dir": str(folder.parent / "data"),
        "set_model_save_dir": str(folder / "saved"),
        "set_train_batch_size": BATCH,
        "set_train_epochs": 2,
        "set_log_period": 1,
        "set_num_workers": 0,
        "set_lr": 0.05,
        "set_with_test": False,
        "set_cpu_threads": 1,
        **RUNS[name][1],
    }
    if (folder / "saved").exists():
        settings |= {"set_checkpoint_dir": "last", "set_train_epochs": 4}
    for setter, value in settings.items():
        getattr(ins, setter)(value.format(folder=folder) if isinstance(value, str) else value)
    ins.train()
    rank = os.environ.get("RANK", "0")
    (folder / f"labels-{settings['set_train_epochs']}-{rank}.json").write_text(json.dumps(model.labels))


def results_of_run(name: str, folder: Path) -> Iterator[tuple[str, Any]]:
    """Train, and yield the order of the labels, the losses, and the tensors of the last checkpoint."""
    from safetensors import safe_open

    ranks = RUNS[name][0]
    own = folder / name.replace(" ", "-")
    own.mkdir()
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    )
    command = [
        sys.executable,
        *launcher,
        str(Path(__file__).resolve()),
        "--train",
        name,
        "--folder",
        str(own),
    ]
    for _ in range(2 if name.startswith("resume") else 1):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for path in sorted(own.glob("labels-*.json")):
        yield f"labels/{path.stem}", json.loads(path.read_text())
    lines = map(json.loads, (own / "saved" / "metrics.jsonl").read_text().splitlines())
    yield "losses", np.array([line["loss"] for line in lines if "loss" in line])
    checkpoints = [path for path in (own / "saved").iterdir() if path.name.isdigit()]
    last = max(checkpoints, key=lambda path: int(path.name))
    files = (str(path.relative_to(last)) for path in last.rglob("*") if path.is_file())
    yield "files", sorted(map(_without_mark, files))
    for path in sorted(last.rglob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in sorted(file.keys()):
                yield f"tensors/{_without_mark(path.name)}/{key}", file.get_tensor(key)


def _without_mark(name: str) -> str:
    return re.sub(r"(shard-\d+)-\w+", r"\1", name)  # of its step, or at random


def results_of_partition(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the bytes of a partition of base64 lines."""
    (folder / "lines").mkdir()
    rng = np.random.default_rng(1)
    for number in range(3):
        text = "".join(f"{rng.bytes(30 + i % 7).hex()[:40]}\t{i % 17}\n" for i in range(200))
        (folder / "lines" / f"in{number}").write_text(text)
    (folder / "lines" / "file_list.txt").write_text("in0\nin1\nin2\n")
    _plsc(
        "data", "partition", "--data_dir", folder / "lines", "--nranks", 3, "--output_dir", folder / "parts"
    )
    for path in sorted((folder / "parts").iterdir()):
        yield path.name, hashlib.sha256(path.read_bytes()).hexdigest() if path.suffix == ".txt" else True


def results_of_protocols() -> Iterator[tuple[str, Any]]:
    """Yield the result of every protocol for the same embeddings."""
    from plsc.evaluate.capacity import measure_capacity
    from plsc.evaluate.curves import roc_curve
    from plsc.evaluate.identification import identify, retrieval, split_gallery
    from plsc.evaluate.templates import pool_templates
    from plsc.evaluate.verification import scores, verify

    rng = np.random.default_rng(2)
    labels = np.repeat(np.arange(40), 6)
    embeddings = rng.normal(size=(40, 16))[labels] + 0.9 * rng.normal(size=(240, 16))
    embeddings = embeddings.astype(np.float32)
    pairs = rng.integers(0, 240, (400, 2))
    pairs[::2, 1] = pairs[::2, 0] // 6 * 6 + (pairs[::2, 0] + 1) % 6
    is_same = labels[pairs[:, 0]] == labels[pairs[:, 1]]
    rows = embeddings[pairs.ravel()]
    yield "scores", scores(rows)
    yield "verify", verify(rows, is_same)
    yield "roc", roc_curve(scores(rows), is_same)
    yield "retrieval", retrieval(embeddings, labels)
    first = split_gallery(labels)
    yield "identify", identify(embeddings[first], labels[first], embeddings[~first], labels[~first])
    yield "capacity", measure_capacity(embeddings, labels)
    yield "templates", pool_templates(embeddings, np.arange(240) // 3, np.arange(240) // 2)


def _plsc(*arguments: Any) -> None:
    command = [sys.executable, "-m", "plsc.cli", *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _exact(value: Any) -> Any:
    """Return a value as JSON: arrays and floats by their bytes, other objects by their public fields."""
    if isinstance(value, torch.Tensor):
        value = value.view(torch.int16).numpy() if value.dtype == torch.bfloat16 else value.numpy()
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.ascontiguousarray(value)
        kind = "floats" if array.dtype.kind in "fV" else "integers"
        return f"{kind} {array.dtype} {list(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"
    if isinstance(value, float):
        return f"floats {value.hex()}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _exact(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_exact(item) for item in value]
    return value


def write_results(folder: Path) -> None:
    """Write folder/results.json with the results of the plsc that Python finds."""
    write_images(folder / "data")
    results = {}
    for name in RUNS:
        results |= {f"{name}/{key}": _exact(value) for key, value in results_of_run(name, folder)}
    results |= {f"partition/{key}": _exact(value) for key, value in results_of_partition(folder)}
    results |= {f"protocols/{key}": _exact(value) for key, value in results_of_protocols()}
    (folder / "results.json").write_text(json.dumps(results, indent=1))


def results_of(checkout: Path) -> dict[str, Any]:
    """Return the results of a checkout, whose compiled parts are built."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).resolve()), "--write", folder]
        subprocess.run(command, check=True, cwd=checkout, env=environment)
        return json.loads((Path(folder) / "results.json").read_text())


def results_of_commit(commit: str) -> dict[str, Any]:
    """Return the results of another commit."""
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        git = ["git", "-C", str(ROOT)]
        subprocess.run([*git, "worktree", "add", "--detach", "-q", str(checkout), commit], check=True)
        try:
            build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
            subprocess.run(build, check=True, cwd=checkout, stdout=subprocess.DEVNULL)
            return results_of(checkout)
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(checkout)], check=True)


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return a line per result that differs."""
    names = dict.fromkeys([*theirs, *ours])
    return [
        f"{name}:\n  now    {str(ours.get(name))[:200]}\n  before {str(theirs.get(name))[:200]}"
        for name in names
        if ours.get(name) != theirs.get(name)
    ]


def main() -> int:
    """Compare, and return 1 if something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--against", default="HEAD~1", help="the commit to compare with")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.folder)
        return 0
    if options.write:
        write_results(options.write)
        return 0
    ours = results_of(ROOT)
    found = differences(ours, results_of_commit(options.against))
    print("\n".join(found) or f"{len(ours)} results are equal")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
