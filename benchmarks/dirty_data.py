"""Plant known faults in the demo's glyphs, for `benchmarks/dirty.py`.

    python demo/make_glyphs.py build/dirty/glyphs --images-per-class 30 --classes 1700
    python benchmarks/dirty_data.py build/dirty/glyphs build/dirty/2 --seed 2

Writes the same images in class folders to `clean/` and `dirty/`, and what is wrong to `clean.json` and
`dirty.json`. In `dirty/`

- 200 characters are two classes, each with half of the images;
- 200 pairs of characters are one class;
- then 20 % of all images are in another class, drawn at random;
- 200 images have a near duplicate in another class, drawn at random: shifted by up to one pixel, brighter or
  darker by up to 10 %, and saved as JPEG of quality 80.

Characters that look identical at 32 x 32 pixels are listed beforehand: pairs whose mean images, without the
level of the paper, have a correlation of at least 0.85. Proposals that concern such a pair, and that are not
planted, count neither as right nor as wrong, for all methods.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops, ImageEnhance

FAULTS, FLIPPED, ALIKE = 200, 0.2, 0.85


def main() -> None:
    """Write both datasets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("glyphs", type=Path, help="output folder of demo/make_glyphs.py")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    lines = [line.split("\t") for line in (options.glyphs / "label.txt").read_text().splitlines()]
    paths: dict[int, list[Path]] = {}
    for path, label in lines:
        paths.setdefault(int(label), []).append(options.glyphs / path)
    chosen = sorted(paths)
    alike = look_alikes({one: paths[one] for one in chosen})
    for name, faults in (("clean", 0), ("dirty", FAULTS)):
        truth = plant({one: paths[one] for one in chosen}, options.folder / name, faults, options.seed)
        (options.folder / f"{name}.json").write_text(json.dumps({"alike": alike, **truth}, indent=1))


def look_alikes(paths: dict[int, list[Path]]) -> list[tuple[int, int]]:
    """Return the pairs of characters whose mean images correlate."""
    means = []
    for files in paths.values():
        images = np.stack([np.asarray(Image.open(file).convert("L"), np.float32) for file in files])
        images -= np.median(images, (1, 2), keepdims=True)  # the paper
        images /= np.linalg.norm(images, axis=(1, 2), keepdims=True)
        means.append(images.mean(0).ravel())
    centred = np.stack(means) - np.mean(means, 1, keepdims=True)
    centred /= np.linalg.norm(centred, axis=1, keepdims=True)
    one, other = np.nonzero(np.triu(centred @ centred.T, 1) >= ALIKE)
    numbers = list(paths)
    return [(numbers[i], numbers[j]) for i, j in zip(one.tolist(), other.tolist(), strict=True)]


def plant(paths: dict[int, list[Path]], folder: Path, faults: int, seed: int) -> dict[str, object]:
    """Write a dataset; return the right class of each image whose class is wrong, and the other faults."""
    rng = np.random.default_rng(seed)
    shutil.rmtree(folder, ignore_errors=True)
    order = rng.permutation(list(paths)).tolist()
    split, merged = order[:faults], order[faults : 3 * faults]
    images: list[tuple[Path, str]] = []  # file, class
    for one in order:
        files = [paths[one][i] for i in rng.permutation(len(paths[one]))]
        for number, file in enumerate(files):
            name = f"{one:05}"
            if one in split and number % 2:
                name = f"{one + 50_000:05}"
            if one in merged:
                name = f"{merged[merged.index(one) // 2 * 2]:05}"
            images.append((file, name))
    names = sorted({name for _, name in images})
    truth: dict[str, object] = {
        "two_classes": [[f"{one:05}", f"{one + 50_000:05}"] for one in split],
        "one_class": [f"{one:05}" for one in merged[::2]],
    }
    flipped, duplicates = {}, []
    written: list[tuple[str, str]] = []  # class, name
    for number, (file, name) in enumerate(images):
        given = name
        if faults and rng.random() < FLIPPED:
            given = other(rng, names, name)
            flipped[f"{given}/{number:05}.png"] = name
        (folder / given).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / given / f"{number:05}.png")
        written.append((given, f"{number:05}.png"))
    right = [place for place in written if "/".join(place) not in flipped]
    for number in rng.permutation(len(right))[:faults]:
        name, file_name = right[number]
        given, copy = other(rng, names, name), f"{file_name[:5]}.jpg"
        (folder / given / copy).write_bytes(near_duplicate(rng, folder / name / file_name))
        duplicates.append([f"{name}/{file_name}", f"{given}/{copy}"])
        flipped[f"{given}/{copy}"] = name
    return {**truth, "flipped": flipped, "duplicates": duplicates}


def other(rng: np.random.Generator, names: list[str], name: str) -> str:
    """Return another class at random."""
    while (given := names[rng.integers(len(names))]) == name:
        pass
    return given


def near_duplicate(rng: np.random.Generator, file: Path) -> bytes:
    """Return the image shifted, of another brightness, as JPEG."""
    image = ImageChops.offset(Image.open(file).convert("L"), *rng.integers(-1, 2, 2).tolist())
    image = ImageEnhance.Brightness(image).enhance(rng.uniform(0.9, 1.1))
    written = io.BytesIO()
    image.save(written, "JPEG", quality=80)
    return written.getvalue()


if __name__ == "__main__":
    main()
