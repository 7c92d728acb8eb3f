"""Create the demo's dataset: images of thousands of glyph classes, and pairs of held-out classes.

    python demo/make_glyphs.py demo/output/glyphs

Writes `images/` and `label.txt` (training), `classes.tsv` (a description of each class), `glyphs_unseen.bin`
and `glyphs_unseen.tsv` (the verification pairs), `unseen/` (the held-out images, for other protocols), and
`manifest.json`. The output is reproducible for equal arguments and fonts. An up-to-date folder is not written
again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import unicodedata
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from fonts import Face, bundled_faces, system_faces
from glyph_classes import GlyphClass, find_classes
from glyph_pairs import choose_pairs, draw_images, write_pair_files
from glyph_protocols import write_protocols
from render import varied

VERSION = 2  # increase it when the generated files change
HELD_OUT = 0.12  # fraction of the classes that are used for evaluation only


def main() -> None:
    """Create the dataset unless it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="output folder")
    parser.add_argument("--images-per-class", type=int, default=14)
    parser.add_argument("--classes", type=int, default=0, help="maximum number of classes; 0: all")
    parser.add_argument("--pairs", type=int, default=4000, help="verification pairs, a multiple of 40")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.pairs < 40 or options.pairs % 40:
        parser.error(f"--pairs is {options.pairs}; expected a multiple of 40, for ten balanced folds")

    faces = bundled_faces()
    faces += system_faces(faces)
    manifest = {
        "version": VERSION,
        "options": {k: v for k, v in vars(options).items() if k != "folder"},
        "faces": [[face.name, Path(face.path).stat().st_size] for face in faces],
    }
    made = options.folder / "manifest.json"
    earlier = json.loads(made.read_text()) if made.is_file() else {}
    if earlier == manifest:
        print(f"glyphs: {options.folder} is up to date")
        return
    if options.folder.exists() and any(options.folder.iterdir()) and earlier.keys() != manifest.keys():
        parser.error(f"{options.folder} contains other files; use a new folder or empty this one")

    options.folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{options.folder.name}-", dir=options.folder.parent) as scratch:
        partial = Path(scratch, "made")
        partial.mkdir()
        make(partial, faces, options)
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=1))
        shutil.rmtree(options.folder, ignore_errors=True)
        partial.rename(options.folder)


def make(folder: Path, faces: list[Face], options: argparse.Namespace) -> None:
    """Write the dataset into an empty folder."""
    seen, unseen = split_classes(find_classes(faces), faces, options.classes, options.seed)
    write_classes(folder / "classes.tsv", seen, unseen)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        jobs = [
            (folder, label, [(f.path, chr(code)) for f, code in training_faces(item, faces)])
            for label, item in enumerate(seen)
        ]
        counts = [options.images_per_class] * len(jobs)
        seeds = [options.seed] * len(jobs)
        lines: list[str] = []
        for label, part in enumerate(pool.map(write_class, jobs, counts, seeds, chunksize=32), 1):
            lines += part
            if label % 1000 == 0:
                print(f"glyphs: drawn {label:,} of {len(jobs):,} training classes", flush=True)
    (folder / "label.txt").write_text("".join(lines))
    images = draw_images(unseen, faces, options.seed)
    pairs = choose_pairs(images, options.pairs, options.seed)
    write_pair_files(folder / "glyphs_unseen", pairs)
    write_protocols(folder / "unseen", images, pairs, options.seed)
    print(
        f"glyphs: {len(seen)} training classes, {len(lines)} images; "
        f"{len(unseen)} held-out classes, {len(pairs)} pairs"
    )


def split_classes(
    classes: list[GlyphClass], faces: list[Face], limit: int, seed: int
) -> tuple[list[GlyphClass], list[GlyphClass]]:
    """Split classes at random into training and held-out classes; `limit`: maximum of their sum, 0: none.

    A held-out class needs evaluation faces of two families, a training class needs two training faces.
    """
    order = np.random.default_rng(seed).permutation(len(classes))
    unseen: list[int] = []
    seen: list[int] = []
    for index in order[: limit or None]:
        item = classes[index]
        families = {faces[f].family for f, _ in item.faces if faces[f].evaluation}
        if len(families) >= 2 and len(unseen) < HELD_OUT * min(len(classes), limit or len(classes)):
            unseen.append(index)
        elif len(training_faces(item, faces)) >= 2:
            seen.append(index)
    return [classes[i] for i in sorted(seen)], [classes[i] for i in sorted(unseen)]


def training_faces(item: GlyphClass, faces: list[Face]) -> list[tuple[Face, int]]:
    """Return the training faces of a class, each with the code point to draw."""
    return [(faces[f], code) for f, code in item.faces if not faces[f].evaluation]


def write_class(job: tuple[Path, int, list[tuple[str, str]]], count: int, seed: int) -> list[str]:
    """Draw the images of a training class, with its faces in turn; return its lines of label.txt."""
    folder, label, drawn = job
    place = Path("images") / f"{label // 100:02d}" / f"{label:04d}"
    (folder / place).mkdir(parents=True)
    for k in range(count):
        path, character = drawn[k % len(drawn)]
        varied(path, character, (seed, k)).save(folder / place / f"{k:02d}.png", compress_level=1)
    return [f"{(place / f'{k:02d}.png').as_posix()}\t{label}\n" for k in range(count)]


def write_classes(path: Path, seen: list[GlyphClass], unseen: list[GlyphClass]) -> None:
    """Write one line per class: label ('unseen' if held out), code points, characters, Unicode names."""
    with path.open("w", encoding="utf-8") as file:
        for label, item in [*enumerate(seen), *(("unseen", item) for item in unseen)]:
            codes = " ".join(f"U+{code:04X}" for code in item.code_points)
            characters = " ".join(map(chr, item.code_points))
            names = "; ".join(unicodedata.name(chr(code), "?") for code in item.code_points)
            file.write(f"{label}\t{codes}\t{characters}\t{names}\n")


if __name__ == "__main__":
    main()
