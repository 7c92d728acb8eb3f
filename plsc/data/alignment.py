"""Align faces by five landmarks to the template of ArcFace.

The least-squares similarity transform (Umeyama 1991, without reflection) maps the landmarks to the template.
The pixels are interpolated once, bilinearly, from the upright image in its own size. Where the image is
shrunk, the value of a pixel is the mean over its area.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image as PillowImage

from plsc.errors import DataError

TEMPLATE = np.array(
    [(38.2946, 51.6963), (73.5318, 51.5014), (56.0252, 71.7366), (41.5493, 92.3655), (70.7299, 92.2041)]
)
"""The landmarks (x, y) in an aligned image of 112x112, as published by insightface: left eye, right eye,
nose, left and right corner of the mouth, as seen in the image. Pixel centres have integer coordinates."""

ALIGNED_SIZE = (112, 112)
_LEAST_SPREAD = 0.5  # pixels; the landmarks of a face of about one pixel
_MOST_SAMPLES = 16  # per output pixel and axis: limits the memory for a huge face


@dataclass(frozen=True)
class Face:
    """An encoded image and the five landmarks (x, y) of the face in it, in pixels; decoding aligns it."""

    image: bytes
    landmarks: tuple[tuple[float, float], ...]  # hashable


def scaled_template(height: int, width: int) -> np.ndarray:
    """Return the template for an image of this size, float64 [5, 2].

    Squares of a multiple of 128: the template with a margin of 8 pixels on the left and right, scaled from
    128x128 (insightface's rule). Otherwise the template is scaled from 112 to the height, and centred
    horizontally: 112x96 gives SphereFace's template.
    """
    if height == width and height % 128 == 0:
        return (TEMPLATE + np.array([8, 0])) * (height / 128)
    ratio = height / 112
    return TEMPLATE * ratio + np.array([(width - 112 * ratio) / 2, 0])


def similarity(points: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the matrix [2, 3] of the similarity transform that maps `points` to `target` best, both [N, 2].

    It minimises the sum of squared distances over rotation, scale and translation, without reflection. Raises
    DataError if the points are equal, or if no such transform fits better than a constant.
    """
    centre, middle = points.mean(axis=0), target.mean(axis=0)
    p, q = (points - centre) @ [1, 1j], (target - middle) @ [1, 1j]
    size = max(np.vdot(p, p).real, 1e-9)
    factor = np.vdot(p, q) / size  # a complex number: scale and rotation
    is_face = size >= len(p) * _LEAST_SPREAD**2 and abs(factor) ** 2 * size >= 1e-3 * np.vdot(q, q).real
    if not is_face:  # also NaN
        raise DataError(
            f"the landmarks {points.round(3).tolist()} are equal, not in pixels, or not a face in order",
            kind="landmarks",
        )
    linear = np.array([[factor.real, -factor.imag], [factor.imag, factor.real]])
    return np.column_stack([linear, middle - linear @ centre])


def align(pixels: np.ndarray, landmarks: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return the aligned face of an image [H, W, C], uint8, with 1 or 3 channels: uint8 [height, width, C].

    landmarks: [5, 2] as in `TEMPLATE`. Outside of the image the result is black. If the face is shrunk k
    times (rounded), each output pixel is the mean of k x k samples. Raises DataError if the landmarks are
    degenerate, or their centre is not in the image.
    """
    x, y = landmarks.mean(axis=0)
    if not (0 <= x < pixels.shape[1] and 0 <= y < pixels.shape[0]):
        raise DataError(
            f"the landmarks are around x={x:.0f}, y={y:.0f}, outside of the image of "
            f"{pixels.shape[1]}x{pixels.shape[0]}; detect them again in this image",
            kind="landmarks",
        )
    # From here on pixel centres have coordinates of n + 0.5, as in Pillow.
    matrix = similarity(landmarks + 0.5, scaled_template(height, width) + 0.5)
    inverse = np.linalg.inv(matrix[:, :2])
    corners = (np.array([(0, 0), (width, 0), (0, height), (width, height)]) - matrix[:, 2]) @ inverse.T
    size = np.array([pixels.shape[1], pixels.shape[0]])
    left, top = np.clip(np.floor(corners.min(axis=0)).astype(int) - 2, 0, size - 1)
    right, bottom = np.clip(np.ceil(corners.max(axis=0)).astype(int) + 2, (left + 1, top + 1), size)
    part = np.ascontiguousarray(pixels[top:bottom, left:right])
    samples = int(np.clip(round(np.sqrt(abs(np.linalg.det(inverse)))), 1, _MOST_SAMPLES))
    offset = -inverse @ matrix[:, 2] - (left, top)
    picture = PillowImage.fromarray(part[:, :, 0] if part.shape[2] == 1 else part).transform(
        (width * samples, height * samples),
        PillowImage.Transform.AFFINE,
        np.column_stack([inverse / samples, offset]).ravel().tolist(),
        PillowImage.Resampling.BILINEAR,
    )
    aligned = np.asarray(picture.reduce(samples) if samples > 1 else picture)
    return aligned.reshape(height, width, pixels.shape[2])
