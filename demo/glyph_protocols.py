"""The files of the evaluation protocols: the held-out images as a dataset, lists, and files of templates.

- `label.txt`: all images; `pairs.txt`: the pairs of `glyphs_unseen.bin` as a text list.
- `gallery.csv`, `probes.csv`, `distractors.csv`: for identification. A quarter of the classes is not in the
  gallery, so that their probes are non-mated searches; another quarter are the distractors.
- `templates/`: meta files as for IJB-B and IJB-C. A template is the images of a class in one font family, a
  medium those of one weight (bold or not).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from glyph_pairs import Pair, PairImage

GALLERY_FACE = "STIXGeneral"
GALLERY_FAMILY = "STIXGeneral"
DIFFERENT_PER_TEMPLATE = 20  # different pairs of templates


def write_protocols(folder: Path, images: list[PairImage], pairs: list[Pair], seed: int) -> None:
    """Write the dataset into a new folder."""
    for image in images:
        path = folder / path_of(image)
        path.parent.mkdir(parents=True, exist_ok=True)
        image.image.save(path, compress_level=1)
    write_lines(folder / "label.txt", (f"{path_of(image)}\t{image.class_index}" for image in images))
    lines = (f"{path_of(p.first)}\t{path_of(p.second)}\t{int(p.kind == 'same')}" for p in pairs)
    write_lines(folder / "pairs.txt", lines)

    enrolled = [image for image in images if image.face.name == GALLERY_FACE]
    others = [image for image in images if image.face.family != GALLERY_FAMILY]
    write_rows(folder / "gallery.csv", [image for image in enrolled if image.class_index % 4 > 1])
    write_rows(folder / "distractors.csv", [image for image in enrolled if image.class_index % 4 == 1])
    write_rows(folder / "probes.csv", [image for image in others if image.class_index % 4 != 1])
    write_templates(folder / "templates", images, seed)


def write_templates(folder: Path, images: list[PairImage], seed: int) -> None:
    """Write the meta files: templates, pairs of templates, two galleries, and the probes."""
    folder.mkdir()
    keys = sorted({(image.class_index, image.face.family) for image in images})
    number = {key: index + 1 for index, key in enumerate(keys)}
    listed = []
    for image in images:
        medium = 2 * image.class_index + int("Bol" in image.face.name)
        template = number[image.class_index, image.face.family]
        listed.append(f"{path_of(image)} {template} {medium}")
    write_lines(folder / "glyphs_face_tid_mid.txt", listed)

    rng = np.random.default_rng(seed)
    pairs = []
    for (owner, family), template in number.items():
        pairs += [(template, number[key], 1) for key in keys if key[0] == owner and key[1] > family]
        for key in rng.choice(len(keys), DIFFERENT_PER_TEMPLATE, replace=False):
            if keys[key][0] != owner:
                pairs.append((template, int(key) + 1, 0))
    write_lines(folder / "glyphs_template_pair_label.txt", (f"{a} {b} {same}" for a, b, same in pairs))

    parts: dict[str, list[str]] = {"gallery_G1": [], "gallery_G2": [], "probe_mixed": []}
    for (owner, family), template in number.items():
        is_gallery = family == GALLERY_FAMILY
        parts[f"gallery_G{1 + owner % 2}" if is_gallery else "probe_mixed"].append(f"{template},{owner}")
    for name, rows in parts.items():
        write_lines(folder / f"glyphs_1N_{name}.csv", ["TEMPLATE_ID,SUBJECT_ID", *rows])


def path_of(image: PairImage) -> str:
    """Return the path of an image below the folder."""
    return f"images/{image.class_index:04d}/{image.face.name}-{ord(image.character):04X}.png"


def write_rows(path: Path, images: list[PairImage]) -> None:
    """Write a dataset as a CSV file with paths and labels."""
    write_lines(path, ["image,label", *(f"{path_of(image)},{image.class_index}" for image in images)])


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines of text."""
    path.write_text("".join(f"{line}\n" for line in lines))
