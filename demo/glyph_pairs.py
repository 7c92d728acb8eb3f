"""The verification pairs: images of held-out characters in different evaluation faces."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fonts import Face
from glyph_classes import GlyphClass
from PIL import Image
from render import varied


@dataclass(frozen=True)
class PairImage:
    """An image of a held-out class, with its character and face."""

    class_index: int
    face: Face
    character: str
    image: Image.Image


@dataclass(frozen=True)
class Pair:
    """Two images; kind is 'same', 'hard' (the other class with the most similar pixels) or 'random'."""

    kind: str
    first: PairImage
    second: PairImage


def draw_images(classes: list[GlyphClass], faces: list[Face], seed: int) -> list[PairImage]:
    """Return an image of each held-out character in each evaluation face."""
    return [
        PairImage(index, faces[f], chr(code), varied(faces[f].path, chr(code), (seed, 1000)))
        for index, item in enumerate(classes)
        for f, code in item.faces
        if faces[f].evaluation
    ]


def choose_pairs(images: list[PairImage], count: int, seed: int) -> list[Pair]:
    """Return `count` pairs in the order same, hard, same, random, ..., so that all folds are balanced.

    The two images of a pair have different faces. Those of a same pair have different families, because a
    slanted copy of an upright letter would be too easy.
    """
    owner = np.array([image.class_index for image in images])
    face = np.array([image.face.name for image in images])
    family = np.array([image.face.family for image in images])
    similarity = pixel_similarity(images)
    rng = np.random.default_rng(seed)
    classes = int(owner.max()) + 1
    rounds = -(-count // (2 * classes))
    turns = np.concatenate([rng.permutation(classes) for _ in range(rounds)])[: count // 2]
    pairs: list[Pair] = []
    for turn, class_index in enumerate(turns):  # all classes in turn, with random faces
        first = rng.choice(np.flatnonzero(owner == class_index))
        other = owner != owner[first]
        second = rng.choice(np.flatnonzero(~other & (family != family[first])))
        pairs.append(Pair("same", images[first], images[second]))
        allowed = other & (face != face[first])
        if turn % 2 == 0:
            against = int(np.where(allowed, similarity[first], -np.inf).argmax())
            pairs.append(Pair("hard", images[first], images[against]))
        else:
            pairs.append(Pair("random", images[first], images[rng.choice(np.flatnonzero(allowed))]))
    return pairs


def pixel_similarity(images: list[PairImage]) -> np.ndarray:
    """Return the cosines of the mean-free pixels of all pairs of images, float32 [N, N]."""
    pixels = np.stack([np.asarray(item.image, np.float32).ravel() for item in images])
    pixels -= pixels.mean(axis=1, keepdims=True)
    pixels /= np.linalg.norm(pixels, axis=1, keepdims=True)
    return pixels @ pixels.T


def write_pair_files(stem: Path, pairs: list[Pair]) -> None:
    """Write the pair file `<stem>.bin` (in the format of lfw.bin) and its description `<stem>.tsv`."""
    encoded = [encode(image.image) for pair in pairs for image in (pair.first, pair.second)]
    is_same = [pair.kind == "same" for pair in pairs]
    stem.with_suffix(".bin").write_bytes(pickle.dumps((encoded, is_same)))
    with stem.with_suffix(".tsv").open("w", encoding="utf-8") as file:
        file.write("kind\tfirst\tfirst face\tsecond\tsecond face\n")
        for pair in pairs:
            a, b = pair.first, pair.second
            file.write(f"{pair.kind}\t{a.character}\t{a.face.name}\t{b.character}\t{b.face.name}\n")


def encode(image: Image.Image) -> bytes:
    """Encode an image as PNG."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
