"""Duplicates among drawn pictures: some shapes and colours per picture, as of one family."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageChops, ImageDraw, ImageEnhance, ImageFilter

from plsc.clean.faults import agreeing, find_duplicates, planted_copies, read_pixels
from plsc.data.sources import open_source
from plsc.errors import DataError

COUNT = 30


def draw(seed, size=160):
    """Return a picture of a face-like shape, each with its own places and colours."""
    rng = np.random.default_rng(seed)
    picture = Image.new("RGB", (size, size), tuple(rng.integers(0, 256, 3).tolist()))
    pen = ImageDraw.Draw(picture)
    for _ in range(6):
        x, y = rng.integers(-10, size - 10, 2).tolist()
        wide, high = rng.integers(10, size // 2, 2).tolist()
        pen.ellipse((x, y, x + wide, y + high), tuple(rng.integers(0, 256, 3).tolist()))
    return picture.filter(ImageFilter.GaussianBlur(1))


def jpeg(picture, quality=70):
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality)
    return Image.open(file)


CHANGES = {
    "shifted": lambda picture: ImageChops.offset(picture, 1, 0),
    "saved": jpeg,
    "brighter": lambda picture: ImageEnhance.Brightness(picture).enhance(1.05),
    "smaller": lambda picture: picture.resize((100, 100)),
}


@pytest.fixture
def opened(tmp_path):
    """Return a function that opens a folder of named pictures or bytes, with pixels and copies."""

    def opened(images):
        for name, image in images.items():
            if isinstance(image, bytes):
                (tmp_path / name).write_bytes(image)
            else:
                image.save(tmp_path / name)
        lines = [f"{name} {number}\n" for number, name in enumerate(images)]
        (tmp_path / "label.txt").write_text("".join(lines))
        source = open_source(tmp_path)
        pixels = read_pixels(source, np.arange(len(images)))
        return source, pixels, planted_copies(source, np.arange(len(images)), pixels)

    return opened


def all_pairs(count):
    return np.stack(np.triu_indices(count, 1), 1)


def test_copies_are_found_and_other_pictures_are_not(opened):
    pictures = {f"{number}.png": draw(number) for number in range(COUNT)}
    changed = {f"{name}.png": change(draw(number)) for number, (name, change) in enumerate(CHANGES.items())}
    _, pixels, copies = opened({**pictures, **changed})
    found = agreeing(pixels, pixels, all_pairs(COUNT + len(CHANGES)), copies)
    near = {(number, COUNT + number) for number in range(len(CHANGES))}
    assert {tuple(pair) for pair in found.subjects.tolist()} == near
    assert (np.diff(found.sure) <= 0).all()


def test_the_same_file_is_certain_and_pairs_come_from_neighbours_and_files(opened):
    pictures = {f"{number}.png": draw(number) for number in range(4)}
    file = io.BytesIO()
    draw(0).save(file, "PNG")
    _, pixels, copies = opened({**pictures, "same.png": file.getvalue(), "near.png": jpeg(draw(1), 90)})
    far = np.arange(6)[:, None]  # the nearest images by two networks
    close = np.array([[0, 1], [1, 5], [2, 1], [3, 1], [4, 1], [5, 1]])
    found = find_duplicates([far, close], pixels, copies)
    assert (found.subjects[0].tolist(), found.sure[0]) == ([0, 4], 1)
    assert found.subjects[1].tolist() == [1, 5]
    assert len(found.sure) == 2


def test_an_image_that_cannot_be_decoded_is_named(opened):
    with pytest.raises(DataError, match=r"^bad.png \(label.txt:1\): "):
        opened({"bad.png": b"no image", "good.png": draw(0)})


def test_pictures_of_one_colour_are_duplicates_only_as_files(opened):
    gray = [Image.new("RGB", (20, 20), (level,) * 3) for level in (0, 128, 128, 255)]
    images = {f"{number}.png": one for number, one in enumerate(gray)}
    images |= {"jpeg.jpg": gray[1], "drawn.png": draw(0)}
    source, pixels, copies = opened(images)
    assert agreeing(pixels, pixels, all_pairs(6), copies).subjects.tolist() == [[1, 2]]
    copies = planted_copies(source, np.arange(5), read_pixels(source, np.arange(5)))  # no other ones
    assert agreeing(pixels, pixels, all_pairs(5), copies).subjects.tolist() == [[1, 2]]
