"""Runs every kind of bad input in turn, on the ranks that it is started on.

    bad_input_worker.py FOLDER RUN

FOLDER holds the bad things, RUN gets a good run first, whose checkpoint is then misused. Prints a JSON line
for each case and rank: what was raised, and its text.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from plsc import Entry
from tests.images import write_dataset


class Files:
    """Bad input files, created once by the test, used by all ranks."""

    def __init__(self, root: Path, run: Path) -> None:
        self.root = root
        self.good = root / "good"
        self.run = run
        self.checkpoint = run / "0"

    def make(self) -> None:
        write_dataset(self.good, classes=5, per_class=4)
        for name, lines in LABEL_FILES.items():
            folder = self.root / name
            shutil.copytree(self.good, folder)
            (folder / "label.txt").write_text(lines)
        for name, content in BAD_IMAGES.items():
            folder = self.root / name
            shutil.copytree(self.good, folder)
            images = list((folder / "images").iterdir())
            content(images[0])
            for image in images[1:]:
                image.unlink()
                if images[0].exists():
                    os.link(images[0], image)
        (self.good / "malicious.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
        (self.root / "no manifest").mkdir()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def make_huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 30)


LABEL_FILES = {
    "empty label.txt": "",
    "negative": "images/0_0.png 0\nimages/1_0.png -1\n",
}
BAD_IMAGES: dict[str, Callable[[Path], object]] = {
    "missing image": Path.unlink,
    "empty image": lambda path: path.write_bytes(b""),
    "truncated image": truncate,
    "huge image": make_huge,
    "huge dimensions": lambda path: Image.new("1", (30000, 30000)).save(path),
}


def entry(files: Files, dataset: str = "good", save: Path | None = None) -> Entry:
    ins = Entry()
    ins.set_dataset_dir(files.root / dataset)
    ins.set_model_save_dir(save or files.run)
    ins.set_model_name("SmallResNet")
    ins.set_image_shape((3, 16, 16))
    ins.set_emb_size(8)
    ins.set_train_batch_size(4)
    ins.set_train_epochs(1)
    ins.set_num_workers(0)
    ins.set_device("cpu")
    return ins


def cases(files: Files):
    """Yield (name, expected parts of the message, function to run)."""

    def train(dataset="good", **settings):
        def run():
            ins = entry(files, dataset, save=files.run.with_name("unused"))
            for setter, value in settings.items():
                getattr(ins, setter)(value)
            ins.train()

        return run

    def resume(checkpoint, **settings):
        return train(set_checkpoint_dir=str(checkpoint), **settings)

    yield "no dataset folder", "does not exist", train("nowhere")
    yield "empty label.txt", "label.txt", train("empty label.txt")
    yield "negative label", "label.txt:2", train("negative")
    yield "label out of range", "outside 0..2", train(set_class_num=3)
    for name in BAD_IMAGES:
        yield name, "label.txt:", train(name)
    yield "no such pair file", "nothing.bin", train(set_val_targets="nothing")
    yield "malicious pair file", "os.system", train(set_val_targets="malicious")
    yield "no checkpoint folder", "no complete checkpoint", resume(files.root / "nothing")
    yield "no manifest", "manifest.json", resume(files.root / "no manifest")
    yield "other class count", "classes 5", resume(files.checkpoint, set_class_num=9)
    yield "other embedding size", "embedding size 8", resume(files.checkpoint, set_emb_size=12)
    yield "loss not finite", "the loss is", train(set_lr=1e30, set_train_epochs=50)
    yield "nothing to test on", "no checkpoint is set", lambda: entry(files).test()


def main() -> None:
    files = Files(Path(sys.argv[1]), Path(sys.argv[2]))
    entry(files).train()
    for name, _, run in cases(files):
        try:
            run()
            caught = None
        except Exception as error:
            caught = error
        text = {"case": name, "raised": type(caught).__name__, "text": str(caught)}
        # A single write, because lines of several ranks share the pipe.
        print(f"CASE {json.dumps(text)}\n", end="", flush=True)


if __name__ == "__main__":
    main()
