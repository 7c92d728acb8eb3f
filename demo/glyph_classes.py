"""Group code points into classes: those with the same outline (A, Alpha, the Cyrillic A) are one class."""

from __future__ import annotations

import unicodedata
from collections import Counter
from dataclasses import dataclass

import numpy as np
from fonts import Face
from render import glyph_mask, plain

# Copies of a letter in another style, size or width: they look like the plain letter of another font.
STYLED = ("<font>", "<super>", "<sub>", "<wide>", "<narrow>", "<small>")
# Marks (M) combine with a letter; C and Z draw nothing, or something arbitrary.
LEFT_OUT_CATEGORIES = ("M", "C", "Z")
MERGE_FACES = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono", "DejaVuSerif", "STIXGeneral")
COMPARE_SIZE = 24  # size in pixels of the compared renderings
SAME_OUTLINE = 0.25  # maximum difference of smoothed pixels (0..1) between equal outlines


@dataclass(frozen=True)
class GlyphClass:
    """Code points with the same outline; `faces` has (face index, code point to draw with it)."""

    code_points: tuple[int, ...]
    faces: tuple[tuple[int, int], ...]


def find_classes(faces: list[Face]) -> list[GlyphClass]:
    """Group all usable code points of the faces into classes, ordered by their lowest code point."""
    codes = sorted({c for face in faces for c in face.code_points if is_usable(c)})
    group = {code: code for code in codes}  # union-find: the parent is a lower code point or itself

    def root(code: int) -> int:
        while group[code] != code:
            code = group[code]
        return code

    for a, b in agreed_pairs([f for f in faces if f.name in MERGE_FACES], set(codes)):
        low, high = sorted((root(a), root(b)))
        group[high] = low
    members: dict[int, list[int]] = {}
    for code in codes:
        members.setdefault(root(code), []).append(code)
    return [GlyphClass(tuple(m), drawn_by(faces, m)) for _, m in sorted(members.items())]


def is_usable(code: int) -> bool:
    """Return whether a code point is an assigned, not combining character that is not a styled copy."""
    character = chr(code)
    return not (
        unicodedata.category(character).startswith(LEFT_OUT_CATEGORIES)
        or unicodedata.decomposition(character).startswith(STYLED)
    )


def agreed_pairs(faces: list[Face], codes: set[int]) -> list[tuple[int, int]]:
    """Return pairs of code points that look the same in more than half of the faces that have both.

    A single face is not enough: I and l look the same in sans-serif faces, but not in others.
    """
    same: Counter[tuple[int, int]] = Counter()
    for face in faces:
        same.update(equal_outlines(face, sorted(codes & face.code_points)))
    both = {(a, b): sum({a, b} <= face.code_points for face in faces) for a, b in same}
    return sorted(pair for pair, count in same.items() if count > both[pair] / 2)


def equal_outlines(face: Face, codes: list[int]) -> list[tuple[int, int]]:
    """Return the pairs of code points that look the same in a face, up to position and size."""
    drawn = {c: image for c in codes if (image := plain(face.path, chr(c), COMPARE_SIZE)) is not None}
    codes = list(drawn)
    pixels = np.stack([soften(drawn[c]) for c in codes]).reshape(len(codes), -1)  # [N, P]
    directions = pixels / np.linalg.norm(pixels, axis=1, keepdims=True)
    pairs = []
    for start in range(0, len(codes), 512):  # in blocks, to limit memory
        near = directions[start : start + 512] @ directions.T > 0.95
        for i, j in zip(*np.nonzero(near), strict=True):
            i += start
            if i < j and np.abs(pixels[i] - pixels[j]).max() < SAME_OUTLINE:
                pairs.append((codes[i], codes[j]))
    return pairs


def soften(image: np.ndarray) -> np.ndarray:
    """Average each pixel with its neighbours, to tolerate an offset of half a pixel."""
    padded = np.pad(image, 1)
    rows = (padded[:-2] + 2 * padded[1:-1] + padded[2:]) / 4
    return (rows[:, :-2] + 2 * rows[:, 1:-1] + rows[:, 2:]) / 4


def drawn_by(faces: list[Face], members: list[int]) -> tuple[tuple[int, int], ...]:
    """Return (face index, lowest code point) for each face that can draw the class."""
    found = []
    for index, face in enumerate(faces):
        code = next((c for c in members if c in face.code_points), None)
        if code is not None and glyph_mask(face.path, chr(code)) is not None:
            found.append((index, code))
    return tuple(found)
