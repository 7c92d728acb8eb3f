"""Render a character in a font face as a small gray image, plain or with random variations."""

from __future__ import annotations

import math
import zlib
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

IMAGE_SIZE = 32  # pixels; the networks need multiples of 16
INK_SIZE = 24.0  # longer side of a glyph in pixels, before variation
MASK_SIZE = 64  # minimum longer side in pixels of the mask that is drawn first


@lru_cache(maxsize=256)
def open_font(path: str, size: int) -> ImageFont.FreeTypeFont:
    """Open a font at a size in pixels, with the basic layout (one glyph per code point)."""
    return ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)


@lru_cache(maxsize=512)
def glyph_mask(path: str, character: str) -> Image.Image | None:
    """Draw a character large and crop it to its ink (mode L, ink is 255); None if it has no ink."""
    size = MASK_SIZE
    while True:
        left, top, right, bottom = map(int, open_font(path, size).getbbox(character))
        longest = max(right - left, bottom - top)
        if longest >= MASK_SIZE or size >= 8 * MASK_SIZE:
            break
        size *= 2  # for small characters such as a full stop
    if longest <= 0:
        return None
    mask = Image.new("L", (right - left + 8, bottom - top + 8))
    font = open_font(path, size)
    ImageDraw.Draw(mask).text((4 - left, 4 - top), character, fill=255, font=font)
    box = mask.getbbox()
    return mask.crop(box) if box else None


def place(
    mask: Image.Image,
    size: int,
    longest: float,
    angle: float = 0.0,
    shift: tuple[float, float] = (0.0, 0.0),
    stretch: float = 1.0,
) -> Image.Image:
    """Place a mask in the centre of a square of `size` pixels, scaled to the longer side `longest`.

    angle: in degrees. shift: in pixels. stretch: width over height. Drawn at twice the size and reduced, for
    smooth thin strokes.
    """
    scale = max(mask.size) / longest / 2  # mask pixels per pixel of the doubled square
    cos, sin = math.cos(math.radians(angle)) * scale, math.sin(math.radians(angle)) * scale
    x, y = size + 2 * shift[0], size + 2 * shift[1]  # position of the centre of the mask
    a, b, d, e = cos / stretch, sin / stretch, -sin, cos
    matrix = (a, b, mask.width / 2 - a * x - b * y, d, e, mask.height / 2 - d * x - e * y)
    doubled = mask.transform((2 * size, 2 * size), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
    return doubled.reduce(2)


def plain(path: str, character: str, size: int) -> np.ndarray | None:
    """Return a character that fills a square, float32 [size, size] in 0..1; None if it has no ink."""
    mask = glyph_mask(path, character)
    if mask is None:
        return None
    return np.asarray(place(mask, size, size - 2.0), np.float32) / 255


def varied(path: str, character: str, seed: tuple[int, ...]) -> Image.Image:
    """Return an image of a character with random variations (mode L); depends only on the arguments.

    Position, scale, rotation, stroke weight, ink, background and noise are random, seeded by `seed`.
    """
    mask = glyph_mask(path, character)
    if mask is None:
        raise ValueError(f"{character!r} has no ink in {path}")
    rng = np.random.default_rng([*seed, ord(character), zlib.crc32(path.rpartition("/")[2].encode())])
    mask = change_weight(mask, rng.uniform(-1, 1))
    ink = place(
        mask,
        IMAGE_SIZE,
        longest=INK_SIZE * rng.uniform(0.75, 1.1),
        angle=rng.uniform(-12, 12),
        shift=(rng.uniform(-2.5, 2.5), rng.uniform(-2.5, 2.5)),
        stretch=rng.uniform(0.88, 1.12),
    )
    if rng.random() < 0.5:
        ink = ink.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 0.8)))
    alpha = np.asarray(ink, np.float32) / 255
    paper, pen = background(rng), rng.uniform(0, 90)
    pixels = paper * (1 - alpha) + pen * alpha + rng.normal(0, rng.uniform(2, 14), alpha.shape)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def change_weight(mask: Image.Image, amount: float) -> Image.Image:
    """Make strokes heavier (amount 0..1) or lighter (0..-1), without erasing thin ones."""
    # The filter is at most about a tenth of the longer side of the mask.
    width = 2 * round(max(mask.size) / 48) + 1
    padded = Image.new("L", (mask.width + 2 * width, mask.height + 2 * width))
    padded.paste(mask, (width, width))
    if width == 1:  # a filter of one pixel divides by zero in Pillow 12.3
        return padded
    if amount >= 0:
        other = padded.filter(ImageFilter.MaxFilter(width))
    else:
        other = padded.filter(ImageFilter.MinFilter(width))
        if np.asarray(other).sum() < 0.5 * np.asarray(padded).sum():  # thin strokes
            return padded
    return Image.blend(padded, other, abs(amount))


def background(rng: np.random.Generator) -> np.ndarray:
    """Return a background of 130..255 with a brightness gradient and soft stains, float32 [size, size]."""
    y, x = np.mgrid[-1 : 1 : IMAGE_SIZE * 1j, -1 : 1 : IMAGE_SIZE * 1j].astype(np.float32)
    slope_x, slope_y = rng.uniform(-30, 30, 2)
    stains = Image.fromarray(rng.normal(0, 12, (5, 5)).astype(np.float32))
    soft = np.asarray(stains.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC))
    return rng.uniform(170, 240) + slope_x * x + slope_y * y + soft
