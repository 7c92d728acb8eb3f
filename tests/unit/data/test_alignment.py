"""Alignment of faces: the transform, the interpolation, and the files of landmarks."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from plsc.data.alignment import TEMPLATE, Face, align, scaled_template, similarity
from plsc.data.decode import decode_image
from plsc.data.overview import thumbnail
from plsc.data.sources import open_source
from plsc.errors import DataError
from tests.faces import smooth_image, turned, write_photos


def umeyama(points, target):
    """Return the transform as Umeyama (1991, eq. 40-42) writes it, but without reflections."""
    centre, middle = points.mean(0), target.mean(0)
    p, q = points - centre, target - middle
    u, d, vt = np.linalg.svd(q.T @ p / len(p))
    sign = np.array([1, np.sign(np.linalg.det(u) * np.linalg.det(vt))])
    rotation = u @ np.diag(sign) @ vt
    linear = (d * sign).sum() / p.var(0).sum() * rotation
    return np.column_stack([linear, middle - linear @ centre])


@given(st.integers(0, 10**6), st.floats(5, 300), st.booleans())
def test_the_transform_is_the_least_squares_similarity(seed, size, mirrored):
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(5, 2))
    points = turned(TEMPLATE, rng.uniform(0, 360), size / 112, (seed % 100, -7)) + size / 10 * noise
    points = points * [-1, 1] if mirrored else points
    found = similarity(points, TEMPLATE)
    assert found == pytest.approx(umeyama(points, TEMPLATE), rel=1e-6, abs=1e-6)
    assert np.linalg.det(found[:, :2]) > 0


def test_the_templates_are_the_published_ones():
    assert scaled_template(112, 112) == pytest.approx(TEMPLATE)
    assert scaled_template(224, 224) == pytest.approx(2 * TEMPLATE)
    assert scaled_template(128, 128)[0] == pytest.approx([46.2946, 51.6963])
    assert scaled_template(112, 96)[0] == pytest.approx([30.2946, 51.6963])  # SphereFace


def sampled(image, points, height, width, samples):
    """Return the reference: float bilinear samples, samples x samples per pixel; NaN outside the image."""
    matrix = np.vstack([similarity(points, scaled_template(height, width)), [0, 0, 1]])
    steps = (np.arange(samples) + 0.5) / samples - 0.5
    y, x = (np.add.outer(np.arange(n), steps).ravel() for n in (height, width))
    grid = np.stack(np.broadcast_arrays(x[None, :], y[:, None], 1.0), -1)
    x, y = (grid @ np.linalg.inv(matrix).T)[..., :2].transpose(2, 0, 1)
    left, top = np.floor(x).astype(int), np.floor(y).astype(int)
    inside = (left >= 0) & (top >= 0) & (left < image.shape[1] - 1) & (top < image.shape[0] - 1)
    left, top, pixels = left * inside, top * inside, image.astype(np.float64)
    dx, dy = (x - left)[..., None], (y - top)[..., None]
    upper = pixels[top, left] * (1 - dx) + pixels[top, left + 1] * dx
    lower = pixels[top + 1, left] * (1 - dx) + pixels[top + 1, left + 1] * dx
    found = np.where(inside[..., None], upper * (1 - dy) + lower * dy, np.nan)
    return found.reshape(height, samples, width, samples, -1).mean(axis=(1, 3))


@pytest.mark.parametrize(
    ("size", "degrees", "scale", "samples"),
    [((112, 112), 0, 1, 1), ((112, 112), 25, 1.3, 1), ((112, 96), -170, 0.4, 1), ((128, 128), 10, 3.1, 3),
     ((32, 32), 90, 1.1, 4), ((16, 16), 5, 2.3, 16)],
)  # fmt: skip
def test_pixels_are_bilinear_samples_and_means_of_them_when_shrunk(size, degrees, scale, samples):
    image = np.random.default_rng(3).integers(0, 256, (500, 600, 3), dtype=np.uint8)
    points = turned(TEMPLATE - 56, degrees, scale, (300, 250))
    expected = sampled(image, points, *size, samples)
    inside = ~np.isnan(expected)
    assert inside.mean() > 0.8
    found = align(image, points, *size)
    # Pillow truncates the samples, and rounds their mean
    assert np.abs(found[inside] - expected[inside]).max() <= (1.51 if samples > 1 else 1.01)
    grey = align(image[:, :, :1], points, *size)
    assert np.array_equal(grey, found[:, :, :1])


def test_outside_of_the_image_it_is_black():
    image = np.full((80, 80, 3), 255, np.uint8)
    found = align(image, TEMPLATE - 10, 112, 112)  # the image's corner is 10 pixels right and down
    assert (found[:9] == 0).all()
    assert (found[:, 91:] == 0).all()
    assert (found[11:89, 11:89] >= 254).all()


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (np.full((5, 2), 30.0), "face"),
        (np.where(np.eye(5, 2) > 0, np.nan, TEMPLATE), "outside of the image"),
        (TEMPLATE + 500, r"around x=556, y=572, outside of the image"),
        (TEMPLATE * [-1.585, 1] + [150, 0], "face"),
    ],
)
def test_landmarks_that_no_face_has_are_refused(points, message):
    with pytest.raises(DataError, match=message) as caught:
        align(np.zeros((130, 120, 3), np.uint8), points, 112, 112)
    assert caught.value.kind == "landmarks"


def test_a_huge_face_takes_bounded_memory():
    image = np.zeros((40, 40, 3), np.uint8)
    assert align(image, (TEMPLATE - TEMPLATE.mean(0)) * 5000 + 20, 112, 112).shape == (112, 112, 3)


@pytest.mark.parametrize(("kind", "channels"), [("PNG", 1), ("JPEG", 3)])
def test_a_face_is_decoded_as_its_pixels_are_aligned(kind, channels):
    file = io.BytesIO()
    Image.fromarray(smooth_image(200, 180, 1)).save(file, kind)
    stored = decode_image(file.getvalue(), (channels, 200, 180)).permute(1, 2, 0).numpy()
    points = turned(TEMPLATE, 20, 1.2, (30, 10))
    found = decode_image(Face(file.getvalue(), tuple(map(tuple, points))), (channels, 112, 112))
    assert np.array_equal(found.permute(1, 2, 0).numpy(), align(stored, points, 112, 112))


def written(points):
    return " ".join(f"{value:g}" for value in points.ravel())


POINTS, OTHER = written(TEMPLATE), written(TEMPLATE * 2)


def folder_with(tmp_path, landmarks, names=("a.jpg", "b c.jpg")):
    for name in names:
        (tmp_path / "person" / name).parent.mkdir(exist_ok=True)
        Image.fromarray(smooth_image(120, 120, 1)).save(tmp_path / "person" / name)
    (tmp_path / "faces.txt").write_text(landmarks)
    return open_source(tmp_path, landmarks="faces.txt")


@pytest.mark.parametrize(
    "text",
    [
        f"2\nlefteye_x lefteye_y righteye_x\nperson/a.jpg {POINTS}\nperson/b c.jpg {OTHER}",
        f"./person/a.jpg {POINTS} 0.98\r\n\r\nperson/b c.jpg\t{OTHER} 1\r\nanother.jpg {POINTS} 1\r\n",
        f"\ufeffperson/a.jpg   {POINTS}\nperson/b c.jpg {OTHER}\n",
    ],
)
def test_landmarks_are_found_by_path(tmp_path, text):
    source = folder_with(tmp_path, text)
    assert [source.name(index) for index in range(2)] == ["person/a.jpg", "person/b c.jpg"]
    assert np.array(source[0][0].landmarks) == pytest.approx(TEMPLATE, rel=1e-5)
    assert np.array(source[1][0].landmarks) == pytest.approx(TEMPLATE * 2, rel=1e-5)
    assert source[0][0].image == (tmp_path / "person/a.jpg").read_bytes()
    source.check_landmarks()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2\nx y\n", "none"),
        (f"person/a.jpg {POINTS}\nperson/b.jpg 1 2 3 4\n", r"faces\.txt:2: "),
        (f"person/a.jpg nan {POINTS[8:]}\n", r"faces\.txt:1: .*finite"),
        (f"person/a.jpg 1e9 {POINTS[8:]}\n", r"faces\.txt:1: .*pixels"),
        (f"a {POINTS}\n\nb {POINTS}\na {OTHER}\n", r"txt:4: .*txt:1"),
        (f"a {written(TEMPLATE.T + np.array([[100], [50]]))}\n", "faces"),
        (f"a {written(TEMPLATE[[1, 0, 2, 4, 3]])}\n", "image"),
        (f"a {POINTS} {'9' * 9000}\n", "line"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_its_line(tmp_path, text, message):
    with pytest.raises(DataError, match=message):
        folder_with(tmp_path, text)


def test_an_image_without_a_line_is_named(tmp_path):
    source = folder_with(tmp_path, f"person/a.jpg {POINTS}\n")
    with pytest.raises(DataError, match=r"1 of 2 .* person/b c\.jpg"):
        source.check_landmarks()
    with pytest.raises(DataError, match=r"^person/b c\.jpg: ") as caught:
        source[1]
    assert caught.value.kind == "landmarks"


def test_paths_are_those_of_label_txt_and_the_file_is_in_the_dataset_folder(label_folder):
    folder = label_folder(4)
    (folder / "label.txt").write_text("".join(f"{number}.jpg {number}\n" for number in range(4)))
    (folder / "points.txt").write_text("".join(f"{number}.jpg {POINTS}\n" for number in range(4)))
    source = open_source(folder, landmarks="points.txt")
    assert np.array(source[3][0].landmarks) == pytest.approx(TEMPLATE, rel=1e-5)
    with pytest.raises(DataError, match=r"train_data/none\.txt does not exist"):
        open_source(folder, landmarks="none.txt")


def test_small_pictures_show_aligned_faces(tmp_path):
    write_photos(tmp_path / "photos")
    source = open_source(tmp_path / "photos", landmarks="landmarks.txt")
    assert thumbnail(source, 0, 56).size == (56, 56)
