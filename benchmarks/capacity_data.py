"""Write embeddings of classes that a small glyph network never saw, for `benchmarks/capacity.py`.

python benchmarks/capacity_data.py demo/output/glyphs build/capacity --omniglot omniglot_small2.zip

Trains as demo/train_glyphs.py does, in one process, on 1,500 characters of the output of demo/make_glyphs.py,
from class --first on. Writes glyphs.npz, all other characters, and omniglot.npz, all characters of the
archive, of the same network: `embeddings`, float32 [n, D], and `labels`, int64 [n]. About 3 minutes.
"""

from __future__ import annotations

import argparse
import io
import shutil
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

from plsc import Entry

TRAINED = 1500  # characters


def main() -> None:
    """Train unless the folder has a checkpoint; then write the embeddings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("glyphs", type=Path, help="output folder of demo/make_glyphs.py")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--omniglot", type=Path, help="omniglot_small2.zip")
    parser.add_argument("--first", type=int, default=0, help="first of the trained characters")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    trained = range(options.first, options.first + TRAINED)
    images = read_glyphs(options.glyphs)
    if not (options.folder / "run").exists():
        train(options, [(path, label - options.first) for path, label in images if label in trained])
    others = [(path, label) for path, label in images if label not in trained]
    embed(options.folder, "glyphs", [path for path, _ in others], [label for _, label in others])
    if options.omniglot:
        names, labels = unpack(options.omniglot, options.folder / "omniglot")
        embed(options.folder, "omniglot", names, labels)


def read_glyphs(folder: Path) -> list[tuple[Path, int]]:
    """Return the images and classes of the folder; those of unseen/ are numbered after the others."""
    found: list[tuple[Path, int]] = []
    for place in (folder, folder / "unseen"):
        first = 1 + max((label for _, label in found), default=-1)
        for line in (place / "label.txt").read_text().splitlines():
            path, label = line.split("\t")
            found.append(((place / path).resolve(), first + int(label)))
    return found


def _entry(options_of_run: Path) -> Entry:
    ins = Entry()
    ins.set_flip(False)
    ins.set_num_workers(0)
    ins.set_model_name("SmallResNet")
    ins.set_image_shape((1, 32, 32))
    ins.set_emb_size(128)
    ins.set_dropout(0.0)
    ins.set_test_batch_size(500)
    ins.set_model_save_dir(str(options_of_run))
    return ins


def train(options: argparse.Namespace, images: list[tuple[Path, int]]) -> None:
    """Train with the settings of demo/train_glyphs.py."""
    data = options.folder / "trained"
    data.mkdir(parents=True, exist_ok=True)
    for number, (path, _) in enumerate(images):
        shutil.copyfile(path, data / f"{number:05}.png")
    (data / "label.txt").write_text("".join(f"{i:05}.png\t{label}\n" for i, (_, label) in enumerate(images)))
    ins = _entry(options.folder / "run")
    ins.set_dataset_dir(str(data))
    ins.set_global_batch_size(128)
    ins.set_train_epochs(options.epochs)
    ins.set_lr(0.1)
    ins.set_seed(1)
    ins.set_log_period(30)
    ins.set_max_last_checkpoint_num(1)
    ins.train()


def unpack(archive: Path, folder: Path) -> tuple[list[Path], list[int]]:
    """Write the drawings as 32 x 32 pictures, centred as the glyphs are; return their paths and classes."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive) as file:
        names = sorted(name for name in file.namelist() if name.endswith(".png"))
        characters = sorted({name.rpartition("/")[0] for name in names})
        paths = [folder / f"{index:04}.png" for index in range(len(names))]
        for name, path in zip(names, paths, strict=True):
            picture = Image.open(io.BytesIO(file.read(name))).convert("L")
            picture.resize((32, 32), Image.Resampling.BOX).save(path)
    return paths, [characters.index(name.rpartition("/")[0]) for name in names]


def embed(folder: Path, name: str, images: list[Path], labels: list[int]) -> None:
    """Write <name>.npz with the embeddings of the newest checkpoint."""
    ins = _entry(folder / "run")
    ins.set_checkpoint_dir("last")
    found = ins.predict([str(path) for path in images]).embeddings
    np.savez(folder / f"{name}.npz", embeddings=found, labels=np.asarray(labels))
    print(f"{name}: {len(labels):,} images of {len(set(labels)):,} characters", flush=True)


if __name__ == "__main__":
    main()
