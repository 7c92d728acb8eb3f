"""Small image datasets on disk for tests."""

from __future__ import annotations

import io
import pickle
import shutil
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

NAMES = (
    "\u0639\u0644\u06cc\u200c\u0631\u0636\u0627", "\u0d28\u0d4d\u200d", "\U0001f469\u200d\U0001f52c",
    "Jean\u00a0Paul", "\u5c71\u7530\u3000\u592a\u90ce", "\u200f\u05d0\u05d1", "a\u2009b\u00adc",
)  # fmt: skip
"""With joiners (Persian, Malayalam, emoji), several blanks, a mark of direction and a soft hyphen."""
UNSAFE_NAMES = ("a\nb", "a\x1b[2Jb", "a\x85b", "a\u2028b", "a\u202eb", "a\u2066b", "a\ud800b", "a\udcffb")


def write_dataset(root: Path, classes: int, per_class: int, size: int = 16, seed: int = 0) -> Path:
    """Write noisy copies of one random pattern a class, as images/ and label.txt."""
    rng = np.random.default_rng(seed)
    (root / "images").mkdir(parents=True)
    lines = []
    for label in range(classes):
        pattern = rng.integers(0, 256, (size // 4, size // 4, 3))
        for copy in range(per_class):
            noisy = np.clip(pattern + rng.integers(-40, 41, pattern.shape), 0, 255).astype(np.uint8)
            name = f"images/{label}_{copy}.png"
            Image.fromarray(noisy).resize((size, size), Image.Resampling.NEAREST).save(root / name)
            lines.append(f"{name}\t{label}\n")
    (root / "label.txt").write_text("".join(lines))
    return root


def class_folders(dataset: Path, root: Path, names: Mapping[int, str]) -> Path:
    """Copy images of `write_dataset` to a folder per class, ROOT/NAME/COPY.png; names: by label."""
    for image in sorted((dataset / "images").iterdir()):
        label, _, copy = image.stem.partition("_")
        if name := names.get(int(label)):
            (root / name).mkdir(parents=True, exist_ok=True)
            shutil.copy(image, root / name / f"{copy}.png")
    return root


def photo(upright: Image.Image, orientation: int, kind: str = "JPEG", **options: object) -> bytes:
    """Return an image as a camera stores it: turned by its EXIF orientation."""
    turns = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}
    stored = upright.transpose(Image.Transpose(turns[orientation])) if orientation > 1 else upright
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    stored.save(file, kind, exif=exif, **options)
    return file.getvalue()


def turn_images(root: Path) -> None:
    """Store each PNG below a folder as `photo` does, with the eight orientations in turn."""
    for number, path in enumerate(sorted(root.rglob("*.png"))):
        path.write_bytes(photo(Image.open(path), number % 8 + 1, "PNG"))


def write_tar(location: str, samples: Iterable[tuple[bytes, int]]) -> int:
    """Write a WebDataset of PNG images; return the number of samples."""
    buffer, count = io.BytesIO(), 0
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for image, label in samples:
            for suffix, content in (("png", image), ("cls", str(label).encode())):
                entry = tarfile.TarInfo(f"{count:09d}.{suffix}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
            count += 1
    with fsspec.open(location, "wb") as file:
        file.write(buffer.getvalue())
    return count


def write_parquet(location: str, samples: Iterable[tuple[bytes, int]]) -> int:
    """Write a Parquet file of images and labels; return the number of samples."""
    images, labels = zip(*samples, strict=True)
    pq.write_table(pa.table({"image": images, "label": labels}), location, row_group_size=100)
    return len(labels)


def write_samples(location: str, samples: Iterable[tuple[bytes, int]]) -> int:
    """Write samples in the format of the suffix; return their number."""
    from plsc.data.writers import writer_of

    own = {".tar": write_tar, ".parquet": write_parquet}
    write = own.get(Path(location).suffix) or writer_of(location)
    return write(location, samples)


def write_pair_file(path: Path, dataset: Path, pairs: int = 40, seed: int = 1) -> Path:
    """Write a pair file from a dataset's images, same and different pairs in turn."""
    rng = np.random.default_rng(seed)
    by_label: dict[str, list[bytes]] = {}
    for line in (dataset / "label.txt").read_text().splitlines():
        name, label = line.split("\t")
        by_label.setdefault(label, []).append((dataset / name).read_bytes())
    labels = sorted(by_label)
    images, is_same = [], []
    for pair in range(pairs):
        first, second = rng.choice(len(labels), 2, replace=False)
        other = first if pair % 2 == 0 else second
        images.append(by_label[labels[first]][0])
        images.append(by_label[labels[other]][-1])
        is_same.append(pair % 2 == 0)
    path.write_bytes(pickle.dumps((images, is_same)))
    return path
