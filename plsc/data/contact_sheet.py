"""A picture of some samples of a set, with their labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image as PillowImage
from PIL import ImageDraw

from plsc.data.decode import decode_image, size_of
from plsc.data.overview import drawn
from plsc.data.sources import Source
from plsc.errors import DataError, OptionError
from plsc.storage.publish import replacing

_COLUMNS, _PIXELS, _CAPTION, _GAP = 8, 112, 14, 4
_PAPER, _INK, _FAULT = (255, 255, 255), (60, 60, 60), (200, 40, 40)


def write_contact_sheet(
    source: Source, path: str | Path, *, images: int = 64, seed: int = 0
) -> int:
    """Write a PNG of `images` samples, drawn at random, in the order of their labels; return their number.

    Each is shrunk or enlarged to fit a square of 112 pixels, with its label below; a broken one is a red
    cross. Raises DataError if the file cannot be written.
    """
    if images < 1:
        raise OptionError(f"images is {images}; expected at least 1")
    labels = source.labels()
    chosen = drawn(len(labels), min(images, len(labels)), seed)
    chosen = chosen[np.argsort(labels[chosen], kind="stable")]
    columns = min(_COLUMNS, len(chosen))
    rows = -(-len(chosen) // columns)
    width, height = _PIXELS + _GAP, _PIXELS + _CAPTION + _GAP
    sheet = PillowImage.new("RGB", (columns * width + _GAP, rows * height + _GAP), _PAPER)
    draw = ImageDraw.Draw(sheet)
    for number, index in enumerate(chosen.tolist()):
        row, column = divmod(number, columns)
        left, top = column * width + _GAP, row * height + _GAP
        picture = _thumbnail(source, index)
        if picture is None:
            corner = left + _PIXELS, top + _PIXELS
            draw.line((left, top, *corner), _FAULT, 3)
            draw.line((left, corner[1], corner[0], top), _FAULT, 3)
        else:
            inset = (_PIXELS - picture.width) // 2, (_PIXELS - picture.height) // 2
            sheet.paste(picture, (left + inset[0], top + inset[1]))
        draw.text((left, top + _PIXELS + 1), str(labels[index]), _INK)
    with replacing(path) as temporary:
        sheet.save(temporary, "PNG")
    return len(chosen)


def _thumbnail(source: Source, index: int) -> PillowImage.Image | None:
    """Return a sample in the size of a sheet's square, or None if it is broken."""
    try:
        data, _ = source[index]
        width, height = size_of(data)
        pixels = decode_image(data, (3, height, width))
    except DataError:
        return None
    if pixels.is_floating_point():  # normalised: show where it lies between its ends
        low, high = float(pixels.min()), float(pixels.max())
        pixels = ((pixels - low) * (255 / max(high - low, 1e-9))).byte()
    picture = PillowImage.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    scale = _PIXELS / max(picture.size)
    size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    return picture.resize(size, PillowImage.Resampling.BILINEAR)
